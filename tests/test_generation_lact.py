# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Generation with LaCT: a cached continuation is the full forward pass, for any pieces, padding and search."""

import copy
import itertools

import pytest
import torch
from lact_cases import TINY, busy_model, tiny_config, token_ids
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import EncoderDecoderCache

from hf_ttt import LaCTForCausalLM, LaCTForSequenceClassification, TTTCache
from hf_ttt.modeling_lact import CACHE_KEY

CHUNK, WINDOW = 4, 5
CASES = {  # name: (variant or rule of lact_cases, other fields)
    "baseline": ("baseline", {}),
    "variant2_parallel": ("variant2", {"ttt_implementation": "parallel"}),
    "variant2_recurrent": ("variant2", {"ttt_implementation": "recurrent"}),
    "prenorm": ("prenorm", {}),
    "prenorm_last": ("prenorm_last", {}),
    "variant5": ("variant5", {}),
    "variant6": ("variant6", {}),
    "mse_full_attention": ("mse", {"window_size": None, "use_muon": False}),
}
SEARCHES = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True},
    "beam": {"do_sample": False, "num_beams": 3},
    "beam_sample": {"do_sample": True, "num_beams": 3},
    "sample_two": {"do_sample": True, "num_return_sequences": 2},
}


def make_model(case: str, dtype: torch.dtype = torch.float64, **fields) -> LaCTForCausalLM:
    """In float64, so that tokens hang on no rounding, which Newton–Schulz iteration amplifies."""
    variant, settings = CASES[case]
    settings = {"lact_chunk_size": CHUNK, "window_size": WINDOW, **settings, **fields}
    return busy_model(tiny_config(variant, **settings)).to(dtype)


@pytest.fixture(scope="module", params=CASES)
def model(request) -> LaCTForCausalLM:
    return make_model(request.param)


@pytest.fixture(scope="module")
def baseline() -> LaCTForCausalLM:
    return make_model("baseline")


def left_padded(lengths: tuple[int, ...], width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids [rows, width], padding included, and the mask: a row's last `length` tokens are real."""
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return token_ids(len(lengths), width, seed), mask


def close(actual: torch.Tensor, expected: torch.Tensor, real: torch.Tensor | None = None) -> None:
    """Equal to 1e-10 of the greatest logit in float64, 1e-5 in float32."""
    if real is not None:
        actual, expected = actual[real.bool()], expected[real.bool()]
    tolerance = 1e-10 if expected.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(1.0, expected.abs().max().item()))


def generate(model, ids, mask=None, seed=1, **settings) -> torch.Tensor:
    """The new tokens [rows, new]."""
    torch.manual_seed(seed)
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **{"max_new_tokens": 9, **settings})[:, ids.shape[1] :]


class Spy:
    """Records of each forward call of the inner model the number of new tokens, and of those in the cache before."""

    def __init__(self, model):
        self.calls: list[tuple[int, int | None]] = []
        self.model = model

    def __enter__(self):
        self.handle = self.model.model.register_forward_pre_hook(self._record, with_kwargs=True)
        return self

    def __exit__(self, *exception):
        self.handle.remove()

    def _record(self, module, args, kwargs):
        given = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        cache = kwargs.get("cache")
        self.calls.append((given.shape[1], None if cache is None else cache.get_seq_length()))
        if cache is not None and cache.get_seq_length():
            assert all(layer.ttt is not None for layer in cache.layers)


# ---- the search gives the same tokens with and without a cache ----


@pytest.mark.parametrize("search", ["greedy", "beam"])
@pytest.mark.parametrize("lengths", [(9,), (11, 4, 8)], ids=["batch1", "batch3"])
def test_tokens_with_and_without_cache_and_row_by_row(model, search, lengths):
    """Quality fell with the number of beams, and padded batches, also of one row, decoded to garbage: states were not
    reordered, and pad tokens went into them."""
    ids, mask = left_padded(lengths, 11)
    tokens = generate(model, ids, mask, **SEARCHES[search])
    assert torch.equal(tokens, generate(model, ids, mask, **SEARCHES[search], use_cache=False))
    for row, length in enumerate(lengths):
        alone = generate(model, ids[row : row + 1, -length:], use_cache=False, **SEARCHES[search])
        assert torch.equal(tokens[row : row + 1], alone)


@pytest.mark.parametrize("search", ["sample", "beam_sample", "sample_two"])
def test_sampled_tokens_with_and_without_cache(model, search):
    ids, mask = left_padded((11, 4, 8), 11)
    tokens = generate(model, ids, mask, **SEARCHES[search])
    assert torch.equal(tokens, generate(model, ids, mask, **SEARCHES[search], use_cache=False))
    assert not torch.equal(tokens, generate(model, ids, mask, seed=2, **SEARCHES[search]))


def test_sampled_rows_follow_their_own_logits(model):
    """Rows of a sampled, padded batch draw from the distribution that each row has alone, whatever the pad ids are."""
    lengths = (11, 4, 8)
    ids, mask = left_padded(lengths, 11)
    settings = {"do_sample": True, "output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 10}
    torch.manual_seed(0)
    out = model.generate(ids, attention_mask=mask, **settings)
    logits = torch.stack(out.logits, 1)
    for row, length in enumerate(lengths):
        with torch.no_grad():
            alone = model(out.sequences[row : row + 1, 11 - length : -1]).logits.float()  # as generate takes them
        close(logits[row : row + 1], alone[:, length - 1 :])


@pytest.mark.parametrize("seed", [1, 2])
def test_pad_ids_do_not_matter(baseline, seed):
    """A padded row decoded to other tokens when the padding held other ids."""
    lengths = (3, 7, 10)
    ids, mask = left_padded(lengths, 10)
    other = torch.where(mask.bool(), ids, token_ids(3, 10, seed + 10))
    assert torch.equal(generate(baseline, ids, mask), generate(baseline, other, mask))


def test_prompt_lengths_around_a_chunk_and_the_window(model):
    """Keys bounded by the window met a mask of full length, and prompts shorter than a chunk had no state yet."""
    for length in (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3):
        ids = token_ids(2, length, seed=length)
        settings = {"do_sample": False, "max_new_tokens": 6}
        assert torch.equal(generate(model, ids, **settings), generate(model, ids, **settings, use_cache=False))


@pytest.mark.parametrize("window", [1, 2, 3, 30])
def test_other_windows(window):
    """The window cache of transformers keeps every key when the window is 1."""
    model = make_model("baseline", window_size=window)
    ids, mask = left_padded((11, 4, 8), 11)
    assert torch.equal(generate(model, ids, mask), generate(model, ids, mask, use_cache=False))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(attention):
    ids, mask = left_padded((11, 4, 8), 11)
    model = make_model("variant2_parallel")
    expected = generate(model, ids, mask, use_cache=False)
    model.set_attn_implementation(attention)
    assert torch.equal(generate(model, ids, mask), expected)


# ---- what reaches the model in each step ----


@pytest.mark.parametrize("lengths", [(5,), (5, 2, 4)], ids=["batch1", "batch3"])
def test_prefill_gets_the_prompt_and_steps_get_a_state(baseline, lengths):
    """transformers 5.x dropped the prompt (emptiness tested by the number of layers), and 5.24 renamed the argument
    that carries the cache, so that steps ran without a state."""
    ids, mask = left_padded(lengths, 5)
    with Spy(baseline) as spy:
        generate(baseline, ids, mask, max_new_tokens=6, do_sample=False)
    assert spy.calls == [(5, 0)] + [(1, 5 + step) for step in range(5)]


def test_beam_search_carries_the_state(baseline):
    with Spy(baseline) as spy:
        generate(baseline, token_ids(2, 5), max_new_tokens=4, num_beams=3, do_sample=False)
    assert spy.calls == [(5, 0), (1, 5), (1, 6), (1, 7)]


def test_generation_without_cache_has_no_state(baseline):
    with Spy(baseline) as spy:
        generate(baseline, token_ids(1, 5), max_new_tokens=3, do_sample=False, use_cache=False)
    assert spy.calls == [(5, None), (6, None), (7, None)]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_prefill_in_pieces(model, size):
    """A prompt fed in pieces lost the state of the pieces before."""
    ids, mask = left_padded((11, 4, 8), 11)
    settings = {"do_sample": False, "max_new_tokens": 6}
    with Spy(model) as spy:
        pieces = generate(model, ids, mask, **settings, prefill_chunk_size=size)
    assert torch.equal(pieces, generate(model, ids, mask, **settings, use_cache=False))
    assert [call for call in spy.calls if call[1] < 11] == [(min(size, 11 - s), s) for s in range(0, 11, size)]


def test_a_returned_cache_is_continued(model):
    """A second turn with the cache of the first equals one that reads everything again."""
    ids, mask = left_padded((9, 3, 6), 9)
    settings = {"do_sample": False, "max_new_tokens": 5}
    first = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **settings)
    cache = first[CACHE_KEY]
    assert isinstance(cache, TTTCache) and cache.get_seq_length() == first.sequences.shape[1] - 1
    turn = torch.cat([first.sequences, token_ids(3, 6, seed=5)], 1)
    mask = torch.cat([mask, mask.new_ones(3, turn.shape[1] - mask.shape[1])], 1)
    with Spy(model) as spy:
        second = generate(model, turn, mask, **settings, **{CACHE_KEY: cache})
    assert spy.calls[0] == (turn.shape[1] - 13, 13)  # the last new token of the first turn is not in its cache
    assert torch.equal(second, generate(model, turn, mask, **settings, use_cache=False))


def test_generation_from_embeddings(model):
    ids, mask = left_padded((11, 4, 8), 11)
    settings = {"do_sample": False, "max_new_tokens": 6}
    expected = generate(model, ids, mask, **settings, use_cache=False)
    embeds = model.get_input_embeddings()(ids)
    for use_cache in (True, False):
        tokens = model.generate(inputs_embeds=embeds, attention_mask=mask, use_cache=use_cache, **settings)
        assert torch.equal(tokens, expected)


# ---- a sequence in pieces ----


def run(model, ids, mask, start: int, stop: int, cache: TTTCache | None = None) -> tuple[torch.Tensor, TTTCache]:
    """Logits of tokens [start, stop) and the cache after them; given as embeddings where `stop` is odd."""
    piece = {"input_ids": ids[:, start:stop]}
    if stop % 2:
        piece = {"inputs_embeds": model.get_input_embeddings()(piece["input_ids"])}
    out = model(**piece, attention_mask=mask[:, :stop], cache=cache, use_cache=True)
    assert cache is None or out[CACHE_KEY] is cache
    return out.logits, out[CACHE_KEY]


def pieces_of(length: int):
    """All ways to cut [0, length) into two or three pieces."""
    for count in (1, 2):
        for cuts in itertools.combinations(range(1, length), count):
            bounds = (0, *cuts, length)
            yield list(zip(bounds, bounds[1:], strict=False))


@torch.no_grad()
def test_any_pieces_equal_one_forward(model):
    """Chunked prefill, several turns and streamed embeddings started each piece from the initial state (5 + 4 + 3)."""
    lengths = (12, 5, 9, 1)
    ids, mask = left_padded(lengths, 12)
    full = model(ids, attention_mask=mask).logits
    for row, length in enumerate(lengths):
        close(full[row : row + 1, -length:], model(ids[row : row + 1, -length:]).logits)
    first: dict[int, tuple] = {}
    for pieces in pieces_of(12):
        cut = pieces[0][1]
        if cut not in first:
            first[cut] = run(model, ids, mask, 0, cut)
        logits, cache = [first[cut][0]], copy.deepcopy(first[cut][1])
        logits += [run(model, ids, mask, start, stop, cache)[0] for start, stop in pieces[1:]]
        close(torch.cat(logits, 1), full, mask)


@pytest.mark.parametrize("case", ["baseline", "prenorm_last", "variant6", "mse_full_attention"])
@torch.no_grad()
def test_pieces_in_float32(case):
    """As exact as one forward pass in float32: 1e-5, and more where Newton–Schulz iteration amplifies its rounding."""
    ids, mask = left_padded((12, 5, 9, 1), 12)
    exact = make_model(case)(ids, attention_mask=mask).logits[mask.bool()]
    model = make_model(case, torch.float32)
    error = lambda logits: (logits[mask.bool()] - exact).abs().max().item()  # noqa: E731
    bound = 1e-5 * exact.abs().max().item() + 4 * error(model(ids, attention_mask=mask).logits)
    for bounds in ((0, 5, 9, 12), (0, 1, 2, 12), (0, 4, 12), (0, 10, 11, 12)):
        cache = TTTCache(model.config)
        logits = [run(model, ids, mask, start, stop, cache)[0] for start, stop in itertools.pairwise(bounds)]
        assert error(torch.cat(logits, 1)) <= bound


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 3])
@torch.no_grad()
def test_last_token_alone(model, length):
    """Prefill of T − 1 tokens and one step differed from T tokens: the padded tail of a chunk went into the state."""
    ids = token_ids(3, length)
    out = model(ids[:, :-1], use_cache=True)
    step = model(ids[:, -1:], cache=out[CACHE_KEY]).logits
    close(step, model(ids).logits[:, -1:])


@torch.no_grad()
def test_one_token_at_a_time_and_streamed_sevens(model):
    """One token, T = 1, crashed in a parallel evaluation; embeddings streamed in sevens ignored the cache."""
    ids = token_ids(2, 20)
    full = model(ids).logits
    for size in (1, 7):
        cache = TTTCache(model.config)
        embeds = model.get_input_embeddings()(ids).split(size, 1)
        close(torch.cat([model(inputs_embeds=piece, cache=cache, use_cache=True).logits for piece in embeds], 1), full)


@torch.no_grad()
def test_an_empty_piece_changes_nothing(baseline):
    ids = token_ids(2, 7)
    cache = TTTCache(baseline.config)
    baseline(ids[:, :5], cache=cache, use_cache=True)
    empty = baseline(ids[:, :0], cache=cache, use_cache=True)
    assert empty.logits.shape == (2, 0, TINY["vocab_size"]) and cache.get_seq_length() == 5
    close(baseline(ids[:, 5:], cache=cache, use_cache=True).logits, baseline(ids).logits[:, 5:])
    assert baseline(ids[:, :0]).logits.shape == (2, 0, TINY["vocab_size"])


def test_gradient_through_a_cached_continuation(model):
    """The built-in recurrent states are copied in place, which cuts the graph between two cached calls."""
    ids, mask = left_padded((13, 6, 9), 13)
    weights = torch.randn(3, 13, TINY["vocab_size"], generator=torch.Generator().manual_seed(0)) * mask[..., None]
    grads = {}
    for bounds in ((0, 13), (0, 6, 7, 13)):
        model.zero_grad()
        cache, logits = TTTCache(model.config), []
        for start, stop in itertools.pairwise(bounds):
            out = model(ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache, use_cache=True)
            logits.append(out.logits)
        (torch.cat(logits, 1) * weights)[:, 7:].sum().backward()
        grads[len(bounds)] = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for name, expected in grads[2].items():
        scale = expected.abs().max().item()
        torch.testing.assert_close(grads[4][name], expected, rtol=0, atol=1e-4 * scale + 1e-6, msg=name)


# ---- names and refusals ----


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("inner", [False, True], ids=["head", "model"])
@torch.no_grad()
def test_both_names_of_the_cache_argument(baseline, name, inner):
    """A renamed argument vanished in **kwargs: every step saw one token and no state, without an error."""
    module = baseline.model if inner else baseline
    ids, cache = token_ids(2, 9), TTTCache(baseline.config)
    for piece in ids.split(4, 1):
        out = module(piece, use_cache=True, **{name: cache})
    assert out[CACHE_KEY] is cache and cache.get_seq_length() == 9
    close(out[0], module(ids)[0][:, 8:])


@torch.no_grad()
def test_classifier_takes_a_cache():
    fields = {"lact_chunk_size": CHUNK, "window_size": WINDOW, "num_labels": 3}
    model = busy_model(tiny_config("baseline", **fields), LaCTForSequenceClassification).double()
    ids = token_ids(2, 9)
    for name in ("cache", "past_key_values"):
        cache = TTTCache(model.config)
        model(ids[:, :5], use_cache=True, attention_mask=torch.ones(2, 5), **{name: cache})
        out = model(ids[:, 5:], use_cache=True, attention_mask=torch.ones(2, 9), **{name: cache})
        close(out.logits, model(ids, attention_mask=torch.ones(2, 9)).logits)


def test_assisted_generation_is_refused(baseline):
    """Draft and verify was not lossless with recurrent states: tokens silently differed."""
    ids = token_ids(1, 9)
    for settings in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": make_model("baseline", num_hidden_layers=1)}):
        with pytest.raises(ValueError, match="stateful"):
            baseline.generate(ids, max_new_tokens=4, **settings)


@pytest.mark.parametrize("implementation", ["quantized", "offloaded", "offloaded_static"])
def test_other_cache_implementations_are_refused(baseline, implementation):
    with pytest.raises(ValueError, match=f"cache_implementation='{implementation}' cannot hold fast weights"):
        baseline.generate(token_ids(1, 5), max_new_tokens=3, cache_implementation=implementation)


@torch.no_grad()
def test_an_empty_dynamic_cache_is_adopted(baseline):
    ids = token_ids(2, 9)
    expected = baseline(ids).logits
    for cache in (DynamicCache(), DynamicCache(config=baseline.config)):
        baseline(ids[:, :6], cache=cache, use_cache=True)
        close(baseline(ids[:, 6:], cache=cache, use_cache=True).logits, expected[:, 6:])
        settings = {"do_sample": False, "max_new_tokens": 5}
        tokens = generate(baseline, ids, **settings, **{CACHE_KEY: DynamicCache()})
        assert torch.equal(tokens, generate(baseline, ids, **settings, use_cache=False))


@torch.no_grad()
def test_caches_without_fast_weights_are_refused(baseline):
    filled = DynamicCache()
    filled.update(torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8), 0)
    static = StaticCache(config=baseline.config, max_cache_len=20)
    both = EncoderDecoderCache(DynamicCache(), DynamicCache())
    offloaded = DynamicCache()
    offloaded.offloading = True  # its constructor needs an accelerator
    for cache in (filled, static, both, offloaded):
        with pytest.raises(ValueError, match="cannot hold fast weights"):
            baseline(token_ids(1, 2), cache=cache, use_cache=True)
