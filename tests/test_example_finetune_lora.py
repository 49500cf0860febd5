# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The example that fine-tunes with LoRA, end to end on a tiny model that the text example trains."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from test_examples import TINY, TRAIN, run_script
from test_remote_code import run_child

pytest.importorskip("peft", reason="peft is an extra of its own")

import finetune_lora as example  # noqa: E402
import train_lact_text as text_example  # noqa: E402
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

BASE_TEXT = "".join(f"Line {i}: {i * i % 97} crêpes.\n" for i in range(60))
NEW_TEXT = "".join(f"Row {i} has {i * 7 % 31} apples — £{i}.\n" for i in range(60))
OPTIONS = [
    *(*TRAIN, "--block_size", "32", "--lora_r", "4"),
    *("--max_steps", "20", "--save_steps", "10", "--logging_steps", "10", "--learning_rate", "2e-2"),
]


def read_json(path: Path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Two texts, and a model that was trained on the first."""
    root = tmp_path_factory.mktemp("files")
    found = {name: root / name for name in ("base.txt", "new.txt", "model")}
    for name, content in (("base.txt", BASE_TEXT), ("new.txt", NEW_TEXT)):
        found[name].write_text(content, encoding="utf-8")
    options = ["--train_file", str(found["base.txt"]), "--output_dir", str(found["model"]), "--max_steps", "30"]
    text_example.main([*options, *TINY, *TRAIN])
    return found


def options_of(files: dict[str, Path], output_dir: Path) -> list[str]:
    named = ["--model_name_or_path", str(files["model"]), "--train_file", str(files["new.txt"])]
    return [*named, "--output_dir", str(output_dir)]


@pytest.fixture(scope="module")
def tuned(files, tmp_path_factory) -> Path:
    """Output directory of twenty steps from the command line, with a checkpoint after ten and a merged model."""
    output_dir = tmp_path_factory.mktemp("tuned")
    run_script("finetune_lora.py", *options_of(files, output_dir), *OPTIONS, "--merge")
    return output_dir


def test_adapter_improves_on_the_base(files, tuned, tmp_path):
    """ "base_…" is what the text example says of the model, and the adapter has a lower loss."""
    options = ["--model_name_or_path", str(files["model"]), "--train_file", str(files["new.txt"]), "--block_size", "32"]
    base = text_example.main([*options, "--do_eval", "--output_dir", str(tmp_path), "--disable_tqdm", "true"])
    metrics = read_json(tuned / "all_results.json")
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert metrics[f"base_{name}"] == pytest.approx(base[f"eval_{name}"], rel=1e-5)
        assert metrics[f"eval_{name}"] < 0.95 * metrics[f"base_{name}"]
    assert (tuned / "loss_curve.png").is_file() and "base_model" in (tuned / "README.md").read_text()


def test_output_is_an_adapter(files, tuned):
    """It holds the adapter alone, of layers and fast weights, and names its base; the base was not touched."""
    config = read_json(tuned / "adapter_config.json")
    assert config["base_model_name_or_path"] == str(files["model"]) and config["task_type"] == "CAUSAL_LM"
    assert config["r"] == 4 and config["target_parameters"] == ["attn.w0", "attn.w1", "attn.w2"]
    assert not (tuned / "model.safetensors").exists()


def child_loads_merged(folder, expected):
    import sys

    sys.modules["peft"] = None  # not there
    import torch
    from transformers import AutoModelForCausalLM

    expected = torch.load(expected)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert model.config.use_cache is True
    with torch.no_grad():
        torch.testing.assert_close(model(expected["ids"]).logits, expected["logits"], atol=1e-4, rtol=1e-4)
    return model.generate(expected["ids"], max_new_tokens=12, do_sample=False).tolist()


def test_merged_model_needs_neither_peft_nor_hf_ttt(files, tuned, tmp_path):
    """The folder "merged" computes and generates what base and adapter do."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(files["model"]), tuned)
    ids = torch.tensor([AutoTokenizer.from_pretrained(tuned / "merged")("Row 9")["input_ids"][:-1]])
    with torch.no_grad():
        torch.save({"ids": ids, "logits": model(ids).logits}, tmp_path / "expected.pt")
    tokens = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    arguments = (child_loads_merged, tuned / "merged", tmp_path / "expected.pt")
    assert run_child(*arguments, home=tmp_path / "home") == tokens.tolist()


def test_resuming_equals_an_uninterrupted_run(files, tuned, tmp_path):
    """From the checkpoint after ten steps the same adapter is reached; the base is evaluated without it."""
    shutil.copytree(tuned / "checkpoint-10", tmp_path / "checkpoint-10")
    metrics = example.main([*options_of(files, tmp_path), *OPTIONS])
    whole = read_json(tuned / "all_results.json")
    for name in ("base_loss", "eval_loss"):
        assert metrics[name] == pytest.approx(whole[name], rel=1e-5)


def test_a_saved_adapter_is_evaluated_and_trained_on(files, tuned, tmp_path):
    """Its loss is that after its training; more steps lower it."""
    options = ["--adapter_name_or_path", str(tuned), "--disable_tqdm", "true", "--block_size", "32"]
    metrics = example.main([*options_of(files, tmp_path / "a"), *options, "--do_eval"])
    assert metrics["eval_loss"] == pytest.approx(read_json(tuned / "all_results.json")["eval_loss"], rel=1e-5)
    more = example.main([*options_of(files, tmp_path / "b"), *options, *OPTIONS, "--save_strategy", "no"])
    assert more["eval_loss"] < metrics["eval_loss"] and more["base_loss"] == pytest.approx(metrics["base_loss"])


@pytest.mark.parametrize("use_reentrant", ["true", "false"])
def test_without_fast_weights_in_bfloat16_with_checkpointing(files, tmp_path, use_reentrant):
    """Dropout is possible then, and reentrant checkpointing of a frozen model learns."""
    options = ["--fast_weights", "false", "--lora_dropout", "0.1", "--dtype", "bfloat16", "--save_strategy", "no"]
    options += ["--gradient_checkpointing", "true"]
    options += ["--gradient_checkpointing_kwargs", f'{{"use_reentrant": {use_reentrant}}}']
    metrics = example.main([*options_of(files, tmp_path), *OPTIONS, *options])
    assert metrics["eval_loss"] < metrics["base_loss"]
    assert read_json(tmp_path / "adapter_config.json")["target_parameters"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to do: give --do_train, --do_eval or both"),
        (["--do_eval"], "no adapter: give --do_train, --adapter_name_or_path or both"),
        (["--do_train", "--lora_r", "0"], "--lora_r 0 must be at least 1"),
        (["--do_train", "--lora_dropout", "1"], "--lora_dropout 1.0 must be at least 0 and below 1"),
        (["--do_train", "--lora_dropout", "0.1"], "--lora_dropout 0.1 is not possible .* --fast_weights false"),
    ],
)
def test_arguments_that_cannot_be(files, tmp_path, options, message):
    """Each is an error before anything is loaded."""
    with pytest.raises(ValueError, match=message):
        example.main([*options_of(files, tmp_path / "out"), *options])
    assert not (tmp_path / "out").exists()


def test_training_without_training_text(files, tmp_path):
    """A validation file alone is for evaluation."""
    named = ["--model_name_or_path", str(files["model"]), "--validation_file", str(files["new.txt"])]
    with pytest.raises(ValueError, match="--do_train needs text to train on"):
        example.main([*named, "--output_dir", str(tmp_path), "--do_train"])


def test_help(capsys):
    """It says what the script does and names every group of options."""
    with pytest.raises(SystemExit, match="0"):
        example.main(["--help"])
    shown = capsys.readouterr().out
    for word in ("--model_name_or_path", "--lora_r", "--fast_weights", "--merge", "--train_file", "--push_to_hub"):
        assert word in shown
