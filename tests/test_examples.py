# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The example that trains on text, and the demo that uses it, end to end with tiny models."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

import hf_ttt
from hf_ttt.hub import is_generated

pytest.importorskip("datasets")
pytest.importorskip("evaluate")
pytest.importorskip("accelerate")

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo_lact_text as demo  # noqa: E402
import train_lact_text as example  # noqa: E402

LINES = [
    f"Line {i}: the café at № {i * i % 97} serves crêpes — and </s> or <|endoftext|> are text.\n" for i in range(40)
]
TEXT = "".join(LINES)
TINY = [
    *("--variant", "variant2", "--hidden_size", "16", "--num_hidden_layers", "1", "--num_attn_heads", "2"),
    *("--num_lact_heads", "2", "--lact_chunk_size", "8", "--window_size", "8", "--block_size", "32"),
    *("--config_overrides", "intermediate_size=32,initializer_range=0.05"),
]
TRAIN = ["--do_train", "--do_eval", "--learning_rate", "1e-2", "--disable_tqdm", "true", "--logging_steps", "1"]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(text_file, tmp_path_factory) -> Path:
    """Output directory of six steps from the command line, with a checkpoint after three."""
    output_dir = tmp_path_factory.mktemp("trained")
    options = ["--train_file", text_file, "--output_dir", output_dir, "--max_steps", "6", "--save_steps", "3"]
    run_script("train_lact_text.py", *options, *TINY, *TRAIN, "--eval_strategy", "steps", "--eval_steps", "3")
    return output_dir


def run_script(name: str, *args) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLES / name), *map(str, args)]
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def losses(output_dir: Path) -> list[float]:
    history = read_json(output_dir / "trainer_state.json")["log_history"]
    return [log["loss"] for log in history if "loss" in log]


def nats_by_hand(model_dir: Path, text: str, block_size: int) -> tuple[float, int]:
    """Σ −log p of the tokens of a text, row by row in float64, and their number."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir).double()
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    stream, nats = [tokenizer.eos_token_id, *ids], 0.0
    for start in range(0, len(ids), block_size - 1):
        row = torch.tensor(stream[start : start + block_size])
        with torch.no_grad():
            log_p = model(row[None]).logits[0].log_softmax(-1)
        nats -= sum(log_p[t, row[t + 1]].item() for t in range(len(row) - 1))
    return nats, len(ids)


def test_training_writes_what_a_user_expects(trained):
    names = {path.name for path in trained.iterdir()}
    assert {"model.safetensors", "config.json", "modeling_lact.py", "configuration_lact.py"} <= names
    assert {"tokenizer_config.json", "generation_config.json", "README.md", "loss_curve.png"} <= names
    assert {"train_results.json", "eval_results.json", "all_results.json", "trainer_state.json"} <= names
    assert (trained / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert losses(trained)[-1] < losses(trained)[0]


def test_card_states_what_was_measured(trained):
    """The card has the data and metrics of the evaluation, and what they were computed with."""
    text = (trained / "README.md").read_text(encoding="utf-8")
    found = {result.metric_type: result for result in ModelCard(text).data.eval_results}
    assert is_generated(text) and found.keys() == {"loss", "perplexity", "bits_per_byte"}
    for name, result in found.items():
        assert result.metric_value == read_json(trained / "eval_results.json")[f"eval_{name}"]
        assert result.dataset_name == "text.txt" and result.metric_args["backend"] == "torch"


def test_evaluation_equals_a_sum_by_hand(trained):
    """Loss per token, perplexity and bits per byte of a held-out part with characters of 2 and 3 bytes."""
    held_out = TEXT[-round(len(TEXT) * 0.1) :]
    nats, tokens = nats_by_hand(trained, held_out, block_size=32)
    metrics = read_json(trained / "eval_results.json")
    assert tokens == len(held_out.encode()) > len(held_out)
    assert metrics["eval_loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert metrics["eval_bits_per_byte"] == pytest.approx(nats / math.log(2) / len(held_out.encode()), rel=1e-5)


def test_saved_model_reloads_and_generates_with_a_cache(trained):
    """Trainer sets config.use_cache to False, and saved it so."""
    model = AutoModelForCausalLM.from_pretrained(trained)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert isinstance(model, hf_ttt.LaCTForCausalLM) and model.config.use_cache
    assert read_json(trained / "checkpoint-3" / "config.json")["use_cache"] is True
    ids = torch.tensor([tokenizer("Line", add_special_tokens=False)["input_ids"]])
    cached, uncached = (
        model.generate(ids, max_new_tokens=20, do_sample=False, use_cache=use_cache) for use_cache in (True, False)
    )
    assert torch.equal(cached, uncached)


@pytest.mark.parametrize("how", ["found", "named"])
def test_resuming_equals_an_uninterrupted_run(trained, text_file, tmp_path, how):
    options = ["--train_file", str(text_file), "--output_dir", str(tmp_path / "out"), "--max_steps", "6"]
    checkpoint = tmp_path / ("out" if how == "found" else "elsewhere") / "checkpoint-3"
    shutil.copytree(trained / "checkpoint-3", checkpoint)
    if how == "named":
        options += ["--resume_from_checkpoint", str(checkpoint)]
    metrics = example.main([*options, *TINY, *TRAIN])
    assert losses(tmp_path / "out") == pytest.approx(losses(trained), rel=1e-5)
    assert metrics["eval_loss"] == pytest.approx(read_json(trained / "eval_results.json")["eval_loss"], rel=1e-5)
    assert read_json(tmp_path / "out" / "config.json") == read_json(trained / "config.json")
    states = [AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (trained, tmp_path / "out")]
    for name in states[0]:
        torch.testing.assert_close(
            states[0][name], states[1][name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_bpe_tokenizer_counts_bytes_of_the_text(text_file, tmp_path):
    """A token of several bytes, and a character of several tokens; the name of the separator in a text is text."""
    options = ["--train_file", str(text_file), "--validation_file", str(text_file), "--max_eval_bytes", "700"]
    options += ["--train_bpe_vocab_size", "300", "--max_steps", "2", "--output_dir", str(tmp_path), "--bf16"]
    metrics = example.main([*options, *TINY, *TRAIN])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = TEXT.encode()[:700].decode(errors="ignore")
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text and tokenizer.eos_token_id not in ids and len(ids) < 600
    nats, tokens = nats_by_hand(tmp_path, text, block_size=32)
    assert tokens == len(ids)
    # --bf16: the products of evaluation are rounded to 8 bits
    assert metrics["eval_loss"] == pytest.approx(nats / tokens, rel=1e-2)
    ratio = metrics["eval_bits_per_byte"] / metrics["eval_loss"]
    assert ratio == pytest.approx(tokens / math.log(2) / len(text.encode()), rel=1e-9)


def test_a_saved_model_is_evaluated_and_fine_tuned(trained, text_file, tmp_path):
    options = ["--model_name_or_path", str(trained), "--block_size", "32", "--disable_tqdm", "true"]
    files = ["--train_file", str(text_file)]
    same = example.main([*options, *files, "--do_eval", "--output_dir", str(tmp_path / "evaluated")])
    assert same["eval_loss"] == pytest.approx(read_json(trained / "eval_results.json")["eval_loss"], rel=1e-6)
    train = ["--do_train", "--max_steps", "2", "--learning_rate", "1e-2", "--output_dir", str(tmp_path / "tuned")]
    tuned = example.main([*options, *files, *train, "--do_eval", "--ttt_implementation", "recurrent"])
    assert tuned["eval_loss"] < same["eval_loss"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").get_ttt_implementation() == "recurrent"


def test_a_data_set_with_its_own_column(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [json.dumps({"content": line}) for line in LINES]
    (folder / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    arguments = example.DataArguments(dataset_name=str(folder), text_column="content", validation_fraction=0.25)
    documents = example.load_named_dataset(arguments)
    assert list(documents["train"]["text"]) == LINES[:30] and list(documents["validation"]["text"]) == LINES[30:]
    with pytest.raises(ValueError, match="--text_column 'text' is not one of \\['content'\\]"):
        example.load_named_dataset(example.DataArguments(dataset_name=str(folder)))


def test_each_of_several_files_holds_out_its_last_part(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name * 10, encoding="utf-8")
    documents = example.load_files(example.DataArguments(train_file=[str(tmp_path / "a"), str(tmp_path / "b")]))
    assert list(documents["train"]["text"]) == ["a" * 9, "b" * 9]
    assert list(documents["validation"]["text"]) == ["a", "b"]


@pytest.mark.parametrize("block_size", [2, 3, 7, 1000])
@pytest.mark.parametrize("texts", [["abcdefg"], ["é", "", "xyz"], ["</s>"], [""]])
def test_packing_predicts_every_token_once(texts, block_size):
    tokenizer = ByT5Tokenizer(extra_ids=0)
    rows = example.pack(texts, tokenizer, block_size)
    stream = [i for text in texts for i in (tokenizer.eos_token_id, *(b + 3 for b in text.encode()))]
    assert rows["input_ids"].shape == rows["labels"].shape and rows["input_ids"].shape[1] == block_size
    assert rows["labels"][:, 1:][rows["labels"][:, 1:] != -100].tolist() == stream[1:]
    assert (rows["labels"][:, 0] == -100).all()
    read = np.concatenate([rows["input_ids"][0, :1], *rows["input_ids"][:, 1:]])
    assert read[: len(stream)].tolist() == stream and (read[len(stream) :] == tokenizer.pad_token_id).all()


@pytest.mark.parametrize(
    "text", ["", "a\nb\n", "x" * 150_000, "line of text\n" * 20_000, "y" * 70_000 + "\n" + "z" * 10]
)
def test_pieces_of_a_text(text):
    pieces = example.text_pieces(text)
    assert "".join(pieces) == text and all(0 < len(piece) <= example.PIECE_CHARACTERS for piece in pieces)


@pytest.mark.parametrize(
    "max_bytes, expected", [(None, ["aé", "bc"]), (1, ["a"]), (2, ["a"]), (3, ["aé"]), (9, ["aé", "bc"])]
)
def test_first_bytes(max_bytes, expected):
    documents = example.Dataset.from_dict({"text": ["aé", "bc"]})
    assert list(example.first_bytes(documents, max_bytes)["text"]) == expected


def test_config_overrides():
    overrides = example.parse_overrides("use_muon=false, inter_multi=2,hidden_act=gelu,intermediate_size=null")
    assert overrides == {"use_muon": False, "inter_multi": 2, "hidden_act": "gelu", "intermediate_size": None}
    assert example.parse_overrides(None) == {}
    for wrong in ("use_muons=false", "use_muon"):
        with pytest.raises(ValueError, match=f"--config_overrides: '{wrong}' is not field=value"):
            example.parse_overrides(wrong)


FILE = ["--train_file", __file__, "--output_dir", "out"]


@pytest.mark.parametrize(
    "args, message",
    [
        (["--do_train", "--output_dir", "out"], "no text: give --train_file"),
        (FILE, "nothing to do: give --do_train, --do_eval"),
        (["--do_train", "--train_file", "missing.txt"], "there is no file 'missing.txt'"),
        (["--do_train", "--validation_file", __file__], "--do_train needs text to train on"),
        ([*FILE, "--do_train", "--dataset_name", "some"], "--dataset_name excludes --train_file"),
        ([*FILE, "--do_train", "--block_size", "1"], "--block_size 1 must be at least 2"),
        ([*FILE, "--do_train", "--validation_fraction", "1"], "--validation_fraction 1.0 must be"),
        ([*FILE, "--do_train", "--max_eval_bytes", "0"], "--max_eval_bytes 0 must be at least 1"),
        ([*FILE, "--do_train", "--train_bpe_vocab_size", "200"], "--train_bpe_vocab_size 200 must be at least 257"),
        ([*FILE, "--do_train", "--train_bpe_vocab_size", "300", "--tokenizer_name", "x"], "leave out --tokenizer_name"),
        ([*FILE, "--do_train", "--resume_from_checkpoint", "nowhere"], "there is no directory 'nowhere'"),
        ([*FILE, "--do_train", "--resume_from_checkpoint", "true"], "there is no checkpoint in 'out'"),
        ([*FILE, "--do_eval", "--validation_fraction", "0"], "evaluation needs text that is not trained on"),
        ([*FILE, "--do_eval", "--train_bpe_vocab_size", "300"], "it needs --do_train"),
        ([*FILE, "--do_train", "--num_lact_heads", "3", "--hidden_size", "16"], "num_lact_heads=3 does not divide"),
        ([*FILE, "--do_train", "--ttt_implementation", "parallel"], "ttt_"),
    ],
    ids=lambda value: None if isinstance(value, list) else value[:30],
)
def test_bad_arguments_say_what_to_do(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        example.main(args)


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match="as UTF-8 text"):
        example.load_files(example.DataArguments(train_file=[str(path)]))


def test_plot_without_matplotlib_says_so_and_goes_on(tmp_path, monkeypatch):
    history = [{"step": 0, "eval_loss": 5.0, "eval_bits_per_byte": 7.0}, {"step": 2, "loss": 3.0}]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert example.plot_history(history, tmp_path / "curve.png") is False
    monkeypatch.undo()
    assert example.plot_history([], tmp_path / "empty.png") is True
    assert example.plot_history(history, tmp_path / "curve.png", {"gzip -9": 2.1}) is True
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_help_is_there():
    for name, words in (("train_lact_text.py", "--train_file"), ("demo_lact_text.py", "--output_dir")):
        assert words in run_script(name, "--help")


def test_demo_text_is_large_and_the_same_each_time():
    text = demo.documentation_text()
    assert text == demo.documentation_text() and len(text.encode()) > 300_000


def test_demo_compressors_by_hand():
    import lzma
    import zlib

    first, text = TEXT[:1500], TEXT[1500:]
    size = len(text.encode())
    alone, after = demo.compressed_bits_per_byte(text), demo.compressed_bits_per_byte(text, before=first)
    # a gzip file is a raw deflate stream with 10 bytes before it and 8 after it; zlib's has 2 and 4
    assert alone["gzip -9"] == pytest.approx(8 * (len(zlib.compress(text.encode(), 9)) - 6 + 18) / size, rel=1e-12)
    assert alone["xz -9e"] == pytest.approx(
        8 * len(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)) / size
    )
    assert after["gzip -9"] < alone["gzip -9"] and after["xz -9e"] < alone["xz -9e"]


def test_demo_from_start_to_end(tmp_path, monkeypatch):
    """Trains, reloads where hf_ttt cannot be imported, and reports; the fresh process finds the same bits."""
    monkeypatch.setattr(demo, "documentation_text", lambda: TEXT * 2)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attn_heads": 2, "num_lact_heads": 2, "block_size": 64}
    settings = {**demo.TRAINING, **sizes, "lact_chunk_size": 8, "window_size": 8, "max_steps": 3, "logging_steps": 1}
    results = demo.run(tmp_path, new_tokens=20, settings={**settings, "disable_tqdm": "true"})
    trained, reloaded = results["trained"], results["reloaded"]
    assert reloaded["model_class"].startswith("transformers_modules.") and reloaded["model_class"].endswith(
        "LaCTForCausalLM"
    )
    assert trained["before"] > trained["after"]
    assert reloaded["bits_per_byte"] == pytest.approx(trained["after"], rel=1e-5)
    assert 0 <= reloaded["difference"] < 1e-4 * max(1, reloaded["greatest_logit"])
    assert reloaded["same_tokens"] and reloaded["with_cache"] > 0 and reloaded["without_cache"] > 0
    report = demo.report(read_json(tmp_path / "demo_results.json"))
    assert f"{trained['after']:.3f}" in report and "gzip -9" in report and "the same tokens" in report
    assert (tmp_path / "loss_curve.png").is_file()
