# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""A Hub on 127.0.0.1, in memory and in a thread, as far as pushing and loading models goes, with faults on demand.

Clients are processes of their own: huggingface_hub reads `FakeHub.client_environment()` when it is imported.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub import ModelCard

TOKEN, USER = "hf_token_of_the_tests", "me"
TASKS = {  # those of the Hub's tasks that models of this package can have
    "text-generation",
    "text-classification",
    "feature-extraction",
    "image-classification",
    "image-feature-extraction",
    "image-to-3d",
}
LICENSES = {"apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-nc-4.0", "other"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def card_errors(content: str) -> list[str]:
    """What the Hub would reject in the metadata of a card."""
    try:
        data = ModelCard(content).data
    except Exception as error:
        return [f"metadata cannot be read: {error}"]
    errors = []
    if data.license is not None and data.license not in LICENSES:
        errors.append(f"license {data.license!r} is not one of {sorted(LICENSES)}")
    if data.pipeline_tag is not None and data.pipeline_tag not in TASKS:
        errors.append(f"pipeline_tag {data.pipeline_tag!r} is not one of {sorted(TASKS)}")
    for name in ("tags", "datasets"):
        value = data.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            errors.append(f"{name} must be a list of strings")
    for model in [data.base_model] if isinstance(data.base_model, str) else data.base_model or []:
        if not _HUB_ID.fullmatch(model):
            errors.append(f"base_model {model!r} is not the id of a model")
    for result in data.eval_results or []:
        names = result.task_type, result.dataset_type, result.dataset_name, result.metric_type
        if not all(isinstance(name, str) and name for name in names) or not isinstance(result.metric_value, float):
            errors.append(f"model-index has {result}")
    return errors


@dataclass
class Fault:
    """What goes wrong at requests whose "METHOD /path" a pattern finds.

    Attributes:
        pattern: of the request.
        status: of the answer; 0 to cut the connection after part of the body.
        skip: so many requests that go well first.
        times: so many that go wrong then.
        part: of the body that a cut lets through.
    """

    pattern: str
    status: int
    skip: int = 0
    times: int = 10**9
    part: float = 0.5

    def strikes(self, request: str) -> bool:
        if not re.search(self.pattern, request):
            return False
        self.skip -= 1
        if self.skip >= 0 or self.times <= 0:
            return False
        self.times -= 1
        return True


@dataclass
class Repository:
    """Commits, each a tree of path → blob, the branches that point at them, and the large files that were uploaded."""

    private: bool
    commits: dict[str, dict[str, str]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)

    def commit(self, tree: dict[str, str], branch: str) -> str:
        text = json.dumps([len(self.commits), branch, sorted(tree.items())])
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name] = tree
        self.branches[branch] = name
        return name

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch or of itself."""
        commit = self.branches.get(revision, revision)
        return commit if commit in self.commits else None


class FakeHub:
    """What the Hub holds, and its server.

    Attributes:
        endpoint: its URL.
        repositories: by id.
        faults: those that are switched on.
        requests: "METHOD /path" of each request, and its Range if it has one.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def client_environment(self, token: str | None = TOKEN) -> dict[str, str]:
        """Variables of a client's process; its caches (HF_HOME) should be new too."""
        local = {name: "127.0.0.1" for name in ("NO_PROXY", "no_proxy")}
        settings = {"HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **local}
        return settings if token is None else {**settings, "HF_TOKEN": token}

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """The files of a revision."""
        repository = self.repositories[repo_id]
        return {path: self.blobs[blob] for path, blob in repository.commits[repository.resolve(revision)].items()}

    def keep(self, content: bytes) -> str:
        """Store a blob; returns its name."""
        name = hashlib.sha256(content).hexdigest()
        self.blobs[name] = content
        return name


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A Hub that runs until the block ends."""
    hub = FakeHub()
    threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()


class Refused(Exception):
    """An answer other than 200, with the Hub's error code."""

    def __init__(self, status: int, code: str = "", **headers: str):
        super().__init__(status, code)
        self.status, self.code, self.headers = status, code, headers


@dataclass
class Answer:
    """A body, bytes or what becomes JSON, with its status and headers."""

    body: Any = b""
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_ROUTES: list[tuple[str, str]] = [
    (r"GET /api/whoami-v2", "whoami"),
    (r"POST /api/validate-yaml", "validate"),
    (r"POST /api/repos/create", "create"),
    (rf"POST /api/models/{_REPO}/branch/(?P<revision>[^/]+)", "branch"),
    (rf"POST /api/models/{_REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    (rf"PUT /lfs/{_REPO}/(?P<name>[0-9a-f]+)", "lfs_put"),
    (rf"POST /lfs/{_REPO}/verify", "lfs_verify"),
    (rf"POST /api/models/{_REPO}/commit/(?P<revision>[^/]+)", "commit"),
    (rf"GET /api/models/{_REPO}(/revision/(?P<revision>[^/]+))?", "info"),
    (rf"GET /api/models/{_REPO}/tree/(?P<revision>[^/]+)(/.*)?", "tree"),
    (rf"GET /{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
]


class _Handler(BaseHTTPRequestHandler):
    """A method for each route, called with the parts of its path."""

    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *args: Any) -> None:
        pass

    def handle_request(self) -> None:
        self.data = self._body()
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        path = unquote(url.path.replace("%2F", "~"))  # of a branch such as refs/pr/1
        request = f"{self.command} {path}"
        with self.hub.lock:
            sent_range = self.headers.get("Range")
            self.hub.requests.append(request + (f" {sent_range}" if sent_range else ""))
            fault = next((fault for fault in self.hub.faults if fault.strikes(request)), None)
            if fault is not None and fault.status:
                answer = Answer({"error": "out of order"}, status=fault.status)
            else:
                answer = self._answer(request)
        self._send(answer, cut=fault.part if fault is not None and not fault.status else None)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def _answer(self, request: str) -> Answer:
        request = request.replace("HEAD ", "GET ", 1)
        for pattern, name in _ROUTES:
            if match := re.fullmatch(pattern, request):
                try:
                    return getattr(self, name)(**match.groupdict())
                except Refused as error:
                    headers = {"X-Error-Code": error.code, "X-Error-Message": error.code, **error.headers}
                    return Answer({"error": error.code}, headers, error.status)
        return Answer({"error": f"no such endpoint: {request}"}, {}, 404)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, answer: Answer, cut: float | None) -> None:
        body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **answer.headers}
        self.send_response(answer.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[: int(len(body) * cut)])
            self.wfile.flush()
        if cut is not None:
            time.sleep(0.1)  # so that the client has read what was sent
            self.close_connection = True

    # ---- who may do what ----

    @property
    def authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def repository(self, repo: str, write: bool = False) -> Repository:
        found = self.hub.repositories.get(repo)
        if not self.authorized and (write or found is None or found.private):
            raise Refused(401, "RepoNotFound")
        if found is None:
            raise Refused(404, "RepoNotFound")
        return found

    def revision_of(self, repo: str, revision: str | None, write: bool = False) -> tuple[Repository, str]:
        found = self.repository(repo, write)
        commit = found.resolve((revision or "main").replace("~", "/"))
        if commit is None:
            raise Refused(404, "RevisionNotFound")
        return found, commit

    # ---- routes ----

    def whoami(self) -> Answer:
        if not self.authorized:
            raise Refused(401)
        return Answer({"type": "user", "name": USER, "fullname": USER, "orgs": [], "auth": {}})

    def validate(self) -> Answer:
        errors = [{"message": message} for message in card_errors(json.loads(self.data)["content"])]
        return Answer({"errors": errors, "warnings": []}, status=400 if errors else 200)

    def create(self) -> Answer:
        if not self.authorized:
            raise Refused(401)
        asked = json.loads(self.data)
        repo = f"{asked.get('organization') or USER}/{asked['name']}"
        answer = Answer({"url": f"{self.hub.endpoint}/{repo}", "name": repo, "id": repo})
        if repo in self.hub.repositories:
            answer.status = 409
            return answer
        private = asked.get("private") is True or asked.get("visibility") == "private"
        new = self.hub.repositories[repo] = Repository(private)
        new.commit({".gitattributes": self.hub.keep(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")}, "main")
        return answer

    def branch(self, repo: str, revision: str) -> Answer:
        found, commit = self.revision_of(repo, "main", write=True)
        if revision in found.branches:
            raise Refused(409)
        found.branches[revision] = commit
        return Answer({})

    def preupload(self, repo: str, revision: str) -> Answer:
        self.revision_of(repo, revision, write=True)
        paths = [file["path"] for file in json.loads(self.data)["files"]]
        mode = lambda path: "lfs" if path.endswith(".safetensors") else "regular"  # noqa: E731
        return Answer({"files": [{"path": path, "uploadMode": mode(path), "shouldIgnore": False} for path in paths]})

    def lfs_batch(self, repo: str) -> Answer:
        found = self.repository(repo, write=True)
        objects: list[dict[str, Any]] = [
            {"oid": asked["oid"], "size": asked["size"]} for asked in json.loads(self.data)["objects"]
        ]
        base = f"{self.hub.endpoint}/lfs/{repo}"
        for item in objects:
            if item["oid"] not in found.large:
                item["actions"] = {"upload": {"href": f"{base}/{item['oid']}"}, "verify": {"href": f"{base}/verify"}}
        return Answer({"transfer": "basic", "objects": objects})

    def lfs_put(self, repo: str, name: str) -> Answer:  # the URL is signed: no token comes
        if hashlib.sha256(self.data).hexdigest() != name:
            raise Refused(400)
        self.hub.repositories[repo].large.add(self.hub.keep(self.data))
        return Answer({})

    def lfs_verify(self, repo: str) -> Answer:
        uploaded = json.loads(self.data)["oid"] in self.hub.repositories[repo].large
        return Answer({}, status=200 if uploaded else 404)

    def commit(self, repo: str, revision: str) -> Answer:
        found, parent = self.revision_of(repo, revision, write=True)
        tree = dict(found.commits[parent])
        for line in map(json.loads, self.data.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                tree[value["path"]] = self.hub.keep(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                if value["oid"] not in found.large:
                    raise Refused(400)
                tree[value["path"]] = value["oid"]
        request = "create_pr" in self.query
        branch = f"refs/pr/{len(found.commits)}" if request else revision.replace("~", "/")
        commit = found.commit(tree, branch)
        urls = {"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{commit}"}
        if request:
            urls["pullRequestUrl"] = f"{self.hub.endpoint}/{repo}/discussions/{branch.rsplit('/', 1)[-1]}"
        return Answer({"success": True, "commitOid": commit, **urls})

    def info(self, repo: str, revision: str | None) -> Answer:
        found, commit = self.revision_of(repo, revision)
        files = [{"rfilename": path} for path in found.commits[commit]]
        return Answer({"id": repo, "sha": commit, "private": found.private, "tags": [], "siblings": files})

    def tree(self, repo: str, revision: str) -> Answer:
        found, commit = self.revision_of(repo, revision)
        files = found.commits[commit].items()
        return Answer(
            [
                {"type": "file", "path": path, "oid": blob[:40], "size": len(self.hub.blobs[blob])}
                for path, blob in files
            ]
        )

    def resolve(self, repo: str, revision: str, path: str) -> Answer:
        found, commit = self.revision_of(repo, revision)
        blob = found.commits[commit].get(path)
        if blob is None:
            raise Refused(404, "EntryNotFound", **{"X-Repo-Commit": commit})
        content = self.hub.blobs[blob]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob}"', "Accept-Ranges": "bytes"}
        if path.endswith(".safetensors"):
            headers |= {"X-Linked-ETag": f'"{blob}"', "X-Linked-Size": str(len(content))}
        if match := re.match(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return Answer(content[start:], headers, 206)
        return Answer(content, headers)
