# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The recurrent evaluation against the definition, and its hand-written backward against finite differences.

The parallel evaluation runs through the same tests where it is exact; what is particular to it is in test_ttt_parallel.
"""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from torch.autograd import gradcheck
from ttt_cases import (
    PER_TOKEN,
    assert_close,
    attend,
    error,
    every_rule,
    gradients,
    make_inputs,
    map_inputs,
    name,
    outputs_and_gradients,
    poisoned_allocations,
    readout,
    reference,
    rounding,
    some_rules,
    state_outputs,
    with_implementations,
)

from hf_ttt import TTTRule, ttt_attention, ttt_init

# Greatest error in units of what rounding the inputs once makes (`rounding`). Measured on this file's cases with three
# seeds: 4.7, and 13.6 with Muon, whose rounding inside the iteration is amplified by up to 490 in a weak direction.
FACTOR, FACTOR_MUON = 8, 32
EXACT = 1e-9  # float64 against float64; Newton–Schulz amplifies rounding by up to 490 a step
# Optional arguments away from their defaults, in turns over the rules: each meets every network, norm and Muon.
OPTIONS = {
    "channel": {"rates": "channel"},
    "scalar-rows": {"rates": "scalar", "per_row": True},
    "no-rates": {"rates": None},
    "channel-no-momentum-rows": {"rates": "channel", "momentum": None, "per_row": True},
    "scalar-no-momentum": {"rates": "scalar", "momentum": None},
}
EVERY = [(*case, options) for case, options in zip(with_implementations(every_rule()), cycle(OPTIONS), strict=False)]


def in_two_calls(x, rule, implementation, norms):
    """Outputs and final state, flat, of 3 tokens and, continuing from their state, the others.

    `norms` are constants in place of the initial norms, which finite differences with respect to the weights would
    move.
    """
    cut = lambda part: {key: t if t is None or key[0] == "w" else t[:, part] for key, t in x.items()}  # noqa: E731
    settings = {"rule": rule, "chunk_size": 2, "implementation": implementation, "return_state": True}
    state = replace(ttt_init(x["w0"], x["w1"], x["w2"], rule, x["k"].shape[0]), **norms) if norms else None
    a, state = ttt_attention(**cut(slice(0, 3)), **settings, state=state)
    b, state = ttt_attention(**cut(slice(3, None)), **settings, state=state)
    return torch.cat([t.flatten() for t in (a, b, *state_outputs(state))])


@pytest.mark.parametrize(("implementation", "rule", "options"), EVERY, ids=name)
def test_every_rule(implementation, rule, options):
    """Every field × every other: the forward equals the definition, the backward is that of the forward. In two calls
    that pass the state on; finite differences in a random direction of all inputs (gradcheck's fast mode)."""
    x = make_inputs(rule, batch=1 if rule.muon else 2, length=5, dk=3, dh=4, dv=2, **OPTIONS[options])
    with torch.no_grad():
        assert error(attend(rule, 2, implementation=implementation)(x), reference(x, rule, 2)) < EXACT
    given = [key for key, t in x.items() if t is not None]
    state = ttt_init(x["w0"], x["w1"], x["w2"], rule, x["k"].shape[0])
    norms = {key: t for key, t in state.tensors().items() if "norm" in key} if rule.detach_norms else {}

    sizes = [x[key].numel() for key in given]

    def function(flat):
        parts = (part.view(x[key].shape) for key, part in zip(given, flat.split(sizes), strict=True))
        return in_two_calls({**x, **dict(zip(given, parts, strict=True))}, rule, implementation, norms)

    flat = torch.cat([x[key].detach().flatten() for key in given]).requires_grad_()
    assert gradcheck(function, [flat], fast_mode=True, check_undefined_grad=False, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "rule"),
    [
        ("recurrent", TTTRule(muon="lact", loss="mse")),
        ("recurrent", TTTRule(weight_norm="pre", inner_steps=2, direction="ascent")),
        ("parallel", TTTRule(update="last", weight_norm="pre", muon="nvs", muon_steps=2)),
        ("parallel", TTTRule(fast_weight="linear", weight_norm="none", inner_steps=2)),
    ],
    ids=name,
)
def test_gradcheck_of_every_element(implementation, rule):
    x = make_inputs(rule, batch=1, length=5, heads=1, dk=3, dh=2, dv=2, rates="channel", per_row=True)
    given = [key for key, t in x.items() if t is not None]

    def function(*tensors):
        return in_two_calls({**x, **dict(zip(given, tensors, strict=True))}, rule, implementation, {})

    assert gradcheck(function, [x[key] for key in given], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("implementation", "rule"), with_implementations(some_rules()), ids=name)
def test_gradients_equal_those_of_the_definition(implementation, rule):
    """Three whole chunks and a ragged one, against autograd through autograd of the stated inner loss."""
    x = make_inputs(rule, length=14, rates="channel" if rule.inner_steps == 2 else "scalar")
    want = outputs_and_gradients(lambda x: reference(x, rule, 4), x, unused="zero")
    with poisoned_allocations():
        got = outputs_and_gradients(attend(rule, 4, implementation=implementation), x)
    assert_close(got, want, EXACT)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 23])
@pytest.mark.parametrize(
    ("implementation", "rule"),
    with_implementations([TTTRule(muon="lact"), TTTRule(update="last", weight_norm="pre", loss="mse", read_with="key")])
    + with_implementations(
        [TTTRule(update="last", weight_norm="pre"), TTTRule(fast_weight="linear", weight_norm="none")]
    ),
    ids=name,
)
def test_lengths_around_the_chunk(implementation, rule, length):
    x = make_inputs(rule, length=length, batch=1 if length % 2 else 3)
    want = outputs_and_gradients(lambda x: reference(x, rule, 4), x, unused="zero")
    got = outputs_and_gradients(attend(rule, 4, implementation=implementation), x)
    assert got["out"].shape == x["v"].shape
    assert_close(got, want, EXACT)


ROUNDED = [("float32", *case) for case in with_implementations(some_rules())]
# rounding to bfloat16 before Newton–Schulz changes the result by its own size: see test_ttt_muon
ROUNDED += [("bfloat16", *case) for case in with_implementations([rule for rule in some_rules() if not rule.muon])]


@pytest.mark.parametrize(("dtype", "implementation", "rule"), ROUNDED, ids=name)
def test_rounding(dtype, implementation, rule):
    """The error in float32 and bfloat16 is that of rounding the inputs, times a small factor."""
    dtype = getattr(torch, dtype)
    rates = "channel" if rule.inner_steps == 2 else "scalar"
    x = make_inputs(rule, length=39, dk=7, dh=9, dv=5, dtype=dtype, rates=rates)
    got = outputs_and_gradients(attend(rule, 8, implementation=implementation), x)
    assert {key: t.dtype for key, t in got.items() if key != "out"} == {
        k: t.dtype for k, t in x.items() if t is not None
    }
    assert got["out"].dtype == dtype
    want, errors = rounding(x, rule, 8)
    factor = FACTOR_MUON if rule.muon else FACTOR
    assert_close(got, want, {key: factor * e for key, e in errors.items()})


def strided(t):
    """The same values, not contiguous: each dimension reversed in memory, with a gap behind each element."""
    wide = t.new_full((*reversed(t.shape), 2), float("nan"))
    view = wide[..., 0].permute(*reversed(range(t.dim())))
    return view.copy_(t)


@pytest.mark.parametrize(
    ("implementation", "rule"),
    with_implementations([TTTRule(muon="nvs"), TTTRule(update="last", weight_norm="pre", read_with="key")]),
    ids=name,
)
@pytest.mark.parametrize("per_row", [False, True], ids=["shared", "per-row"])
def test_non_contiguous_inputs(implementation, rule, per_row):
    """Inputs may have any strides, and so may the incoming gradient."""
    x = make_inputs(rule, length=11, rates="channel", per_row=per_row)
    attention = attend(rule, 4, implementation=implementation)
    want = outputs_and_gradients(attention, x)
    y = map_inputs(strided, x)
    assert not any(t.is_contiguous() for t in y.values())
    out = attention(y)
    got = gradients(out, y, weights=strided(readout(out)))
    assert_close({"out": out, **got}, want, 1e-12)
    out.sum().backward()  # the incoming gradient is expanded from one element
    want = gradients(attention(x), x, weights=torch.ones_like(out))
    assert_close({key: t.grad for key, t in y.items()}, want, 1e-12)


@pytest.mark.parametrize(
    ("implementation", "rule"),
    with_implementations([TTTRule(), TTTRule(update="last", weight_norm="pre", muon="lact")]),
    ids=name,
)
def test_rows_do_not_meet(implementation, rule):
    """Each row of a batch gives what it gives alone, with fast weights of its own."""
    x = make_inputs(rule, batch=3, length=10, per_row=True)
    attention = attend(rule, 4, implementation=implementation)
    whole = attention(x)
    grads = gradients(whole, x)
    for row in range(3):
        alone = map_inputs(lambda t, row=row: t[row : row + 1], x)
        out = attention(alone)
        want = {"out": out, **gradients(out, alone, weights=readout(whole)[row : row + 1])}
        assert_close({"out": whole[row : row + 1], **{k: g[row : row + 1] for k, g in grads.items()}}, want, EXACT)


@pytest.mark.parametrize(
    ("implementation", "rule"),
    with_implementations([TTTRule(), TTTRule(fast_weight="linear", weight_norm="none")]),
    ids=name,
)
def test_double_backward_is_refused(implementation, rule):
    """Also where the incoming gradient is a constant, for which torch's own check says nothing and the result is
    wrong."""
    x = make_inputs(rule, length=9)
    attention = attend(rule, 4, implementation=implementation)
    for loss in (attention(x).sum(), attention(x).square().sum()):
        with pytest.raises(RuntimeError, match="no second derivative: .*create_graph=False"):
            torch.autograd.grad(loss, [x["k"]], create_graph=True)


def grows_without_bound(rule):
    """Steps that grow the weights, which grow the steps, with nothing that bounds either."""
    return (rule.loss == "mse" or rule.update == "all") and rule.weight_norm == "none" and not rule.muon


EXTREME = [(kind, *case) for kind in ("zeros", "constant") for case in with_implementations(some_rules())]
BOUNDED = [rule for rule in some_rules() if not grows_without_bound(rule)]
EXTREME += [("times100", *case) for case in with_implementations(BOUNDED)]


@pytest.mark.parametrize(("kind", "implementation", "rule"), EXTREME, ids=name)
def test_extreme_inputs_stay_finite(kind, implementation, rule):
    """Large tokens; zeros, whose rows have no norm and whose update Newton–Schulz divides by 1e-7; constant tokens."""
    x = make_inputs(rule, length=39, dtype=torch.float32)
    change, names = {
        "times100": (lambda t: 100 * t, ("q", "k", "v")),
        "zeros": (torch.zeros_like, ("q", "k", "v", "w0", "w1", "w2", "lr0")),
        "constant": (lambda t: t[:, :1].expand_as(t).clone(), PER_TOKEN),
    }[kind]
    got = outputs_and_gradients(attend(rule, 8, implementation=implementation), map_inputs(change, x, names=names))
    assert all(t.isfinite().all() for t in got.values())


@pytest.mark.parametrize(
    ("implementation", "rule"),
    with_implementations([TTTRule(), TTTRule(muon="lact"), TTTRule(update="last", weight_norm="pre", muon="nvs")])
    + with_implementations([TTTRule(fast_weight="linear", weight_norm="none")]),
    ids=name,
)
def test_a_token_repeated_4096_times(implementation, rule):
    x = make_inputs(rule, batch=1, length=1, dtype=torch.float32)
    x = {key: t if t is None or key[0] == "w" else t.detach().expand(1, 4096, *t.shape[2:]) for key, t in x.items()}
    x = map_inputs(torch.Tensor.clone, x)
    got = outputs_and_gradients(attend(rule, 64, implementation=implementation), x)
    assert all(t.isfinite().all() for t in got.values())
