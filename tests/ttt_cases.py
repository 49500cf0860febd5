# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Rules, inputs and comparisons that the tests of the TTT ops share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_ttt import TTTRule, TTTState, ttt_attention
from hf_ttt.ttt_reference import reference_attention

NAMES = ("q", "k", "v", "w0", "w1", "w2", "lr0", "lr1", "lr2", "momentum")
PER_TOKEN = ("q", "k", "v", "lr0", "lr1", "lr2", "momentum")
Inputs = dict[str, Tensor | None]

NETWORKS = (
    {"update": "all", "fast_weight": "swiglu"},
    {"update": "last", "fast_weight": "swiglu"},
    {"update": "last", "fast_weight": "linear"},
)
NORMS = (
    {"weight_norm": "post"},
    {"weight_norm": "post", "detach_norms": True},
    {"weight_norm": "pre"},
    {"weight_norm": "pre", "detach_norms": True},
    {"weight_norm": "none"},
)
MUONS = ({}, {"muon": "lact"}, {"muon": "nvs", "muon_steps": 3})


def every_rule() -> list[TTTRule]:
    """All combinations of the fields, without those that mean the same ("linear" has no w0 and w2 to update)."""
    fields = (
        NETWORKS,
        NORMS,
        MUONS,
        ({"inner_steps": 1}, {"inner_steps": 2}),
        ({"loss": "dot_product"}, {"loss": "mse"}),
        ({"direction": "descent"}, {"direction": "ascent"}),
        ({"read_with": "query"}, {"read_with": "key"}),
    )
    return [TTTRule(**{k: v for part in parts for k, v in part.items()}) for parts in itertools.product(*fields)]


def some_rules() -> list[TTTRule]:
    """Every value of every field, each of the networks with each norm, and each Muon with each norm."""
    rest = itertools.cycle(
        [
            {},
            {"loss": "mse", "direction": "ascent"},
            {"inner_steps": 2, "read_with": "key"},
            {"direction": "ascent", "inner_steps": 2},
            {"read_with": "key"},
            {"loss": "mse", "inner_steps": 2},
            {"direction": "ascent"},
        ]
    )
    rules = []
    for i, (network, norm) in enumerate(itertools.product(NETWORKS, NORMS)):
        for muon in (MUONS[i % 3], MUONS[(i + 1) % 3]):
            rules.append(TTTRule(**network, **norm, **muon, **next(rest)))
    return rules


def parallelizable(rules: list[TTTRule]) -> list[TTTRule]:
    return [rule for rule in rules if rule.parallelizable]


def with_implementations(rules: list[TTTRule]) -> list[tuple[str, TTTRule]]:
    """Each rule with each evaluation that is exact for it."""
    return [("recurrent", rule) for rule in rules] + [("parallel", rule) for rule in parallelizable(rules)]


def name(value: object) -> str | None:
    """Test id of a rule: what sets it apart from the default. Other values keep pytest's id."""
    if not isinstance(value, TTTRule):
        return None
    parts = ["linear" if value.fast_weight == "linear" else value.update, value.weight_norm]
    parts += ["detached"] if value.detach_norms else []
    parts += [f"{value.muon}{value.muon_steps}"] if value.muon else []
    parts += [
        x for x, default in zip((value.loss, value.direction), ("dot_product", "descent"), strict=True) if x != default
    ]
    parts += ["key"] if value.read_with == "key" else []
    parts += [f"{value.inner_steps}steps"] if value.inner_steps > 1 else []
    return "-".join(parts)


def make_inputs(
    rule: TTTRule,
    *,
    batch: int = 2,
    length: int = 17,
    heads: int = 2,
    dk: int = 5,
    dh: int = 6,
    dv: int = 4,
    dtype: torch.dtype = torch.float64,
    rates: str | None = "scalar",
    momentum: str | float | None = "random",
    per_row: bool = False,
    seed: int = 0,
    requires_grad: bool = True,
) -> Inputs:
    """Arguments of `ttt_attention` with all widths different; fast weights are float32 at least. Values are small
    enough for the steps on an unnormalised squared error to stay bounded.

    `rates` is "scalar", "channel" or None; `momentum` is "random", a number for all tokens, or None.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    uniform = lambda *shape: torch.rand(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    linear = rule.fast_weight == "linear"
    dh = dk if linear else dh
    lead, tokens, wide = ((batch,) if per_row else ()), (batch, length, heads), rates == "channel"
    x: Inputs = {"q": normal(*tokens, dk), "k": 0.5 * normal(*tokens, dk), "v": normal(*tokens, dv)}
    x["w0"] = None if linear else 0.5 * 0.5 * normal(*lead, heads, dh, dk)
    x["w1"] = 0.5 * normal(*lead, heads, dv, dh)
    x["w2"] = None if linear else 0.5 * 0.5 * normal(*lead, heads, dh, dk)
    for rate, width in (("lr0", dk), ("lr1", dh), ("lr2", dk)):
        x[rate] = None if rates is None else 0.1 + 0.4 * uniform(*tokens, width if wide else 1)
    if momentum == "random":
        x["momentum"] = uniform(*tokens, 1)
    else:
        x["momentum"] = None if momentum is None else torch.full((*tokens, 1), momentum, dtype=torch.float64)
    high = torch.promote_types(dtype, torch.float32)
    for key, tensor in x.items():
        if tensor is not None:
            x[key] = tensor.to(dtype if key in ("q", "k", "v") else high).requires_grad_(requires_grad)
    return x


def map_inputs(function: Callable[[Tensor], Tensor], x: Inputs, names: tuple[str, ...] = NAMES) -> Inputs:
    """New leaves: `function` of the named inputs, the others as they are; all require gradients."""
    return {
        key: None if t is None else (function(t.detach()) if key in names else t.detach()).requires_grad_()
        for key, t in x.items()
    }


def reference(x: Inputs, rule: TTTRule, chunk_size: int) -> Tensor:
    return reference_attention(**x, rule=rule, chunk_size=chunk_size)[0]


def readout(out: Tensor) -> Tensor:
    """A fixed random weighting of an output, so that gradients of sum(out · weights) see each element."""
    generator = torch.Generator().manual_seed(out.numel())
    return torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out.dtype)


def gradients(out: Tensor, x: Inputs, weights: Tensor | None = None, unused: str = "fail") -> dict[str, Tensor]:
    """∂ sum(out · weights) / ∂ input for each input that is there. With unused="zero" a missing gradient counts as
    zero; the ops themselves must give each input one."""
    given = {key: t for key, t in x.items() if t is not None}
    loss = (out * (readout(out) if weights is None else weights)).sum()
    if unused == "zero" and not loss.requires_grad:
        some = [None] * len(given)
    else:
        some = torch.autograd.grad(loss, list(given.values()), allow_unused=unused == "zero", retain_graph=True)
    return {key: torch.zeros_like(t) if g is None else g for (key, t), g in zip(given.items(), some, strict=True)}


def rounding(x: Inputs, rule: TTTRule, chunk_size: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The definition's results for inputs of any type, and the relative error that rounding the inputs once more makes
    in each (the greatest of three draws): what the problem itself amplifies, Newton–Schulz iteration included."""
    unit = lambda t: torch.finfo(t.dtype).eps / 2  # noqa: E731
    function = lambda y: outputs_and_gradients(lambda z: reference(z, rule, chunk_size), y, unused="zero")  # noqa: E731
    want = function(map_inputs(Tensor.double, x))
    tokens_unit = unit(x["k"])
    errors = dict.fromkeys(want, tokens_unit)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        shaken = {}
        for key, t in x.items():
            if t is not None:  # fast weights are cast to the tokens' type before they meet them
                noise = 2 * torch.rand(t.shape, dtype=torch.float64, generator=generator) - 1
                t = t.detach().double() * (1 + (tokens_unit if key in ("w0", "w1", "w2") else unit(t)) * noise)
            shaken[key] = t
        got = function(map_inputs(Tensor.clone, shaken))
        errors = {key: max(e, error(got[key], want[key])) for key, e in errors.items()}
    return want, errors


def state_outputs(state: TTTState) -> list[Tensor]:
    """What a state holds that a gradient can flow from."""
    return [t for t in state.tensors().values() if t.requires_grad]


def error(a: Tensor, b: Tensor) -> float:
    """Greatest difference over the greatest value of b, or over 1e-6 where all of b is smaller."""
    if a.shape != b.shape:
        raise AssertionError(f"shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if a.numel() == 0:
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item()


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float | dict[str, float]) -> None:
    """`error` of each tensor of `want` within the tolerance; NaN fails."""
    assert got.keys() >= want.keys()
    limits = tolerance if isinstance(tolerance, dict) else dict.fromkeys(want, tolerance)
    errors = {key: error(got[key], want[key]) for key in want}
    bad = {key: (e, limits[key]) for key, e in errors.items() if not e <= limits[key]}
    assert not bad, f"relative errors above their limits: {bad}"


def outputs_and_gradients(attention: Callable[[Inputs], Tensor], x: Inputs, unused: str = "fail") -> dict[str, Tensor]:
    """{"out": …, "q": gradient of q, …}."""
    out = attention(x)
    return {"out": out, **gradients(out, x, unused=unused)}


def attend(rule: TTTRule, chunk_size: int, **settings) -> Callable[[Inputs], Tensor]:
    """`ttt_attention` as a function of the inputs."""
    return lambda x: ttt_attention(**x, rule=rule, chunk_size=chunk_size, **settings)


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Freshly allocated memory holds NaN, so that a result that was never written shows."""
    previous = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(previous[0])
        torch.utils.deterministic.fill_uninitialized_memory = previous[1]
