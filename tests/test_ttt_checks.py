# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What a call refuses: each error names the argument, what came, and what would do."""

import pytest
import torch
from ttt_cases import make_inputs

from hf_ttt import TTTRule, ttt_attention, ttt_read, ttt_update

RULE = TTTRule()
LINEAR = TTTRule(fast_weight="linear", weight_norm="none")
B, T, H, DK, DH, DV = 2, 17, 2, 5, 6, 4  # of make_inputs


def call(rule=RULE, chunk_size=4, settings=None, **changes):
    x = {**make_inputs(rule, requires_grad=False), **changes}
    return ttt_attention(**x, rule=rule, chunk_size=chunk_size, **(settings or {}))


SHAPES = {
    "k-rank": ({"k": torch.zeros(B, T, DK)}, r"k has shape \(2, 17, 5\); expected \[batch, tokens, heads, key width\]"),
    "q-rank": ({"q": torch.zeros(B, T, H * DK)}, r"q has shape \(2, 17, 10\); expected .*\[2, 17, 2, 5\]"),
    "q-length": ({"q": torch.zeros(B, T - 1, H, DK)}, r"q has shape \(2, 16, 2, 5\)"),
    "v-heads": ({"v": torch.zeros(B, T, 1, DV)}, r"v has shape \(2, 17, 1, 4\); expected .*\[2, 17, 2, any\]"),
    "v-batch": ({"v": torch.zeros(1, T, H, DV)}, r"v has shape \(1, 17, 2, 4\)"),
    "lr0-width": ({"lr0": torch.zeros(B, T, H, 3)}, r"lr0 has shape \(2, 17, 2, 3\); expected .*1 or 5"),
    "lr1-width": ({"lr1": torch.zeros(B, T, H, 5)}, r"lr1 has shape \(2, 17, 2, 5\); expected a last width of 1 or 6"),
    "lr2-rank": ({"lr2": torch.zeros(B, T, H)}, r"lr2 has shape \(2, 17, 2\)"),
    "momentum-width": ({"momentum": torch.zeros(B, T, H, 2)}, r"momentum has shape \(2, 17, 2, 2\)"),
    "w1-rank": ({"w1": torch.zeros(DV, DH)}, r"w1 has shape \(4, 6\); expected \[heads, value width, hidden width\]"),
    "w1-value-width": (
        {"w1": torch.zeros(H, DV + 1, DH)},
        r"w1 has shape \(2, 5, 6\); expected .*\[2, 4, any\]|\[2, 4, 6\]",
    ),
    "w1-heads": ({"w1": torch.zeros(3, DV, DH)}, r"w1 has shape \(3, 4, 6\)"),
    "w1-rows": ({"w1": torch.zeros(3, H, DV, DH)}, r"w1 has shape \(3, 2, 4, 6\); expected .*\[2, 2, 4, 6\]"),
    "w0-hidden-width": ({"w0": torch.zeros(H, DH + 1, DK)}, r"w0 has shape \(2, 7, 5\); expected .*\[2, 6, 5\]"),
    "w2-key-width": ({"w2": torch.zeros(H, DH, DK + 1)}, r"w2 has shape \(2, 6, 6\); expected .*\[2, 6, 5\]"),
    "w0-missing": ({"w0": None}, "w0 is None, but a 'swiglu' fast network needs it"),
}


@pytest.mark.parametrize(("changes", "message"), SHAPES.values(), ids=SHAPES)
def test_shapes(changes, message):
    changes = {key: t if t is None else t.double() for key, t in changes.items()}
    with pytest.raises(ValueError, match=message):
        call(**changes)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shapes_are_checked_on_any_device(device):
    x = {key: t.to(device) for key, t in make_inputs(RULE, requires_grad=False).items()}
    with pytest.raises(ValueError, match="v has shape"):
        ttt_attention(**{**x, "v": x["v"][:, :-1]}, rule=RULE, chunk_size=4)


def test_inner_dimension_of_a_linear_network():
    with pytest.raises(ValueError, match="input width is 6, but a linear fast network is applied to keys of width 5"):
        call(LINEAR, w1=torch.zeros(H, DV, DH, dtype=torch.float64))


def test_types():
    with pytest.raises(ValueError, match="v has dtype torch.float32; expected one floating-point type .*float64 in k"):
        call(v=torch.zeros(B, T, H, DV))
    with pytest.raises(ValueError, match="q has dtype torch.int64"):
        x = {key: torch.zeros(B, T, H, DK, dtype=torch.long) for key in ("q", "k")}
        call(**x)


NAN = float("nan")


@pytest.mark.parametrize("name", ["lr0", "lr1", "lr2"])
@pytest.mark.parametrize("value", [-0.1, NAN, -float("inf")], ids=str)
def test_rates(name, value):
    rate = torch.rand(B, T, H, 1, dtype=torch.float64)
    rate[1, 3, 0, 0] = value
    with pytest.raises(ValueError, match=f"{name} has a value that is negative or NaN"):
        call(**{name: rate})


@pytest.mark.parametrize("value", [-0.1, 1.1, NAN], ids=str)
def test_momentum(value):
    momentum = torch.rand(B, T, H, 1, dtype=torch.float64)
    momentum[0, 16, 1, 0] = value
    with pytest.raises(ValueError, match=r"momentum has a value outside \[0, 1\] or NaN"):
        call(momentum=momentum)


@pytest.mark.parametrize("chunk_size", [0, -4, 2.0, True, None])
def test_chunk_size(chunk_size):
    with pytest.raises(ValueError, match=f"chunk_size={chunk_size!r} must be an integer of at least 1"):
        call(chunk_size=chunk_size)


def test_implementation_and_backend():
    with pytest.raises(ValueError, match="implementation='fast' is not one of 'auto', 'recurrent', 'parallel'"):
        call(settings={"implementation": "fast"})
    with pytest.raises(ValueError, match="backend='cuda' is not one of 'auto', 'torch', 'triton'"):
        call(settings={"backend": "cuda"})
    for rule, field in [
        (TTTRule(), "update='last'"),
        (TTTRule(update="last", loss="mse", weight_norm="none"), "loss='dot_product'"),
        (TTTRule(fast_weight="linear"), "weight_norm='none' or 'pre'"),
    ]:
        with pytest.raises(ValueError, match=f"implementation='parallel' is not exact for this rule: .*set {field}"):
            call(rule, settings={"implementation": "parallel"})


MASKS = {
    "rank": (torch.ones(B, 1, T, T), r"attention_mask has shape \(2, 1, 17, 17\); expected a padding mask \[2, 17\]"),
    "length": (torch.ones(B, T + 1), r"attention_mask has shape \(2, 18\)"),
    "hole": (torch.tensor([[1] * 5 + [0] + [1] * 11, [1] * 17]), "not a padding mask: .*interrupted by zeros"),
    "additive": (torch.zeros(B, T).masked_fill(torch.arange(T) < 3, -1e9), "values other than 0 and 1"),
    "nan": (torch.full((B, T), NAN), "values other than 0 and 1"),
}


@pytest.mark.parametrize(("mask", "message"), MASKS.values(), ids=MASKS)
def test_masks(mask, message):
    with pytest.raises(ValueError, match=message):
        call(settings={"attention_mask": mask})


ENDS = {
    "start": ([1, T], r"cu_seqlens is \[1, 17\]; expected boundaries that rise from 0 to 17"),
    "end": ([0, 5], "rise from 0 to 17"),
    "order": ([0, 9, 5, T], "rise from 0 to 17"),
    "rank": ([[0, T]], r"cu_seqlens has shape \(1, 2\)"),
    "none": ([], r"cu_seqlens has shape \(0,\)"),
}


@pytest.mark.parametrize(("ends", "message"), ENDS.values(), ids=ENDS)
def test_document_boundaries(ends, message):
    x = make_inputs(RULE, batch=1, requires_grad=False)
    with pytest.raises(ValueError, match=message):
        ttt_attention(**x, rule=RULE, chunk_size=4, cu_seqlens=torch.tensor(ends, dtype=torch.int32))


def test_documents_with_batch_or_padding():
    ends, mask = torch.tensor([0, T]), torch.ones(1, T)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="cu_seqlens needs documents packed into one row, but k has a batch of 2"):
        call(settings={"cu_seqlens": ends})
    with pytest.raises(ValueError, match="cu_seqlens has .* dtype torch.float32; expected integers"):
        call(**make_inputs(RULE, batch=1), settings={"cu_seqlens": ends.float()})
    with pytest.raises(ValueError, match="attention_mask has zeros and cu_seqlens is given"):
        call(**make_inputs(RULE, batch=1), settings={"cu_seqlens": ends, "attention_mask": mask})


def some_state(rule, chunk_size=4, **options):
    x = make_inputs(rule, length=6, **options)
    return ttt_attention(**x, rule=rule, chunk_size=chunk_size, return_state=True)[1]


def test_a_state_that_does_not_fit():
    none, pre, post = (TTTRule(weight_norm=norm) for norm in ("none", "pre", "post"))
    cases = [
        (none, some_state(none, batch=3), "state has 3 rows; expected 2"),
        (post, some_state(none), "state was made for another rule: it has no norms, which weight_norm='post' needs"),
        (
            pre,
            some_state(post),
            "state was made for another rule: it has no main weights, which weight_norm='pre' needs",
        ),
        (none, some_state(none, rates=None), "lr0 is given, but the state's unfinished chunk has no it|has no lr0"),
        (none, some_state(none, momentum=None), "momentum is given, but the state's unfinished chunk has"),
        (
            none,
            some_state(none, chunk_size=5),
            r"state's unfinished chunk holds k of \[5, 2, 5\] per row; expected \[4, 2, 5\]",
        ),
        (none, some_state(none, rates="channel"), r"state's unfinished chunk holds lr0 of \[4, 2, 5\]"),
        (none, some_state(none, dk=7), r"w0 has shape \(2, 2, 6, 7\)|holds k of"),
        (none, some_state(none, heads=3), r"w1 has shape \(2, 3, 4, 6\)|holds k of"),
    ]
    for rule, state, message in cases:
        with pytest.raises(ValueError, match=message):
            call(rule, settings={"state": state})
    x = make_inputs(none, rates=None, requires_grad=False)
    with pytest.raises(ValueError, match="lr0 is None, but the state's unfinished chunk has it"):
        ttt_attention(**x, rule=none, chunk_size=4, state=some_state(none))


def test_primitives():
    state = some_state(RULE)
    x = make_inputs(RULE, requires_grad=False)
    with pytest.raises(ValueError, match=r"q has shape \(1, 17, 2, 5\); expected \[2, tokens, 2, 5\]"):
        ttt_read(state, x["q"][:1], rule=RULE)
    with pytest.raises(ValueError, match=r"q has shape \(2, 17, 5\)"):
        ttt_read(state, x["q"][:, :, 0], rule=RULE)
    with pytest.raises(ValueError, match=r"q has shape \(2, 17, 2, 4\); expected .*5"):
        ttt_read(state, x["q"][..., :4], rule=RULE)
    with pytest.raises(ValueError, match="v has shape"):
        ttt_update(state, x["k"], x["v"][:, 1:], rule=RULE)
    with pytest.raises(ValueError, match="w0 has shape|w1 has shape"):
        ttt_update(state, x["k"][:1], x["v"][:1], rule=RULE)


def test_values_are_looked_at_in_direct_calls_only():
    """Meta tensors have none; a tensor subclass may not allow it."""
    x = {key: t.to("meta") for key, t in make_inputs(RULE, requires_grad=False).items()}
    out, state = ttt_attention(
        **{**x, "lr0": -x["lr0"]}, rule=RULE, chunk_size=4, return_state=True, attention_mask=None
    )
    assert out.shape == x["v"].shape
    assert out.device.type == state.w1.device.type == "meta"
    mask = torch.ones(B, T, device="meta")
    assert ttt_attention(**x, rule=RULE, chunk_size=4, attention_mask=mask).shape == x["v"].shape
