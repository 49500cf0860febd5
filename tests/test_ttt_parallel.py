# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The parallel evaluation against the recurrent one, at any length and any momentum in [0, 1]."""

import pytest
import torch
from ttt_cases import (
    assert_close,
    attend,
    error,
    every_rule,
    gradients,
    make_inputs,
    map_inputs,
    name,
    outputs_and_gradients,
)
from ttt_cases import parallelizable as parallelizable_of

from hf_ttt import TTTRule, ttt_attention

SAME = 1e-10  # float64 against float64, outputs and gradients
RULES = parallelizable_of(every_rule())
LAST = TTTRule(update="last", weight_norm="none")
LINEAR = TTTRule(fast_weight="linear", weight_norm="none")
PRE_MUON = TTTRule(update="last", weight_norm="pre", muon="lact")
FEW = [
    LAST,
    LINEAR,
    TTTRule(update="last", weight_norm="pre"),
    PRE_MUON,
    TTTRule(fast_weight="linear", weight_norm="pre", muon="nvs"),
]


def both(x, rule, chunk_size):
    """Outputs, final state and gradients of the two evaluations."""
    results = []
    for implementation in ("recurrent", "parallel"):
        settings = {"rule": rule, "chunk_size": chunk_size, "implementation": implementation}
        out, state = ttt_attention(**x, **settings, return_state=True)
        tensors = state.tensors()
        everything = torch.cat([t.flatten() for t in (out, *tensors.values()) if t.is_floating_point()])
        results.append({"out": out, **{f"state.{k}": t for k, t in tensors.items()}, **gradients(everything, x)})
    return results


@pytest.mark.parametrize("rule", RULES, ids=name)
def test_equals_recurrent_for_every_rule(rule):
    """23 tokens in chunks of 4: output, state after, and gradients through both."""
    x = make_inputs(rule, length=23, rates="channel" if rule.inner_steps == 2 else "scalar", dtype=torch.float64)
    recurrent, parallel = both(x, rule, 4)
    assert_close(parallel, recurrent, SAME)


@pytest.mark.parametrize("momentum", [None, 0.0, 1.0, "random"], ids=str)
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 23], ids=lambda t: f"{t}-tokens")
@pytest.mark.parametrize("rule", FEW, ids=name)
def test_lengths_and_momentum(rule, length, momentum):
    x = make_inputs(rule, length=length, momentum=momentum, rates=None if length % 2 else "channel")
    recurrent, parallel = both(x, rule, 4)
    assert_close(parallel, recurrent, SAME)


@pytest.mark.parametrize("rule", FEW[:3], ids=name)
def test_every_length_up_to_two_chunks(rule):
    x = make_inputs(rule, length=17, requires_grad=False)
    for length in range(18):
        part = {key: t if t is None or key[0] == "w" else t[:, :length] for key, t in x.items()}
        for chunk_size in (1, 8, 64):
            recurrent, parallel = (attend(rule, chunk_size, implementation=i)(part) for i in ("recurrent", "parallel"))
            assert error(parallel, recurrent) < SAME


@pytest.mark.parametrize("momentum", [None, 0.0, 1.0, "random"], ids=str)
@pytest.mark.parametrize("rule", [*FEW, TTTRule(update="last", weight_norm="pre", inner_steps=2)], ids=name)
def test_several_blocks_of_chunks(rule, momentum):
    """37 chunks: state and momentum pass from block to block; and a momentum that is exactly 0 and 1 in some chunks."""
    x = make_inputs(rule, length=75, momentum=momentum)
    if momentum == "random":
        m = x["momentum"].detach().clone()
        m[:, 8:10], m[:, 30:34], m[:, 40:48] = 0.0, 0.0, 1.0
        x["momentum"] = m.requires_grad_()
    recurrent, parallel = both(x, rule, 2)
    assert_close(parallel, recurrent, SAME)


@pytest.mark.parametrize("momentum", [0.0, 1.0, "random"], ids=str)
@pytest.mark.parametrize("rule", [LAST, TTTRule(fast_weight="linear", weight_norm="pre")], ids=name)
def test_4096_chunks_in_float32(rule, momentum):
    """A division by the running product of the momentum overflows long before; the scan's error is that of a sum.

    Adding 4,096 updates in float32 makes about √4096 roundings of 2⁻²⁴, and with a momentum of 1 the sum is summed
    again. Factor 4 over that."""
    x = make_inputs(rule, batch=1, length=4096 + 1, heads=1, momentum=momentum, dtype=torch.float32)
    exact = map_inputs(torch.Tensor.double, x)
    want = outputs_and_gradients(attend(rule, 1, implementation="parallel"), exact)
    with torch.no_grad():
        assert error(want["out"], attend(rule, 1, implementation="recurrent")(exact)) < SAME
    got = outputs_and_gradients(attend(rule, 1, implementation="parallel"), x)
    assert all(t.isfinite().all() for t in got.values())
    assert_close(got, want, 4 * 64 * 2**-24)


@pytest.mark.parametrize("rule", [LAST, PRE_MUON], ids=name)
def test_continues_a_state(rule):
    """The parallel evaluation from a state with momentum, main weights and an unfinished chunk."""
    x = make_inputs(rule, length=41)
    settings = {"rule": rule, "chunk_size": 4, "return_state": True}
    cut = lambda a, b: {key: t if key[0] == "w" else t[:, a:b] for key, t in x.items()}  # noqa: E731
    results = []
    for implementation in ("recurrent", "parallel"):
        _, state = ttt_attention(**cut(0, 18), **settings)
        out, state = ttt_attention(**cut(18, 41), **settings, implementation=implementation, state=state)
        total = torch.cat([t.flatten() for t in (out, state.w1, state.momentum1)])
        results.append({"out": out, "w1": state.w1, "momentum1": state.momentum1, **gradients(total, x)})
    assert_close(results[1], results[0], SAME)


def test_where_it_is_not_exact_it_is_refused():
    x = make_inputs(TTTRule())
    with pytest.raises(ValueError, match="implementation='parallel' is not exact for this rule: .*set update='last'"):
        attend(TTTRule(), 4, implementation="parallel")(x)
