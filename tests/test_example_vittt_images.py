# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The example that trains on images, end to end with tiny models, and its parts against formulas by hand."""

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from transformers import AutoModelForImageClassification, TrainerControl, TrainerState, TrainingArguments, pipeline

import hf_ttt
from hf_ttt.hub import is_generated

pytest.importorskip("datasets")
pytest.importorskip("evaluate")
pytest.importorskip("accelerate")
pytest.importorskip("sklearn")

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import train_vittt_images as example  # noqa: E402
import vittt_recipe as recipe  # noqa: E402

TINY = ["--config_overrides", "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,drop_path_rate=0.2"]
H_TINY = ["--model", "h_vittt", "--config_overrides", "hidden_sizes=[8,16],depths=[1,1]"]
FEW = ["--max_train_samples", "48", "--max_eval_samples", "24", "--per_device_train_batch_size", "16"]
RUN = ["--do_train", "--do_eval", "--disable_tqdm", "true", "--logging_steps", "1", "--learning_rate", "1e-2"]
MIXED = ["--mixup", "0.8", "--cutmix", "1.0", "--ema", "--mesa", "1.0"]


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForImageClassification.from_pretrained(folder).state_dict()


def assert_same_weights(first: Path, second: Path) -> None:
    one, two = weights(first), weights(second)
    assert list(one) == list(two)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """Output directory of two plain steps."""
    folder = tmp_path_factory.mktemp("plain")
    example.main(["--output_dir", str(folder), "--max_steps", "2", *TINY, *FEW, *RUN])
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """Output directory of four steps of H-ViTTT (with batch norm) with everything on, and a checkpoint after two."""
    folder = tmp_path_factory.mktemp("mixed")
    options = ["--max_steps", "4", "--save_steps", "2", "--eval_strategy", "steps", "--eval_steps", "2"]
    example.main(["--output_dir", str(folder), *options, *H_TINY, *FEW, *RUN, *MIXED])
    return folder


@pytest.fixture(scope="module")
def folder_of_images(tmp_path_factory) -> Path:
    """Twelve images of unequal sizes in two classes, dark and light."""
    folder = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0)
    for name, low in (("dark", 0), ("light", 200)):
        (folder / name).mkdir()
        for i in range(6):
            pixels = noise.integers(low, low + 50, (20 + i, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def test_two_plain_steps_write_what_a_user_expects(plain):
    names = {path.name for path in plain.iterdir()}
    assert {"model.safetensors", "config.json", "modeling_vittt.py", "README.md"} <= names
    assert {"preprocessor_config.json", "image_processing_vittt.py", "trainer_state.json"} <= names
    for name in ("loss_curve.png", "confusion_matrix.png"):
        assert (plain / name).read_bytes().startswith(b"\x89PNG")
    assert read_json(plain / "eval_results.json")["eval_images"] == 24


def test_card_states_what_was_measured(plain):
    """The card has the data and metrics of the evaluation, and what they were computed with."""
    text = (plain / "README.md").read_text(encoding="utf-8")
    found = {result.metric_type: result for result in ModelCard(text).data.eval_results}
    assert is_generated(text) and found.keys() == {"loss", "accuracy"}
    for name, result in found.items():
        assert result.metric_value == read_json(plain / "eval_results.json")[f"eval_{name}"]
        assert result.dataset_name == "scikit-learn digits" and result.metric_args["backend"] == "torch"


def test_saved_folder_classifies_in_a_pipeline_as_in_evaluation(plain):
    """The share of the held-out digits that the pipeline gets right is the accuracy that was reported."""
    classify = pipeline("image-classification", str(plain), trust_remote_code=True)
    images = example.load_images(example.DataArguments(max_eval_samples=24), seed=42)["validation"]
    found = [rows[0]["label"] for rows in classify(list(images["image"]), top_k=1)]
    right = sum(int(name) == label for name, label in zip(found, images["label"], strict=True))
    assert right / 24 == pytest.approx(read_json(plain / "eval_results.json")["eval_accuracy"])


def test_everything_on_is_trained_saved_and_evaluated(mixed):
    results = read_json(mixed / "eval_results.json")
    assert {"eval_accuracy", "eval_loss", "eval_ema_accuracy", "eval_ema_loss"} <= set(results)
    assert results["eval_ema_loss"] != results["eval_loss"]
    average = AutoModelForImageClassification.from_pretrained(mixed / "ema")
    assert isinstance(average, hf_ttt.HViTTTForImageClassification)
    assert (mixed / "ema" / "preprocessor_config.json").is_file()


def test_distillation_begins_at_its_share_of_the_training(mixed):
    """MESA adds a second cross entropy, near log 10 here, from a quarter of the steps on: from the second of four."""
    history = read_json(mixed / "trainer_state.json")["log_history"]
    first, *later = [log["loss"] for log in history if "loss" in log]
    assert first < 3.5 and all(loss > 3.9 for loss in later) and len(later) == 3


def test_resuming_equals_an_unbroken_run(mixed, tmp_path):
    """The moving average, its batch norm, the augmentation and the mixing go on where they were."""
    shutil.copytree(mixed / "checkpoint-2", tmp_path / "checkpoint-2")
    example.main(["--output_dir", str(tmp_path), "--max_steps", "4", *H_TINY, *FEW, *RUN, *MIXED])
    assert_same_weights(mixed, tmp_path)
    assert_same_weights(mixed / "ema", tmp_path / "ema")


def test_resuming_with_an_average_that_the_checkpoint_lacks(mixed, tmp_path):
    shutil.copytree(mixed / "checkpoint-2", tmp_path / "checkpoint-2")
    shutil.rmtree(tmp_path / "checkpoint-2" / "ema")
    with pytest.raises(ValueError, match="--ema: the checkpoint .* was made without it"):
        example.main(["--output_dir", str(tmp_path), *H_TINY, *FEW, *RUN, *MIXED])


def test_a_folder_of_images_replaces_the_head_of_a_saved_model(plain, folder_of_images, tmp_path):
    options = ["--model_name_or_path", str(plain), "--train_dir", str(folder_of_images), "--max_steps", "2"]
    metrics = example.main([*options, "--validation_fraction", "0.5", "--output_dir", str(tmp_path), *RUN])
    model = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert metrics["eval_images"] == 6 and model.config.id2label == {0: "dark", 1: "light"}
    assert model.head.weight.shape == (2, 16)
    assert read_json(tmp_path / "preprocessor_config.json")["crop_size"] == {"height": 32, "width": 32}
    again = example.main(
        ["--model_name_or_path", str(tmp_path), "--train_dir", str(folder_of_images), "--validation_fraction", "0.5"]
        + ["--do_eval", "--disable_tqdm", "true", "--output_dir", str(tmp_path / "again")]
    )
    assert again["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


def test_evaluating_a_model_of_other_classes(plain, folder_of_images, tmp_path):
    options = ["--model_name_or_path", str(plain), "--train_dir", str(folder_of_images), "--do_eval"]
    with pytest.raises(ValueError, match="tells the classes .*'9'.* apart, and the images have .*'dark', 'light'"):
        example.main([*options, "--output_dir", str(tmp_path)])


def test_seeds_give_means(tmp_path, capsys):
    options = ["--output_dir", str(tmp_path), "--max_steps", "1", "--seeds", "3", "4", *TINY, *FEW, *RUN]
    means = example.main(options)
    values = [read_json(tmp_path / f"seed-{seed}" / "eval_results.json")["eval_accuracy"] for seed in (3, 4)]
    assert means["eval_accuracy"] == pytest.approx(sum(values) / 2)
    assert f"eval_accuracy: mean {means['eval_accuracy']:.4f} of {values[0]:.4f}" in capsys.readouterr().out
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "seed-3", tmp_path / "seed-4")


def test_splits_of_the_digits():
    """The last fifth is held out for new writers; a random fifth depends on the seed; none is in both."""
    writers = example.load_images(example.DataArguments(split="writers"), seed=0)
    first, second = (example.load_images(example.DataArguments(), seed=seed) for seed in (0, 1))
    labels = example.load_digits()["train"]["label"]
    assert list(writers["train"]["label"]) + list(writers["validation"]["label"]) == list(labels)
    assert writers.num_rows == first.num_rows == {"train": 1438, "validation": 359}
    assert list(first["validation"]["label"]) != list(second["validation"]["label"])


@pytest.mark.parametrize("model", ["vittt", "h_vittt"])
@pytest.mark.parametrize("size", ["mini", "tiny", "base"])
def test_configuration_has_the_size_and_the_variant(model, size):
    arguments = example.ModelArguments(
        model=model, size=size, variant="variant3", config_overrides="drop_path_rate=0.3"
    )
    config = example.new_config(arguments, 64, {"id2label": {0: "a", 1: "b", 2: "c"}})
    assert config.model_type == model and config.ttt_fast_weight == "linear" and config.num_labels == 3
    assert config.drop_path_rate == 0.3 and config.image_size == 64
    name = {"vittt": "hidden_size", "h_vittt": "hidden_sizes"}[model]
    expected = example.MINI[model] if size == "mini" else example.CONFIGS[model].size(size).to_dict()
    assert getattr(config, name) == expected[name]


def test_overrides_may_be_lists():
    overrides = example.parse_overrides("depths=[1, 2],use_muon=false, hidden_act=relu", example.CONFIGS["h_vittt"])
    assert overrides == {"depths": [1, 2], "use_muon": False, "hidden_act": "relu"}
    assert example.parse_overrides(None, example.CONFIGS["vittt"]) == {}


@pytest.mark.parametrize("shape", [(9, 9), (6, 10)])
def test_augmentation_without_amounts_changes_nothing(shape):
    none = recipe.RecipeArguments(rotation=0, zoom=0, shift=0)
    pixels = torch.randn(5, 3, *shape)
    torch.testing.assert_close(recipe.augment(pixels, none), pixels, rtol=1e-5, atol=1e-5)


def test_augmentation_mirrors_half_of_the_images():
    flips = recipe.RecipeArguments(rotation=0, zoom=0, shift=0, horizontal_flip=True)
    torch.manual_seed(0)
    pixels = torch.randn(400, 1, 5, 6)
    out = recipe.augment(pixels, flips)
    same, mirrored = (((out - x).abs().amax((1, 2, 3)) < 1e-5) for x in (pixels, pixels.flip(-1)))
    assert (same ^ mirrored).all() and 150 < mirrored.sum() < 250


def test_augmentation_crops_within_the_image():
    """A quarter of the area of a ramp from −1 to 1 spans a range of 1 and does not leave the ramp's."""
    ramp = torch.linspace(-1, 1, 101).expand(200, 1, 101, 101)
    crops = recipe.augment(ramp, recipe.RecipeArguments(rotation=0, zoom=0, shift=0, crop_scale=0.25))
    span = crops[:, 0, 50, -1] - crops[:, 0, 50, 0]
    assert 0.98 < span.min() < 1.2 and 1.8 < span.max() <= 2
    assert (crops[:, 0, 50].diff() > 1e-4).all()  # nowhere the repeated border


def test_rotation_keeps_the_shape_of_a_wide_image(monkeypatch):
    """By 90 degrees, (x, y) of a wide image reads (−y, x): pixels are square, whatever the sides of the image."""
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, low, high: x.fill_(high))
    pixels = torch.zeros(1, 1, 21, 41)
    pixels[0, 0, 10, 15] = 1  # 5 left of the centre
    turned = recipe.augment(pixels, recipe.RecipeArguments(rotation=90, zoom=0, shift=0))
    row, column = divmod(int(turned.argmax()), 41)
    assert (abs(row - 10), column) == (5, 20)


def test_soft_targets_by_hand():
    targets = recipe.soft_targets(torch.tensor([2, 0]), 4, 0.2)
    expected = [[0.05, 0.05, 0.85, 0.05], [0.85, 0.05, 0.05, 0.05]]
    torch.testing.assert_close(targets, torch.tensor(expected))


@pytest.mark.parametrize("mixup, cutmix", [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixing_mixes_targets_in_the_share_of_the_pixels(mixup, cutmix):
    """An image of class c is c everywhere, so the mean of a mixed image is its target times the classes."""
    labels = torch.arange(5)
    pixels = labels.float()[:, None, None, None].expand(-1, 3, 7, 9)
    blends = 0
    for seed in range(30):
        torch.manual_seed(seed)
        mixed, targets = recipe.mix_images(pixels, recipe.soft_targets(labels, 5, 0), mixup, cutmix)
        torch.testing.assert_close(mixed.mean((1, 2, 3)), targets @ labels.float())
        torch.testing.assert_close(targets.sum(1), torch.ones(5))
        blends += bool((mixed[0].std() < 1e-5) & (mixed[0, 0, 0, 0] > 0) & (mixed[0, 0, 0, 0] < 4))
    assert blends == {(0.8, 0.0): 30, (0.0, 1.0): 0}.get((mixup, cutmix), blends) and (not cutmix or blends < 30)


def test_no_mixing_is_the_same_tensors():
    pixels, targets = torch.randn(2, 3, 4, 4), torch.rand(2, 3)
    assert recipe.mix_images(pixels, targets, 0, 0) == (pixels, targets)


@pytest.mark.parametrize("warmup", [True, False])
def test_moving_average_by_hand(warmup):
    """Weights and running statistics; counters are copied; the decay is limited at first only if asked for."""
    config = hf_ttt.HViTTTConfig(hidden_sizes=[8], depths=[1], num_labels=2)
    model, other = (hf_ttt.HViTTTForImageClassification(config) for _ in range(2))
    average = recipe.MovingAverage(other, 0.9, warmup)
    before = {name: value.clone() for name, value in average.model.state_dict().items()}
    model(torch.randn(2, 3, 8, 8))  # the running statistics move
    state = TrainerState(global_step=5)
    average.on_step_end(TrainingArguments(), state, TrainerControl(), model=model)
    decay = 6 / 15 if warmup else 0.9
    for name, value in model.state_dict().items():
        expected = decay * before[name] + (1 - decay) * value if value.is_floating_point() else value
        torch.testing.assert_close(average.model.state_dict()[name], expected, msg=name)
    assert not average.model.training and not any(p.requires_grad for p in average.model.parameters())


def test_published_decay_of_the_moving_average():
    model = hf_ttt.ViTTTForImageClassification(
        hf_ttt.ViTTTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    for batch, expected in ((4096, 0.9996), (1024, 0.9999)):
        average = recipe.load_average(model, recipe.RecipeArguments(ema=True), batch, None)
        assert average.decay == pytest.approx(expected, abs=1e-7) and average.model is not model
    assert recipe.load_average(model, recipe.RecipeArguments(ema=True, ema_decay=0.5), 64, None).decay == 0.5
    assert recipe.load_average(model, recipe.RecipeArguments(), 64, None) is None


def test_confusion_matrix_by_hand(tmp_path):
    metrics = recipe.ClassMetrics(3)
    prediction = recipe.EvalPrediction(predictions=np.array([0, 2, 2, 1]), label_ids=np.array([0, 1, 2, 1]))
    assert metrics(prediction) == {"accuracy": 0.75}
    assert metrics.confusion.tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    assert example.plot_confusion(metrics.confusion, ["a", "b", "long name"], tmp_path / "few.png")
    assert example.plot_confusion(np.eye(60, dtype=int), [str(i) for i in range(60)], tmp_path / "many.png")
    assert (tmp_path / "few.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_without_matplotlib_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert example.plot_history([{"step": 1, "loss": 2.0}], tmp_path / "curve.png") is False
    assert example.plot_confusion(np.eye(2, dtype=int), ["a", "b"], tmp_path / "confusion.png") is False
    assert not list(tmp_path.iterdir())


def test_images_are_processed_anew_only_where_a_transform_is_random(folder_of_images, monkeypatch):
    images = example.load_images(example.DataArguments(train_dir=str(folder_of_images)), seed=0)["train"]
    processor = hf_ttt.ViTTTImageProcessor(crop_size=16)
    kept = example.ProcessedImages(images, processor)
    black = example.ProcessedImages(images, processor, lambda image: image.point(lambda _: 0))
    monkeypatch.setattr(example, "CACHED_BYTES", 0)
    fresh = example.ProcessedImages(images, processor)
    assert kept.pixels is not None and fresh.pixels is None and black.pixels is None
    for i in range(len(images)):
        torch.testing.assert_close(kept[i]["pixel_values"], fresh[i]["pixel_values"])
        assert kept[i]["labels"] == fresh[i]["labels"] == images[i]["label"]
        assert black[i]["pixel_values"].unique().numel() == 3  # one value in each channel


def test_rand_augment_needs_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match="--rand_augment rand-m9 needs timm"):
        recipe.timm_rand_augment("rand-m9")


def test_a_data_set_with_its_own_columns_and_names(tmp_path, folder_of_images):
    """Labels as text, columns of other names, and a split of its own."""
    rows = {"picture": [], "kind": []}
    for path in sorted(folder_of_images.glob("*/*.png")):
        rows["picture"].append(str(path))
        rows["kind"].append(path.parent.name)
    images = example.Dataset.from_dict(rows).cast_column("picture", example.datasets.Image())
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        images.to_parquet(tmp_path / "data" / f"{split}.parquet")
    arguments = example.DataArguments(dataset_name=str(tmp_path / "data"), image_column="picture", label_column="kind")
    loaded = example.load_images(arguments, seed=0)
    assert len(loaded["validation"]) == 12 and loaded["train"].features["label"].names == ["dark", "light"]
    with pytest.raises(ValueError, match="--image_column 'image' is not one of"):
        example.load_images(example.DataArguments(dataset_name=str(tmp_path / "data")), seed=0)


def test_folders_without_enough_classes(tmp_path, folder_of_images):
    (tmp_path / "empty").mkdir()
    shutil.copytree(folder_of_images / "dark", tmp_path / "one" / "dark")
    other = tmp_path / "other"
    shutil.copytree(folder_of_images / "dark", other / "dark")
    shutil.copytree(folder_of_images / "light", other / "bright")
    shutil.copytree(folder_of_images, tmp_path / "splits" / "test")
    cases = (("empty", "has no images in subfolders"), ("one", "class"), ("splits", "no images to train on"))
    for name, message in cases:
        with pytest.raises(ValueError, match=message):
            example.load_images(example.DataArguments(train_dir=str(tmp_path / name)), seed=0)
    arguments = example.DataArguments(train_dir=str(folder_of_images), validation_dir=str(other))
    with pytest.raises(ValueError, match="validation images have the classes .*'bright'"):
        example.load_images(arguments, seed=0)


OUT = ["--output_dir", "out", "--do_train"]


@pytest.mark.parametrize(
    "args, message",
    [
        (["--output_dir", "out"], "nothing to do: give --do_train, --do_eval"),
        ([*OUT, "--train_dir", "missing"], "--train_dir: there is no directory 'missing'"),
        ([*OUT, "--train_dir", ".", "--dataset_name", "x"], "--dataset_name excludes --train_dir"),
        ([*OUT, "--validation_dir", "."], "--validation_dir needs --train_dir"),
        ([*OUT, "--train_dir", ".", "--split", "writers"], "--split writers is for the digits"),
        ([*OUT, "--validation_fraction", "1"], "--validation_fraction 1.0 must be"),
        ([*OUT, "--image_size", "0"], "--image_size 0 must be at least 1"),
        ([*OUT, "--mesa", "1"], "add --ema"),
        ([*OUT, "--zoom", "2"], "--zoom 2.0 must be from 0 to 1"),
        ([*OUT, "--do_eval", "--validation_fraction", "0"], "give a --validation_fraction above 0"),
        ([*OUT, "--config_overrides", "patch=4"], "'patch=4' is not field=value with a field of ViTTTConfig"),
        ([*OUT, "--resume_from_checkpoint", "true"], "there is no checkpoint in 'out'"),
    ],
    ids=lambda value: None if isinstance(value, list) else value[:30],
)
def test_bad_arguments_say_what_to_do(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        example.main(args)


def test_smoothing_is_not_in_the_loss_of_evaluation(plain):
    """The held-out loss is the plain cross entropy, whatever training smooths."""
    model = AutoModelForImageClassification.from_pretrained(plain)
    images = example.load_images(example.DataArguments(max_eval_samples=24), seed=42)["validation"]
    processed = example.ProcessedImages(images, hf_ttt.ViTTTImageProcessor(crop_size=32))
    with torch.no_grad():
        log_p = model(processed.pixels).logits.double().log_softmax(-1)
    expected = -log_p[range(24), processed.labels].mean().item()
    assert read_json(plain / "eval_results.json")["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert math.isfinite(expected)
