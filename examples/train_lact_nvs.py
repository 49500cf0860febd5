# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Train or evaluate LaCT-NVS, which renders new views of a scene from a few posed images of it.

The scenes come from a folder or file of posed images (as published with LaCT, COLMAP text models or NeRF's
transforms.json) or, by default, are rendered on the spot: coloured solids on a floor. Views of the training scenes and
whole scenes are held out, and the model is compared there with what needs no model, and with itself when it is given
the input views of another scene.

    python examples/train_lact_nvs.py --output_dir solids --do_train --do_eval
    python examples/train_lact_nvs.py --output_dir objects --do_train --do_eval --scenes objects/ --image_size 128
    python examples/train_lact_nvs.py --output_dir rooms --do_train --do_eval --scenes rooms/ --normalize_scene \\
        --image_size 72 128 --num_input 8 --size l12_ttt1x --max_steps 20000 --learning_rate 4e-4 \\
        --curriculum "0:size=40x64; 5000:size=72x128" --lpips_weight 1 --lpips_start 5000

A run that finds a checkpoint in its output directory goes on from there. Needs `pip install hf-ttt[nvs]`.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from nvs_recipe import NVSTrainer, RecipeArguments, TrainingViews, ViewScores, half_size_first, random_of
from nvs_solids import write_scenes
from render_turntable import contact_sheet
from torch import Tensor
from train_vittt_images import find_checkpoint, new_figure, parse_overrides, set_up_logging
from transformers import HfArgumentParser, TrainingArguments, set_seed

from hf_ttt import LaCTNVSConfig, LaCTNVSModel, LaCTNVSProcessor
from hf_ttt.data import SceneDataset, collate_scenes, load_scenes
from hf_ttt.modeling_lact_nvs import to_scene

logger = logging.getLogger(__name__)

MINI = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "block_config": [
        {"type": "attention", "head_dim": 32},
        {"type": "ttt", "head_dim": 32},
        {"type": "mlp"},
    ],
    "initializer_range": 0.1,  # widths so small need greater initial weights than the published ones
    "ttt_read_with": "key",  # what is written by like tokens is read by them from the first step on
}
SIZE_FIELDS = ("hidden_size", "num_hidden_layers", "block_config")
TRIVIAL = {
    "mean_training_image": "mean training image",
    "mean_input": "mean of the input views",
    "nearest_input": "nearest input view",
}
PREDICTORS = {"model": "model", **TRIVIAL, "other_inputs": "model, another scene's inputs"}
SETS = {"views": "held-out views of training scenes", "scenes": "held-out scenes"}
SHEET_ROWS = 4  # of each set


@dataclass
class ModelArguments:
    """The model."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Saved model to go on with, instead of a new one; the arguments below are then not used."},
    )
    size: Literal["mini", "l12_ttt1x", "l14_ttt2x", "l24_ttt2x", "l24_ttt4x"] = field(
        default="mini", metadata={"help": "A published size, or one for small images on a CPU (mini)."}
    )
    variant: Literal["baseline", "variant1", "variant2", "variant3", "variant4", "variant5", "variant6"] | None = field(
        default=None,
        metadata={
            "help": "Row of the paper's Table 2. Default: variant6 for size mini, which learns soonest; else baseline."
        },
    )
    ttt_implementation: Literal["auto", "recurrent", "parallel"] | None = field(
        default=None, metadata={"help": "Evaluation of the TTT layers. Default: what the configuration says."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Further fields of the configuration: 'patch_size=4,hidden_size=192'."}
    )


@dataclass
class DataArguments:
    """The scenes, which of them are held out, and how many views are taken of them."""

    scenes: str | None = field(
        default=None,
        metadata={"help": "Folder or file of scenes. Default: solids are rendered into the output directory."},
    )
    scene_format: Literal["auto", "json", "colmap", "nerf"] = field(
        default="auto", metadata={"help": "Format of the scenes."}
    )
    num_input: int = field(default=4, metadata={"help": "Input views."})
    num_target: int = field(default=4, metadata={"help": "Views to render for a scene of a batch of training."})
    image_size: list[int] | None = field(
        default=None,
        metadata={"help": "Height and width of the images in pixels, or one side. Default: the model's; else 64."},
    )
    normalize_scene: bool = field(
        default=False,
        metadata={"help": "Move and scale each scene's cameras, as published for scenes but not objects."},
    )
    held_out_views: int = field(
        default=4, metadata={"help": "Views of each scene that are rendered in evaluation only."}
    )
    held_out_scenes: int | None = field(
        default=None, metadata={"help": "Scenes that are not trained on, the last ones. Default: an eighth."}
    )
    draws_per_epoch: int = field(default=8, metadata={"help": "How often an epoch draws views of each scene."})
    max_eval_scenes: int = field(default=16, metadata={"help": "Evaluate on this many scenes of a kind at most."})
    solid_scenes: int = field(default=128, metadata={"help": "Number of scenes of solids to render."})
    solid_views: int = field(default=24, metadata={"help": "Views of each scene of solids."})

    def __post_init__(self):
        for name in ("num_input", "num_target", "held_out_views", "draws_per_epoch", "max_eval_scenes"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1")
        if self.image_size is not None and (len(self.image_size) > 2 or min(self.image_size) < 1):
            raise ValueError(f"--image_size {self.image_size} must be a height and a width, or one side")


@dataclass
class NVSTrainingArguments(TrainingArguments):
    """`TrainingArguments` with defaults for the solids, and no need for --use_cpu without an accelerator."""

    per_device_train_batch_size: int = field(default=4, metadata={"help": "Scenes in a batch of training."})
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Scenes in a batch of evaluation."})
    max_steps: int = field(default=4000, metadata={"help": "Steps of training."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Greatest learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "How the learning rate falls."})
    warmup_steps: float = field(default=0.05, metadata={"help": "Steps of warm-up; below 1, their share."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Adam's second decay."})
    weight_decay: float = field(default=0.05, metadata={"help": "Weight decay, except of biases and norms."})
    max_grad_norm: float = field(default=0.0, metadata={"help": "Not used; see --clip_grad_norm."})
    logging_steps: float = field(default=50, metadata={"help": "Steps between two values of the loss."})
    eval_strategy: str = field(default="steps", metadata={"help": "When to evaluate in training: no, steps or epoch."})
    eval_steps: float | None = field(default=0.2, metadata={"help": "Steps between two evaluations, or their share."})
    save_steps: float = field(default=0.25, metadata={"help": "Steps between two checkpoints, or their share."})
    save_total_limit: int | None = field(default=1, metadata={"help": "Checkpoints that are kept."})
    bf16: bool | None = field(default=None, metadata={"help": "Use bfloat16. Default: on a GPU that has it."})

    def __post_init__(self):
        if not torch.accelerator.is_available():
            self.use_cpu, self.dataloader_pin_memory = True, False
        if self.bf16 is None:
            self.bf16 = not self.use_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        if self.max_grad_norm:
            raise ValueError(
                f"--max_grad_norm {self.max_grad_norm} would clip gradients before --skip_grad_norm sees them: use "
                "--clip_grad_norm"
            )
        if not self.do_train:
            self.eval_strategy = "no"  # transformers takes any other as --do_eval
        self.label_names, self.batch_eval_metrics = ["target_pixel_values"], True
        super().__post_init__()


@dataclass
class Arguments:
    """All arguments of a run."""

    model: ModelArguments
    data: DataArguments
    recipe: RecipeArguments
    training: NVSTrainingArguments


def parse_arguments(args: list[str] | None) -> Arguments:
    """Arguments from a list of strings (default: the command line), or from the one JSON or YAML file that it names."""
    kinds = (ModelArguments, DataArguments, RecipeArguments, NVSTrainingArguments)
    parser = HfArgumentParser(kinds, description=__doc__.split("\n\n    ")[0], allow_abbrev=False)
    args = sys.argv[1:] if args is None else args
    if len(args) == 1 and args[0].endswith(".json"):
        parsed = Arguments(*parser.parse_json_file(args[0]))
    elif len(args) == 1 and args[0].endswith((".yaml", ".yml")):
        parsed = Arguments(*parser.parse_yaml_file(args[0]))
    else:
        parsed = Arguments(*parser.parse_args_into_dataclasses(args))
    if not parsed.training.do_train and not parsed.training.do_eval:
        raise ValueError("nothing to do: give --do_train, --do_eval or both")
    if parsed.recipe.curriculum != "" and parsed.training.dataloader_num_workers:
        raise ValueError(
            "--curriculum needs --dataloader_num_workers 0, since other processes do not see a stage begin; or give "
            "--curriculum '' for none, which is not the default"
        )
    return parsed


# ---- data ----


class EvaluationViews(SceneDataset):
    """The held-out views of scenes as targets, and input views drawn from the others, always the same.

    Args:
        seed: a number.
        scenes, processor, num_input, num_target: as in `SceneDataset`.
    """

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        scene = self.scenes[index]
        others, held_out = split_views(len(scene["file_path"]), self.num_target)
        return self.sample(scene, random_of(self.seed, index).sample(others, self.num_input), held_out)


def split_views(count: int, held_out: int) -> tuple[list[int], list[int]]:
    """Indices of the views to train on, and of those held out, which are spread evenly."""
    chosen = [(2 * i + 1) * count // (2 * held_out) for i in range(held_out)]
    return [i for i in range(count) if i not in set(chosen)], chosen


def without_held_out(scene: dict[str, Any], held_out: int) -> dict[str, Any]:
    """A row of `load_scenes` with its views to train on."""
    kept, _ = split_views(len(scene["file_path"]), held_out)
    return {name: value if name == "name" else [value[i] for i in kept] for name, value in scene.items()}


def read_scenes(args: Arguments, side: int) -> list[dict[str, Any]]:
    """Rows of `load_scenes`; solids are rendered where no scenes are named, in images of this side.

    Raises:
        ValueError: for a scene with too few views.
    """
    data, recipe, training = args.data, args.recipe, args.training
    path = data.scenes
    if path is None:
        with training.main_process_first(desc="rendering solids"):
            folder = Path(training.output_dir) / "_solids"
            path = write_scenes(folder, data.solid_scenes, data.solid_views, side, training.seed)
    scenes = list(load_scenes(path, data.scene_format))
    most = {
        name: max([getattr(data, name), *(fields.get(name, 0) for _, fields in recipe.stages)])
        for name in ("num_input", "num_target")
    }
    wanted = most["num_input"] + most["num_target"] + data.held_out_views
    for scene in scenes:
        if len(scene["file_path"]) < wanted:
            raise ValueError(
                f"--scenes: scene {scene['name']!r} has {len(scene['file_path'])} views; {most['num_input']} inputs "
                f"(--num_input, --curriculum), {most['num_target']} targets (--num_target) and {data.held_out_views} "
                f"held-out views (--held_out_views) are {wanted}"
            )
    return scenes


def split_scenes(
    scenes: list[dict[str, Any]], held_out: int | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The scenes to train on, and the last ones, which are held out."""
    held_out = len(scenes) // 8 if held_out is None else held_out
    if not 0 <= held_out < len(scenes):
        raise ValueError(
            f"--held_out_scenes {held_out} must be from 0 to {len(scenes) - 1}: there are {len(scenes)} scenes"
        )
    return scenes[: len(scenes) - held_out], scenes[len(scenes) - held_out :]


def load_processor(args: Arguments, checkpoint: str | None) -> LaCTNVSProcessor:
    """The processor of the checkpoint or model, or a new one, with the size that was asked for."""
    name = checkpoint or args.model.model_name_or_path
    size = args.data.image_size
    size = (
        None
        if size is None
        else dict(zip(("height", "width"), (size * 2)[:2] if len(size) == 1 else size, strict=True))
    )
    if name is None:
        return LaCTNVSProcessor(size=size or 64, normalize_scene=args.data.normalize_scene)
    processor = LaCTNVSProcessor.from_pretrained(name)
    processor.size = size or processor.size
    processor.normalize_scene = processor.normalize_scene or args.data.normalize_scene
    return processor


def load_model(model_args: ModelArguments, checkpoint: str | None) -> LaCTNVSModel:
    """A new model, or the one of the checkpoint or of `--model_name_or_path`."""
    name = checkpoint or model_args.model_name_or_path
    chosen = {} if model_args.ttt_implementation is None else {"ttt_implementation": model_args.ttt_implementation}
    if name is not None:
        return LaCTNVSModel.from_pretrained(name, dtype=torch.float32, **chosen)
    size, variant = MINI, "variant6"
    if model_args.size != "mini":
        published = LaCTNVSConfig.size(model_args.size)
        size, variant = {name: getattr(published, name) for name in SIZE_FIELDS}, "baseline"
    overrides = parse_overrides(model_args.config_overrides, LaCTNVSConfig)
    return LaCTNVSModel(LaCTNVSConfig.variant(model_args.variant or variant, **{**size, **chosen, **overrides}))


def check_sizes(args: Arguments, processor: LaCTNVSProcessor, patch: int) -> None:
    """Raise a `ValueError` for image sizes that the patch size does not divide."""
    sizes = [("--image_size", tuple(processor.size.values()))]
    sizes += [("--curriculum: size", fields["size"]) for _, fields in args.recipe.stages if "size" in fields]
    for name, size in sizes:
        if any(side % patch for side in size):
            raise ValueError(f"{name} {size[0]} × {size[1]} (height × width) must be multiples of patch_size={patch}")


# ---- evaluation ----


def mean_training_image(views: SceneDataset) -> Tensor:
    """The mean [3, h, w] of input and target views, of one draw of each scene."""
    total = sum(
        torch.cat([sample["pixel_values"], sample["target_pixel_values"]]).double().mean(0)
        for sample in (views[i] for i in range(len(views.scenes)))
    )
    return (total / len(views.scenes)).float()


def nearest_input(batch: dict[str, Tensor]) -> Tensor:
    """For each target view the input view [B, V', 3, h, w] whose camera is nearest, by the distance of their places."""
    targets = to_scene(batch["target_camera_to_world"], batch.get("world_to_scene"), batch.get("scene_scale"))
    places = [poses[..., :3, 3] for poses in (targets, batch["camera_to_world"])]
    nearest = torch.cdist(*places).argmin(-1)  # [B, V']
    return batch["pixel_values"][torch.arange(len(nearest), device=nearest.device)[:, None], nearest]


def predictions(
    model: LaCTNVSModel, batch: dict[str, Tensor], others: dict[str, Tensor] | None, mean_image: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """What each of `PREDICTORS` gives for the target views [B, V', 3, h, w] of a batch.

    Args:
        others: input views of other scenes, if there are any.
        mean_image: of training.
    """
    target = batch["target_pixel_values"]
    size = tuple(target.shape[-2:])

    def render(views: dict[str, Tensor]) -> Tensor:
        names = ("pixel_values", "intrinsics", "camera_to_world", "world_to_scene", "scene_scale")
        scene = model.reconstruct(**{name: views[name] for name in names if name in views})
        return model.render(scene, batch["target_intrinsics"], batch["target_camera_to_world"], size)

    yield "model", render(batch)
    yield "mean_training_image", mean_image.to(target.device).expand_as(target)
    yield "mean_input", batch["pixel_values"].mean(1, keepdim=True).expand_as(target)
    yield "nearest_input", nearest_input(batch)
    if others is not None:
        yield "other_inputs", render(others)


@torch.no_grad()
def compare(
    model: LaCTNVSModel,
    views: EvaluationViews,
    mean_image: Tensor,
    batch_size: int,
    lpips: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> dict[str, dict[str, float]]:
    """PSNR, SSIM and LPIPS of what each of `PREDICTORS` gives for held-out views."""
    model.eval()
    scores: dict[str, ViewScores] = {}
    count = len(views)
    for start in range(0, count, batch_size):
        places = range(start, min(start + batch_size, count))
        batch = on_device(collate_scenes([views[i] for i in places]), model.device)
        others = None
        if count > 1:
            others = on_device(collate_scenes([views[(i + 1) % count] for i in places]), model.device)
        for name, rendered in predictions(model, batch, others, mean_image):
            scores.setdefault(name, ViewScores(lpips)).add(rendered, batch["target_pixel_values"])
    return {name: score.compute() for name, score in scores.items()}


def on_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch there."""
    return {name: value.to(device) for name, value in batch.items()}


def summary(results: dict[str, dict[str, float]]) -> dict[str, float]:
    """The model's numbers, its gain in decibels over the best of `TRIVIAL`, and what another scene's inputs cost it."""
    found = dict(results["model"])
    found["gain_over_trivial"] = found["psnr"] - max(results[name]["psnr"] for name in TRIVIAL if name in results)
    if "other_inputs" in results:
        found["cost_of_other_inputs"] = found["psnr"] - results["other_inputs"]["psnr"]
    return found


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """The results of all sets as text."""
    lines = []
    for name, rows in results.items():
        columns = list(rows["model"])
        lines += ["", f"{SETS[name]:<36}" + "".join(f"{column:>13}" for column in columns)]
        lines += [
            f"  {label:<34}" + "".join(f"{rows[key][column]:>13.3f}" for column in columns)
            for key, label in PREDICTORS.items()
            if key in rows
        ]
        short = summary(rows)
        lines.append(
            f"  {short['gain_over_trivial']:+.2f} dB beside the best without a model"
            + (
                f"; another scene's inputs cost {short['cost_of_other_inputs']:.2f} dB"
                if "cost_of_other_inputs" in short
                else ""
            )
        )
    return "\n".join(lines)


# ---- pictures ----


@torch.no_grad()
def draw_sheet(model: LaCTNVSModel, views: dict[str, EvaluationViews], path: str | Path) -> None:
    """Write a contact sheet: a row for a scene, with its input views, a target, its rendering, and the error (white:
    none)."""
    rows = []
    for dataset in views.values():
        for i in range(min(SHEET_ROWS, len(dataset))):
            batch = on_device(collate_scenes([dataset[i]]), model.device)
            rendered = model(**batch).rendered[0, :1]
            target = batch["target_pixel_values"][0, :1]
            error = 1 - (rendered - target).abs().mean(1, keepdim=True).expand_as(target)
            images = torch.cat([batch["pixel_values"][0], target, rendered, error])
            rows.append(dataset.processor.post_process_novel_views(images[None])[0])
    inputs = len(rows[0]) - 3
    contact_sheet(rows, path, [*(f"input {i + 1}" for i in range(inputs)), "target", "rendering", "error"])


def plot_history(history: list[dict[str, float]], path: str | Path) -> bool:
    """Draw the loss, and the PSNR of held-out views; returns whether it was written, False without matplotlib.

    Args:
        history: `trainer.state.log_history`.
        path: the picture to write.
    """
    figure = new_figure(8, 7)
    if figure is None:
        return False
    top, bottom = figure.subplots(2, sharex=True)
    curves = [(top, "loss", "training", "-")]
    curves += [
        (axes, f"eval_{name}_{key}", label, "o-")
        for name, label in SETS.items()
        for axes, key in ((top, "loss"), (bottom, "psnr"))
    ]
    for axes, name, label, style in curves:
        points = [(log["step"], log[name]) for log in history if name in log]
        if points:
            axes.plot(*zip(*points, strict=True), style, markersize=4, label=f"{label}, last {points[-1][1]:.4g}")
    top.set(ylabel="loss", yscale="log")
    bottom.set(ylabel="PSNR (dB), mean of views", xlabel="step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
    figure.savefig(path, dpi=150)
    return True


# ---- the run ----


def train(trainer: NVSTrainer, checkpoint: str | None) -> dict[str, float]:
    """Train, then save model, processor, metrics and state."""
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    metrics["train_scenes"] = len(trainer.train_dataset.scenes)
    trainer.save_model()
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    return metrics


def evaluate(trainer: NVSTrainer, mean_image: Tensor) -> dict[str, float]:
    """Compare the model with `TRIVIAL` on held-out views; print a table, draw a contact sheet and save the numbers."""
    held_out, folder = trainer.eval_dataset, Path(trainer.args.output_dir)
    results = {
        name: compare(trainer.model, views, mean_image, trainer.args.per_device_eval_batch_size, trainer.lpips)
        for name, views in held_out.items()
    }
    metrics = {f"{name}_{key}": value for name, rows in results.items() for key, value in summary(rows).items()}
    if trainer.is_world_process_zero():
        print(table(results))
        (folder / "comparison.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
        draw_sheet(trainer.model, held_out, folder / "contact_sheet.png")
    trainer.save_metrics("eval", metrics)
    return metrics


def run(args: Arguments) -> dict[str, float]:
    """Run the whole job and return its metrics."""
    data, training = args.data, args.training
    checkpoint = find_checkpoint(training)
    set_seed(training.seed)
    model, processor = load_model(args.model, checkpoint), load_processor(args, checkpoint)
    check_sizes(args, processor, model.config.patch_size)
    if args.recipe.curriculum is None:
        args.recipe.stages = half_size_first(tuple(processor.size.values()), model.config.patch_size)
    scenes, new_scenes = split_scenes(read_scenes(args, max(processor.size.values())), data.held_out_scenes)
    logger.info(f"{model.num_parameters():,} parameters; {len(scenes)} scenes, {len(new_scenes)} more are held out")

    kept = [without_held_out(scene, data.held_out_views) for scene in scenes]
    counts = {"num_input": data.num_input, "num_target": data.num_target}
    draws = {"draws": data.draws_per_epoch, "seed": training.seed}
    held_out = {
        name: EvaluationViews(
            rows[: data.max_eval_scenes], processor, data.num_input, data.held_out_views, seed=training.seed
        )
        for name, rows in (("views", scenes), ("scenes", new_scenes))
        if rows
    }
    views = TrainingViews(kept, copy.deepcopy(processor), **counts, **draws) if training.do_train else None
    trainer = NVSTrainer(args.recipe, processor, model=model, args=training, train_dataset=views, eval_dataset=held_out)
    metrics: dict[str, float] = {}
    if training.do_train:
        metrics |= train(trainer, checkpoint)
    if training.do_eval:
        metrics |= evaluate(trainer, mean_training_image(TrainingViews(kept, processor, **counts, **draws)))
    if training.do_train and trainer.is_world_process_zero():
        plot_history(trainer.state.log_history, Path(training.output_dir) / "loss_curve.png")
    if training.do_train:
        publish = trainer.push_to_hub if training.push_to_hub else trainer.create_model_card
        measured = {name: metrics[name] for name in metrics if name.startswith(tuple(f"{kind}_" for kind in SETS))}
        publish(
            dataset="solids on a floor" if data.scenes is None else Path(data.scenes).name, metrics=measured or None
        )
    return metrics


def main(args: list[str] | None = None) -> dict[str, float]:
    """Run the whole job and return its metrics; `args` as on the command line."""
    parsed = parse_arguments(args)
    set_up_logging(parsed.training)
    logger.setLevel(logging.INFO if parsed.training.should_log else parsed.training.get_process_log_level())
    return run(parsed)


if __name__ == "__main__":
    main()
