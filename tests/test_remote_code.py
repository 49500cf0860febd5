# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""A saved folder is self-contained: it loads where hf_ttt cannot be imported, from disk and from a Hub.

What a fresh process does is written as a function here (`child_…`), whose source is sent to it.
"""

import ast
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from lact_cases import busy_model, tiny_config, token_ids
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, ByT5Tokenizer, pipeline
from transformers.dynamic_module_utils import get_imports, get_relative_import_files, get_relative_imports

import hf_ttt

REPOSITORY, REVISION = "someone/tiny-lact", "0123456789abcdef0123456789abcdef01234567"
AUTO_CLASSES = {"AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"}
NO_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

PRELUDE = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError("No module named " + repr(name) + " (blocked)", name=name)

sys.meta_path.insert(0, Blocker())
if {no_triton!r}:
    sys.modules["triton"] = None  # not there, also for find_spec, by which torch and transformers look for it
"""


def run_child(function, *args: str, home: Path, blocked=("hf_ttt",), no_triton: bool = False, **environment: str):
    """Run a function in a fresh process with its own caches; returns what it returns (by JSON)."""
    home.mkdir(exist_ok=True)
    code = PRELUDE.format(blocked=list(blocked), no_triton=no_triton) + textwrap.dedent(inspect.getsource(function))
    code += f"\nimport json\nprint()\nprint(json.dumps({function.__name__}(*{[str(a) for a in args]!r})))\n"
    settings = {"HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    offline = {} if "HF_ENDPOINT" in environment else {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **settings, **offline, **environment},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder written by `save_pretrained`, and beside it what the model computes."""
    root = tmp_path_factory.mktemp("saved")
    model = busy_model(tiny_config("baseline", lact_chunk_size=4, window_size=5))
    model.save_pretrained(root / "lm")
    write_expected(model, root / "expected.pt")
    return root


def write_expected(model, path: Path) -> None:
    ids = token_ids(2, 11)
    with torch.no_grad():
        logits, inner = model(ids).logits, model.model(ids).last_hidden_state
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    buffers = dict(model.named_buffers())
    torch.save({"ids": ids, "logits": logits, "inner": inner, "tokens": tokens, "buffers": buffers}, path)


def python_files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}


# ---- what is in the folder ----


def test_auto_map_is_complete(saved):
    """auto_map held only the class that was saved, so AutoModel or a classifier could not be made from the folder."""
    auto_map = json.loads((saved / "lm" / "config.json").read_text())["auto_map"]
    assert auto_map.keys() == AUTO_CLASSES
    for reference in auto_map.values():
        module, name = reference.split(".")
        assert f"class {name}(" in (saved / "lm" / f"{module}.py").read_text(encoding="utf-8")


def test_saved_files_are_those_that_the_model_reaches(saved):
    """Files of subfolders were missing, or reached by an import that a flat folder cannot resolve."""
    source = Path(hf_ttt.__file__).parent
    reached = {Path(file).name for file in get_relative_import_files(source / "modeling_lact.py")}
    reached.add("modeling_lact.py")
    files = python_files(saved / "lm")
    assert files.keys() == reached
    assert files == {name: (source / name).read_text(encoding="utf-8") for name in reached}


def test_imports_of_every_saved_file(saved):
    """From the Hub every file's imports must be installed, also inside functions: only torch, transformers and the
    standard library are. Relative imports are `from .sibling import name`, which is all that is copied and resolved."""
    files = python_files(saved / "lm")
    for name, text in files.items():
        assert set(get_imports(saved / "lm" / name)) <= {"torch", "transformers"} | set(sys.stdlib_module_names), name
        siblings = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert not any(alias.name.split(".")[0] == "hf_ttt" for alias in node.names), name
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module.split(".")[0] != "hf_ttt", name
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1 and node.module and "." not in node.module, (name, ast.unparse(node))
                siblings.add(node.module)
        assert {f"{sibling}.py" for sibling in siblings} <= files.keys(), name
        assert set(get_relative_imports(saved / "lm" / name)) == siblings, name


def test_every_model_class_calls_post_init():
    """A remote class without post_init() fails in from_pretrained of transformers 5."""
    for name in hf_ttt.__all__:
        value = getattr(hf_ttt, name)
        if isinstance(value, type) and issubclass(value, torch.nn.Module):
            assert "self.post_init()" in inspect.getsource(value.__init__), name


@pytest.mark.parametrize("tie", [False, True])
def test_tied_embeddings_are_saved_once(tie, tmp_path):
    """`_tied_weights_keys` as a list has no keys(): construction and save_pretrained failed in transformers 5."""
    model = busy_model(tiny_config("variant2", tie_word_embeddings=tie))
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.embeddings.weight" in names and ("lm_head.weight" in names) is not tie
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embeddings.weight) is tie
    ids = token_ids(2, 9)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_an_installed_package_loads_its_own_class(saved):
    """With hf_ttt imported the folder loads without trust_remote_code, and keeps its code files when saved again."""
    model = AutoModelForCausalLM.from_pretrained(saved / "lm")
    assert type(model) is hf_ttt.LaCTForCausalLM
    assert type(AutoConfig.from_pretrained(saved / "lm")) is hf_ttt.LaCTConfig


# ---- a process without hf_ttt ----


def child_loads(folder, expected, second):
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    expected = torch.load(expected)
    trust = {"trust_remote_code": True}
    model = AutoModelForCausalLM.from_pretrained(folder, **trust).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        assert torch.equal(model(expected["ids"]).logits, expected["logits"])
    buffers = dict(model.named_buffers())
    assert buffers.keys() == expected["buffers"].keys() and buffers
    assert all(torch.equal(buffers[name], value) for name, value in expected["buffers"].items())
    for use_cache in (True, False):
        settings = {"max_new_tokens": 6, "do_sample": False, "use_cache": use_cache}
        tokens = model.generate(expected["ids"], attention_mask=torch.ones_like(expected["ids"]), **settings)
        assert torch.equal(tokens, expected["tokens"])

    assert AutoConfig.from_pretrained(folder, **trust).lact_chunk_size == 4
    inner = AutoModel.from_pretrained(folder, **trust).eval()
    with torch.no_grad():
        assert torch.equal(inner(expected["ids"]).last_hidden_state, expected["inner"])
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, **trust)
    assert classifier(expected["ids"], attention_mask=torch.ones(2, 11)).logits.shape == (2, 3)
    assert torch.equal(classifier.model.layers[1].attn.w1, model.model.layers[1].attn.w1)
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, ttt_implementation="recurrent", **trust)
    assert half(expected["ids"]).logits.dtype == torch.bfloat16
    assert half.model.layers[0].attn.w1.dtype == torch.float32 and half.get_ttt_implementation() == "recurrent"
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, **trust), **trust)
    assert fresh(expected["ids"], labels=expected["ids"]).loss.isfinite()
    model.save_pretrained(second)
    return type(model).__name__


@pytest.fixture(scope="module")
def second(saved, tmp_path_factory) -> Path:
    """The folder that a process without hf_ttt and triton saves again."""
    root = tmp_path_factory.mktemp("second")
    args = saved / "lm", saved / "expected.pt", root / "lm"
    assert run_child(child_loads, *args, home=root / "home", no_triton=True) == "LaCTForCausalLM"
    return root / "lm"


def test_loads_without_the_package_and_triton(saved, second):
    """Remote code: logits, buffers (garbage if not made again after loading on meta), generation, every Auto class."""
    assert python_files(second) == python_files(saved / "lm")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (saved / "lm", second)]
    assert configs[0] == configs[1]


@NO_TRITON
def test_loads_without_the_package_but_with_triton(saved, tmp_path):
    run_child(child_loads, saved / "lm", saved / "expected.pt", tmp_path / "lm", home=tmp_path / "home")


def test_a_folder_saved_from_remote_code_loads_again(saved, second, tmp_path):
    """After fine-tuning, the pushed copy had weights and no code: the second generation must load like the first."""
    third = tmp_path / "third"
    run_child(child_loads, second, saved / "expected.pt", third, home=tmp_path / "home")
    assert python_files(third) == python_files(second)


# ---- a Hub ----


class ReadOnlyHub(BaseHTTPRequestHandler):
    """Serves a folder as the repository `REPOSITORY`, as far as downloading needs it."""

    protocol_version = "HTTP/1.1"
    folder: Path
    served: list[str]

    def log_message(self, *args) -> None:
        pass

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = unquote(self.path.split("?")[0])
        names = sorted(file.name for file in self.folder.iterdir())
        if path.startswith(f"/api/models/{REPOSITORY}"):
            listing = [{"type": "file", "path": name, "oid": name, "size": 1} for name in names]
            info = {"id": REPOSITORY, "sha": REVISION, "siblings": [{"rfilename": name} for name in names]}
            body = json.dumps(listing if "/tree/" in path else info).encode()
            return self.answer(200, body, Content_Type="application/json")
        name = path.rsplit("/", 1)[-1]
        if not path.startswith(f"/{REPOSITORY}/resolve/") or name not in names:
            return self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=REVISION)
        if self.command == "GET":
            self.served.append(name)
        body = (self.folder / name).read_bytes()
        self.answer(200, body, ETag=f'"{name}"', X_Repo_Commit=REVISION, Accept_Ranges="bytes")

    do_HEAD = do_GET


@pytest.fixture
def hub(saved):
    handler = type("Hub", (ReadOnlyHub,), {"folder": saved / "lm", "served": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler.served
    server.shutdown()
    server.server_close()


def child_loads_from_hub(repository, expected):
    import torch
    from transformers import AutoModelForCausalLM, dynamic_module_utils

    checked, check_imports = [], dynamic_module_utils.check_imports

    def recording(filename):
        checked.append(str(filename).rsplit("/", 1)[-1])
        return check_imports(filename)

    dynamic_module_utils.check_imports = recording
    expected = torch.load(expected)
    model = AutoModelForCausalLM.from_pretrained(repository, trust_remote_code=True).eval()
    with torch.no_grad():
        assert torch.equal(model(expected["ids"]).logits, expected["logits"])
    return sorted(set(checked))


def test_loads_from_a_hub_that_checks_every_file(saved, hub, tmp_path):
    """A top-level import of triton in a file that is only imported passed from a folder and failed from the Hub."""
    endpoint, served = hub
    proxies = {name: "127.0.0.1" for name in ("NO_PROXY", "no_proxy")}
    settings = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", **proxies}
    args = REPOSITORY, saved / "expected.pt"
    checked = run_child(child_loads_from_hub, *args, home=tmp_path / "home", no_triton=True, **settings)
    assert set(checked) == python_files(saved / "lm").keys()
    assert set(checked) | {"config.json", "model.safetensors"} <= set(served)


# ---- two revisions of the code in one process ----


def child_two_revisions(folder, changed, expected):
    import sys

    import torch
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    import hf_ttt

    expected = torch.load(expected)
    names = "modeling_lact.LaCTForCausalLM"
    compute = lambda model: model.eval()(expected["ids"]).logits.detach()  # noqa: E731
    installed = hf_ttt.LaCTForCausalLM.from_pretrained(folder)
    assert torch.equal(compute(installed), expected["logits"])
    copies = {}
    for path in (changed, folder):
        copies[path] = get_class_from_dynamic_module(names, path).from_pretrained(path)
        assert torch.equal(compute(installed), expected["logits"])
    assert torch.equal(compute(copies[folder]), expected["logits"])
    difference = (compute(copies[changed]) - expected["logits"]).abs().max().item()

    registries = []
    for model in (installed, *copies.values()):
        package = type(model).__module__.rsplit(".", 1)[0]
        registries.append(sys.modules[f"{package}.ttt_ops"].TTT_FUNCTIONS)
    assert len({id(registry) for registry in registries}) == 3
    registries[1].register("recurrent", "torch", None)
    registries[1].register("parallel", "torch", None)
    assert torch.equal(compute(installed), expected["logits"])
    assert torch.equal(compute(copies[folder]), expected["logits"])
    return difference


def test_two_revisions_in_one_process_share_nothing(saved, tmp_path):
    """Registering an op's name twice, by the package and by a remote copy of another revision, re-pointed the first."""
    changed = tmp_path / "lm_changed"
    changed.mkdir()
    for file in (saved / "lm").iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    state = (changed / "ttt_state.py").read_text(encoding="utf-8")
    assert state.count("\nEPS = 1e-5") == 1
    (changed / "ttt_state.py").write_text(state.replace("\nEPS = 1e-5", "\nEPS = 0.5"), encoding="utf-8")
    args = saved / "lm", changed, saved / "expected.pt"
    assert run_child(child_two_revisions, *args, home=tmp_path / "home", blocked=()) > 1e-3


# ---- pipelines ----


@pytest.mark.parametrize("source", ["object", "folder"])
def test_text_generation_pipeline(source, tmp_path):
    """Batches of prompts are padded on the left; each text is what its prompt gives alone."""
    tokenizer = ByT5Tokenizer(padding_side="left")
    config = tiny_config("variant2", vocab_size=len(tokenizer), lact_chunk_size=4, window_size=5)
    model = busy_model(config)
    if source == "object":
        generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    else:
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        generator = pipeline("text-generation", model=str(tmp_path))
    assert isinstance(generator.model, hf_ttt.LaCTForCausalLM)
    prompts = ["a", "fast weights", "one step"]
    settings = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    batched = [out[0]["generated_text"] for out in generator(prompts, batch_size=3, **settings)]
    for prompt, text in zip(prompts, batched, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        alone = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False)[0, ids.shape[1] :]
        assert text == tokenizer.decode(alone, skip_special_tokens=True)
        assert generator(prompt, **settings)[0]["generated_text"] == text
