# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""State dicts out of the files that the published training code, or anyone since, has written."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError
from safetensors.torch import load_file

WEIGHTS = ("auto", "ema", "raw")
_KEYS = {"ema": ("state_dict_ema", "ema"), "raw": ("model", "state_dict")}
_EMA_FIRST = ("h_vittt",)  # whose published numbers are those of the averaged weights
_HUB_FILE = re.compile(r"(?P<repo>\w[\w.-]*/[\w.-]+)/(?P<file>\S+)")
_FORBIDDEN = re.compile(r"GLOBAL ([\w.]+)")  # in what torch says of a class that it will not unpickle


def read_state_dict(
    source: str | Path, architecture: str = "vittt", *, weights: str = "auto", allow_pickle: bool = False
) -> dict[str, Any]:
    """The state dict in a checkpoint.

    Args:
        source: a file written by `torch.save` or a `.safetensors` file: a path, or "hub-id/file", such as
            "someone/ViTTT/vittt_s.pth", which is downloaded.
        architecture: decides what "auto" takes where a checkpoint has both kinds of weights: averaged ones for
            "h_vittt", the trained ones themselves otherwise.
        weights: "ema" (keys `state_dict_ema`, `ema`), "raw" (keys `model`, `state_dict`, or a file that is nothing
            but a state dict), or "auto".
        allow_pickle: whether a file with other Python objects than tensors may be read, which runs code from it.

    Returns:
        The state dict as it is in the file, on the CPU.

    Raises:
        ValueError: if the source is no checkpoint, holds Python objects without `allow_pickle`, or lacks the weights.
        OSError: if it cannot be read or downloaded.
        ImportError: if `allow_pickle` meets a class that is not installed.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights={weights!r} is not one of {', '.join(map(repr, WEIGHTS))}")
    path = _local_file(str(source))
    checkpoint = _load(path, allow_pickle)
    if not isinstance(checkpoint, Mapping):
        raise ValueError(f"source={path.name!r} holds a {type(checkpoint).__name__}, not a dictionary of tensors")
    return dict(_select(checkpoint, weights, architecture in _EMA_FIRST, path.name))


def _local_file(source: str) -> Path:
    """The path that a source names, downloaded if it is on the Hub."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    match = _HUB_FILE.fullmatch(source)
    if path.is_dir() or not match:
        raise ValueError(
            f"source={source!r} is {'a folder' if path.is_dir() else 'no file that exists'}; expected the path of a "
            "checkpoint, or 'hub-id/file' such as 'someone/ViTTT/vittt_s.pth'"
        )
    try:
        return Path(hf_hub_download(match["repo"], match["file"]))
    except (OSError, ValueError) as error:
        raise OSError(
            f"source={source!r} is no file here, and cannot be downloaded as 'hub-id/file': {error}"
        ) from error


def _load(path: Path, allow_pickle: bool) -> Any:
    """What a file holds; Python objects other than tensors and containers only if allowed."""
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"source={path.name!r} is not a safetensors file: {error}") from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        forbidden = _FORBIDDEN.search(str(error))
        whole = forbidden or (zipfile.is_zipfile(path) and isinstance(error, pickle.UnpicklingError))
        if not whole:
            raise ValueError(f"source={path.name!r} is damaged, or not a file of torch.save") from error
        if not allow_pickle:
            kind = forbidden[1] if forbidden else "of an unknown class"
            raise ValueError(
                f"source={path.name!r} holds, beside tensors, a pickled Python object ({kind}), often the "
                "configuration of a training run, and reading it runs code from the file. If you trust the file, set "
                "allow_pickle=True (--allow-pickle on the command line)"
            ) from None
    warnings.warn(f"allow_pickle: reading {path.name!r} runs code from the file", stacklevel=3)
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"source={path.name!r} holds a Python object whose class is not installed ({error}): install it to read "
            "the file"
        ) from error


def _select(checkpoint: Mapping[str, Any], weights: str, ema_first: bool, name: str) -> Mapping[str, Any]:
    """The state dict of the chosen weights in what a file holds."""
    found = {
        kind: [checkpoint[key] for key in keys if isinstance(checkpoint.get(key), Mapping) and checkpoint[key]]
        for kind, keys in _KEYS.items()
    }
    if not any(found.values()):  # a bare state dict
        found["raw"] = [checkpoint]
    order = (("ema", "raw") if ema_first else ("raw", "ema")) if weights == "auto" else (weights,)
    for kind in order:
        if found[kind]:
            return found[kind][0]
    raise ValueError(
        f"weights={weights!r}: {name!r} has no state dict under {' or '.join(map(repr, _KEYS[weights]))}; it has "
        f"{', '.join(repr(key) for key in list(checkpoint)[:8])}. Choose another of 'auto', 'ema', 'raw'"
    )
