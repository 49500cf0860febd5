# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""`python -m benchmarks models`: models are of equal size, what is counted is exact, and nothing is lost or wrong."""

from __future__ import annotations

import argparse
import csv
import sys
from types import SimpleNamespace

import pytest
import torch
from benchmarks import models
from transformers import DynamicCache
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from hf_ttt import TTTCache

TINY = models.SIZES["tiny"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def options(folder, *arguments):
    """Options of a run that takes seconds."""
    parser = argparse.ArgumentParser()
    models.add_arguments(parser)
    few = ["--size", "tiny", "--lengths", "16", "64", "--steps", "4", "--repeats", "2", "--backends", "torch"]
    fixed = ["--dtype", "fp32", "--device", DEVICE, "--output", str(folder)]
    return parser.parse_args([*few, *fixed, *arguments])


def read(folder):
    with (folder / "models.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def make(name, backend="torch"):
    model = models.make_model(name, TINY, torch.float32, DEVICE, backend)
    return models.Run(model, TINY.chunk, repeats=1, steps=4)


def result(measurement):
    """What a measurement returns."""
    return dict(models.in_turns({"": measurement}))[""]


@pytest.mark.parametrize("size", models.SIZES)
def test_equal_numbers_of_parameters(size):
    counts = []
    for name in models.MODELS:
        with torch.device("meta"):
            model = models.MODELS[name](models.SIZES[size], models.mlp_width(name, models.SIZES[size]))
        assert model.config.num_hidden_layers == models.SIZES[size].layers
        assert model.config.hidden_size == models.SIZES[size].hidden
        assert model.config.vocab_size == models.SIZES[size].vocabulary
        counts.append(models.parameters(model))
    assert max(counts) <= 1.02 * min(counts)


@pytest.mark.parametrize("name", models.MODELS)
def test_decoding_is_right(name):
    assert models.decoding_error(make(name)) <= models.TOLERANCES["fp32"]


def lact_bytes(updated):
    """Of a layer in float32, one chunk full of tokens: a window, fast weights and buffers, keys and values to come."""
    width, heads, head = TINY.hidden, TINY.lact_heads, TINY.hidden // TINY.lact_heads
    window = 2 * width * TINY.chunk  # with the newest token, which a view hides
    weights = heads * head * head
    norms = heads * head
    tokens = TINY.chunk * (2 * width + 4 * heads)  # keys, values, three rates and momentum
    weight_norm = updated == 3
    integers = 2  # the count of tokens, and the width of the window, which transformers holds as a tensor
    return 4 * (window + updated * (2 * weights + weight_norm * norms) + tokens) + 8 * integers


HEADS = TINY.hidden // TINY.delta_width
EXPECTED = {  # of a layer, after 64 tokens
    "lact-baseline": lact_bytes(updated=3),
    "lact-variant2": lact_bytes(updated=1),
    "llama": 4 * 2 * TINY.hidden * 64,
    "gated-deltanet": 4 * (4 * 4 * TINY.hidden + 2 * HEADS * TINY.delta_width**2),  # convolution of q, k and v; states
}


@pytest.mark.parametrize("name", models.MODELS)
def test_bytes_of_the_cache(name):
    assert result(models.measure_decode(make(name), 1, 64))["cache_bytes"] == TINY.layers * EXPECTED[name]


def test_cache_bytes_count_a_storage_once_and_no_weights():
    """A view holds all of its memory; what two tensors share is held once; the model's weights are not the cache's."""
    model = torch.nn.Linear(8, 8)
    cache = DynamicCache()
    memory = torch.zeros(1, 1, 10, 4)
    cache.update(memory, torch.zeros(1, 1, 10, 4), 0)
    cache.layers[0].keys, cache.layers[0].values = memory[:, :, -3:], memory[:, :, :2]
    cache.layers[0].ttt = [model.weight.detach().expand(2, 8, 8)]
    assert models.cache_bytes(cache, model) == 4 * 40


def test_prefill_of_a_batch_and_training():
    run = make("lact-variant2")
    before = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    prefill = result(models.measure_prefill(run, 2, 40))
    assert prefill["tokens_per_second"] == pytest.approx(2e3 * 40 / prefill["ms"], rel=1e-3)
    assert prefill["peak_bytes"] > 4 * 2 * 40 * TINY.hidden
    train = result(models.measure_training(run, 2, 70))
    assert train["peak_bytes"] >= 4 * models.parameters(run.model)  # the gradients
    assert all((parameter != before[name]).any() for name, parameter in run.model.named_parameters())


def test_an_update_is_spread_over_its_chunk():
    """Steps of one second and an update of 33 in a chunk of 32: two seconds a token."""
    lact, llama = make("lact-variant2"), make("llama")
    times = [[1.0, 1.0, 1.0, 33.0]] * 2
    assert models.spread(times, lact, 64) == [2.0] * 6
    assert models.spread(times, lact, 16) == models.spread(times, llama, 64) == [1.0] * 6


def test_measurements_take_turns():
    order = []

    def measurement(name, repeats):
        for i in range(repeats):
            order.append(f"{name}{i}")
            yield
        if name == "c":
            raise torch.OutOfMemoryError
        return {"repeats": repeats}

    done = list(models.in_turns({name: measurement(name, n) for name, n in (("a", 2), ("b", 1), ("c", 1))}))
    assert order == ["a0", "b0", "c0", "a1"]
    assert done == [("b", {"repeats": 1}), ("a", {"repeats": 2})]


def test_figures():
    seconds = [i / 1000 for i in range(1, 12)]
    assert models.figures(seconds, 3) == {"tokens_per_second": 500.0, "ms": 6.0, "ms_20": 3.0, "ms_80": 9.0}


def test_package_of_a_function_that_transformers_may_take_from_elsewhere(monkeypatch):
    """It decides the speed of Gated DeltaNet, so the table says it."""

    def torch_function(x):
        return x

    torch_function.__module__ = "transformers.models.qwen3_next"
    decorate = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fake_fla")
    assert models.package(decorate(torch_function)) == "torch"

    def fast_function(x):
        return x

    fast_function.__module__ = "fake_fla.ops"
    monkeypatch.setitem(sys.modules, "fake_fla", SimpleNamespace(chunk_gated_delta_rule=fast_function))
    decorate = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fake_fla")
    assert models.package(decorate(torch_function)) == "fake_fla"
    assert models.package(torch_function) == "unknown"


def test_a_run_is_complete_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    models.main(options(tmp_path, "--models", "lact-variant2", "llama"))
    rows = read(tmp_path)
    sizes = [("prefill", "16"), ("decode", "16"), ("prefill", "64"), ("decode", "64"), ("train", "64")]
    assert [(row["measure"], row["length"]) for row in rows] == [size for size in sizes for _ in range(2)]
    assert {(row["model"], row["evaluation"]) for row in rows} == {
        ("lact-variant2", "parallel torch"),
        ("llama", "sdpa"),
    }
    assert all(float(row["tokens_per_second"]) > 0 and int(row["peak_bytes"]) > 0 for row in rows)
    assert all((row["cache_bytes"] != "") == (row["measure"] == "decode") for row in rows)
    assert all(row[name] for row in rows for name in ("device", "torch", "transformers", "commit", "parameters"))

    path = tmp_path / "models.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))  # stopped before the last row
    built = []
    make_model = models.make_model
    monkeypatch.setattr(models, "make_model", lambda name, *args: built.append(name) or make_model(name, *args))
    models.main(options(tmp_path, "--models", "lact-variant2", "llama"))
    assert built == ["llama"]
    assert path.read_text().splitlines(keepends=True)[:-1] == lines[:-1]
    assert read(tmp_path)[-1]["measure"] == "train"
    models.main(options(tmp_path, "--models", "lact-variant2", "llama"))
    assert built == ["llama"]
    models.main(options(tmp_path, "--models", "llama", "--overwrite"))
    assert built == ["llama", "llama"]
    assert len(read(tmp_path)) == len(rows)


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra that draws is not installed")
    row = {"model": "llama", "backend": "", "size": "tiny", "dtype": "fp32", "device": "x", "commit": "y"}
    rows = [
        {**row, "measure": measure, "length": str(length), "tokens_per_second": "5.0", "cache_bytes": str(length)}
        for measure in ("prefill", "decode", "train")
        for length in (8, 1024)
    ]
    models.plot(rows, tmp_path / "models.png")
    assert (tmp_path / "models.png").read_bytes()[:4] == b"\x89PNG"


def test_a_wrong_model_is_not_measured(tmp_path, monkeypatch):
    """Llama that forgets its cache: no row of it is written, the other model's are, and the run fails."""
    forward = models.forward

    def forgetful(model, tokens, past=0, cache=None, **kwargs):
        return forward(model, tokens, past, cache if isinstance(cache, TTTCache) else None, **kwargs)

    monkeypatch.setattr(models, "forward", forgetful)
    with pytest.raises(SystemExit, match="llama decodes wrongly"):
        models.main(options(tmp_path, "--models", "llama", "lact-variant2"))
    assert {row["model"] for row in read(tmp_path)} == {"lact-variant2"}


@pytest.mark.parametrize("length", [4, 33, 96 + 1])
def test_lengths_that_cannot_be_measured(tmp_path, length):
    """No steps before, or an update in the middle of the steps, whose time would be lost."""
    with pytest.raises(SystemExit, match=f"--lengths {length}: expected"):
        models.main(options(tmp_path, "--lengths", str(length)))
    assert not (tmp_path / "models.csv").exists()


@pytest.mark.parametrize(("device", "quick"), models.EFFORTS)
def test_default_lengths_can_be_measured(device, quick, monkeypatch):
    parser = argparse.ArgumentParser()
    models.add_arguments(parser)
    monkeypatch.setattr(models, "is_available", lambda device: device == "cuda")
    chosen = models.complete(parser.parse_args(["--device", device, *(["--quick"] if quick else [])]))
    assert len(chosen.lengths) == 3
    assert chosen.backends == (["torch", "triton"] if device == "cuda" else ["torch"])
