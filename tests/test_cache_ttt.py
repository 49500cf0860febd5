# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The generation cache: what each operation on it does to all that it holds."""

import copy
import inspect

import pytest
import torch
from lact_cases import busy_model, tiny_config, token_ids
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from hf_ttt import LaCTForCausalLM, TTTCache, TTTState
from hf_ttt.cache_ttt import TTTLayer, TTTSlidingWindowLayer
from hf_ttt.modeling_lact import CACHE_KEY

CHUNK, WINDOW = 4, 5
RULES = ["baseline", "prenorm", "variant2", "variant6"]


def make_model(rule: str = "baseline", **fields) -> LaCTForCausalLM:
    """In float64, so that rows of different batches agree to 1e-10."""
    return busy_model(tiny_config(rule, **{"lact_chunk_size": CHUNK, "window_size": WINDOW, **fields})).double()


@pytest.fixture(scope="module", params=RULES)
def model(request) -> LaCTForCausalLM:
    return make_model(request.param)


@torch.no_grad()
def fill(model, ids: torch.Tensor, mask: torch.Tensor | None = None, cache: TTTCache | None = None) -> TTTCache:
    """The cache after these tokens."""
    return model(ids, attention_mask=mask, cache=cache, use_cache=True)[CACHE_KEY]


@torch.no_grad()
def step(model, ids: torch.Tensor, cache: TTTCache) -> torch.Tensor:
    """Logits of three more tokens, one after the other: they read every part of the cache and fill a chunk."""
    return torch.cat([model(piece, cache=cache, use_cache=True).logits for piece in ids.split(1, 1)], 1)


def held(cache: TTTCache) -> dict[str, torch.Tensor]:
    """All tensors of a cache that have a row for each row of the batch, by layer and name."""
    tensors = {}
    for i, layer in enumerate(cache.layers):
        tensors |= {f"{i}.keys": layer.keys, f"{i}.values": layer.values}
        tensors |= {f"{i}.{name}": tensor for name, tensor in layer.ttt.tensors().items()}
    return tensors


def storage_bytes(cache: TTTCache) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in held(cache).values())


def assert_same_row(actual: TTTState, row: int, alone: TTTState) -> None:
    """Row `row` of a state is the state of a row that was alone. A momentum buffer that is not there is zero, and slots
    behind the count mean nothing."""
    count = int(alone.count[0])
    assert int(actual.count[row]) == count
    names = actual.tensors().keys() | alone.tensors().keys()
    for name in names - {"count"}:
        mine, other = getattr(actual, name), getattr(alone, name)
        if mine is None or other is None:
            assert name.startswith("momentum") and (mine is None or not mine[row].any())
            continue
        mine, other = mine[row], other[0]
        if name in ("k", "v", "lr0", "lr1", "lr2", "momentum"):
            mine, other = mine[:count], other[:count]
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11, msg=name)


# ---- what a cache holds ----


@pytest.mark.parametrize("layer", [TTTLayer, TTTSlidingWindowLayer])
def test_layers_are_complete_in_every_version(layer):
    """A renamed abstract method of the base class (get_max_cache_shape) made cache layers impossible to build."""
    assert issubclass(layer, CacheLayerMixin) and not inspect.isabstract(layer)
    made = layer(sliding_window=WINDOW) if layer is TTTSlidingWindowLayer else layer()
    assert made.get_seq_length() == 0 and made.ttt is None and not made.is_compileable
    keys, values = made.update(torch.ones(2, 1, 7, 3), torch.ones(2, 1, 7, 3))
    assert keys.shape == values.shape == (2, 1, 7, 3) and made.get_seq_length() == 7
    assert made.get_mask_sizes(1) == ((WINDOW, 3) if layer is TTTSlidingWindowLayer else (8, 0))
    assert made.get_max_length() in (-1, WINDOW)


@pytest.mark.parametrize("window", [WINDOW, 1, None])
def test_length_counts_tokens_and_not_layers(window):
    """A cache was taken for filled because it had layers, and a linear-only one had no length."""
    model = make_model(window_size=window)
    cache = TTTCache(model.config)
    assert isinstance(cache, DynamicCache) and len(cache) == 2 and cache.get_seq_length() == 0
    for total in (3, 6):
        fill(model, token_ids(2, 3), cache=cache)
        assert [cache.get_seq_length(layer) for layer in (0, 1)] == [total, total]


def test_a_long_prompt_is_not_kept(model):
    """The window's keys were a slice of the whole prompt's, which stayed in memory until the next token."""
    short, long = (fill(model, token_ids(2, length)).layers[0] for length in (WINDOW, 9 * WINDOW))
    for name in ("keys", "values"):
        sizes = [getattr(layer, name).untyped_storage().nbytes() for layer in (short, long)]
        assert sizes[1] <= sizes[0]


def test_a_state_is_there_after_the_first_token(model):
    """transformers' own recurrent states are None until a convolution state is written too."""
    cache = fill(model, token_ids(2, 1))
    assert all(layer.ttt.count.tolist() == [1, 1] for layer in cache.layers)


def test_each_row_has_the_state_it_has_alone(model):
    """Pads went into the state, and the count of an unfinished chunk was one for all rows."""
    lengths = (13, 2, 8, 5)
    ids = token_ids(4, 13)
    mask = (torch.arange(13) >= 13 - torch.tensor(lengths)[:, None]).long()
    whole = fill(model, ids, mask)
    pieces = fill(model, ids[:, 6:], mask, fill(model, ids[:, :6], mask[:, :6]))
    for row, length in enumerate(lengths):
        alone = fill(model, ids[row : row + 1, -length:])
        for cache in (whole, pieces):
            for layer, other in zip(cache.layers, alone.layers, strict=True):
                assert_same_row(layer.ttt, row, other.ttt)


def test_row_without_tokens_keeps_the_initial_state(model):
    """A row that is all padding has the initial weights, and later what it has alone."""
    ids, mask = token_ids(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[1] = 0
    cache = fill(model, ids, mask)
    attention = model.model.layers[0].attn
    torch.testing.assert_close(cache.layers[0].ttt.w1[1], attention.w1.detach())
    assert cache.layers[0].ttt.count.tolist() == [2, 0]
    fill(model, token_ids(2, 5, seed=1), torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], 1), cache)
    alone = fill(model, token_ids(2, 5, seed=1)[1:])
    assert_same_row(cache.layers[1].ttt, 1, alone.layers[1].ttt)


# ---- operations ----


def test_reorder_permutes_every_tensor(model):
    """Beams kept the fast weights, the momentum or the unfinished chunk of other beams."""
    cache = fill(model, token_ids(3, 10))
    before = {name: tensor.clone() for name, tensor in held(cache).items()}
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    after = held(cache)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor[order]), name
    ids = token_ids(3, 3, seed=1)
    torch.testing.assert_close(step(model, ids, cache), step(model, ids, fill(model, token_ids(3, 10)[order])))


def test_repeat_and_select_rows(model):
    """The built-in layers repeat and select keys and values, and leave the states as they are."""
    ids, more = token_ids(3, 10), token_ids(6, 3, seed=1)
    cache = fill(model, ids)
    cache.batch_repeat_interleave(2)
    assert all(tensor.shape[0] == 6 for tensor in held(cache).values())
    torch.testing.assert_close(step(model, more, cache), step(model, more, fill(model, ids.repeat_interleave(2, 0))))
    for chosen in (torch.tensor([2, 0]), torch.tensor([True, False, True])):
        cache = fill(model, ids)
        cache.batch_select_indices(chosen)
        assert all(tensor.shape[0] == 2 for tensor in held(cache).values())
        torch.testing.assert_close(step(model, more[:2], cache), step(model, more[:2], fill(model, ids[chosen])))


def test_operations_on_an_empty_cache_do_nothing(model):
    cache = TTTCache(model.config)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0]))
    cache.reset()
    for layer in range(len(cache)):
        cache.layers[layer].offload()
        cache.layers[layer].prefetch()
    ids = token_ids(2, 5)
    torch.testing.assert_close(step(model, ids, cache), step(model, ids, TTTCache(model.config)))


def test_reset_restores_the_initial_state(model):
    """Resetting to zeros is wrong: the fast weights begin at their trained initial values."""
    cache = fill(model, token_ids(3, 10))
    cache.reset()
    assert cache.get_seq_length() == 0 and all(layer.ttt is None for layer in cache.layers)
    ids = token_ids(2, 9, seed=1)  # also with another batch size
    assert torch.equal(step(model, ids, cache), step(model, ids, TTTCache(model.config)))


def test_a_copy_is_independent(model):
    """Decoding writes the unfinished chunk in place, which must not reach a copy from before."""
    cache = fill(model, token_ids(2, 6))
    copied = copy.deepcopy(cache)
    ids = token_ids(2, 5, seed=1)
    expected = step(model, ids, cache)
    for (name, mine), other in zip(held(cache).items(), held(copied).values(), strict=True):
        assert mine.data_ptr() != other.data_ptr(), name
    assert torch.equal(step(model, ids, copied), expected)


def test_offload_and_prefetch_move_the_state(model):
    """Only keys and values went back to the device of a layer."""
    cache = fill(model, token_ids(2, 6))
    layer = cache.layers[0]
    layer.offload()
    assert {tensor.device.type for tensor in held(cache).values()} == {"cpu"}
    layer.device = torch.device("meta")  # stands for an accelerator
    layer.prefetch()
    assert layer.keys.device.type == "meta"
    assert {tensor.device.type for tensor in layer.ttt.tensors().values()} == {"meta"}
    assert {tensor.device.type for tensor in cache.layers[1].ttt.to("meta").tensors().values()} == {"meta"}


@pytest.mark.parametrize("window", [WINDOW, None])
def test_crop_is_refused(window):
    """Tokens cannot be taken back out of the fast weights; cropping only the keys would be silently wrong."""
    model = make_model(window_size=window)
    cache = fill(model, token_ids(1, 9))
    assert not getattr(cache, "is_croppable", False)
    for tokens in (-2, 4):
        with pytest.raises(ValueError, match="cannot be cropped"):
            cache.crop(tokens)
    assert cache.get_seq_length() == 9


# ---- size, types, parameters ----


@pytest.mark.parametrize("rule", ["baseline", "variant2"])
@pytest.mark.parametrize("window", [WINDOW, 1])
@torch.no_grad()
def test_size_does_not_grow(rule, window):
    """The cost of a decode step grew with the sequence. With a window of 1 the keys of transformers' layer did."""
    model = make_model(rule, window_size=window, num_hidden_layers=1, use_muon=False)  # which amplifies rounding
    ids = token_ids(1, 210)
    cache, sizes = fill(model, ids[:, :9]), set()
    for t in range(9, 209):
        model(ids[:, t : t + 1], cache=cache, use_cache=True)
        sizes.add(storage_bytes(cache))
    assert len(sizes) == 1 and cache.get_seq_length() == 209
    assert cache.layers[0].keys.shape[2] == window - 1
    last = model(ids[:, 209:], cache=cache, use_cache=True).logits
    torch.testing.assert_close(last, model(ids).logits[:, -1:], rtol=0, atol=1e-8)


def test_inference_leaves_the_parameters_alone(model):
    """Fast weights are a state of the sequence: nothing of them may be written to the trained initial values."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.generate(token_ids(2, 7), max_new_tokens=10, do_sample=False)
    step(model, token_ids(2, 9), TTTCache(model.config))
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("rule", RULES)
def test_state_is_float32_in_a_bfloat16_model(rule, tmp_path):
    """Fast weights, momentum, norms and rates that accumulate in bfloat16 drift."""
    make_model(rule).to(torch.bfloat16).save_pretrained(tmp_path)
    model = LaCTForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cache = fill(model, token_ids(2, 10))
    for name, tensor in held(cache).items():
        expected = torch.bfloat16 if name.split(".")[1] in ("keys", "values", "k", "v") else torch.float32
        assert tensor.dtype == (torch.int64 if name.endswith("count") else expected), name
    model.generate(token_ids(2, 7), max_new_tokens=6, do_sample=False)


def test_a_cache_from_inference_mode_continues_outside(model):
    """Tensors made in inference mode cannot be written in place outside of it."""
    ids = token_ids(2, 6)
    with torch.inference_mode():
        cache = model(ids, use_cache=True)[CACHE_KEY]
    more = token_ids(2, 5, seed=1)
    torch.testing.assert_close(step(model, more, cache), step(model, more, fill(model, ids)))


def test_evaluation_in_trainer_gets_no_cache(tmp_path):
    """A cache among the outputs of an evaluation step cannot be gathered into predictions: Trainer.evaluate crashed."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = make_model("variant2")
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in token_ids(4, 9)]
    seen = []
    arguments = TrainingArguments(tmp_path, per_device_eval_batch_size=2, report_to="none", use_cpu=True)
    metrics = lambda result: seen.append(result.predictions) or {"rows": len(result.predictions)}  # noqa: E731
    trainer = Trainer(model, arguments, eval_dataset=rows, compute_metrics=metrics)
    model.config.use_cache = True
    assert {"cache", "past_key_values"} <= set(model.config.keys_to_ignore_at_inference)
    assert trainer.evaluate()["eval_rows"] == 4
    assert seen[0].shape == (4, 9, model.config.vocab_size)
