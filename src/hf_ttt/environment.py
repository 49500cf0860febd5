# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What is installed here, and which evaluation "auto" takes for each model and rule, and why."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any, NamedTuple

import torch

import hf_ttt

from .configuration_ttt import VARIANTS
from .modeling_lact import LaCTForCausalLM
from .modeling_lact_nvs import LaCTNVSModel
from .modeling_vittt import ViTTTForImageClassification
from .ttt_interface import CallSize
from .ttt_triton import INTERPRETED, is_available

PACKAGES = (
    "torch",
    "transformers",
    "huggingface-hub",
    "safetensors",
    "tokenizers",
    "triton",
    "accelerate",
    "datasets",
    "evaluate",
    "peft",
    "jinja2",
    "pillow",
    "matplotlib",
)


class Example(NamedTuple):
    """A model at a published size, whose calls have a width and a number of tokens over all heads."""

    model: Any
    size: str
    width: int
    tokens: int


EXAMPLES = {
    "LaCT": Example(LaCTForCausalLM, "760m", 384, 4 * 32768),
    "ViTTT": Example(ViTTTForImageClassification, "small", 64, 6 * 196 * 64),
    "LaCT-NVS": Example(LaCTNVSModel, "l24_ttt2x", 768, 8 * 1024),
}


def environment() -> dict[str, Any]:
    """Versions, devices, and what "auto" takes here: {"hf-ttt", "python", "platform", "packages", "devices", "triton",
    "evaluations"}, all of which JSON holds.

    A package that is not installed has the version None. An evaluation has the keys "model", "rule", "implementation",
    "backend" and "why"; it is that of a published size on the first device.
    """
    return {
        "hf-ttt": hf_ttt.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": _devices(),
        "triton": _triton(),
        "evaluations": _evaluations(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = [f"cuda:{i} {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for i, gpu in enumerate(gpus)]
    return [*names, f"cpu, {torch.get_num_threads()} threads"]


def _triton() -> str:
    """Whether Triton's kernels run here, and if not why."""
    if _version("triton") is None:
        return "not installed"
    if INTERPRETED:
        return "interpreted on the CPU (TRITON_INTERPRET is set): for tests, not for speed"
    return "runs on the GPU" if is_available("cuda") and torch.cuda.is_available() else "installed, but there is no GPU"


def _evaluations(device: torch.device) -> list[dict[str, str]]:
    rows = []
    for name, example in EXAMPLES.items():
        size = CallSize(device, example.width, example.tokens)
        for variant in VARIANTS:
            rule = example.model.config_class.variant(variant).rule
            chosen = example.model._ttt_functions.explain(rule, "auto", "auto", size)
            row = dict(zip(("implementation", "backend", "why"), chosen, strict=True))
            rows.append({"model": f"{name} {example.size}", "rule": variant, **row})
    return rows
