# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""A folder pushed to the Hub in one commit: whole, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, metadata_load
from huggingface_hub.errors import HTTPError  # that of the HTTP client, which is no OSError
from safetensors import SafetensorError
from transformers import AutoConfig

from .cards import HUB_ID, empty_model, is_generated, model_class, sealed

# What a Trainer leaves beside a model, and what must not leave a machine: training_args.bin is a pickle with the token.
_LEFT_OUT = (
    ".*",
    "_*",
    "checkpoint-*",
    "runs",
    "training_args.bin",
    "optimizer.*",
    "scheduler.*",
    "scaler.*",
    "rng_state*",
)


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
    commit_message: str = "Upload model",
) -> CommitInfo:
    """Push a folder with a model and its card, in one commit: if it fails, the branch is what it was before.

    Files of a `Trainer` that are not part of the model (checkpoints, optimizer, `training_args.bin`) stay behind, and
    so do those whose names begin with a dot or an underscore. In a card that hf-ttt wrote, the name of the repository
    is filled in.

    Args:
        folder: what `save_pretrained` or a `Trainer` wrote.
        repo_id: "name" or "owner/name"; made if it does not exist.
        private: whether a new repository is private; True is an error for one that is public.
        revision: branch to push to, made if it does not exist; None for "main".
        create_pr: whether to open a pull request instead of changing "main".
        token: of the Hub; None for the one of `hf auth login` or of HF_TOKEN.
        commit_message: its first line.

    Returns:
        What the Hub says of the commit: `oid`, `commit_url` and, with `create_pr`, `pr_url`.

    Raises:
        ValueError: for a folder that does not load or has no card, before anything is sent; for `create_pr` with a
            `revision`; for `private` and a public repository.
        OSError: if the Hub cannot be reached, or refuses.
    """
    folder = Path(folder)
    if create_pr and revision not in (None, "main"):
        raise ValueError(
            f"revision={revision!r} does not go with create_pr, which is always towards 'main': leave it out"
        )
    check_folder(folder)
    api = HfApi(token=token)
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if private and not api.model_info(repo_id).private:
            raise ValueError(f"private=True, but {repo_id!r} exists and is public: choose another name, or change that")
        if revision is not None and revision != "main":
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.create_commit(
            repo_id,
            list(_operations(folder, repo_id)),
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )
    except RuntimeError as error:  # of an upload, whose reason is its cause
        raise OSError(f"{error} {error.__cause__ or ''}") from error
    except HTTPError as error:
        if isinstance(error, OSError):
            raise
        raise ConnectionError(f"the Hub at {api.endpoint} cannot be reached: {error}") from error


def check_folder(folder: str | Path) -> None:
    """Does nothing for a folder with a model of this package that loads, anywhere, and has a card.

    Args:
        folder: the folder.

    Raises:
        ValueError: that says what is wrong.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"folder={str(folder)!r} is not a folder")
    _check_card(folder)
    expected = empty_model(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    modules = {reference.split(".")[0] for reference in (getattr(config, "auto_map", None) or {}).values()}
    absent = sorted(f"{module}.py" for module in modules if not (folder / f"{module}.py").is_file())
    if absent or not modules:
        raise ValueError(
            f"folder={str(folder)!r} lacks {', '.join(absent) or 'auto_map in config.json'}, so it loads only where "
            "hf-ttt is installed: save the model again with save_pretrained"
        )
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)  # what it says of keys is an error here
    try:
        _, info = model_class(config, folder).from_pretrained(folder, output_loading_info=True)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"folder={str(folder)!r} does not load: {error}") from error
    finally:
        logger.setLevel(level)
    problems = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "of a wrong shape": sorted(str(key[0]) for key in info["mismatched_keys"]),
    }
    found = [f"{len(keys)} {what} ({', '.join(keys[:3])}…)" for what, keys in problems.items() if keys]
    if found:
        raise ValueError(
            f"folder={str(folder)!r} has weights that do not fit its {type(expected).__name__}: {', '.join(found)}"
        )


def _check_card(folder: Path) -> None:
    path = folder / "README.md"
    if not path.is_file():
        raise ValueError(f"folder={str(folder)!r} has no README.md: write one, or let `hf-ttt card {folder}` do it")
    try:
        metadata = metadata_load(path)
    except Exception as error:  # of the YAML parser
        raise ValueError(f"{str(path)!r} has metadata that cannot be read: {error}") from error
    if not metadata:
        raise ValueError(f"{str(path)!r} has no metadata: `hf-ttt card {folder} --overwrite` writes a new one")


def _operations(folder: Path, repo_id: str) -> Iterator[CommitOperationAdd]:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if not path.is_file() or any(fnmatch(part, pattern) for part in inside.parts for pattern in _LEFT_OUT):
            continue
        content: str | bytes = str(path)
        if str(inside) == "README.md":
            text = path.read_text(encoding="utf-8")
            if is_generated(text):
                content = sealed(text.replace(HUB_ID, repo_id)).encode()
        yield CommitOperationAdd(path_in_repo=inside.as_posix(), path_or_fileobj=content)
