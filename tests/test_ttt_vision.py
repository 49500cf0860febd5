# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Both evaluations of the ViTTT block against its definition, in values and gradients, and in narrow types."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from hf_ttt.ttt_vision import (
    VISION_FUNCTIONS,
    VisionRule,
    VisionTokens,
    conv_step,
    glu_step,
    vision_parallel,
    vision_recurrent,
)
from hf_ttt.ttt_vision_reference import reference_vision

RULES = {
    "baseline": VisionRule(),
    "ascent": VisionRule(direction="ascent"),
    "mse": VisionRule(loss="mse"),
    "variant1": VisionRule(update="last"),
    "variant1_mse_ascent": VisionRule(update="last", loss="mse", direction="ascent"),
    "variant3": VisionRule(update="last", fast_weight="linear"),
    "variant6": VisionRule(update="last", fast_weight="linear", normalise=False),
    "no_norm": VisionRule(normalise=False),
    "linear_all": VisionRule(fast_weight="linear"),
    "linear_plain": VisionRule(fast_weight="linear_plain"),
    "linear_plain_no_norm": VisionRule(fast_weight="linear_plain", normalise=False, direction="ascent"),
}
GRIDS = [(1, 1), (1, 6), (2, 3), (3, 3), (5, 4), (7, 2)]  # of 8 channels: fewer tokens than channels, and more
EVALUATIONS = {"recurrent": vision_recurrent, "parallel": vision_parallel}


def make_inputs(grid, batch=2, heads=2, width=8, dtype=torch.float64, scale=1.0, seed=0):
    """Tokens of both branches and their initial fast weights, large enough for every part to matter."""
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, dtype=dtype, generator=generator) * scale  # noqa: E731
    height, width_tokens = grid
    tokens = [random(batch, heads, height * width_tokens, width) for _ in range(3)]
    maps = [random(batch, height, width_tokens, width) for _ in range(3)]
    weights = [random(1, heads, width, width) * 0.5 for _ in range(2)] + [random(width, 1, 3, 3) * 0.5]
    return VisionTokens(*tokens, *maps), weights


def evaluate(function, tokens, weights, rule):
    """Outputs, and gradients of a random projection of both, by name."""
    leaves = [x.detach().clone().requires_grad_() for x in (*tokens, *weights)]
    out = function(VisionTokens(*leaves[:6]), *leaves[6:], rule=rule)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in out]
    sum((x * c).sum() for x, c in zip(out, cotangents, strict=True)).backward()
    names = (*VisionTokens._fields, "w1", "w2", "w3")
    grads = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in zip(names, leaves, strict=True)}
    return {"gated": out[0].detach(), "depthwise": out[1].detach(), **grads}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("function", EVALUATIONS.values(), ids=EVALUATIONS)
def test_equals_the_definition(function, rule, grid):
    """Outputs and all gradients, with fewer and with more tokens than the head is wide."""
    tokens, weights = make_inputs(grid)
    got, want = evaluate(function, tokens, weights, rule), evaluate(reference_vision, tokens, weights, rule)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, atol=1e-10, rtol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("name", ["baseline", "mse", "variant3", "linear_plain"])
def test_several_steps(name, steps):
    """Each step reads the weights of the one before."""
    rule = VisionRule(**{**vars(RULES[name]), "inner_steps": steps})
    tokens, weights = make_inputs((4, 3))
    got, want = evaluate(vision_recurrent, tokens, weights, rule), evaluate(reference_vision, tokens, weights, rule)
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, atol=1e-10, rtol=1e-9)
    once = evaluate(vision_recurrent, tokens, weights, RULES[name])
    assert (got["gated"] - once["gated"]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="set inner_steps=1"):
        VISION_FUNCTIONS.resolve(rule, "parallel")
    with pytest.raises(ValueError, match="set inner_steps=1"):
        vision_parallel(tokens, *weights, rule=rule)
    assert VISION_FUNCTIONS.resolve(rule) == ("recurrent", "torch")
    assert VISION_FUNCTIONS.resolve(RULES[name]) == ("parallel", "torch")


@pytest.mark.parametrize("grid", [(2, 2), (3, 4)], ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("function", EVALUATIONS.values(), ids=EVALUATIONS)
def test_gradcheck(function, rule, grid):
    """Gradients against finite differences, in both orders of the linear attention."""
    tokens, weights = make_inputs(grid, batch=1, heads=1, width=5)
    leaves = [x.requires_grad_() for x in (*tokens, *weights)]
    call = lambda *x: function(VisionTokens(*x[:6]), *x[6:], rule=rule)  # noqa: E731
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("grid", [(2, 2), (5, 5)], ids=str)
@pytest.mark.parametrize("function", EVALUATIONS.values(), ids=EVALUATIONS)
@pytest.mark.parametrize("zero", ["k", "v", "k_map", "v_map"])
def test_zero_tokens_have_finite_gradients(function, zero, grid):
    """A step of zero has a norm of zero, whose gradient a square root would make infinite."""
    tokens, weights = make_inputs(grid)
    tokens = tokens._replace(**{zero: torch.zeros_like(getattr(tokens, zero))})
    for name, value in evaluate(function, tokens, weights, RULES["baseline"]).items():
        assert value.isfinite().all(), name


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 0.01), (torch.bfloat16, 0.02)], ids=str)
def test_narrow_types_keep_small_updates(dtype, limit):
    """float16 at 200 × 304 tokens and initial scale: the published code scales by 1 / N before it sums, and is off by
    69 % there. Inputs and weights are as large as at the initialisation of a model of 64 channels."""
    grid, (batch, heads, width) = (200, 304), (1, 2, 32)
    tokens, weights = make_inputs(grid, batch, heads, width, dtype=torch.float32, scale=0.16)
    weights = [w / w.std() * 0.02 for w in weights]
    narrow = VisionTokens(*(x.to(dtype) for x in tokens))
    wide = VisionTokens(*(x.float() for x in narrow))  # the same inputs: what is measured is the arithmetic
    for rule in (RULES["baseline"], RULES["variant6"]):
        steps = [
            [w - w0 for w, w0 in zip((*glu_step(x.k, x.v, *weights[:2], rule),), weights[:2], strict=True)]
            for x in (narrow, wide)
        ]
        for got, want in zip(*steps, strict=True):
            if want.norm() > 0:
                assert relative(got, want) < limit
        first = weights[2].flatten(1).mT
        kernels = [conv_step(x.k_map, x.v_map, weights[2], rule) - first for x in (narrow, wide)]
        assert relative(*kernels) < limit
        for function in EVALUATIONS.values():
            outputs = zip(function(narrow, *weights, rule=rule), function(wide, *weights, rule=rule), strict=True)
            assert all(got.dtype == dtype and relative(got, want) < limit for got, want in outputs)


def test_sums_do_not_overflow_float16():
    """Sums of 60,800 products of 1.5 · 1.5 · … pass float16's greatest number; their mean does not."""
    tokens, weights = make_inputs((200, 304), 1, 1, 16, dtype=torch.float32)
    tokens = VisionTokens(*(x.abs() + 1 for x in tokens))
    narrow = VisionTokens(*(x.half() for x in tokens))
    assert (tokens.k.mT @ tokens.v).max() > 65504
    for function in EVALUATIONS.values():
        for got, want in zip(
            function(narrow, *weights, rule=VisionRule()), function(tokens, *weights, rule=VisionRule()), strict=True
        ):
            assert got.isfinite().all() and relative(got, want) < 0.01


@pytest.mark.parametrize("function", EVALUATIONS.values(), ids=EVALUATIONS)
def test_autocast_does_not_narrow_the_step(function):
    """Under autocast the step is still summed in float32: the error is that of the inputs' rounding, not of the sum."""
    tokens, weights = make_inputs((30, 40), 1, 2, 8, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        w1, w2 = glu_step(tokens.k, tokens.v, *weights[:2], VisionRule(fast_weight="linear_plain"))
        outputs = function(tokens, *weights, rule=VisionRule())
    assert w1.dtype == w2.dtype == torch.float32
    exact, _ = glu_step(tokens.k, tokens.v, *weights[:2], VisionRule(fast_weight="linear_plain"))
    assert relative(w1, exact) < 1e-6
    for got, want in zip(outputs, function(tokens, *weights, rule=VisionRule()), strict=True):
        assert relative(got, want) < 0.02


@pytest.mark.parametrize("function", EVALUATIONS.values(), ids=EVALUATIONS)
def test_float64_stays_float64(function):
    """Nothing in between is rounded to float32."""
    tokens, weights = make_inputs((3, 5))
    assert all(x.dtype == torch.float64 for x in function(tokens, *weights, rule=VisionRule()))


def test_images_do_not_see_each_other():
    """A batch gives what its images give alone, and an empty batch gives an empty result."""
    tokens, weights = make_inputs((4, 3), batch=3)
    for function in EVALUATIONS.values():
        together = function(tokens, *weights, rule=VisionRule())
        for i in range(3):
            alone = function(VisionTokens(*(x[i : i + 1] for x in tokens)), *weights, rule=VisionRule())
            for got, want in zip(together, alone, strict=True):
                torch.testing.assert_close(got[i : i + 1], want, atol=1e-12, rtol=0)
        empty = function(VisionTokens(*(x[:0] for x in tokens)), *weights, rule=VisionRule())
        assert [x.shape[0] for x in empty] == [0, 0]


def test_the_depthwise_branch_is_a_convolution():
    """Without a step it is conv2d of the queries: taps, padding and their order are PyTorch's."""
    tokens, weights = make_inputs((5, 7))
    still = tokens._replace(k_map=torch.zeros_like(tokens.k_map))
    _, out = vision_recurrent(still, *weights, rule=VisionRule())
    want = F.conv2d(tokens.q_map.permute(0, 3, 1, 2), weights[2], padding=1, groups=8).permute(0, 2, 3, 1)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("update", "first"),
        ("fast_weight", "conv"),
        ("loss", "l1"),
        ("direction", "up"),
        ("normalise", "yes"),
        ("inner_steps", 0),
        ("inner_steps", 1.5),
    ],
)
def test_unknown_values(field, value):
    """The error names the field and the value."""
    with pytest.raises(ValueError, match=f"{field}={value!r}"):
        VisionRule(**{field: value})


def test_mse_needs_a_gate():
    """The published "mse" predicts with the gate, which a linear fast network does not have."""
    for fast_weight in ("linear", "linear_plain"):
        with pytest.raises(ValueError, match="loss='mse' is defined for fast_weight='swiglu' only"):
            VisionRule(loss="mse", fast_weight=fast_weight)


def test_rules_are_distinct():
    """No two rules of this file's list compute the same."""
    tokens, weights = make_inputs((4, 3))
    outputs = {name: vision_recurrent(tokens, *weights, rule=rule)[0] for name, rule in RULES.items()}
    same = {frozenset(("variant3", "linear_all"))}  # a linear network has one weight
    for (a, x), (b, y) in itertools.combinations(outputs.items(), 2):
        assert (frozenset((a, b)) in same) == torch.equal(x, y), (a, b)
