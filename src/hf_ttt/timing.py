# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""How fast the op or a saved model is on this machine; what gives a wrong result is not timed."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Timer
from transformers import AutoConfig
from transformers.modeling_utils import PreTrainedModel

from .configuration_lact import LaCTConfig
from .modeling_lact import CACHE_KEY
from .ttt_interface import Rule
from .ttt_ops import ttt_attention
from .ttt_triton import INTERPRETED

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHECKED_CHUNKS = 3  # Muon amplifies rounding from update to update; a missing update shows in the first chunks too
# Of the output, relative to float64's greatest value. Measured on a CPU over all variants, widths 16 to 128, and tiny
# models of all families: at most 6.8e-6 in float32, 0.1 in bfloat16 and 4.8e-2 in float16; times 10 and 2. A chunk of
# the wrong size gives more than 0.34.
TOLERANCES = {"float32": 7e-5, "bfloat16": 0.2, "float16": 0.2}


class Timing(NamedTuple):
    """What was timed, in how many milliseconds (median), how many units a second that is, and the relative error."""

    what: str
    milliseconds: float
    rate: float
    unit: str
    error: float


class OpSize(NamedTuple):
    """Of q, k and v [batch, tokens, heads, width], with square fast weights and chunks of so many tokens."""

    batch: int = 1
    tokens: int = 4096
    heads: int = 4
    width: int = 64
    chunk: int = 256


def time_op(
    variant: str,
    size: OpSize,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    backward: bool = False,
    seconds: float = 1.0,
) -> list[Timing]:
    """Milliseconds of `ttt_attention` in each evaluation that is exact and available here.

    Args:
        variant: of the rule, as in `LaCTConfig.variant`.
        size: of the tensors.
        dtype: of the tokens, a name in `DTYPES`; fast weights and rates are float32.
        device: "cpu" or "cuda".
        backward: whether the gradients of all inputs are computed too.
        seconds: to measure for, each.

    Raises:
        ValueError: for values that are not known, sizes below 1, and a result that is wrong.
    """
    _check(dtype, device, seconds)
    for name, value in size._asdict().items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    config = LaCTConfig.variant(variant)
    inputs = _op_inputs(size, config, DTYPES[dtype], device)
    call: dict[str, Any] = {"rule": config.rule, "chunk_size": size.chunk}
    checked = _op_inputs(
        size._replace(tokens=min(size.tokens, CHECKED_CHUNKS * size.chunk)), config, DTYPES[dtype], device
    )
    exact = {name: None if x is None else x.double() for name, x in checked.items()}
    expected: Any = ttt_attention(**exact, **call, implementation="recurrent", backend="torch")
    leaves = [x.requires_grad_(backward) for x in inputs.values() if x is not None]
    rows = []
    for choice in _evaluations(config.rule):
        run = _attention(inputs, leaves, {**call, **choice}, backward)
        with contextlib.suppress(ImportError):  # a backend that is not there
            name = " ".join(choice.values()) + (" forward+backward" if backward else " forward")
            output: Any = ttt_attention(**checked, **call, **choice)
            error = _checked(name, output, expected, dtype)
            rows.append(_timing(name, run, size.batch * size.tokens, "tokens/s", error, seconds))
    return rows


def _attention(inputs: dict[str, Any], leaves: list[Tensor], call: dict[str, Any], backward: bool) -> Callable:
    def run() -> Tensor:
        with torch.set_grad_enabled(backward):
            out: Any = ttt_attention(**inputs, **call)
            if backward:
                torch.autograd.grad(out.float().square().sum(), leaves)
        return out.detach()

    return run


def _evaluations(rule: Rule) -> Iterator[dict[str, Any]]:
    """Those that are exact; an interpreter's time would say nothing of a kernel."""
    implementations = ("recurrent", "parallel") if rule.parallelizable else ("recurrent",)
    backends = ("torch",) if INTERPRETED else ("torch", "triton")
    for implementation, backend in itertools.product(implementations, backends):
        yield {"implementation": implementation, "backend": backend}


def _op_inputs(size: OpSize, config: LaCTConfig, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Random arguments of `ttt_attention`; keys and queries of unit length, rates of some 0.005."""
    batch, tokens, heads, width, _ = size
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    uniform = lambda: torch.rand(batch, tokens, heads, 1, generator=generator)  # noqa: E731
    q, k, v = (normal(batch, tokens, heads, width) for _ in range(3))
    inputs: dict[str, Any] = dict(zip("qkv", (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v), strict=True))
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    for i in range(3):
        read = i == 1 or config.rule.fast_weight == "swiglu"
        inputs[f"w{i}"] = normal(heads, width, width) / width**0.5 if read else None
    for i in range(3):
        inputs[f"lr{i}"] = uniform() * 0.01 if config.ttt_learnable_lr and i in config.rule.updated else None
    inputs["momentum"] = uniform() if config.use_momentum else None
    return {name: None if x is None else x.to(device) for name, x in inputs.items()}


# ---- models ----


def time_model(
    folder: str | Path,
    *,
    batch: int = 1,
    length: int = 1024,
    dtype: str = "float32",
    device: str = "cpu",
    seconds: float = 1.0,
) -> list[Timing]:
    """Rates of a saved model in each evaluation that is exact: of a language model prefill and decoding with a cache
    (without the head), of a vision model images, of a novel-view model scenes and views. The check before that holds a
    copy of the model in float64.

    Args:
        folder: what `save_pretrained` wrote.
        batch: sequences, images or scenes.
        length: tokens of a prompt; pixels of the side of an image, rounded up to whole patches, for other models.
        dtype, device, seconds: as in `time_op`.

    Raises:
        ValueError: for a folder or values that do not fit, and a result that is wrong.
    """
    from .hub.cards import empty_model, model_class

    _check(dtype, device, seconds)
    for name, value in (("batch", batch), ("length", length)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    empty_model(folder)  # says what is wrong with a folder
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = model_class(config, Path(folder)).from_pretrained(folder, dtype=DTYPES[dtype]).to(device).eval()
    measure = _MEASURES.get(config.model_type, _time_images)
    rows = []
    with torch.no_grad():
        exact = copy.deepcopy(model).double()
        for choice in _evaluations(config.rule):
            with contextlib.suppress(ImportError):  # a backend that is not there
                model.set_ttt_implementation(**choice)
                rows += measure(model, exact, " ".join(choice.values()), (batch, length), dtype, seconds)
    return rows


def _time_language(
    model: PreTrainedModel, exact: PreTrainedModel, name: str, size: tuple[int, int], dtype: str, seconds: float
) -> list[Timing]:
    batch, length = size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (batch, length + 1), generator=generator).to(model.device)
    prompt, last = ids[:, :-1], ids[:, -1:]
    short = ids[:, : CHECKED_CHUNKS * model.config.lact_chunk_size]
    base, exact_base = getattr(model, "model", model), getattr(exact, "model", exact)  # the cache is that of the base
    expected = exact_base(short).last_hidden_state[:, -1:]
    cache = base(short[:, :-1], use_cache=True)[CACHE_KEY]
    decoded = base(short[:, -1:], **{CACHE_KEY: cache}, use_cache=True).last_hidden_state
    error = _checked(f"{name} decoding", decoded, expected, dtype)
    prefill = lambda: base(prompt, use_cache=True)  # noqa: E731
    cache = prefill()[CACHE_KEY]
    step = lambda: base(last, **{CACHE_KEY: cache}, use_cache=True)  # noqa: E731
    return [
        _timing(f"{name} prefill", prefill, prompt.numel(), "tokens/s", error, seconds),
        _timing(f"{name} decoding", step, batch, "tokens/s", error, seconds),
    ]


def _time_images(
    model: PreTrainedModel, exact: PreTrainedModel, name: str, size: tuple[int, int], dtype: str, seconds: float
) -> list[Timing]:
    batch, side = size
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, model.config.num_channels, side, side, generator=generator)
    images = images.to(model.device, model.dtype)
    first = lambda outputs: outputs[0][-1] if isinstance(outputs[0], tuple) else outputs[0]  # noqa: E731
    run = lambda: first(model(images, return_dict=False))  # noqa: E731
    error = _checked(name, run(), first(exact(images.double(), return_dict=False)), dtype)
    return [_timing(f"{name} forward", run, batch, "images/s", error, seconds)]


def _time_views(
    model: PreTrainedModel, exact: PreTrainedModel, name: str, size: tuple[int, int], dtype: str, seconds: float
) -> list[Timing]:
    batch, side = size
    views, side = 4, -(-side // model.config.patch_size) * model.config.patch_size
    poses = torch.eye(4).repeat(batch, views, 1, 1)
    poses[..., 0, 3] = torch.arange(views) / views
    cameras = (
        torch.tensor([side, side, side / 2, side / 2]).repeat(batch, views, 1).to(model.device),
        poses.to(model.device),
    )
    images = torch.rand(batch, views, 3, side, side, generator=torch.Generator().manual_seed(0))
    images = images.to(model.device, model.dtype)
    reconstruct = lambda: model.reconstruct(images, *cameras)  # noqa: E731
    scene = reconstruct()
    render = lambda: model.render(scene, *cameras, size=(side, side))  # noqa: E731
    expected = exact.render(exact.reconstruct(images.double(), *cameras), *cameras, size=(side, side))
    error = _checked(name, render(), expected, dtype)
    return [
        _timing(f"{name} reconstruct ({views} views)", reconstruct, batch, "scenes/s", error, seconds),
        _timing(f"{name} render", render, batch * views, "views/s", error, seconds),
    ]


_MEASURES: dict[str, Any] = {"lact_swiglu": _time_language, "lact_nvs": _time_views}

# ---- what both share ----


def _check(dtype: str, device: str, seconds: float) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(map(repr, DTYPES))}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' is not there: use 'cpu'")
    if not seconds > 0:
        raise ValueError(f"seconds={seconds} must be above 0")


def _checked(name: str, actual: Tensor, expected: Tensor, dtype: str) -> float:
    """The relative error of a result.

    Raises:
        ValueError: if it is too great.
    """
    error = ((actual.double() - expected).abs().max() / expected.abs().max()).item()
    if not error <= TOLERANCES[dtype]:
        raise ValueError(
            f"{name} is wrong: relative error {error:.2e} against float64, above {TOLERANCES[dtype]:.0e} for {dtype}; "
            "nothing was timed"
        )
    return error


def _timing(name: str, run: Callable, units: int, unit: str, error: float, seconds: float) -> Timing:
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    median = timer.blocked_autorange(min_run_time=seconds).median
    return Timing(name, median * 1e3, units / median, unit, error)
