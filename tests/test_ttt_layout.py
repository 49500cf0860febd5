# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Padding and packed documents: each row or document gives exactly what it gives alone."""

import pytest
import torch
from ttt_cases import (
    PER_TOKEN,
    assert_close,
    attend,
    gradients,
    make_inputs,
    map_inputs,
    name,
    readout,
    with_implementations,
)

from hf_ttt import TTTRule, ttt_attention
from hf_ttt.ttt_layout import make_layout

EXACT = 1e-11  # float64; a row's sums may be made in another order than those of the row alone
C, T = 4, 14
RULES = with_implementations(
    [
        TTTRule(muon="lact"),
        TTTRule(weight_norm="pre", loss="mse", read_with="key", inner_steps=2),
        TTTRule(update="last", weight_norm="pre", muon="nvs"),
        TTTRule(fast_weight="linear", weight_norm="none"),
    ]
)
by_rule = pytest.mark.parametrize(("implementation", "rule"), RULES, ids=name)
MASKS = {  # lengths and sides of rows of T tokens
    "left": [(T, "left"), (9, "left"), (3, "left")],
    "right": [(5, "right"), (T, "right"), (8, "right")],
    "both": [(9, "left"), (5, "right"), (1, "left")],
    "an-empty-row": [(9, "left"), (0, "left"), (4, "right")],
    "all-rows-empty": [(0, "left"), (0, "right"), (0, "left")],
    "in-the-middle": [(7, "middle"), (T, "left"), (2, "middle")],
}
DOCUMENTS = {
    "several": [9, 2, 14, 4],
    "one": [T],
    "empty-ones": [0, 5, 0, 0, 9, 0],
    "all-short": [3, 1, 4],
    "single-tokens": [1] * 6,
    "nothing": [0],
}


def make_mask(rows):
    mask = torch.zeros(len(rows), T, dtype=torch.long)
    for row, (length, side) in zip(mask, rows, strict=True):
        start = {"left": T - length, "right": 0, "middle": 3}[side]
        row[start : start + length] = 1
    return mask


def rows_alone(attention, x, places, per_row, weights):
    """Outputs and gradients of each row on its own: `places` are (batch row, slice of its tokens); the gradients of
    shared fast weights are summed."""
    outs, grads = [], []
    for i, (row, tokens) in enumerate(places):
        cut = {
            key: (t[i : i + 1] if per_row else t) if key[0] == "w" else t[row : row + 1, tokens]
            for key, t in x.items()
            if t is not None
        }
        alone = {**dict.fromkeys(x), **map_inputs(torch.Tensor.clone, cut)}
        outs.append(attention(alone))
        grads.append(gradients(outs[-1], alone, weights=weights[row : row + 1, tokens]))
    return outs, grads


def check_rows(attention, whole, x, places, per_row, real):
    """`whole` against its rows alone; `real` [B, T] says which tokens are none of padding."""
    weights = readout(whole)
    outs, grads = rows_alone(attention, x, places, per_row, weights)
    got = gradients(whole, x, weights=weights, unused="fail" if whole.numel() else "zero")
    for i, (row, tokens) in enumerate(places):
        assert_close({"out": whole[row : row + 1, tokens]}, {"out": outs[i]}, EXACT)
        assert_close(
            {key: got[key][row : row + 1, tokens] for key in PER_TOKEN if key in got},
            {key: grads[i][key] for key in PER_TOKEN if key in got},
            EXACT,
        )
    join = (lambda parts: torch.cat(parts)) if per_row else (lambda parts: torch.stack(parts).sum(0))
    for key in ("w0", "w1", "w2"):
        if key in got:
            assert_close({key: got[key]}, {key: join([g[key] for g in grads])}, EXACT)
    assert not whole[~real].any()
    assert not any(got[key][~real].any() for key in PER_TOKEN if key in got)


@by_rule
@pytest.mark.parametrize("rows", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("per_row", [False, True], ids=["shared", "per-row"])
def test_padding(implementation, rule, rows, per_row):
    """Left, right and both; the padding holds NaN, which reaches neither outputs nor gradients."""
    mask = make_mask(rows)
    x = make_inputs(rule, batch=3, length=T, per_row=per_row)
    x = map_inputs(lambda t: t.masked_fill((mask == 0)[..., None, None], float("nan")), x, names=PER_TOKEN)
    out = ttt_attention(**x, rule=rule, chunk_size=C, implementation=implementation, attention_mask=mask)
    places = []
    for row in range(3):
        real = mask[row].nonzero()[:, 0]
        places.append((row, slice(int(real[0]), int(real[-1]) + 1) if len(real) else slice(0, 0)))
    check_rows(attend(rule, C, implementation=implementation), out, x, places, per_row, mask != 0)


@by_rule
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("per_row", [False, True], ids=["shared", "per-row"])
def test_packed_documents(implementation, rule, lengths, per_row):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    x = make_inputs(rule, batch=1, length=int(ends[-1]))
    if per_row:
        x.update({key: t for key, t in make_inputs(rule, batch=len(lengths), per_row=True).items() if key[0] == "w"})
    out = ttt_attention(**x, rule=rule, chunk_size=C, implementation=implementation, cu_seqlens=ends)
    places = [(0, slice(int(a), int(b))) for a, b in zip(ends, ends[1:], strict=False)]
    real = torch.ones(1, int(ends[-1]), dtype=torch.bool)
    check_rows(attend(rule, C, implementation=implementation), out, x, places, per_row, real)


@by_rule
def test_an_all_ones_mask_says_nothing(implementation, rule):
    x = make_inputs(rule, batch=1, length=T)
    attention = attend(rule, C, implementation=implementation)
    ends, ones = torch.tensor([0, 5, T], dtype=torch.int32), torch.ones(1, T)
    assert torch.equal(attention(x), attend(rule, C, implementation=implementation, attention_mask=ones)(x))
    packed = attend(rule, C, implementation=implementation, cu_seqlens=ends)(x)
    both = attend(rule, C, implementation=implementation, cu_seqlens=ends, attention_mask=ones)(x)
    assert torch.equal(packed, both)
    assert not torch.allclose(packed, attention(x))


@by_rule
def test_a_document_does_not_touch_the_next(implementation, rule):
    """Changing the first document leaves the second bit-equal, outputs and gradients."""
    results = []
    for seed in (0, 1):
        x, other = make_inputs(rule, batch=1, length=T), make_inputs(rule, batch=1, length=T, seed=seed)
        x = {
            key: t if t is None or key[0] == "w" else torch.cat([other[key][:, :6], t[:, 6:]], 1)
            for key, t in x.items()
        }
        x = map_inputs(torch.Tensor.clone, x)
        out = ttt_attention(
            **x, rule=rule, chunk_size=C, implementation=implementation, cu_seqlens=torch.tensor([0, 6, T])
        )
        grads = gradients(out, x)
        results.append([out[:, 6:], *(grads[key][:, 6:] for key in PER_TOKEN if key in grads)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_mask_types_and_values():
    """bool, integer and floating-point masks of 0 and 1 mean the same."""
    rule = TTTRule()
    x, mask = make_inputs(rule, batch=3, length=T), make_mask(MASKS["both"])
    outs = [attend(rule, C, attention_mask=mask.to(dtype))(x) for dtype in (torch.bool, torch.int32, torch.float32)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_gradients_exist_where_no_row_updates():
    """Rows that are all shorter than a chunk are laid end to end; rates and momentum still get zero gradients."""
    rule = TTTRule()
    x, mask = make_inputs(rule, batch=3, length=4), torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    grads = gradients(attend(rule, C, attention_mask=mask)(x), x)
    assert all(not grads[key].any() for key in ("k", "v", "lr0", "lr1", "lr2", "momentum"))
    assert grads["q"].any()


@pytest.mark.parametrize("return_state", [False, True])
@pytest.mark.parametrize("kind", ["aligned", "masked", "packed", "continued"])
def test_arranged_positions_hold_each_token_once(kind, return_state):
    """A layout is a bijection between the real tokens and the arranged positions that hold one."""
    batch, rows, counts, mask, ends = 3, 3, None, None, None
    if kind in ("masked", "continued"):
        mask = make_mask(MASKS["an-empty-row"])
    if kind == "continued":
        counts = [3, 0, 1]
    if kind == "packed":
        batch, rows, ends = 1, 4, torch.tensor([0, 5, 5, 13, T])
    layout = make_layout(
        batch,
        T,
        C,
        attention_mask=mask,
        cu_seqlens=ends,
        counts=counts,
        has_state=counts is not None,
        return_state=return_state,
    )
    assert layout.rows == rows
    assert layout.aligned == (kind == "aligned")
    if layout.aligned:
        return
    token = torch.arange(1, batch * T + 1, dtype=torch.float64).view(batch, T, 1, 1)
    arranged = layout.arrange(token)
    real = torch.ones(batch, T) if mask is None else mask
    want = token[real != 0].flatten().sort().values
    assert torch.equal(arranged[arranged != 0].sort().values, want)
    assert torch.equal(layout.restore(arranged), token * real[..., None, None])
    assert sum(group.rows for group in layout.groups) <= rows
    assert all(group.updates * C <= group.length for group in layout.groups)
