# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What serves a model: pipelines with and without the package, streams of text, fixed shapes, compiled decoding."""

import shutil
import threading

import pytest
import torch
from lact_cases import busy_model, tiny_config, token_ids
from test_generation_lact import CHUNK, SEARCHES, close, generate, left_padded, make_model
from test_remote_code import run_child
from test_remote_code_vittt import photograph, save_folder
from transformers import ByT5Tokenizer, CompileConfig, TextIteratorStreamer
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from vittt_cases import CLASSIFIERS
from vittt_cases import busy_model as busy_vision_model
from vittt_cases import tiny_config as tiny_vision_config

from hf_ttt import LaCTForSequenceClassification, TTTCache, TTTStaticCache
from hf_ttt.modeling_lact import CACHE_KEY

PROMPTS = ["a", "fast weights", "one step of descent", "chunk by chunk"]
GREEDY = {"do_sample": False, "max_new_tokens": 11}

# ---- pipelines ----


def text_model(model_class=None, **fields):
    config = tiny_config("variant2", vocab_size=384, lact_chunk_size=CHUNK, window_size=5, **fields)
    return busy_model(config, **({} if model_class is None else {"model_class": model_class}))


def write_text_folder(folder):
    text_model().save_pretrained(folder)
    ByT5Tokenizer(padding_side="left").save_pretrained(folder)


def write_classifier_folder(folder):
    text_model(LaCTForSequenceClassification, num_labels=3).save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)


def write_image_folder(folder):
    save_folder(busy_vision_model(CLASSIFIERS["vittt"], tiny_vision_config("vittt")), folder)
    for size in (50, 61, 40):
        photograph().crop((0, 0, size, size)).save(folder / f"{size}.png")


TASKS = {
    "text-generation": write_text_folder,
    "text-classification": write_classifier_folder,
    "image-classification": write_image_folder,
}


def run_pipeline(task, folder, trust, prompts):
    """What a pipeline gives for inputs one by one, then for a batch: lists of [text or label, score]."""
    import json
    from pathlib import Path

    from transformers import pipeline

    inputs, settings = json.loads(prompts), {}
    if task == "text-generation":
        settings = {"do_sample": False, "max_new_tokens": 11, "return_full_text": False}
    elif task == "text-classification":
        settings = {"top_k": None}
    else:
        inputs = sorted(map(str, Path(folder).glob("*.png")))
    pipe = pipeline(task, model=folder, trust_remote_code=trust == "True")

    def plain(result):
        rows = result if isinstance(result, list) else [result]
        return [[row.get("generated_text", row.get("label")), row.get("score", 0.0)] for row in rows]

    return [[plain(pipe(x, **settings)) for x in inputs], list(map(plain, pipe(inputs, batch_size=3, **settings)))]


@pytest.mark.parametrize("task", TASKS)
def test_pipelines_with_and_without_the_package(task, tmp_path):
    """A batch of inputs of different lengths or sizes gives what each gives alone, and a process that has only the
    folder gives what the installed package gives."""
    import json

    folder = tmp_path / "model"
    folder.mkdir()
    TASKS[task](folder)
    alone, batched = run_pipeline(task, str(folder), "False", json.dumps(PROMPTS))
    remote = run_child(run_pipeline, task, folder, True, json.dumps(PROMPTS), home=tmp_path / "home")
    assert len(alone) == len(batched) == (3 if task == "image-classification" else 4)
    for other in (batched, *remote):
        for row, expected in zip(other, alone, strict=True):
            assert [name for name, _ in row] == [name for name, _ in expected]
            assert [score for _, score in row] == pytest.approx([score for _, score in expected], abs=1e-5)
    assert len({str(row) for row in alone}) > 1  # or nothing would be compared


def test_a_stream_gives_the_text_of_generate():
    """Text arrives in pieces, while it is made, and is in the end what generate returns."""
    tokenizer, model = ByT5Tokenizer(padding_side="left"), text_model()
    ids = tokenizer("fast weights", return_tensors="pt").input_ids
    expected = model.generate(ids, **GREEDY)[0, ids.shape[1] :]
    for settings in ({}, {"cache_implementation": "static"}):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60, errors="replace")
        run = {"input_ids": ids, "streamer": streamer, **GREEDY, **settings}
        thread = threading.Thread(target=model.generate, kwargs=run)
        thread.start()
        pieces = list(streamer)
        thread.join()
        assert "".join(pieces) == tokenizer.decode(expected, errors="replace")
        assert len(pieces) >= len(expected)  # an entry for each token, empty while a word is not complete


def test_continuous_batching_is_refused():
    """A paged cache has no place for fast weights; requests failed one by one, with an error from inside."""
    with pytest.raises(ValueError, match="continuous batching .* cannot hold fast weights"):
        make_model("baseline").generate_batch([[1, 2, 3], [4, 5]], max_new_tokens=4)


# ---- fixed shapes ----


@pytest.fixture(scope="module", params=["baseline", "prenorm", "variant2_parallel", "variant6", "mse_full_attention"])
def model(request):
    return make_model(request.param)


@pytest.fixture(scope="module")
def baseline():
    return make_model("baseline")


@pytest.mark.parametrize("search", ["greedy", "sample", "beam"])
def test_static_cache_gives_the_tokens_of_the_dynamic_one(model, search):
    """Over chunk borders that differ by row."""
    ids, mask = left_padded((11, 4, 8), 11)
    settings = {**SEARCHES[search], "max_new_tokens": 2 * CHUNK + 3}
    tokens = generate(model, ids, mask, **settings, cache_implementation="static")
    assert torch.equal(tokens, generate(model, ids, mask, **settings))


@pytest.mark.parametrize("size", [1, 3, 11])
def test_static_cache_with_a_prompt_in_pieces(model, size):
    """Pieces of one token are steps, also where the token is padding: it takes no place in its row's chunk."""
    ids, mask = left_padded((11, 4, 8), 11)
    tokens = generate(model, ids, mask, **GREEDY, cache_implementation="static", prefill_chunk_size=size)
    assert torch.equal(tokens, generate(model, ids, mask, **GREEDY))


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_static_cache_with_prompts_around_a_chunk(baseline, length):
    """A chunk that is full, or becomes so, at the first step; the model's own weights stay as they are."""
    ids = token_ids(1, length)
    before = {name: parameter.clone() for name, parameter in baseline.named_parameters()}
    tokens = generate(baseline, ids, **GREEDY, cache_implementation="static")
    assert all(torch.equal(parameter, before[name]) for name, parameter in baseline.named_parameters())
    assert torch.equal(tokens, generate(baseline, ids, **GREEDY))


@torch.no_grad()
@pytest.mark.parametrize("whole_mask", [True, False])
def test_logits_with_a_static_cache(model, whole_mask):
    """Pieces of any length equal one forward pass; the mask may cover all tokens, or only the new ones."""
    ids, mask = left_padded((13, 6, 9), 13)
    cache, logits = TTTStaticCache(model.config, 13), []
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, 12), (12, 13)):
        part = mask[:, 0 if whole_mask else start : stop]
        out = model(ids[:, start:stop], attention_mask=part, cache=cache, use_cache=True)
        assert out[CACHE_KEY] is cache and cache.get_seq_length() == stop
        logits.append(out.logits)
    close(torch.cat(logits, 1), model(ids, attention_mask=mask).logits, mask)


@torch.no_grad()
def test_rows_of_a_static_cache(model):
    """Rows can be repeated and selected between two calls, and a cache that is reset starts again."""
    ids = token_ids(2, 9)
    cache = TTTStaticCache(model.config, 20)
    for _ in range(2):
        model(ids[:, :7], cache=cache, use_cache=True)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        swapped = ids.flip(0)
        steps = [model(swapped[:, i : i + 1], cache=cache, use_cache=True).logits for i in (7, 8)]
        close(torch.cat(steps, 1), model(swapped).logits[:, 7:])
        cache.reset()
        assert cache.get_seq_length() == 0


@torch.no_grad()
def test_a_static_cache_does_not_grow(baseline):
    """The same tensors hold the window and the chunk after any number of tokens."""
    cache = TTTStaticCache(baseline.config)
    places = set()
    for i in range(3 * CHUNK):
        baseline(token_ids(1, 1, seed=i), cache=cache, use_cache=True)
        layer = cache.layers[0]
        if i > 0:  # the first call allocates
            places.add((layer.keys.data_ptr(), layer.values.data_ptr(), cache.real.data_ptr()))
    assert len(places) == 1 and layer.keys.shape[2] == baseline.config.window_size - 1


def test_what_a_static_cache_refuses(baseline):
    """Gradients, which writing in place would break; more tokens than were asked for; no length where one is needed."""
    with pytest.raises(ValueError, match="under torch.no_grad"):
        baseline(token_ids(1, 3), cache=TTTStaticCache(baseline.config), use_cache=True)
    full = make_model("mse_full_attention")
    with pytest.raises(ValueError, match="max_cache_len is None, but the attention of this model"):
        TTTStaticCache(full.config)
    cache = TTTStaticCache(full.config, 4)
    with torch.no_grad():
        full(token_ids(1, 4), cache=cache, use_cache=True)
        with pytest.raises(ValueError, match="max_cache_len is 4, but the call ends with token 5"):
            full(token_ids(1, 1), cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(-1)


@torch.no_grad()
def test_packed_documents_leave_a_static_cache_as_it_is(baseline):
    """An empty cache was filled by documents that leave no state."""
    ids, positions = token_ids(1, 10), torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
    cache = TTTStaticCache(baseline.config)
    got = baseline(ids, position_ids=positions, cache=cache, use_cache=True)
    close(got.logits, baseline(ids, position_ids=positions).logits)
    assert cache.get_seq_length() == 0 and cache.real is None and got.get(CACHE_KEY) is None


@torch.no_grad()
def test_a_static_cache_of_another_copy_of_the_code(baseline, tmp_path):
    """The package's cache in a model of remote code, whose classes are others, was taken for a growing one."""
    baseline.save_pretrained(tmp_path)
    remote = get_class_from_dynamic_module("modeling_lact.LaCTForCausalLM", str(tmp_path)).from_pretrained(tmp_path)
    assert not isinstance(remote, type(baseline))
    ids, mask = left_padded((11, 4), 11)
    cache = TTTStaticCache(baseline.config)
    parts = [
        remote(ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache, use_cache=True).logits
        for start, stop in ((0, 9), (9, 11))
    ]
    close(torch.cat(parts, 1), remote(ids, attention_mask=mask).logits, mask)
    assert cache.seen.tolist() == [11, 4]


# ---- compiled decoding ----


@pytest.fixture
def graphs():
    """The graphs that were compiled, and a configuration that collects them."""
    torch._dynamo.reset()
    found: list = []

    def collect(graph, inputs):
        found.append(graph)
        return graph.forward

    config = CompileConfig(fullgraph=True, dynamic=None, backend=collect, mode=None)
    config._compile_all_devices = True  # generate compiles on accelerators only
    yield found, config
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["baseline", "variant2_parallel", "variant6", "mse_full_attention"])
def test_compiled_steps_give_the_same_tokens_without_compiling_again(case, graphs):
    """One graph without breaks, compiled at most three times (first; with counters that change; with momentum), and not
    again for further tokens, chunks, or another batch with other padding."""
    found, config = graphs
    model = make_model(case)
    settings = {"do_sample": False, "cache_implementation": "static", "compile_config": config}
    ids, mask = left_padded((11, 4, 8), 11)
    for new_tokens in (2 * CHUNK, 5 * CHUNK):
        expected = generate(model, ids, mask, do_sample=False, max_new_tokens=new_tokens)
        assert torch.equal(generate(model, ids, mask, max_new_tokens=new_tokens, **settings), expected)
    compiled = len(found)
    assert 1 <= compiled <= 3
    ids, mask = left_padded((3, 10, 6), 11, seed=7)
    expected = generate(model, ids, mask, do_sample=False, max_new_tokens=new_tokens)
    assert torch.equal(generate(model, ids, mask, max_new_tokens=new_tokens, **settings), expected)
    assert len(found) == compiled


@pytest.mark.slow
@torch.no_grad()
def test_a_loop_of_ones_own(graphs):
    """A step that a user compiles equals the forward pass, and says what to call when a chunk is full before it."""
    found, config = graphs
    model, ids = make_model("baseline"), token_ids(2, 3 * CHUNK)
    expected = model(ids).logits
    step = torch.compile(model.forward, fullgraph=True, backend=config.backend)
    cache, logits = TTTStaticCache(model.config), []
    logits.append(model(ids[:, :5], cache=cache, use_cache=True).logits)
    for i in range(5, ids.shape[1]):
        cache.update_full_chunks()
        logits.append(step(ids[:, i : i + 1], cache=cache, use_cache=True).logits)
    close(torch.cat(logits, 1), expected)
    assert len(found) <= 3
    assert cache.room == 0
    with pytest.raises(Exception, match="update_full_chunks"):
        step(ids[:, :1], cache=cache, use_cache=True)


@pytest.mark.slow
@torch.no_grad()
def test_calls_that_are_no_steps_are_not_compiled(graphs):
    """Prompts and other caches go through the compiled call as they are."""
    found, config = graphs
    model, ids = make_model("baseline"), token_ids(2, 9)
    call = model.get_compiled_call(config)
    cache = TTTCache(model.config)
    logits = [call(input_ids=ids[:, :8], cache=cache, use_cache=True).logits]
    logits.append(call(input_ids=ids[:, 8:], cache=cache, use_cache=True).logits)
    close(torch.cat(logits, 1), model(ids).logits)
    assert not found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend needs a C++ compiler")
def test_the_default_compiler(graphs):
    """What fuses and reorders gives the same tokens in float64."""
    config = CompileConfig(fullgraph=True, dynamic=None, backend="inductor", mode=None)
    config._compile_all_devices = True
    model = make_model("variant2_parallel", num_hidden_layers=1)
    ids, mask = left_padded((11, 4), 11)
    settings = {"do_sample": False, "max_new_tokens": 2 * CHUNK + 2}
    tokens = generate(model, ids, mask, **settings, cache_implementation="static", compile_config=config)
    assert torch.equal(tokens, generate(model, ids, mask, **settings))
