# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Padding and packed documents in the whole model: each is what it is alone, in logits and gradients."""

import pytest
import torch
from lact_cases import TINY, busy_model, gradients, tiny_config, token_ids
from transformers import DataCollatorWithFlattening

from hf_ttt import LaCTForCausalLM, LaCTForSequenceClassification, TTTCache
from hf_ttt.modeling_lact import CACHE_KEY

CHUNK, WINDOW = 4, 5
RULES = ["baseline", "variant2", "prenorm", "variant6"]
ATTENTIONS = ["eager", "sdpa"]
DOCUMENTS = [(3, 5, 2), (9, 1, 14, 4)]


def make_model(rule: str, attention: str = "sdpa", model_class=LaCTForCausalLM, **fields):
    """In float64, where rounding is far below anything that leaks between rows."""
    config = tiny_config(rule, **{"lact_chunk_size": CHUNK, "window_size": WINDOW, **fields})
    config._attn_implementation = attention
    return busy_model(config, model_class).double()


@pytest.fixture(scope="module", params=RULES)
def model(request) -> LaCTForCausalLM:
    return make_model(request.param)


def readout(logits: torch.Tensor) -> torch.Tensor:
    """A number that depends on every logit, and more on later ones."""
    weights = torch.linspace(-1, 2, logits.numel(), dtype=logits.dtype).view_as(logits)
    return (logits * weights.cos()).sum()


def alone(model, rows: list[torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logits of each row [1, t] without padding or neighbours, and the gradients of the sum of their readouts."""
    model.zero_grad()
    logits = [model(row, use_cache=False).logits for row in rows if row.shape[1]]
    sum(readout(x) for x in logits).backward()
    return [x.detach() for x in logits], {name: g.clone() for name, g in gradients(model).items()}


def together(model, cut, **inputs) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The same from one call, whose logits `cut` takes apart."""
    model.zero_grad()
    logits = cut(model(**inputs).logits)
    sum(readout(x) for x in logits).backward()
    return [x.detach() for x in logits], gradients(model)


def assert_equal(actual, expected) -> None:
    """To 1e-10 of the greatest number of each tensor (float64)."""
    (logits, grads), (logits_alone, grads_alone) = actual, expected
    for mine, other in zip(logits, logits_alone, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10 * other.abs().max().item())
    for name, other in grads_alone.items():
        assert grads[name] is not None and grads[name].isfinite().all(), name
        torch.testing.assert_close(grads[name], other, rtol=0, atol=1e-10 * other.abs().max().item() + 1e-12, msg=name)


# ---- padding ----

PADDINGS = {  # (tokens on the left, real tokens, on the right) of each row
    "left": [(0, 13, 0), (8, 5, 0), (4, 9, 0)],
    "right": [(0, 13, 0), (0, 5, 8), (0, 9, 4)],
    "both": [(2, 11, 0), (3, 5, 5), (0, 4, 9)],
    "empty_row": [(0, 13, 0), (13, 0, 0), (4, 9, 0)],
    "one_row_left": [(3, 4, 0)],
    "one_row_right": [(0, 9, 3)],
    "equal_rows": [(3, 9, 0), (3, 9, 0)],
}


def padded(rows: list[tuple[int, int, int]], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids, also in the padding, and the mask."""
    mask = torch.stack([torch.tensor([0] * left + [1] * real + [0] * right) for left, real, right in rows])
    return token_ids(*mask.shape, seed=seed), mask


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_padded_rows_are_what_they_are_alone(model, padding, attention):
    """Pads entered the state and moved chunks and positions, or the mask was only read in batches of two or more."""
    rows = PADDINGS[padding]
    ids, mask = padded(rows)
    spans = [(i, slice(left, left + real)) for i, (left, real, _) in enumerate(rows) if real]
    model.set_attn_implementation(attention)
    expected = alone(model, [ids[i : i + 1, span] for i, span in spans])
    cut = lambda logits: [logits[i : i + 1, span] for i, span in spans]  # noqa: E731
    assert_equal(together(model, cut, input_ids=ids, attention_mask=mask), expected)


@pytest.mark.parametrize("padding", ["left", "right"])
@torch.no_grad()
def test_logits_do_not_depend_on_pad_ids(model, padding):
    ids, mask = padded(PADDINGS[padding])
    other = torch.where(mask.bool(), ids, token_ids(*ids.shape, seed=7))
    a, b = (model(x, attention_mask=mask).logits[mask.bool()] for x in (ids, other))
    assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@torch.no_grad()
def test_types_of_masks(model, dtype):
    ids, mask = padded(PADDINGS["left"])
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(model(ids, attention_mask=mask.to(dtype)).logits[mask.bool()], expected)
    ones = torch.ones_like(mask, dtype=dtype)
    torch.testing.assert_close(model(ids, attention_mask=ones).logits, model(ids).logits)


@torch.no_grad()
def test_every_row_empty(model):
    ids = token_ids(2, 6)
    logits = model(ids, attention_mask=torch.zeros_like(ids)).logits
    assert logits.shape == (2, 6, TINY["vocab_size"]) and logits.isfinite().all()


@pytest.mark.parametrize("implementation", ["recurrent", "parallel"])
def test_both_evaluations_pad_and_pack(implementation):
    """A fast path without mask support must refuse a mask; both evaluations of this package take it."""
    model = make_model("variant2", ttt_implementation=implementation)
    ids, mask = padded(PADDINGS["both"])
    spans = [(i, slice(left, left + real)) for i, (left, real, _) in enumerate(PADDINGS["both"])]
    cut = lambda logits: [logits[i : i + 1, span] for i, span in spans]  # noqa: E731
    expected = alone(model, [ids[i : i + 1, span] for i, span in spans])
    assert_equal(together(model, cut, input_ids=ids, attention_mask=mask), expected)
    documents = split_documents((9, 1, 14, 4))
    packed = {"input_ids": torch.cat(documents, 1), "cu_seqlens": boundaries((9, 1, 14, 4))}
    assert_equal(together(model, lambda x: x.split((9, 1, 14, 4), 1), **packed), alone(model, documents))


@pytest.mark.parametrize("window", [1, 3, None])
def test_padding_with_other_windows(window):
    model = make_model("baseline", window_size=window)
    rows = PADDINGS["left"]
    ids, mask = padded(rows)
    cut = lambda logits: [logits[i : i + 1, left:] for i, (left, _, _) in enumerate(rows)]  # noqa: E731
    assert_equal(together(model, cut, input_ids=ids, attention_mask=mask), alone(model, cut(ids)))


@pytest.mark.parametrize("padding", ["left", "right", "both"])
@torch.no_grad()
def test_classifier_reads_the_last_real_token(padding):
    model = make_model("baseline", model_class=LaCTForSequenceClassification, num_labels=3)
    rows = PADDINGS[padding]
    ids, mask = padded(rows)
    logits = model(ids, attention_mask=mask).logits
    for i, (left, real, _) in enumerate(rows):
        torch.testing.assert_close(logits[i : i + 1], model(ids[i : i + 1, left : left + real]).logits)


def test_masks_that_do_not_fit_are_refused(model):
    ids = token_ids(2, 6)
    for mask in (torch.ones(2, 5), torch.ones(1, 6), torch.ones(2, 1, 6, 6)):
        with pytest.raises(ValueError, match="attention_mask has shape"):
            model(ids, attention_mask=mask)


# ---- packed documents ----


def split_documents(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Random documents [1, t]."""
    return list(token_ids(1, sum(lengths)).split(lengths, 1))


def boundaries(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def restarting(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(t) for t in lengths])[None]


def collated(lengths: tuple[int, ...], **settings) -> dict:
    """What transformers' collator makes of the documents, with its labels taken off."""
    documents = [{"input_ids": document[0].tolist()} for document in split_documents(lengths)]
    batch = DataCollatorWithFlattening(return_tensors="pt", **settings)(documents)
    return {name: value for name, value in batch.items() if name != "labels"}


PACKINGS = {
    "collator": lambda lengths: collated(lengths),
    "collator_seq_idx": lambda lengths: collated(lengths, return_seq_idx=True),
    "collator_flash": lambda lengths: collated(lengths, return_flash_attn_kwargs=True),
    "collator_both": lambda lengths: collated(lengths, return_seq_idx=True, return_flash_attn_kwargs=True),
    "collator_no_positions": lambda lengths: collated(
        lengths, return_position_ids=False, return_flash_attn_kwargs=True, return_seq_idx=True
    ),
    "cu_seqlens": lambda lengths: {"cu_seqlens": boundaries(lengths)},
    "cu_seqlens_2d": lambda lengths: {"cu_seqlens": boundaries(lengths)[None].long()},
    "cu_seqlens_and_ones": lambda lengths: {
        "cu_seqlens": boundaries(lengths),
        "attention_mask": torch.ones(1, sum(lengths), dtype=torch.long),
    },
    "positions_and_ones": lambda lengths: {
        "position_ids": restarting(lengths),
        "attention_mask": torch.ones(1, sum(lengths), dtype=torch.long),
    },
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
def test_packed_documents_are_what_they_are_alone(model, packing, lengths):
    """State leaked across packed documents: position_ids were ignored, and an all-ones mask hid the boundaries."""
    documents = split_documents(lengths)
    inputs = {"input_ids": torch.cat(documents, 1), **PACKINGS[packing](lengths)}
    assert torch.equal(inputs["input_ids"], torch.cat(documents, 1))
    expected = alone(model, documents)
    assert_equal(together(model, lambda logits: logits.split(lengths, 1), **inputs), expected)


@pytest.mark.parametrize("packing", ["collator", "cu_seqlens_and_ones"])
@pytest.mark.parametrize("window", [None, WINDOW, 2])
def test_packing_in_eager_attention(packing, window):
    model = make_model("baseline", "eager", window_size=window)
    lengths = (9, 1, 14, 4)
    documents = split_documents(lengths)
    inputs = {"input_ids": torch.cat(documents, 1), **PACKINGS[packing](lengths)}
    assert_equal(together(model, lambda logits: logits.split(lengths, 1), **inputs), alone(model, documents))


@torch.no_grad()
def test_another_first_document_changes_nothing_after_it(model):
    lengths = (3, 5, 2)
    ids = token_ids(1, 10)
    other = torch.cat([token_ids(1, 3, seed=9), ids[:, 3:]], 1)
    a, b = (model(x, cu_seqlens=boundaries(lengths)).logits for x in (ids, other))
    assert torch.equal(a[:, 3:], b[:, 3:]) and not torch.equal(a[:, :3], b[:, :3])


def test_rows_of_packed_documents(model):
    """A batch of two rows, each with its own documents by restarting position_ids."""
    lengths = [(3, 5, 6), (9, 1, 4)]
    ids = token_ids(2, 14)
    positions = torch.cat([restarting(row) for row in lengths])
    cut = lambda x: [part for i in range(2) for part in x[i : i + 1].split(lengths[i], 1)]  # noqa: E731
    assert_equal(together(model, cut, input_ids=ids, position_ids=positions), alone(model, cut(ids)))


def test_loss_of_packed_documents(model):
    """The collator masks the first label of each document, so the loss is the mean over all other tokens."""
    lengths = (3, 5, 2)
    features = [{"input_ids": document[0].tolist()} for document in split_documents(lengths)]
    batch = DataCollatorWithFlattening(return_tensors="pt")(features)
    losses = [model(x, labels=x).loss * (x.shape[1] - 1) for x in split_documents(lengths)]
    torch.testing.assert_close(model(**batch).loss, sum(losses) / (sum(lengths) - len(lengths)))


@torch.no_grad()
def test_empty_documents(model):
    lengths = (0, 3, 0, 0, 7, 0)
    ids = token_ids(1, 10)
    logits = model(ids, cu_seqlens=boundaries(lengths)).logits
    torch.testing.assert_close(logits, model(ids, cu_seqlens=boundaries((3, 7))).logits)


@torch.no_grad()
def test_positions_that_only_start_later_are_one_document():
    """Positions from 5 on are no boundary; rotary embeddings are relative, in the window attention alone."""
    model, ids = make_model("baseline", ttt_nope=True), token_ids(2, 9)
    moved = model(ids, position_ids=torch.arange(5, 14)[None]).logits
    torch.testing.assert_close(moved, model(ids).logits, rtol=0, atol=1e-5)  # tables of angles are float32


@torch.no_grad()
def test_no_cache_comes_of_packed_documents(model):
    """The state after several documents continues none of them."""
    assert model.config.use_cache
    ids = token_ids(1, 10)
    for inputs in ({"cu_seqlens": boundaries((3, 7))}, {"position_ids": restarting((3, 7))}):
        assert model(ids, **inputs).get(CACHE_KEY) is None
        assert model(ids, use_cache=True, **inputs).get(CACHE_KEY) is None


@torch.no_grad()
def test_packed_documents_do_not_continue_a_cache(model):
    cache = model(token_ids(1, 4), use_cache=True)[CACHE_KEY]
    with pytest.raises(ValueError, match="a cache with tokens was passed together with packed documents"):
        model(token_ids(1, 10), cu_seqlens=boundaries((3, 7)), cache=cache)
    assert isinstance(cache, TTTCache) and cache.get_seq_length() == 4


def test_contradictions_are_refused(model):
    ids, mask = padded([(3, 7, 0)])
    with pytest.raises(ValueError, match="attention_mask has zeros and packed documents are given"):
        model(ids, attention_mask=mask, cu_seqlens=boundaries((3, 7)))
    with pytest.raises(ValueError, match="packed into one row"):
        model(token_ids(2, 10), cu_seqlens=boundaries((3, 7)))


@torch.no_grad()
def test_a_mask_wins_over_positions(model):
    """generate() sends position_ids that are constant over the padding, which is no restart of a document."""
    ids, mask = padded(PADDINGS["left"])
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(logits[mask.bool()], model(ids, attention_mask=mask).logits[mask.bool()])
