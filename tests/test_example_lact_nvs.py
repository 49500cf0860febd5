# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The examples of novel views, end to end with tiny models on scenes of a ray caster, and their parts by hand."""

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModel, AutoProcessor, TrainerControl, TrainerState, TrainingArguments

import hf_ttt

pytest.importorskip("datasets")
pytest.importorskip("evaluate")
pytest.importorskip("accelerate")

sys.path[:0] = [str(Path(__file__).parents[1] / "examples"), str(Path(__file__).parent)]

import nvs_recipe as recipe  # noqa: E402
import nvs_solids as solids  # noqa: E402
import ray_caster  # noqa: E402
import render_turntable as turntable  # noqa: E402
import train_lact_nvs as example  # noqa: E402

from hf_ttt.data import SceneDataset, load_scenes  # noqa: E402

TINY = ["--config_overrides", 'hidden_size=16,num_hidden_layers=1,block_config=[{"type":"ttt"},{"type":"mlp"}]']
FEW = ["--image_size", "16", "24", "--num_input", "2", "--num_target", "2", "--held_out_views", "2"]
RUN = [
    "--do_train",
    "--do_eval",
    "--disable_tqdm",
    "true",
    "--logging_steps",
    "1",
    "--per_device_train_batch_size",
    "2",
]


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModel.from_pretrained(folder).state_dict()


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    """Three scenes of eight views of 24 × 24 pixels."""
    return solids.write_scenes(tmp_path_factory.mktemp("scenes"), 3, 8, 24, render=ray_caster.render)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, scenes) -> Path:
    """Output directory of four steps on two of the scenes, with a checkpoint after two."""
    folder = tmp_path_factory.mktemp("trained")
    options = ["--max_steps", "4", "--save_steps", "2", "--save_total_limit", "2", "--eval_steps", "2"]
    data = ["--scenes", str(scenes), "--held_out_scenes", "1", *FEW]
    example.main(["--output_dir", str(folder), *options, *data, *TINY, *RUN])
    return folder


# ---- training ----


def test_four_steps_write_what_a_user_expects(trained):
    names = {path.name for path in trained.iterdir()}
    assert {"model.safetensors", "config.json", "modeling_lact_nvs.py", "README.md", "trainer_state.json"} <= names
    for name in ("loss_curve.png", "contact_sheet.png"):
        assert (trained / name).read_bytes().startswith(b"\x89PNG")
    assert AutoProcessor.from_pretrained(trained).size == {"height": 16, "width": 24}
    results = read_json(trained / "comparison.json")
    assert set(results) == {"views", "scenes"} and set(results["views"]) == set(example.PREDICTORS)
    assert "other_inputs" not in results["scenes"]  # there is one scene only
    card = (trained / "README.md").read_text(encoding="utf-8")
    assert "views_psnr" in card and "\ndatasets" not in card  # a folder of scenes is no data set of the Hub
    history = read_json(trained / "trainer_state.json")["log_history"]
    last = [log for log in history if "eval_views_psnr" in log][-1]
    assert last["eval_views_psnr"] == pytest.approx(results["views"]["model"]["psnr"], rel=1e-5)
    assert last["eval_views_ssim"] == pytest.approx(results["views"]["model"]["ssim"], abs=1e-5)


def test_summary_by_hand():
    rows = {"model": 20.0, "mean_training_image": 12.0, "mean_input": 16.5, "nearest_input": 15.0, "other_inputs": 18.0}
    found = example.summary({name: {"psnr": value, "ssim": 0.5} for name, value in rows.items()})
    assert found == {"psnr": 20.0, "ssim": 0.5, "gain_over_trivial": 3.5, "cost_of_other_inputs": 2.0}


def test_resuming_equals_an_unbroken_run(trained, scenes, tmp_path):
    """The views that are drawn depend on seed and epoch, not on how often the run was interrupted."""
    shutil.copytree(trained / "checkpoint-2", tmp_path / "checkpoint-2")
    data = ["--scenes", str(scenes), "--held_out_scenes", "1", *FEW]
    example.main(["--output_dir", str(tmp_path), "--max_steps", "4", "--eval_strategy", "no", *data, *TINY, *RUN])
    one, two = weights(trained), weights(tmp_path)
    before = weights(trained / "checkpoint-2")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    assert any((one[name] - before[name]).abs().max() > 1e-5 for name in one)


def test_epochs_and_draws_give_other_views(scenes):
    rows = list(load_scenes(scenes))
    views = example.TrainingViews(rows, hf_ttt.LaCTNVSProcessor(size=24), 2, 2, draws=5, seed=0)
    assert len(views) == 15
    seen = {views[i]["camera_to_world"].numpy().tobytes() for i in range(0, 15, 3)}
    views.epoch = 1
    seen |= {views[i]["camera_to_world"].numpy().tobytes() for i in range(0, 15, 3)}
    assert len(seen) > 5
    torch.testing.assert_close(views[4], views[4])


def test_evaluating_a_saved_model_on_solids(trained, tmp_path, monkeypatch):
    """Without --scenes solids are rendered at the model's size; nothing is trained."""
    write = solids.write_scenes
    monkeypatch.setattr(example, "write_scenes", lambda *args: write(*args, render=ray_caster.render))
    options = ["--model_name_or_path", str(trained), "--do_eval", "--solid_scenes", "4", "--solid_views", "7"]
    metrics = example.main(["--output_dir", str(tmp_path), *options, *FEW[3:], "--held_out_scenes", "2"])
    assert {"views_psnr", "scenes_gain_over_trivial", "scenes_cost_of_other_inputs"} <= set(metrics)
    assert Image.open(tmp_path / "_solids" / "solids-0003" / "images" / "006.png").size == (24, 24)
    assert not (tmp_path / "model.safetensors").exists()


def test_held_out_views_are_never_trained_on(scenes):
    row = load_scenes(scenes)[0]
    kept, held_out = example.split_views(8, 2)
    assert (kept, held_out) == ([0, 1, 3, 4, 5, 7], [2, 6])
    remaining = example.without_held_out(row, 2)
    assert remaining["file_path"] == [row["file_path"][i] for i in kept] and remaining["name"] == row["name"]
    views = example.EvaluationViews([row], hf_ttt.LaCTNVSProcessor(size=24), 3, 2, seed=0)
    sample = views[0]
    torch.testing.assert_close(sample["target_camera_to_world"], torch.tensor(row["camera_to_world"])[[2, 6]])
    for pose in sample["camera_to_world"]:
        assert not any(torch.allclose(pose, target) for target in sample["target_camera_to_world"])
    torch.testing.assert_close(views[0], sample)


def a_batch() -> dict[str, torch.Tensor]:
    """A scene with two plain input views, 0.2 at x = 0 and 0.6 at x = 10, and three targets of 0.5."""
    poses = torch.eye(4).expand(1, 5, 4, 4).clone()
    poses[0, :, 0, 3] = torch.tensor([0.0, 10.0, 9.0, 1.0, 4.0])
    colours = torch.tensor([0.2, 0.6]).view(1, 2, 1, 1, 1).expand(1, 2, 3, 16, 16)
    intrinsics = torch.tensor([16.0, 16.0, 8.0, 8.0]).expand(1, 5, 4)
    return {
        "pixel_values": colours,
        "intrinsics": intrinsics[:, :2],
        "camera_to_world": poses[:, :2],
        "target_pixel_values": torch.full((1, 3, 3, 16, 16), 0.5),
        "target_intrinsics": intrinsics[:, 2:],
        "target_camera_to_world": poses[:, 2:],
    }


def tiny_model(seed: int = 0) -> hf_ttt.LaCTNVSModel:
    torch.manual_seed(seed)
    config = hf_ttt.LaCTNVSConfig(
        hidden_size=16, num_hidden_layers=1, block_config=[{"type": "ttt"}, {"type": "mlp"}], initializer_range=0.5
    )
    return hf_ttt.LaCTNVSModel(config).eval()


@torch.no_grad()
def test_predictors_by_hand():
    batch, model = a_batch(), tiny_model()
    others = {**batch, "pixel_values": 1 - batch["pixel_values"]}
    found = dict(example.predictions(model, batch, others, torch.full((3, 16, 16), 0.1)))
    assert set(found) == set(example.PREDICTORS)
    assert all(rendered.shape == (1, 3, 3, 16, 16) for rendered in found.values())
    means = {name: rendered.mean((0, 2, 3, 4)).tolist() for name, rendered in found.items()}
    assert means["mean_training_image"] == pytest.approx([0.1] * 3)
    assert means["mean_input"] == pytest.approx([0.4] * 3)
    assert means["nearest_input"] == pytest.approx([0.6, 0.2, 0.2])
    torch.testing.assert_close(found["model"], model(**batch).rendered)
    expected = model(**{**batch, "pixel_values": others["pixel_values"]}).rendered
    torch.testing.assert_close(found["other_inputs"], expected)
    assert (found["model"] - found["other_inputs"]).abs().max() > 1e-3


def test_nearest_input_where_the_scene_has_its_own_coordinates():
    """Input cameras come in the scene's coordinates and targets in the world's: here x_scene = (x − 10) / 5."""
    batch = a_batch()
    batch["world_to_scene"], batch["scene_scale"] = torch.eye(4)[None].clone(), torch.tensor([0.2])
    batch["world_to_scene"][0, 0, 3] = -10
    batch["camera_to_world"] = batch["camera_to_world"].clone()
    batch["camera_to_world"][0, :, 0, 3] = torch.tensor([-2.0, 0.0])
    assert example.nearest_input(batch).mean((0, 2, 3, 4)).tolist() == pytest.approx([0.6, 0.2, 0.2])


def test_mean_training_image(scenes):
    """Of one draw of each scene: half inputs, half targets."""
    rows = list(load_scenes(scenes))
    views = example.TrainingViews(rows, hf_ttt.LaCTNVSProcessor(size=24), 4, 4, draws=3, seed=0)  # all eight views
    images = [np.asarray(Image.open(file), float) / 255 for row in rows for file in row["file_path"]]
    expected = torch.tensor(np.mean(images, 0)).permute(2, 0, 1)
    torch.testing.assert_close(example.mean_training_image(views).double(), expected, rtol=0, atol=1e-6)


def test_comparison_does_not_depend_on_the_batches(scenes):
    """Another scene's inputs are the next scene's, also across batches; a lone scene has none."""
    views = example.EvaluationViews(list(load_scenes(scenes)), hf_ttt.LaCTNVSProcessor(size=24), 2, 2, seed=0)
    model, mean = tiny_model(), torch.zeros(3, 24, 24)
    whole, single = (example.compare(model, views, mean, size) for size in (3, 1))
    for name, row in whole.items():
        assert row == pytest.approx(single[name], rel=1e-4)
    assert example.compare(model, views, mean, 2)["other_inputs"] == pytest.approx(whole["other_inputs"], rel=1e-4)


# ---- the recipe ----


def one_step(guard: recipe.GradientNormGuard, gradient: float, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of four ones after a step of AdamW with such a gradient, and the gradient that the optimizer saw."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.weight.grad = torch.full((1, 4), gradient)
    guard.on_pre_optimizer_step(TrainingArguments(), TrainerState(global_step=step), TrainerControl(), model=model)
    optimizer.step()
    return model.weight.detach(), model.weight.grad


@pytest.mark.parametrize(
    "gradient, step, left_out",
    [(1.0, 9, False), (1.1, 9, False), (1.1, 10, True), (1.0, 10, False), (math.nan, 0, True)],
)
def test_great_gradients_are_left_out(gradient, step, left_out):
    """Of four elements 1.0 the norm is 2, which is the bound; from step 10 on; what is not finite always."""
    guard = recipe.GradientNormGuard(clip=1.0, bound=2.0, start=10)
    weight, seen = one_step(guard, gradient, step)
    assert guard.skipped == left_out and (seen is None) == left_out
    assert torch.equal(weight, torch.ones(1, 4)) == left_out
    if not left_out:
        assert seen.norm().item() == pytest.approx(1.0, rel=1e-4)


def test_no_bound_and_no_clipping():
    weight, seen = one_step(recipe.GradientNormGuard(clip=0, bound=0, start=0), 1e6, 0)
    assert not torch.equal(weight, torch.ones(1, 4)) and seen.norm() == 2e6


class Poisoned(recipe.TrainingViews):
    """The first draw of each epoch is not a number."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index == 0:
            sample["target_pixel_values"] = sample["target_pixel_values"] * math.nan
        return sample


def test_a_poisoned_batch_leaves_the_weights_as_they_are(scenes, tmp_path):
    """Neither by the optimizer nor by weight decay, and the training goes on to its end."""
    processor = hf_ttt.LaCTNVSProcessor(size=24)
    views = Poisoned(list(load_scenes(scenes))[:1], processor, 2, 2, draws=1, seed=0)
    model = tiny_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"max_steps": 2, "learning_rate": 0.1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    training = example.NVSTrainingArguments(output_dir=str(tmp_path), do_train=True, eval_strategy="no", **options)
    trainer = recipe.NVSTrainer(recipe.RecipeArguments(), processor, model=model, args=training, train_dataset=views)
    trainer.train()
    assert trainer.guard.skipped == 2
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_views_that_are_kept_are_those_that_are_read(scenes, monkeypatch):
    """Also after the size changed; each image is opened once for a size. What does not fit, and scenes that their
    input views normalise, are read each time."""
    rows = list(load_scenes(scenes))[:2]
    opened = []
    read = recipe.TrainingViews._views
    monkeypatch.setattr(
        recipe.TrainingViews, "_views", staticmethod(lambda scene, chosen: opened.extend(chosen) or read(scene, chosen))
    )

    def make(**fields):
        processor = hf_ttt.LaCTNVSProcessor(size=24, **fields)
        return recipe.TrainingViews(rows, processor, 2, 3, draws=4, seed=0)

    views = make()
    for size in ({"height": 24, "width": 24}, {"height": 8, "width": 16}):
        views.processor.size = size
        kept = [views[i] for i in range(8)]
        assert len(opened) == 16
        with monkeypatch.context() as patch:
            patch.setattr(recipe, "KEPT_BYTES", 2 * 8 * 3 * 4 * size["height"] * size["width"] - 1)
            torch.testing.assert_close(kept, [views[i] for i in range(8)])
        assert len(opened) == 16 + 8 * 5
        opened.clear()
    normalised = make(normalize_scene=True)
    assert [sample["world_to_scene"].shape for sample in (normalised[0], normalised[2])] == [(4, 4)] * 2
    assert len(opened) == 10


def test_half_size_first():
    """Only where the patch size divides the halves; from 0.6 of the steps on the images have their own size."""
    assert recipe.half_size_first((64, 96), 8) == [(0, {"size": (32, 48)}), (0.6, {"size": (64, 96)})]
    assert recipe.half_size_first((64, 72), 8) == []


def test_training_begins_with_half_the_size_by_default(scenes, tmp_path, monkeypatch):
    """Of 5 steps 3, and the one that was drawn ahead; not with --curriculum ''."""
    seen = []
    loss = recipe.NVSTrainer.compute_loss

    def watched(self, model, inputs, *args, **kwargs):
        if model.training:
            seen.append(inputs["pixel_values"].shape[-1])
        return loss(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(recipe.NVSTrainer, "compute_loss", watched)
    options = ["--scenes", str(scenes), *FEW[3:], "--image_size", "16", "--max_steps", "5", "--save_strategy", "no"]
    options += [*TINY, "--do_train", "--disable_tqdm", "true"]
    example.main(["--output_dir", str(tmp_path / "a"), *options])
    assert seen[:3] == [8, 8, 8] and seen[-1] == 16 and len(seen) == 5
    seen.clear()
    example.main(["--output_dir", str(tmp_path / "b"), *options, "--curriculum", ""])
    assert seen == [16] * 5


def test_curriculum_by_hand(scenes):
    """A stage keeps what it does not name, and a run that is resumed begins in the stage it was in."""
    assert recipe.parse_curriculum("0.25:inputs=3; .5:targets=1") == [
        (0.25, {"num_input": 3}),
        (0.5, {"num_target": 1}),
    ]
    stages = recipe.parse_curriculum("0:size=16,targets=1; 0.3:size=8x16; 5:inputs=3,targets=2")
    assert stages == [
        (0, {"size": (16, 16), "num_target": 1}),
        (0.3, {"size": (8, 16)}),
        (5, {"num_input": 3, "num_target": 2}),
    ]
    views = recipe.TrainingViews(list(load_scenes(scenes)), hf_ttt.LaCTNVSProcessor(size=24), 2, 2, draws=1, seed=0)
    curriculum = recipe.Curriculum(stages, views)
    shapes = {}
    for step in (0, 2, 3, 5, 9):
        state = TrainerState(global_step=step, max_steps=10)
        (curriculum.on_step_end if step else curriculum.on_train_begin)(None, state, None)
        shapes[step] = [tuple(views[0][name].shape) for name in ("pixel_values", "target_pixel_values")]
    assert shapes[0] == shapes[2] == [(2, 3, 16, 16), (1, 3, 16, 16)]
    assert shapes[3] == [(2, 3, 8, 16), (1, 3, 8, 16)]
    assert shapes[5] == shapes[9] == [(3, 3, 8, 16), (2, 3, 8, 16)]


def test_curriculum_reaches_the_model_and_not_the_evaluation(scenes, tmp_path, monkeypatch):
    seen = []
    loss = recipe.NVSTrainer.compute_loss

    def watched(self, model, inputs, *args, **kwargs):
        seen.append((model.training, tuple(inputs["pixel_values"].shape[1:])))
        return loss(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(recipe.NVSTrainer, "compute_loss", watched)
    options = [
        "--scenes",
        str(scenes),
        *FEW,
        "--max_steps",
        "6",
        "--curriculum",
        "0:size=16,inputs=1; 2:size=16x24,inputs=2",
    ]
    example.main(["--output_dir", str(tmp_path), *options, *TINY, *RUN, "--save_strategy", "no", "--eval_steps", "6"])
    trained = [shape for training, shape in seen if training]
    assert trained[:2] == [(1, 3, 16, 16)] * 2 and trained[-2:] == [(2, 3, 16, 24)] * 2
    assert {shape for training, shape in seen if not training} == {(2, 3, 16, 24)}
    assert AutoProcessor.from_pretrained(tmp_path).size == {"height": 16, "width": 24}


def test_lpips_joins_the_loss_at_its_step(scenes, tmp_path, monkeypatch):
    """It is worth 10 here, with weight 0.5; it is reported beside the other metrics, and never in evaluation's loss."""
    constant = lambda rendered, target: 10 + 0 * (rendered - target).mean((-3, -2, -1))  # noqa: E731
    monkeypatch.setattr(recipe, "load_lpips", lambda: constant)
    options = ["--scenes", str(scenes), *FEW, "--max_steps", "4", "--lpips_weight", "0.5", "--lpips_start", "2"]
    example.main(["--output_dir", str(tmp_path), *options, *TINY, *RUN, "--save_strategy", "no", "--eval_steps", "4"])
    history = read_json(tmp_path / "trainer_state.json")["log_history"]
    losses = [log["loss"] for log in history if "loss" in log]
    assert max(losses[:2]) < 1 and all(5 < loss < 6 for loss in losses[2:]) and len(losses) == 4
    last = [log for log in history if "eval_views_lpips" in log][-1]
    assert last["eval_views_lpips"] == 10 and last["eval_views_loss"] < 1
    assert read_json(tmp_path / "comparison.json")["views"]["mean_input"]["lpips"] == 10


@pytest.mark.parametrize("variant", ["baseline", "variant2", "variant6", None])
def test_configuration_has_the_size_and_the_variant(variant):
    """Without a variant the small model is variant 6, and a published one the baseline."""
    arguments = example.ModelArguments(variant=variant, config_overrides="patch_size=4,num_hidden_layers=1")
    config = example.load_model(arguments, None).config
    assert config.patch_size == 4 and config.num_hidden_layers == 1
    assert config.hidden_size == example.MINI["hidden_size"] and config.use_muon == (
        variant in ("baseline", "variant2")
    )
    with torch.device("meta"):
        published = example.load_model(example.ModelArguments(size="l12_ttt1x"), None)
    assert 135.2e6 < published.num_parameters() < 135.4e6 and published.config.use_muon


OUT = ["--output_dir", "out", "--do_train"]


@pytest.mark.parametrize(
    "args, message",
    [
        (["--output_dir", "out"], "nothing to do: give --do_train, --do_eval"),
        ([*OUT, "--num_input", "0"], "--num_input 0 must be at least 1"),
        ([*OUT, "--held_out_views", "0"], "--held_out_views 0 must be at least 1"),
        ([*OUT, "--image_size", "1", "2", "3"], "--image_size .* must be a height and a width"),
        ([*OUT, "--lpips_weight", "-1"], "--lpips_weight -1.0 must be at least 0"),
        ([*OUT, "--skip_grad_norm", "nan"], "--skip_grad_norm nan must be at least 0"),
        ([*OUT, "--max_grad_norm", "1"], "--max_grad_norm 1.0 would clip .* use --clip_grad_norm"),
        ([*OUT, "--curriculum", "size=32"], "--curriculum: 'size=32' is not STEP:field=number"),
        ([*OUT, "--curriculum", "0:depth=2"], "--curriculum: '0:depth=2' is not STEP:field=number"),
        ([*OUT, "--curriculum", "0:targets=2x3"], "--curriculum: '0:targets=2x3' is not STEP:field=number"),
        ([*OUT, "--curriculum", "0:targets=0"], "--curriculum: '0:targets=0' is not STEP:field=number"),
        ([*OUT, "--curriculum", "5:size=32;5:size=64"], r"--curriculum: the steps \[5.0, 5.0\] must grow"),
        ([*OUT, "--curriculum", "1.5:size=32"], "--curriculum: '1.5:size=32' is not STEP:field=number"),
        ([*OUT, "--dataloader_num_workers", "1"], "or give --curriculum '' for none"),
        ([*OUT, "--curriculum", "5:size=32", "--dataloader_num_workers", "1"], "--curriculum needs --dataloader_num_w"),
    ],
)
def test_arguments_that_make_no_sense(args, message):
    with pytest.raises(ValueError, match=message):
        example.parse_arguments(args)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--image_size", "20"], "--image_size 20 × 20 .* multiples of patch_size=8"),
        (["--curriculum", "9:size=24x20"], "--curriculum: size 24 × 20 .* multiples of patch_size=8"),
        (["--held_out_scenes", "3"], "--held_out_scenes 3 must be from 0 to 2: there are 3 scenes"),
        (["--num_target", "5"], "scene 'solids-0000' has 8 views; 2 inputs .* 5 targets .* 2 held-out .* are 9"),
        (["--curriculum", "9:targets=6"], "scene 'solids-0000' has 8 views; 2 inputs .* 6 targets .* are 10"),
        (["--config_overrides", "depth=1"], "--config_overrides: 'depth=1' is not field=value"),
    ],
)
def test_arguments_that_do_not_fit_the_scenes(args, message, scenes, tmp_path):
    with pytest.raises(ValueError, match=message):
        example.main([*OUT, "--output_dir", str(tmp_path), "--scenes", str(scenes), *FEW, *args])


# ---- turntable ----


def test_turntable_of_a_folder_and_of_the_scene_it_saved(trained, scenes, tmp_path):
    """Not square, and with the number of frames that was asked for; the saved scene gives the same frames."""
    options = ["--model", str(trained), "--frames", "5", "--size", "16", "40"]
    saved = tmp_path / "scene.safetensors"
    first = turntable.main(
        [
            *options,
            "--scene",
            str(scenes / "solids-0000"),
            "--output_dir",
            str(tmp_path / "a"),
            "--save_scene",
            str(saved),
        ]
    )
    second = turntable.main([*options, "--scene", str(saved), "--output_dir", str(tmp_path / "b")])
    gifs = [Image.open(folder / "turntable.gif") for folder in (first, second)]
    for gif in gifs:
        assert gif.size == (40, 16) and gif.n_frames == 5
    assert (first / "turntable.gif").read_bytes() == (second / "turntable.gif").read_bytes()
    assert Image.open(first / "contact_sheet.png").size == (5 * 122 - 2, 12 + 2 * 50 - 2)  # three times as large


def test_turntable_arguments(trained, scenes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--model", str(trained), "--scene"]
    cases = [
        ([str(scenes)], "holds 3 scenes"),
        ([str(scenes / "solids-0000"), "--num_input", "9"], "--num_input 9 must be from 1 to 8"),
        ([str(scenes / "solids-0000"), "--frames", "0"], "--frames 0 and --fps 12 must be positive"),
        ([str(scenes / "solids-0000"), "--elevation", "90"], "--elevation 90.0 between -90 and 90"),
        ([str(scenes / "solids-0000"), "--save_scene", "x.pt"], "must end in .safetensors"),
        ([str(scenes / "solids-0000"), "--size", "16", "20"], "multiples of patch_size=8"),
        (["missing.safetensors"], "there is no file 'missing.safetensors'"),
    ]
    for args, message in cases:
        with pytest.raises(ValueError, match=message):
            turntable.main([*options, *args])


def test_a_saved_scene_without_its_cameras(trained, scenes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, processor = AutoModel.from_pretrained(trained), AutoProcessor.from_pretrained(trained)
    scene, *_ = turntable.reconstruct(model, processor, scenes / "solids-0001", 2)
    scene.save("alone.safetensors")
    options = ["--model", str(trained), "--scene", "alone.safetensors", "--frames", "2"]
    with pytest.raises(ValueError, match="has no alone.json beside it.* give --radius and --focal_length"):
        turntable.main(options)
    folder = turntable.main([*options, "--radius", "3", "--focal_length", "1.2"])
    assert Image.open(folder / "turntable.gif").n_frames == 2


def test_orbit_of_cameras_on_a_circle():
    """Twelve cameras at radius 3 and elevation 20 degrees about a tilted axis through (1, 2, 3) give that circle."""
    up = np.array([0.6, 0.0, 0.8])
    orbit = turntable.Orbit([1.0, 2.0, 3.0], up.tolist(), 3.0, 20.0, 1.5)
    intrinsics, poses = orbit.cameras(12, (20, 30))
    assert intrinsics.shape == (1, 12, 4) and intrinsics[0, 0].tolist() == [30, 30, 15, 10]
    found = turntable.fit_orbit(poses[0].double().numpy(), intrinsics[0].numpy(), (20, 30))
    np.testing.assert_allclose(found.centre, [1, 2, 3], atol=1e-5)
    np.testing.assert_allclose(found.up, up, atol=1e-5)
    assert (found.radius, found.elevation, found.focal_length) == pytest.approx((3.0, 20.0, 1.5), rel=1e-5)


def test_orbit_of_cameras_that_look_the_same_way():
    """Their axes meet nowhere: the centre is one ahead of their mean."""
    poses = np.tile(np.eye(4), (3, 1, 1))
    poses[:, 0, 3] = [-1, 0, 1]
    found = turntable.fit_orbit(poses, np.ones((3, 4)), (8, 8))
    np.testing.assert_allclose(found.centre, [0, 0, 1])
    np.testing.assert_allclose(found.up, [0, -1, 0])


def test_input_views_are_far_apart():
    poses = np.tile(np.eye(4), (5, 1, 1))
    poses[:, 0, 3] = [0, 1, 2, 9, 10]
    assert turntable.spread(poses, 3) == [0, 4, 2]


def test_frames_a_few_at_a_time_are_the_same(monkeypatch):
    model = tiny_model()
    batch = a_batch()
    scene = model.reconstruct(batch["pixel_values"], batch["intrinsics"], batch["camera_to_world"])
    orbit = turntable.Orbit([0, 0, 0], [0, 0, 1], 3.0, 30.0, 1.2)
    many = turntable.render_orbit(model, scene, orbit, 7, (16, 8))
    monkeypatch.setattr(turntable, "VIEWS_AT_ONCE", 3)
    torch.testing.assert_close(turntable.render_orbit(model, scene, orbit, 7, (16, 8)), many)
    assert many.shape == (1, 7, 3, 16, 8)


def test_video_through_imageio_where_it_is(tmp_path, monkeypatch, capsys):
    written = []
    fake = SimpleNamespace(mimwrite=lambda path, frames, **options: written.append((path, frames, options)))
    monkeypatch.setitem(sys.modules, "imageio", fake)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", SimpleNamespace())
    frames = [Image.new("RGB", (10, 6))] * 2
    assert turntable.write_video(frames, tmp_path / "a.mp4", 12) is True
    assert written[0][1][0].shape == (6, 10, 3) and written[0][2]["fps"] == 12
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert turntable.write_video(frames, tmp_path / "b.mp4", 12) is False
    assert "pip install imageio imageio-ffmpeg" in capsys.readouterr().out


def test_contact_sheet_keeps_the_shape_of_its_images(tmp_path):
    """A wide black image within the cell of a square one has white above and below, and is not stretched."""
    turntable.contact_sheet([[Image.new("RGB", (200, 200), "red")], [Image.new("RGB", (200, 100))]], tmp_path / "s.png")
    sheet = np.asarray(Image.open(tmp_path / "s.png"))
    assert sheet.shape == (402, 200, 3)
    assert (sheet[:200] == [255, 0, 0]).all() and (sheet[252:352] == 0).all() and (sheet[352:] == 255).all()


def test_chosen_views_are_those_that_were_drawn(scenes):
    """`SceneDataset.sample` with the views that its `__getitem__` drew gives the same sample."""
    rows = list(load_scenes(scenes))
    drawn = SceneDataset(rows, hf_ttt.LaCTNVSProcessor(size=24), 2, 2, seed=4)
    poses = torch.tensor(rows[0]["camera_to_world"])
    inputs, targets = (
        [int((poses - pose).abs().amax((1, 2)).argmin()) for pose in drawn[0][name]]
        for name in ("camera_to_world", "target_camera_to_world")
    )
    assert len({*inputs, *targets}) == 4
    torch.testing.assert_close(drawn.sample(rows[0], inputs, targets), drawn[0])
