# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The command line: what each command writes and prints, how it fails, and its help. (test_hub.py has `push`.)"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import lact_cases
import nvs_cases
import pytest
import torch
import vittt_cases
from fake_hub import card_errors
from huggingface_hub import ModelCard
from nvs_cases import INDEX, golden_inputs, golden_state, golden_tensors, published_config
from safetensors.torch import load_file, save_file
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoProcessor,
)
from typer.testing import CliRunner

import hf_ttt
from hf_ttt import HViTTTBackbone, timing
from hf_ttt.cli import app, parse_settings
from hf_ttt.modeling_lact import CACHE_KEY

GOLDEN = Path(__file__).with_name("golden")
TENSORS = {
    "vittt": load_file(GOLDEN / "vittt" / "model_vittt_official_b.safetensors"),
    "h_vittt": load_file(GOLDEN / "vittt" / "model_hvittt_official.safetensors"),
    "nonsquare": load_file(GOLDEN / "vittt" / "model_hvittt_official_nonsquare.safetensors"),
    "dense": load_file(GOLDEN / "vittt" / "backbone_det_official.safetensors"),
}


def state_of(name):
    return {key[3:]: value for key, value in TENSORS[name].items() if key.startswith("sd.")}


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def convert(architecture, source, output, *arguments):
    return run("convert", "--architecture", architecture, source, output, *arguments)


@pytest.fixture
def source(tmp_path):
    """A function that writes a checkpoint with the weights of a golden model, and gives its path."""

    def write(name, wrap=lambda state: {"model": state}):
        path = tmp_path / f"{name}.pth"
        torch.save(wrap(state_of(name)), path)
        return path

    return write


@torch.no_grad()
def check_logits(model, tensors):
    want = tensors["eval.logits"]
    atol = 5e-5 * want.abs().max().item()  # the golden index's tolerance
    torch.testing.assert_close(model(tensors["pixel_values"]).logits, want, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("vittt", dict),
        ("vittt", lambda state: {"model": state, "epoch": 299}),
        ("vittt", lambda state: {"state_dict": {f"module.{key}": value for key, value in state.items()}}),
        ("h_vittt", lambda state: {"ema": state}),
        (
            "h_vittt",
            lambda state: {"model": {key: value * 0 for key, value in state.items()}, "state_dict_ema": state},
        ),
    ],
    ids=["bare", "model", "state_dict", "ema", "both"],
)
def test_converted_folder_gives_the_published_logits(tmp_path, source, name, wrap):
    output = tmp_path / "out"
    result = convert(name, source(name, wrap), output)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{output}\n"
    assert "Reading " in result.stderr and "Converted to " in result.stderr and "parameters" in result.stderr
    check_logits(AutoModelForImageClassification.from_pretrained(output), TENSORS[name])


def test_what_the_folder_holds(tmp_path, source):
    output = tmp_path / "out"
    assert convert("h_vittt", source("h_vittt"), output, "--license", "mit").exit_code == 0
    names = {path.name for path in output.iterdir()}
    assert names >= {"model.safetensors", "config.json", "preprocessor_config.json", "README.md"}
    assert names >= {"configuration_vittt.py", "modeling_vittt.py", "image_processing_vittt.py"}
    config = json.loads((output / "config.json").read_text())
    assert config["image_size"] == 64 and config["hidden_sizes"] == [8, 16, 24, 32]
    assert config["id2label"] == {str(i): f"LABEL_{i}" for i in range(6)}
    assert "AutoModelForImageClassification" in config["auto_map"]
    processor = AutoImageProcessor.from_pretrained(output)
    image = torch.zeros(3, 100, 200, dtype=torch.uint8)
    assert processor(image, return_tensors="pt").pixel_values.shape == (1, 3, 64, 64)


@pytest.mark.parametrize("licence", [None, "mit"])
def test_card(tmp_path, source, licence):
    """The licence is the one that is given, never one of this package's own."""
    output = tmp_path / "out"
    arguments = [] if licence is None else ["--license", licence]
    assert convert("vittt", source("vittt"), output, *arguments).exit_code == 0
    card = ModelCard.load(output / "README.md")
    header = card.content.split("---")[1]
    assert f"license: {licence or 'other'}\n" in header
    assert "library_name: transformers\n" in header and "pipeline_tag: image-classification\n" in header
    assert all(f"- {tag}\n" in header for tag in ("custom_code", "test-time-training", "linear-attention"))
    assert ("look for the terms beside the published weights" in card.content) is (licence is None)
    assert "vittt.pth" in card.text and str(tmp_path) not in card.content


@torch.no_grad()
def test_dense_backbone(tmp_path, source):
    output = tmp_path / "out"
    result = convert("h_vittt", source("dense"), output)
    assert result.exit_code == 0, result.output
    assert "pipeline_tag: image-feature-extraction\n" in (output / "README.md").read_text()
    tensors = TENSORS["dense"]
    maps = HViTTTBackbone.from_pretrained(output)(tensors["case1.pixel_values"]).feature_maps
    for index, got in enumerate(maps):
        want = tensors[f"case1.steady.stage{index}"]
        torch.testing.assert_close(got, want, atol=2e-5 * want.abs().max().item(), rtol=0)
    assert len(maps) == 3


def test_images_that_are_not_square(tmp_path, source):
    output = tmp_path / "out"
    assert convert("h_vittt", source("nonsquare"), output).exit_code == 0
    processor = AutoImageProcessor.from_pretrained(output)
    image = torch.zeros(3, 100, 100, dtype=torch.uint8)
    assert processor(image, return_tensors="pt").pixel_values.shape == (1, 3, 32, 64)
    check_logits(AutoModelForImageClassification.from_pretrained(output), TENSORS["nonsquare"])


def test_safetensors_and_options(tmp_path):
    save_file(state_of("vittt"), tmp_path / "x.safetensors")
    options = ["--image-size", 48, "--num-labels", 5, "--config", "embed_dim=32", "--config", "qkv_bias=True"]
    output = tmp_path / "out"
    result = convert("vittt", tmp_path / "x.safetensors", output, *options, "--config", "ttt_loss_type=only_w1")
    assert result.exit_code == 0, result.output
    config = json.loads((output / "config.json").read_text())
    assert (config["image_size"], config["ttt_update"]) == (48, "last")
    assert AutoImageProcessor.from_pretrained(output).crop_size["height"] == 48


def test_language_model(tmp_path):
    name = "model_m1_full_mom.safetensors"
    config = json.loads((GOLDEN / "lact" / "models.json").read_text())["models"][name]["config"]
    tensors = load_file(GOLDEN / "lact" / name)
    state = {key.removeprefix("state_dict/"): tensors[key] for key in tensors if key.startswith("state_dict/")}
    torch.save(state, tmp_path / "lact.pth")
    (tmp_path / "760m.json").write_text(json.dumps(config))
    output = tmp_path / "out"
    result = convert("lact", tmp_path / "lact.pth", output, "--config", tmp_path / "760m.json")
    assert result.exit_code == 0, result.output
    loaded = AutoModelForCausalLM.from_pretrained(output).state_dict()
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[key], value) for key, value in state.items())
    assert not (output / "preprocessor_config.json").exists()
    assert "pipeline_tag: text-generation\n" in (output / "README.md").read_text()
    assert card_errors((output / "README.md").read_text()) == []


NVS = "model_nvsA_2heads_im2.safetensors"


@pytest.fixture
def nvs_checkpoint(tmp_path):
    """A checkpoint of the published training code."""
    path = tmp_path / "obj_res256.pt"
    training = {"optimizer": {"state": {}}, "lr_scheduler": {"last_epoch": 3}, "now_iters": 3}
    torch.save({"model": golden_state(golden_tensors(NVS)), **training}, path)
    return path


@pytest.mark.parametrize("on_the_hub", [False, True])
def test_novel_view_model(tmp_path, nvs_checkpoint, on_the_hub, monkeypatch):
    """The published layout, of a file and of the Hub: the folder gives the published views, and has its processor."""
    config = {**published_config(NVS), "use_fused": True}
    (tmp_path / "l24.json").write_text(json.dumps(config))
    asked, source, output = [], nvs_checkpoint, tmp_path / "out"
    if on_the_hub:
        source = "airsplay/lact_nvs/obj_res256.pt"
        monkeypatch.setattr(
            "hf_ttt.conversion.checkpoint.hf_hub_download", lambda *names: asked.append(names) or str(nvs_checkpoint)
        )
    result = convert("lact_nvs", source, output, "--config", tmp_path / "l24.json", "--image-size", 64)
    assert result.exit_code == 0, result.output
    assert asked == ([("airsplay/lact_nvs", "obj_res256.pt")] if on_the_hub else [])
    tensors = golden_tensors(NVS)
    with torch.no_grad():
        rendered = AutoModel.from_pretrained(output)(**golden_inputs(tensors)).rendered
    atol = INDEX["tolerance"]["rendered"]
    torch.testing.assert_close(rendered, tensors["rendered_exact_muon"], atol=atol, rtol=0)
    assert AutoProcessor.from_pretrained(output).size == {"height": 64, "width": 64}
    assert {"modeling_lact_nvs.py", "processing_lact_nvs.py"} <= {path.name for path in output.iterdir()}
    card = (output / "README.md").read_text()
    assert "pipeline_tag: image-to-3d\n" in card and "# LaCT-NVS" in card and "obj_res256.pt" in card
    assert "AutoModel.from_pretrained" in card and str(tmp_path) not in card


def test_novel_view_model_of_scenes(tmp_path, nvs_checkpoint):
    """Published scenes are not square and have coordinates of their own: the processor is ready for both."""
    (tmp_path / "l24.json").write_text(json.dumps(published_config(NVS)))
    options = "--config", tmp_path / "l24.json", "--image-size", "72x128", "--normalize-scene"
    result = convert("lact_nvs", nvs_checkpoint, tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    assert processor.size == {"height": 72, "width": 128} and processor.normalize_scene


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image-size", "64x66"], "image_size=66 must be a multiple of patch_size=4"),
        (["--image-size", "64x64x3"], "--image-size '64x64x3' is neither a side nor HEIGHTxWIDTH"),
        (["--image-size", "-8"], "--image-size '-8' is neither a side nor HEIGHTxWIDTH"),
        (["--image-size", "66"], "image_size=66 must be a multiple of patch_size=4"),
        (["--image-size", "0"], "image_size=0 must be a multiple of patch_size=4"),
        (["--num-labels", "5"], "num_labels=5 is not known"),
        (["--config", "layers=24"], "layers=24 contradicts blocks.1"),
        (["--config", "laers=2"], "laers=2 is not known"),
    ],
)
def test_novel_view_model_that_does_not_fit(tmp_path, nvs_checkpoint, arguments, message):
    """One line, and no folder."""
    result = convert("lact_nvs", nvs_checkpoint, tmp_path / "out", *arguments)
    assert result.exit_code == 1 and not (tmp_path / "out").exists()
    assert result.stderr.splitlines()[-1].startswith("Error: ") and message in result.stderr


class CfgNode(dict):
    """A configuration as a training run pickles it."""


def test_pickled_configuration(tmp_path, source):
    path = source("vittt", lambda state: {"model": state, "config": CfgNode(MODEL="vittt")})
    result = convert("vittt", path, tmp_path / "out")
    assert result.exit_code == 1 and "--allow-pickle" in result.stderr and "CfgNode" in result.stderr
    assert not (tmp_path / "out").exists()
    result = convert("vittt", path, tmp_path / "out", "--allow-pickle")
    assert result.exit_code == 0, result.output
    assert "Warning: allow_pickle: reading 'vittt.pth' runs code from the file\n" in result.stderr


def test_choice_of_weights(tmp_path, source):
    def both(state):
        return {"model": state, "state_dict_ema": {key: value * 0 for key, value in state.items()}}

    path, output = source("h_vittt", both), tmp_path / "out"
    assert convert("h_vittt", path, output, "--weights", "raw").exit_code == 0
    check_logits(AutoModelForImageClassification.from_pretrained(output), TENSORS["h_vittt"])


# ---- failures ----


def failing(tmp_path, source):
    """Name → source and arguments of a conversion that fails, and what it says."""
    missing = source("vittt", lambda state: {key: value for key, value in state.items() if key != "norm.bias"})
    good = source("h_vittt")
    (tmp_path / "list.json").write_text("[1]")
    return {
        "missing": ("vittt", missing, [], "norm.bias is missing"),
        "labels": ("h_vittt", good, ["--num-labels", "1000"], "num_labels=1000 contradicts head.bias"),
        "config": ("h_vittt", good, ["--config", "dim=[1,2]"], "dim=[1, 2] contradicts"),
        "unknown": ("h_vittt", good, ["--config", "width=2"], "width=2 is not known"),
        "setting": ("h_vittt", good, ["--config", "width"], "'width' is neither key=value nor"),
        "no_json": ("h_vittt", good, ["--config", str(tmp_path / "no.json")], "No such file"),
        "list_json": ("h_vittt", good, ["--config", str(tmp_path / "list.json")], "must hold an object of fields"),
        "image_size": ("h_vittt", good, ["--image-size", "0"], "image_size=0 must be the side"),
        "architecture": ("vittt", good, [], "architecture='vittt' contradicts state_dict"),
        "source": ("vittt", "nothing.pth", [], "source='nothing.pth' is no file that exists"),
        "ema": ("h_vittt", good, ["--weights", "ema"], "weights='ema': 'h_vittt.pth' has no state dict"),
    }


def test_failures_are_one_line_and_write_nothing(tmp_path, source):
    for name, (architecture, path, arguments, message) in failing(tmp_path, source).items():
        before = sorted(tmp_path.iterdir())
        result = convert(architecture, path, tmp_path / "out", *arguments)
        assert result.exit_code == 1, name
        assert result.stdout == "", name
        *_, last = result.stderr.splitlines()
        assert last.startswith("Error: ") and message in last, (name, last)
        assert "Traceback" not in result.stderr, name
        assert sorted(tmp_path.iterdir()) == before, name


def test_hub_errors_are_one_line(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("404 Client Error.\n\nRepository Not Found")

    monkeypatch.setattr("hf_ttt.conversion.checkpoint.hf_hub_download", fail)
    result = convert("vittt", "someone/nothing/x.pth", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].endswith("'hub-id/file': 404 Client Error. Repository Not Found")


def test_output_folder_in_use(tmp_path, source):
    output, path = tmp_path / "out", source("vittt")
    output.mkdir()
    assert convert("vittt", path, output).exit_code == 0  # an empty one will do
    (output / "config.json").write_text("{}")
    result = convert("vittt", path, output)
    assert result.exit_code == 1 and "is not empty" in result.stderr and "--overwrite" in result.stderr
    assert (output / "config.json").read_text() == "{}"
    assert convert("vittt", path, output, "--overwrite").exit_code == 0
    assert json.loads((output / "config.json").read_text())["hidden_size"] == 32
    result = convert("vittt", path, tmp_path, "--overwrite")
    assert result.exit_code == 1 and "no config.json" in result.stderr and path.exists()


@pytest.mark.parametrize(
    "arguments",
    [[], ["--architecture", "vit", "a", "b"], ["-a", "vittt", "a"], ["-a", "vittt", "a", "b", "--weights", "best"]],
)
def test_wrong_usage(arguments):
    assert run("convert", *arguments).exit_code == 2


# ---- env, card and bench ----


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved tiny models of the three families."""
    root = tmp_path_factory.mktemp("folders")
    lact_cases.busy_model(lact_cases.tiny_config("variant2")).save_pretrained(root / "lact")
    vision = vittt_cases.tiny_config("h_vittt")
    vittt_cases.busy_model(hf_ttt.HViTTTForImageClassification, vision).save_pretrained(root / "vittt")
    nvs_cases.busy_model(nvs_cases.tiny_config()).save_pretrained(root / "nvs")
    return root


def test_env_as_json():
    """Versions are those that run, and what "auto" takes is what models say, for every family and rule."""
    result = run("env", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    found = json.loads(result.stdout)
    assert (found["hf-ttt"], found["packages"]["torch"]) == (hf_ttt.__version__, torch.__version__)
    assert found["devices"][-1].startswith("cpu, ") and isinstance(found["triton"], str)
    rows = {(row["model"].split()[0], row["rule"]): row for row in found["evaluations"]}
    assert len(rows) == 3 * 7 and all(row["why"] for row in rows.values())
    for rule in ("baseline", "variant1", "variant2", "variant6"):
        model = hf_ttt.LaCTForCausalLM(lact_cases.tiny_config(rule))
        assert rows["LaCT", rule]["implementation"] == model.get_ttt_implementation()
    assert "update='all'" in rows["LaCT-NVS", "baseline"]["why"]


def test_env_as_text(monkeypatch):
    """A table with a reason for each row; a package that is not installed is shown as such."""
    monkeypatch.setattr("hf_ttt.environment.PACKAGES", ("torch", "no-such-package"))
    result = run("env")
    assert result.exit_code == 0 and f"torch            {torch.__version__}" in result.stdout
    assert "no-such-package  not installed" in result.stdout
    assert re.search(r"LaCT 760m +variant2 +parallel +torch +\[\d\]", result.stdout)
    assert re.search(r"^\[1\] ", result.stdout, re.MULTILINE)


def test_card_command(folders, tmp_path):
    """It writes README.md or another file, says which, and does not replace what was edited by hand."""
    output = tmp_path / "card.md"
    options = ["--license", "mit", "--dataset", "someone/books", "--repo-id", "me/x", "--language", "en"]
    result = run("card", folders / "lact", "--output", output, *options)
    assert (result.exit_code, result.stdout) == (0, f"{output}\n"), result.stderr
    text = output.read_text()
    assert card_errors(text) == [] and 'from_pretrained("me/x"' in text
    assert all(line in text for line in ("license: mit\n", "- someone/books\n", "language: en\n"))
    result = run("card", folders / "lact")
    assert (result.exit_code, result.stdout) == (0, f"{folders / 'lact' / 'README.md'}\n")
    output.write_text("# Mine\n")
    result = run("card", folders / "lact", "--output", output)
    assert result.exit_code == 1 and "--overwrite" in result.stderr and output.read_text() == "# Mine\n"
    assert run("card", folders / "lact", "--output", output, "--overwrite").exit_code == 0
    result = run("card", tmp_path)
    assert result.exit_code == 1 and result.stdout == "" and "has no config.json" in result.stderr


def test_bench_of_the_op():
    """Every evaluation that is exact, each with its error against float64."""
    size = ["--tokens", 70, "--heads", 1, "--width", 16, "--chunk", 16, "--seconds", 0.01]
    result = run("bench", "--variant", "variant6", "--backward", "--json", "--device", "cpu", *size)
    assert result.exit_code == 0, result.stderr
    rows = {row["what"]: row for row in json.loads(result.stdout)}
    assert {"recurrent torch forward+backward", "parallel torch forward+backward"} <= rows.keys()
    for row in rows.values():
        assert 0 <= row["error"] < 7e-5 and row["rate"] == pytest.approx(70 / row["milliseconds"] * 1e3)
    result = run("bench", "--variant", "baseline", "--dtype", "bfloat16", "--device", "cpu", *size)
    assert result.exit_code == 0 and "recurrent torch forward" in result.stdout and "parallel" not in result.stdout
    assert result.stderr.startswith("Measuring on cpu, bfloat16")


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("lact", ["recurrent torch prefill", "recurrent torch decoding", "parallel torch prefill"]),
        ("vittt", ["recurrent torch forward", "parallel torch forward"]),
        ("nvs", ["recurrent torch reconstruct (4 views)", "recurrent torch render"]),
    ],
)
def test_bench_of_a_model(folders, name, measured):
    result = run("bench", folders / name, "--length", 30, "--seconds", 0.01, "--json", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert set(measured) <= {row["what"] for row in rows} and all(row["rate"] > 0 for row in rows)


def test_bench_times_nothing_that_is_wrong(monkeypatch, folders):
    """An op whose output is off by 1 % of its greatest value, and decoding without its cache, are errors."""
    exact = timing.ttt_attention

    def wrong(q, *args, **kwargs):
        out = exact(q, *args, **kwargs)
        return out if out.dtype == torch.float64 else out + 0.01 * out.abs().max()

    monkeypatch.setattr(timing, "ttt_attention", wrong)
    result = run("bench", "--tokens", 40, "--heads", 1, "--width", 16, "--chunk", 16, "--device", "cpu")
    assert (result.exit_code, result.stdout) == (1, "") and "is wrong: relative error 1.00e-02" in result.stderr
    forward = hf_ttt.LaCTModel.forward

    def forgetful(self, *args, **kwargs):
        kwargs.pop(CACHE_KEY, None)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(hf_ttt.LaCTModel, "forward", forgetful)
    result = run("bench", folders / "lact", "--length", 30, "--device", "cpu")
    assert (result.exit_code, result.stdout) == (1, "") and "recurrent torch decoding is wrong" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--tokens", 0], 1, "tokens=0 must be at least 1"),
        (["--seconds", 0], 1, "seconds=0.0 must be above 0"),
        (["--variant", "variant9"], 1, "variant 'variant9' is not known"),
        (["no-such-folder"], 1, "has no config.json"),
        (["--dtype", "int8"], 2, "int8"),
        (["--tokens", "many"], 2, "--tokens"),
    ],
)
def test_bench_fails_in_one_line(arguments, code, message):
    result = run("bench", "--device", "cpu", *arguments)
    assert (result.exit_code, result.stdout) == (code, "") and message in result.stderr
    assert "Traceback" not in result.stderr


# ---- the rest ----


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"hf-ttt {hf_ttt.__version__}\n")


def test_settings():
    got = parse_settings(
        ["a=1", "b=[1,2]", "c=(1, 2)", "d=true", "e=False", "f=None", "g=only_w1", "h=", "i=0.5", "j=a=b"]
    )
    assert got == {
        "a": 1,
        "b": [1, 2],
        "c": (1, 2),
        "d": True,
        "e": False,
        "f": None,
        "g": "only_w1",
        "h": "",
        "i": 0.5,
        "j": "a=b",
    }


def test_help():
    environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "hf_ttt.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: hf-ttt" in done.stdout
    for command in ("env", "convert", "card", "push", "bench"):
        assert re.search(rf"^\W*{command} ", done.stdout, re.MULTILINE), command
    result = CliRunner().invoke(app, ["convert", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    for option in (
        "--architecture",
        "--weights",
        "--license",
        "--allow-pickle",
        "--config",
        "--overwrite",
        "--num-labels",
    ):
        assert option in result.stdout, option


def test_only_the_command_line_imports_typer():
    source = Path(hf_ttt.__file__).parent
    importing = set()
    for file in source.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if any(name.split(".")[0] in ("typer", "click", "rich") for name in names):
                importing.add(file.name)
    assert importing == {"cli.py"}
