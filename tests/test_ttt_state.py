# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The state between two calls: splitting a sequence anywhere, any number of times, changes nothing."""

import itertools
from dataclasses import fields, replace

import pytest
import torch
from ttt_cases import PER_TOKEN, assert_close, gradients, make_inputs, name, with_implementations

from hf_ttt import TTTRule, TTTState, ttt_attention, ttt_init
from hf_ttt.ttt_layout import make_layout
from hf_ttt.ttt_ops import evaluate

EXACT = 1e-11  # float64; the sums over a chunk may be made in another order
C, T = 4, 13
RULES = with_implementations(
    [
        TTTRule(muon="lact"),
        TTTRule(weight_norm="pre", loss="mse", read_with="key", inner_steps=2),
        TTTRule(update="last", weight_norm="pre", muon="nvs", detach_norms=True),
        TTTRule(fast_weight="linear", weight_norm="none"),
    ]
)
by_rule = pytest.mark.parametrize(("implementation", "rule"), RULES, ids=name)
PRE = TTTRule(weight_norm="pre")


def cut(x, start, stop):
    return {key: t if t is None or key[0] == "w" else t[:, start:stop] for key, t in x.items()}


def in_pieces(x, ends, rule, implementation, state=None, masks=None, **settings):
    """Outputs, joined, and last state of calls on the tokens up to each of `ends`."""
    outs, start = [], 0
    for i, end in enumerate(ends):
        out, state = ttt_attention(
            **cut(x, start, end),
            rule=rule,
            chunk_size=C,
            implementation=implementation,
            state=state,
            return_state=True,
            attention_mask=None if masks is None else masks[i],
            **settings,
        )
        outs.append(out)
        start = end
    return torch.cat(outs, 1), state


def named(out, state):
    """Output and state as one dictionary; of the unfinished chunk's slots only those that are in use."""
    tensors = dict(state.tensors())
    used = torch.arange(C) < tensors["count"][:, None] if "count" in tensors else None
    for key in ("k", "v", "lr0", "lr1", "lr2", "momentum"):
        if key in tensors:
            tensors[key] = tensors[key].masked_fill(~used[..., None, None], 0)
    return {"out": out, **{f"state.{key}": t for key, t in tensors.items()}}


def snapshot(state):
    return {key: (t, t.detach().clone()) for key, t in state.tensors().items()}


def assert_unchanged(before, state):
    assert {key: id(t) for key, (t, _) in before.items()} == {key: id(t) for key, t in state.tensors().items()}
    assert all(torch.equal(t, copy) for t, copy in before.values())


@by_rule
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_every_split_in_two(implementation, rule, grad):
    """Outputs, state and, through the state, gradients."""
    x = make_inputs(rule, length=T, rates="channel")
    want_out, want_state = in_pieces(x, [T], rule, implementation)
    plain = ttt_attention(**x, rule=rule, chunk_size=C, implementation=implementation)
    assert_close({"out": want_out}, {"out": plain}, EXACT)
    want = gradients(want_out, x)
    for middle in range(T + 1):
        with torch.set_grad_enabled(grad):
            out, state = in_pieces(x, [middle, T], rule, implementation)
        assert_close(named(out, state), named(want_out, want_state), EXACT)
        if grad and 0 < middle < T:
            assert_close(gradients(out, x), want, EXACT)


@by_rule
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_many_pieces(implementation, rule, grad):
    """Token by token; around chunk borders; with empty calls between."""
    x = make_inputs(rule, length=T, momentum=None if rule.muon == "lact" else "random")
    want_out, want_state = in_pieces(x, [T], rule, implementation)
    for ends in (list(range(1, T + 1)), [3, 4, 5, 7, 8, 12, T], [0, 4, 4, 8, 8, T, T], [1, 9, T]):
        with torch.set_grad_enabled(grad):
            out, state = in_pieces(x, ends, rule, implementation)
        assert_close(named(out, state), named(want_out, want_state), EXACT)
        if grad:
            assert_close(gradients(out, x), gradients(want_out, x), EXACT)


@by_rule
def test_inference_mode(implementation, rule):
    """A state from inference mode continues there and outside."""
    x = make_inputs(rule, length=T, requires_grad=False)
    want_out, want_state = in_pieces(x, [T], rule, implementation)
    with torch.inference_mode():
        out, state = in_pieces(cut(x, 0, 6), [2, 5, 6], rule, implementation)
        inside, inside_state = in_pieces(cut(x, 6, T), [1, 7], rule, implementation, state=state)
    with torch.no_grad():
        outside, outside_state = in_pieces(cut(x, 6, T), [1, 7], rule, implementation, state=state)
    for more, last in ((inside, inside_state), (outside, outside_state)):
        assert_close(named(torch.cat([out, more], 1), last), named(want_out, want_state), EXACT)


def test_gradients_reach_the_state():
    """A loss on the state alone: the weights, main weights, momentum and unfinished chunk carry gradients."""
    x = make_inputs(PRE, length=T)
    for ends in ([T], [5, T], [4, 6, 8, T]):
        _, state = in_pieces(x, ends, PRE, "recurrent")
        total = torch.cat([t.flatten() for key, t in state.tensors().items() if key != "count"])
        grads = gradients(total, x, unused="zero")
        if len(ends) == 1:
            want = grads
        assert_close(grads, want, EXACT)
    assert all(want[key].any() for key in want if key != "q")


@by_rule
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_rows_with_different_phases(implementation, rule, grad):
    """Left- and right-padded pieces put the rows of a batch at different places in their chunks."""
    x = make_inputs(rule, batch=3, length=T)
    masks = [
        torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]),
        torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]),
        None,
        torch.tensor([[1, 0, 0], [0, 0, 1], [0, 0, 0]]),
    ]
    ends = [5, 9, 10, T]
    with torch.set_grad_enabled(grad):
        out, state = in_pieces(x, ends, rule, implementation, masks=masks)
    real = torch.cat([torch.ones(3, 1) if m is None else m for m in masks], 1) != 0
    assert not out[~real].any()
    got = gradients(out, x) if grad else None
    for row in range(3):
        pick = lambda t, row=row: t[row : row + 1, real[row]]  # noqa: E731
        alone = {key: t if t is None or key[0] == "w" else pick(t) for key, t in x.items()}
        want_out, want_state = in_pieces(alone, [int(real[row].sum())], rule, implementation)
        row_state = state.index_select(torch.tensor([row]))
        assert_close(named(pick(out), row_state), named(want_out, want_state), EXACT)
        if grad:
            weights = torch.ones_like(want_out)
            want = torch.autograd.grad((want_out * weights).sum(), x["k"], retain_graph=True)[0][row]
            (mine,) = torch.autograd.grad(out[row].sum(), x["k"], retain_graph=True)
            assert_close({"k": mine[row]}, {"k": want}, EXACT)
    if grad:
        assert not any(got[key][~real].any() for key in PER_TOKEN if key in got)


PIECES = {
    "tokens": ([1] * T, [None] * T),
    "pieces": ([3, 1, 1, 4, 2, 1, 1], [None] * 7),
    "phases": (
        [1, 1, 2, 1, 4, 1, 3],
        [[[1], [0]], None, [[1, 1], [0, 1]], [[0], [1]], [[0, 0, 0, 1], [1, 1, 1, 1]], [[0], [0]], None],
    ),
}


@by_rule
@pytest.mark.parametrize(("sizes", "masks"), PIECES.values(), ids=PIECES)
def test_in_place(implementation, rule, sizes, masks):
    """What a cache does: the state that it owns is changed, to the same numbers."""
    x = make_inputs(rule, length=T, requires_grad=False)
    masks = [None if mask is None else torch.tensor(mask) for mask in masks]
    ends = list(itertools.accumulate(sizes))
    with torch.enable_grad():  # the other path
        want_out, want_state = in_pieces(x, ends, rule, implementation, masks=masks)
    state, outs = ttt_init(x["w0"], x["w1"], x["w2"], rule, 2), []
    with torch.no_grad():
        for size, end, mask in zip(sizes, ends, masks, strict=True):
            counts = None if state.count is None else state.count.tolist()
            settings = {"attention_mask": mask, "counts": counts, "has_state": True, "return_state": True}
            layout = make_layout(2, size, C, **settings)
            part = cut(x, end - size, end)
            owned = state.count is not None
            slots = state.k
            out, state = evaluate(
                *(part[key] for key in PER_TOKEN),
                state,
                layout,
                rule=rule,
                implementation=implementation,
                in_place=owned,
            )
            assert not owned or max(layout.totals or [layout.total]) > C or state.k is slots
            outs.append(out)
    assert_close(named(torch.cat(outs, 1), state), named(want_out, want_state), EXACT)


@by_rule
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_a_functional_call_leaves_its_state_alone(implementation, rule, grad):
    x = make_inputs(rule, length=T)
    with torch.set_grad_enabled(grad):
        for middle in (2, 4, 7):
            _, state = in_pieces(cut(x, 0, middle), [middle], rule, implementation)
            before = snapshot(state)
            for end in (middle, middle + 1, middle + 2, T):
                in_pieces(cut(x, middle, end), [end - middle], rule, implementation, state=state)
                assert_unchanged(before, state)


@by_rule
def test_packed_documents_have_a_row_each(implementation, rule):
    """cu_seqlens with state: one row per document, and each continues alone."""
    x, lengths = make_inputs(rule, batch=1, length=T), [5, 0, 2, 6]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    settings = {"rule": rule, "chunk_size": C, "implementation": implementation, "return_state": True}
    out, state = ttt_attention(**x, **settings, cu_seqlens=ends)
    assert state.batch_size == 4
    more = make_inputs(rule, batch=1, length=10, seed=1)
    more = {key: x[key] if key[0] == "w" else t for key, t in more.items()}
    more_ends = torch.tensor([0, 1, 4, 6, 10])
    out2, state2 = ttt_attention(**more, **settings, cu_seqlens=more_ends, state=state)
    for row in range(4):
        a, b = slice(int(ends[row]), int(ends[row + 1])), slice(int(more_ends[row]), int(more_ends[row + 1]))
        alone = {
            key: t if t is None or key[0] == "w" else torch.cat([t[:, a], more[key][:, b]], 1) for key, t in x.items()
        }
        want_out, want_state = in_pieces(alone, [alone["k"].shape[1]], rule, implementation)
        got = torch.cat([out[:, a], out2[:, b]], 1)
        assert_close(named(got, state2.index_select(torch.tensor([row]))), named(want_out, want_state), EXACT)
    with pytest.raises(ValueError, match="state has 4 rows; expected 2, one per batch row or document"):
        ttt_attention(**x, **settings, cu_seqlens=torch.tensor([0, 5, T]), state=state)


def test_weights_are_not_read_when_a_state_is_given():
    x = make_inputs(PRE, length=T)
    _, state = in_pieces(cut(x, 0, 6), [6], PRE, "recurrent")
    rest = cut(x, 6, T)
    want, _ = in_pieces(rest, [7], PRE, "recurrent", state=state)
    other = {**rest, **{key: torch.full_like(rest[key], float("nan")) for key in ("w0", "w1", "w2")}}
    got, _ = in_pieces(other, [7], PRE, "recurrent", state=state)
    assert torch.equal(got, want)


@pytest.fixture(params=["fresh", "after-some-tokens"])
def some_state(request):
    x = make_inputs(PRE, batch=3, length=T)
    if request.param == "fresh":
        return ttt_init(x["w0"], x["w1"], x["w2"], PRE, 3)
    return in_pieces(x, [6], PRE, "recurrent")[1]


def test_select_repeat_reorder(some_state):
    rows = torch.tensor([2, 0, 2])
    for state, order in (
        (some_state.index_select(rows), rows),
        (some_state.repeat_interleave(2), torch.tensor([0, 0, 1, 1, 2, 2])),
    ):
        assert state.batch_size == len(order)
        assert state.tensors().keys() == some_state.tensors().keys()
        for key, t in state.tensors().items():
            assert torch.equal(t, getattr(some_state, key)[order])


def test_selected_rows_continue_as_their_own(some_state):
    x = make_inputs(PRE, batch=3, length=5, seed=1)
    rows = torch.tensor([2, 0])
    out, state = in_pieces(x, [5], PRE, "recurrent", state=some_state)
    part = {key: t if key[0] == "w" else t[rows] for key, t in x.items()}
    part_out, part_state = in_pieces(part, [5], PRE, "recurrent", state=some_state.index_select(rows))
    assert_close(named(part_out, part_state), named(out[rows], state.index_select(rows)), EXACT)


def test_detach_clone_to(some_state):
    assert not any(t.requires_grad for t in some_state.detach().tensors().values())
    clone = some_state.clone()
    pairs = itertools.product(clone.tensors().values(), some_state.tensors().values())
    assert not any(a.data_ptr() == b.data_ptr() for a, b in pairs)
    moved = some_state.to("meta")
    assert all(t.device.type == "meta" for t in moved.tensors().values())
    assert {k: t.dtype for k, t in moved.tensors().items()} == {k: t.dtype for k, t in some_state.tensors().items()}


@pytest.mark.parametrize("rows", [1, 3])
def test_save_and_load(tmp_path, rows):
    """Also a fresh state of one row, whose working and main weights are one tensor, and which has no momentum yet."""
    x = make_inputs(PRE, batch=rows, length=T)
    fresh = ttt_init(x["w0"], x["w1"], x["w2"], PRE, rows)
    for i, state in enumerate([fresh, in_pieces(x, [6], PRE, "recurrent")[1]]):
        state.save(tmp_path / f"{i}.safetensors")
        loaded = TTTState.load(tmp_path / f"{i}.safetensors")
        assert loaded.tensors().keys() == state.tensors().keys()
        for key, t in loaded.tensors().items():
            assert torch.equal(t, getattr(state, key))
            assert t.dtype == getattr(state, key).dtype
        rest = cut(make_inputs(PRE, batch=rows, length=5, seed=1), 0, 5)
        want, _ = in_pieces(rest, [5], PRE, "recurrent", state=state)
        got, _ = in_pieces(rest, [5], PRE, "recurrent", state=loaded)
        assert torch.equal(got, want)


def test_a_linear_state_has_no_other_weights(tmp_path):
    rule = TTTRule(fast_weight="linear", weight_norm="none")
    x = make_inputs(rule, momentum=None, rates=None)
    state = ttt_init(None, x["w1"], None, rule, 2)
    assert set(state.tensors()) == {"w1"}
    state.save(tmp_path / "state.safetensors")
    assert set(TTTState.load(tmp_path / "state.safetensors").tensors()) == {"w1"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_types(dtype):
    """Everything that accumulates is float32 at least; the unfinished chunk keeps the tokens' type."""
    x = make_inputs(PRE, length=6, dtype=dtype)
    high = torch.promote_types(dtype, torch.float32)
    x = {key: t.detach().to(dtype) for key, t in x.items()}
    _, state = in_pieces(x, [6], PRE, "recurrent")
    for key, t in state.tensors().items():
        expected = {"count": torch.int64, "k": dtype, "v": dtype}.get(key, high)
        assert t.dtype == expected, key


def test_init_errors():
    x = make_inputs(PRE)
    with pytest.raises(ValueError, match="w0 is None"):
        ttt_init(None, x["w1"], x["w2"], PRE, 2)
    with pytest.raises(ValueError, match="w1 is None"):
        ttt_init(x["w0"], None, x["w2"], PRE, 2)
    with pytest.raises(ValueError, match=r"w1 has shape \(4, 6\); expected"):
        ttt_init(x["w0"], x["w1"][0], x["w2"], PRE, 2)
    with pytest.raises(ValueError, match=r"w0 has shape \(3, 2, 6, 5\); expected"):
        ttt_init(x["w0"].expand(3, -1, -1, -1), x["w1"], x["w2"], PRE, 2)


def test_every_field_is_a_tensor_with_rows_first(some_state):
    assert all(t.shape[0] == some_state.batch_size for t in some_state.tensors().values())
    assert {field.name for field in fields(TTTState)} >= set(some_state.tensors())
    assert replace(some_state, w0=None).tensors().keys() == some_state.tensors().keys() - {"w0"}
