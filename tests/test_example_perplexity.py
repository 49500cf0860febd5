# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The example that plots the loss by position: its numbers against one forward pass, and from start to end."""

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lact_cases import busy_model, tiny_config
from PIL import Image
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel

pytest.importorskip("evaluate")
pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[1] / "examples"
TEXT = "Each chunk of tokens is a step of gradient descent on the fast weights. " * 6
LENGTH = 50


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLES))
    import perplexity_by_position

    yield perplexity_by_position
    sys.path.remove(str(EXAMPLES))


def model_of(variant: str, seed: int = 0):
    return busy_model(tiny_config(variant, vocab_size=384), seed=seed)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Two saved models with their tokenizers, and a text."""
    root = tmp_path_factory.mktemp("models")
    (root / "text.txt").write_text(TEXT, encoding="utf-8")
    paths = [root / "one", root / "two"]
    for seed, path in enumerate(paths):
        model_of("variant2", seed).save_pretrained(path)
        ByT5Tokenizer().save_pretrained(path)
    return paths


def text_rows() -> torch.Tensor:
    ids = ByT5Tokenizer()(TEXT, add_special_tokens=False, return_tensors="pt").input_ids[0]
    rows = len(ids) // LENGTH
    return ids[: rows * LENGTH].view(rows, LENGTH)


@torch.no_grad()
def nll_by_hand(model, ids: torch.Tensor) -> torch.Tensor:
    """[rows, length - 1], from one forward pass over whole rows."""
    scores = model(ids).logits[:, :-1].double().log_softmax(-1)
    return -scores.gather(2, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("piece", [1, 7, 8, 100])
@pytest.mark.parametrize("variant", ["baseline", "variant2"])
def test_pieces_give_the_losses_of_one_forward_pass(example, variant, piece):
    """A context that is read piece after piece loses nothing at the seams, and no position is counted twice."""
    model, ids = model_of(variant).double(), text_rows()[:3]
    got = example.nll_by_position(model, ids, piece)
    torch.testing.assert_close(got, nll_by_hand(model, ids), rtol=1e-9, atol=1e-9)


def test_models_of_transformers_can_be_compared(example):
    """Any causal model with a cache has a curve, whichever name its output gives the cache."""
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=384, n_embd=32, n_layer=2, n_head=2, n_positions=64)).eval()
    ids = text_rows()[:2]
    torch.testing.assert_close(
        example.nll_by_position(gpt2, ids, 9), nll_by_hand(gpt2, ids), rtol=1e-5, atol=1e-5, check_dtype=False
    )


def test_bins_by_hand(example):
    """Seven positions in three bins: widths 3, 3 and 1; means over positions and the two rows."""
    nll = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7], [3.0, 4, 5, 6, 7, 8, 9]], dtype=torch.float64)
    bins = example.bin_losses(nll.sum(0), rows=2, num_bins=3)
    assert [(b.first, b.last, b.num_tokens, b.loss) for b in bins] == [(1, 3, 6, 3.0), (4, 6, 6, 6.0), (7, 7, 2, 8.0)]
    assert bins[1].perplexity == pytest.approx(math.exp(6.0))


def test_from_start_to_end(example, folders, tmp_path):
    """Two models in two evaluations: four curves in the table, equal to sums by hand, and a plot."""
    arguments = [*map(str, folders), "--text_file", str(folders[0].parent / "text.txt"), "--length", str(LENGTH)]
    arguments += ["--implementation", "recurrent", "parallel", "--num_bins", "4", "--piece", "16", "--batch_size", "2"]
    curves = example.main([*arguments, "--output_dir", str(tmp_path)])
    with (tmp_path / "perplexity_by_position.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    kinds = [("one", "recurrent"), ("one", "parallel"), ("two", "recurrent"), ("two", "parallel")]
    assert [(curve.model, curve.implementation) for curve in curves] == kinds
    assert [(row["model"], row["implementation"]) for row in table[::4]] == kinds and len(table) == 16
    for seed, name in enumerate(("one", "two")):
        nll = nll_by_hand(model_of("variant2", seed), text_rows())
        expected = [part.mean().item() for part in nll.split(13, 1)]
        for implementation in ("recurrent", "parallel"):
            rows = [row for row in table if (row["model"], row["implementation"]) == (name, implementation)]
            assert [float(row["loss"]) for row in rows] == pytest.approx(expected, rel=1e-4)
            assert [(row["first_position"], row["last_position"]) for row in rows][-1] == ("40", "49")
            assert sum(int(row["num_tokens"]) for row in rows) == nll.numel()
    with Image.open(tmp_path / "perplexity_by_position.png") as plot:
        assert plot.width > 600 and len(plot.convert("RGB").getcolors(2**24)) > 3
    assert not list(tmp_path.glob("*.part"))


def test_rows_of_a_text(example, tmp_path):
    """No more of the text is tokenized than the rows that were asked for need; a rest that fills no row is left out."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 400, encoding="utf-8")
    read = []

    def tokenizer(text, **settings):
        read.append(text)
        return ByT5Tokenizer()(text, add_special_tokens=False)

    rows = example.read_rows(path, tokenizer, LENGTH, 3)
    assert rows.shape == (3, LENGTH) and len(read) == 1
    torch.testing.assert_close(rows, text_rows()[:3])
    path.write_text(TEXT, encoding="utf-8")
    assert example.read_rows(path, tokenizer, LENGTH, None).shape == (len(TEXT) // LENGTH, LENGTH)


def test_bad_input_says_what_to_do(example, folders, tmp_path, capsys):
    """A text that is too short, no text, no UTF-8, impossible sizes, and an evaluation that a model does not have."""
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("too short", encoding="utf-8")
    binary.write_bytes(b"\xff\xfe\x00")
    run = lambda *rest: example.main([str(folders[0]), *map(str, rest), "--output_dir", str(tmp_path)])  # noqa: E731
    with pytest.raises(ValueError, match="has 9 tokens; --length 50 needs at least as many"):
        run("--text_file", short, "--length", 50)
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        run("--text_file", binary)
    for rest, message in (
        (["--text_file", tmp_path / "none.txt"], "there is no file"),
        (["--text_file", short, "--length", 1], "--length 1 must be at least 2"),
        (["--text_file", short, "--num_bins", 0], "--num_bins 0 must be at least 1"),
    ):
        with pytest.raises(SystemExit):
            run(*rest)
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="is no model of hf-ttt"):
        example.choose_implementation(torch.nn.Linear(1, 1), "linear", "parallel")


def test_models_of_the_same_name_keep_their_paths(example):
    assert example.labels_of(["a/lact", "b/gpt"]) == ["lact", "gpt"]
    assert example.labels_of(["a/lact", "b/lact"]) == ["a/lact", "b/lact"]


def test_help_is_there():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "perplexity_by_position.py", "--help"], capture_output=True, text=True, check=True
    )
    assert "--text_file" in done.stdout and "piece after piece" in done.stdout
