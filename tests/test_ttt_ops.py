# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""ttt_attention, ttt_update and ttt_read: dispatch, unused inputs, empty inputs, autocast."""

import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from ttt_cases import (
    PER_TOKEN,
    assert_close,
    attend,
    error,
    gradients,
    make_inputs,
    map_inputs,
    name,
    parallelizable,
    readout,
    some_rules,
    with_implementations,
)

from hf_ttt import TTTRule, ttt_attention, ttt_init, ttt_read, ttt_update
from hf_ttt.ttt_ops import TTT_FUNCTIONS, TTTInterface
from hf_ttt.ttt_reference import reference_attention

EXACT = 1e-9
LAST = TTTRule(update="last", weight_norm="none")
LINEAR = TTTRule(fast_weight="linear", weight_norm="none")


# ---- dispatch ----


def test_auto_is_parallel_where_that_is_exact():
    assert TTT_FUNCTIONS.resolve(LAST) == ("parallel", "torch")
    assert TTT_FUNCTIONS.resolve(TTTRule()) == ("recurrent", "torch")
    assert TTT_FUNCTIONS.resolve(LAST, "recurrent", "torch") == ("recurrent", "torch")


def test_a_backend_that_is_not_there_is_an_import_error(monkeypatch):
    monkeypatch.setattr(
        TTT_FUNCTIONS, "_functions", {k: f for k, f in TTT_FUNCTIONS._functions.items() if k[1] == "torch"}
    )
    x = make_inputs(LAST)
    for implementation in ("auto", "recurrent", "parallel"):
        with pytest.raises(ImportError, match="backend='triton' .*use backend='torch'"):
            attend(LAST, 4, implementation=implementation, backend="triton")(x)


def test_a_registered_function_is_called(monkeypatch):
    calls = []

    def function(*args, **kwargs):
        calls.append(kwargs)
        return TTT_FUNCTIONS.get(LAST, "recurrent", "torch")(*args, **kwargs)

    monkeypatch.setattr(TTT_FUNCTIONS, "_functions", dict(TTT_FUNCTIONS._functions))
    TTT_FUNCTIONS.register("parallel", "triton", function)
    x = make_inputs(LAST)
    out = attend(LAST, 4, implementation="parallel", backend="triton")(x)
    assert_close({"out": out}, {"out": attend(LAST, 4)(x)}, EXACT)
    assert calls == [{"rule": LAST, "chunk_size": 4, "updates": 4, "return_state": False}]
    assert TTTInterface()._functions == {}


def test_importing_the_ops_needs_no_triton():
    assert "triton" not in {m.split(".")[0] for m in vars(sys.modules["hf_ttt.ttt_ops"])}


# ---- primitives ----


@pytest.mark.parametrize(
    ("implementation", "rule"),
    [("recurrent", rule) for rule in some_rules()] + [("parallel", rule) for rule in parallelizable(some_rules())],
    ids=lambda value: value if isinstance(value, str) else name(value),
)
def test_update_and_read_equal_the_definition(implementation, rule):
    """One update with all tokens as the chunk, then reads; forward and backward."""
    x = make_inputs(rule, length=7, rates="channel", per_row=rule.inner_steps == 2)
    queries = make_inputs(rule, length=5, seed=1)["q"]

    def by_definition(x):
        tokens = [x[key] for key in ("k", "k", "v", "w0", "w1", "w2", "lr0", "lr1", "lr2", "momentum")]
        weights = reference_attention(*tokens, rule=rule, chunk_size=7)[1]
        q = x["q"][:, :5] * queries.detach()
        zeros = q.new_zeros(*q.shape[:3], x["v"].shape[-1])
        return reference_attention(q, q, zeros, *weights, rule=rule, chunk_size=6)[0]

    def by_primitives(x):
        state = ttt_init(x["w0"], x["w1"], x["w2"], rule, 2)
        tokens = [x[key] for key in PER_TOKEN if key != "q"]
        state = ttt_update(state, *tokens, rule=rule, implementation=implementation)
        return ttt_read(state, x["q"][:, :5] * queries.detach(), rule=rule)

    want, got = by_definition(x), by_primitives(x)
    assert_close({"out": got, **gradients(got, x)}, {"out": want, **gradients(want, x, unused="zero")}, EXACT)


@pytest.mark.parametrize("rule", [TTTRule(muon="lact"), TTTRule(weight_norm="pre"), LAST], ids=name)
def test_updates_in_turn_equal_a_sequence(rule):
    """Read, update, read, update, read is ttt_attention; momentum carries on."""
    x = make_inputs(rule, length=11)
    state, outs = ttt_init(x["w0"], x["w1"], x["w2"], rule, 2), []
    for start in (0, 4, 8):
        part = {key: x[key][:, start : start + 4] for key in PER_TOKEN}
        outs.append(ttt_read(state, part.pop("q"), rule=rule))
        state = ttt_update(state, **part, rule=rule)
    got, want = torch.cat(outs, 1), attend(rule, 4)(x)
    assert_close({"out": got, **gradients(got, x)}, {"out": want, **gradients(want, x)}, EXACT)


def test_an_update_leaves_its_state_and_the_unfinished_chunk_alone():
    rule = TTTRule(weight_norm="pre")
    x = make_inputs(rule, length=6)
    _, state = ttt_attention(**x, rule=rule, chunk_size=4, return_state=True)
    before = {key: t.clone() for key, t in state.tensors().items()}
    after = ttt_update(state, *(x[key] for key in PER_TOKEN if key != "q"), rule=rule)
    assert all(torch.equal(t, before[key]) for key, t in state.tensors().items())
    for key in (*PER_TOKEN[1:], "count"):
        assert getattr(after, key) is getattr(state, key)
    assert not torch.equal(after.w1, state.w1)
    assert ttt_update(state, *(None if x[k] is None else x[k][:, :0] for k in PER_TOKEN[1:]), rule=rule) is state


def test_bfloat16_tokens_read_float32_weights():
    rule = TTTRule()
    x = make_inputs(rule, length=7, dtype=torch.bfloat16, requires_grad=False)
    state = ttt_init(x["w0"], x["w1"], x["w2"], rule, 2)
    after = ttt_update(state, x["k"], x["v"], x["lr0"], x["lr1"], x["lr2"], rule=rule)
    assert after.w1.dtype == torch.float32
    out = ttt_read(after, x["q"], rule=rule)
    assert out.dtype == torch.bfloat16
    exact = ttt_read(after, x["q"].float(), rule=rule)
    assert error(out, exact) < 8 * 2**-9  # weights, two products, gate and output are rounded: about five roundings


# ---- unused inputs ----


@pytest.mark.parametrize(
    ("implementation", "rule"), with_implementations([LAST, TTTRule(update="last"), LINEAR]), ids=name
)
def test_unused_inputs_may_be_there_or_not(implementation, rule):
    """lr0 and lr2 with "last", w0 and w2 with "linear": accepted, and their gradient is zero, not None."""
    attention = attend(rule, 4, implementation=implementation)
    unused = ("lr0", "lr2", "w0", "w2") if rule.fast_weight == "linear" else ("lr0", "lr2")
    x = make_inputs(rule)
    if rule.fast_weight == "linear":
        other = make_inputs(LAST)
        x = {**x, "w0": other["w0"], "w2": other["w2"]}
    without = {**x, **dict.fromkeys(unused)}
    out, want = attention(x), attention(without)
    assert torch.equal(out, want)
    got, expected = gradients(out, x), gradients(want, without)
    assert_close(got, expected, 0.0)
    assert all(not got[key].any() and got[key].shape == x[key].shape for key in unused)


def test_a_nan_in_an_unused_weight_stays_there():
    """The published code adds 0 · sum(w0) to the output, so that one NaN or inf poisons everything."""
    for rule in (LINEAR,):
        other = make_inputs(LAST)
        x = {**make_inputs(rule), "w0": torch.full_like(other["w0"], float("nan")), "w2": other["w2"] / 0}
        for implementation in ("recurrent", "parallel"):
            assert attend(rule, 4, implementation=implementation)(x).isfinite().all()


@pytest.mark.parametrize(("implementation", "rule"), with_implementations(some_rules()), ids=name)
@pytest.mark.parametrize("length", [0, 1, 4])
def test_gradients_without_an_update_are_zero_not_none(implementation, rule, length):
    """No chunk is full before the last token, so that rates and momentum have no part; a parameter without a gradient
    stops distributed training."""
    x = make_inputs(rule, length=length)
    grads = gradients(attend(rule, 4, implementation=implementation)(x), x)
    silent = ("lr0", "lr1", "lr2", "momentum", "v", "q" if rule.read_with == "key" else "k")
    assert all(not grads[key].any() for key in silent)
    assert length == 0 or grads["w1"].any()


@pytest.mark.parametrize("chosen", ["q", "k", "v", "lr1", "w0", "w1", "momentum"])
@pytest.mark.parametrize(("implementation", "rule"), with_implementations([TTTRule(), LAST]), ids=name)
def test_only_one_input_requires_gradients(implementation, rule, chosen):
    attention, x = attend(rule, 4, implementation=implementation), make_inputs(rule)
    want = gradients(attention(x), x)[chosen]
    alone = {key: t.detach().requires_grad_(key == chosen) for key, t in x.items()}
    out = attention(alone)
    (got,) = torch.autograd.grad((out * readout(out)).sum(), [alone[chosen]])
    assert torch.equal(got, want)
    assert not attention({key: t.detach() for key, t in x.items()}).requires_grad


# ---- empty and short inputs ----


@pytest.mark.parametrize("return_state", [False, True])
@pytest.mark.parametrize("kind", ["plain", "mask", "documents"])
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (0, 0), (1, 1)], ids=str)
def test_empty_inputs(batch, length, kind, return_state):
    rule = TTTRule(weight_norm="pre")
    batch = 1 if kind == "documents" else batch
    x = make_inputs(rule, batch=batch, length=length)
    settings = {
        "plain": {},
        "mask": {"attention_mask": torch.ones(batch, length)},
        "documents": {"cu_seqlens": torch.tensor([0, 0, length])},
    }[kind]
    result = ttt_attention(**x, rule=rule, chunk_size=4, return_state=return_state, **settings)
    out = result[0] if return_state else result
    assert out.shape == (batch, length, 2, 4)
    gradients(out, x, unused="zero")
    if return_state:
        assert result[1].batch_size == (2 if kind == "documents" else batch)
        assert result[1].count.tolist() == ([0, length % 4] if kind == "documents" else [length % 4] * batch)


def test_one_token_reads_the_initial_weights():
    rule = TTTRule()
    x = make_inputs(rule, length=1)
    want = ttt_read(ttt_init(x["w0"], x["w1"], x["w2"], rule, 2), x["q"], rule=rule)
    for chunk_size in (1, 4):
        assert_close({"out": attend(rule, chunk_size)(x)}, {"out": want}, 1e-12)


def test_no_documents_at_all():
    rule = TTTRule()
    x = make_inputs(rule, batch=1, length=0)
    out, state = ttt_attention(**x, rule=rule, chunk_size=4, cu_seqlens=torch.tensor([0]), return_state=True)
    assert out.shape == (1, 0, 2, 4)
    assert state.batch_size == 0


# ---- types and autocast ----


class Products(TorchDispatchMode):
    """Types and shapes of the operands of batched matrix products."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "bmm" in str(function):
            operands = [t for t in args if isinstance(t, torch.Tensor)][-2:]
            self.seen.add((operands[0].dtype, operands[1].dtype, *(tuple(t.shape[-2:]) for t in operands)))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("implementation", "rule"), with_implementations([TTTRule(), LAST, LINEAR]), ids=name)
def test_autocast(implementation, rule):
    """Products of tokens are made in bfloat16, also in the backward; everything that accumulates is float32, and so is
    the scan over the 8 chunks of the parallel form."""
    x = make_inputs(rule, length=33, dtype=torch.float32)
    with Products() as products:
        with torch.autocast("cpu", torch.bfloat16):
            out, state = attend(rule, 4, implementation=implementation, return_state=True)(x)
        assert out.dtype == torch.bfloat16
        grads = gradients(out, x)
    assert products.seen
    for *types, left, right in products.seen:
        assert types == [torch.bfloat16] * 2 or (8, 8) in (left, right)
    assert {key: g.dtype for key, g in grads.items()} == dict.fromkeys(grads, torch.float32)
    assert {t.dtype for t in state.tensors().values()} == {torch.float32, torch.bfloat16, torch.int64}
    assert {state.w1.dtype, state.momentum1.dtype, state.lr1.dtype, state.momentum.dtype} == {torch.float32}
    rough = map_inputs(torch.Tensor.bfloat16, x, names=("q", "k", "v"))
    assert torch.equal(
        out, attend(rule, 4, implementation=implementation)(rough)
    )  # as tokens that are bfloat16 already


def test_autocast_leaves_float64_alone():
    x = make_inputs(LAST)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(LAST, 4)(x)
    assert torch.equal(out, attend(LAST, 4)(x))


@pytest.mark.parametrize("rule", [TTTRule(muon="lact"), *parallelizable(some_rules())[:2]], ids=name)
def test_float16(rule):
    x = make_inputs(rule, dtype=torch.float16)
    out = attend(rule, 4)(x)
    assert out.dtype == torch.float16
    assert all(g.isfinite().all() for g in gradients(out, x).values())


def test_bfloat16_weights_become_float32():
    """A model in bfloat16 has bfloat16 parameters; the state accumulates in float32, their gradients come in
    bfloat16."""
    x = map_inputs(torch.Tensor.bfloat16, make_inputs(TTTRule()))
    out, state = ttt_attention(**x, rule=TTTRule(), chunk_size=4, return_state=True)
    assert (out.dtype, state.w1.dtype) == (torch.bfloat16, torch.float32)
    assert {g.dtype for g in gradients(out, x).values()} == {torch.bfloat16}


def test_bfloat16_muon_in_a_sequence():
    """The published type of the iteration: near the float32 one as far as rounding lets it, finite, differentiable."""
    rule = TTTRule(update="last", muon="lact")
    x = make_inputs(rule, length=33, dtype=torch.float32)
    exact, rough = attend(rule, 8)(x), attend(replace(rule, muon_dtype="bfloat16"), 8)(x)
    # 4 products in 5 iterations round by 2⁻⁹; in weak directions that grows, by a factor of some tens on random updates
    assert 0 < error(rough, exact) < 20 * 32 * 2**-9
    assert all(g.isfinite().all() for g in gradients(rough, x).values())
