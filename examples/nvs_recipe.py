# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What training does to views beside the model: which are drawn, the loss, and what is done about great gradients.

`train_lact_nvs.py` uses it.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import Trainer, TrainerCallback, TrainerState

from hf_ttt.data import SceneDataset, collate_scenes, sample_views
from hf_ttt.hub import TrainerCardMixin
from hf_ttt.metrics import LPIPS, PSNR, SSIM, load_lpips, view_squared_error, view_ssim

logger = logging.getLogger(__name__)

HALF_SIZE_SHARE = 0.6  # of the steps, by default
KEPT_BYTES = 2**30  # views of float32 that are kept in memory
STAGE_FIELDS = {"inputs": "num_input", "targets": "num_target", "size": "size"}


@dataclass
class RecipeArguments:
    """Loss, curriculum, and what is done about great gradients."""

    lpips_weight: float = field(
        default=0.0, metadata={"help": "Weight of LPIPS beside the squared error, and report it (needs lpips)."}
    )
    lpips_start: int = field(default=0, metadata={"help": "Step of the first loss with LPIPS."})
    curriculum: str | None = field(
        default=None,
        metadata={
            "help": "Views and image size from steps on (below 1, their share): '0:size=32,targets=2; 0.5:size=64'. "
            "Fields: inputs, targets, size (a side, or HEIGHTxWIDTH). Default: images of half the size first, where "
            "the patch size divides them, which are a quarter of the work; '' for none."
        },
    )
    clip_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are scaled down to this norm; 0: never."})
    skip_grad_norm: float = field(
        default=4.0, metadata={"help": "Steps with a gradient of a greater norm are left out; 0: none."}
    )
    skip_start: int = field(
        default=1000, metadata={"help": "Step of the first that is left out for that. Non-finite ones always are."}
    )

    def __post_init__(self):
        for name in ("lpips_weight", "lpips_start", "clip_grad_norm", "skip_grad_norm", "skip_start"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 0")
        self.stages = parse_curriculum(self.curriculum)


Stage = tuple[float, dict[str, Any]]  # from which step, or, below 1, share of all steps; what is set then


def parse_curriculum(text: str | None) -> list[Stage]:
    """'0:size=32,targets=2; 500:size=64' → [(0, {"size": (32, 32), "num_target": 2}), (500, {"size": (64, 64)})]"""
    stages: list[Stage] = []
    for stage in filter(None, (part.strip() for part in (text or "").split(";"))):
        found = re.fullmatch(r"(\d+|0?\.\d+):(.+)", stage)
        pairs = [
            re.fullmatch(r"\s*(\w+)=([1-9]\d*)(?:x([1-9]\d*))?\s*", part)
            for part in (found[2] if found else "").split(",")
        ]
        if not found or not all(
            pair and pair[1] in STAGE_FIELDS and (pair[1] == "size" or not pair[3]) for pair in pairs
        ):
            raise ValueError(
                f"--curriculum: {stage!r} is not STEP:field=number,… with the fields {', '.join(STAGE_FIELDS)}, such "
                "as '500:size=64,targets=4' or '500:size=48x64'"
            )
        fields = {}
        for pair in pairs:
            number = int(pair[2])
            fields[STAGE_FIELDS[pair[1]]] = (number, int(pair[3] or number)) if pair[1] == "size" else number
        stages.append((float(found[1]), fields))
    steps = [step for step, _ in stages]
    if steps != sorted(set(steps)):
        raise ValueError(f"--curriculum: the steps {steps} must grow")
    return stages


def half_size_first(size: tuple[int, int], patch: int) -> list[Stage]:
    """Stages that begin with half of this height and width; none where the patch size does not divide that."""
    if any(side % (2 * patch) for side in size):
        return []
    return [(0, {"size": (size[0] // 2, size[1] // 2)}), (HALF_SIZE_SHARE, {"size": size})]


def random_of(*parts: int) -> random.Random:
    """A source of randomness that depends on these numbers only."""
    return random.Random(" ".join(map(str, parts)))


class TrainingViews(SceneDataset):
    """Views of scenes, several draws of each in an epoch, which depend on seed and epoch only: so a run that was
    interrupted draws as one that was not. Where all of them fit into `KEPT_BYTES`, each is read and resized once.

    Args:
        draws: of each scene in an epoch.
        seed: a number.
        scenes, processor, num_input, num_target: as in `SceneDataset`.
    """

    def __init__(self, *args: Any, draws: int, seed: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.draws, self.run_seed, self.epoch = draws, seed, 0
        self.num_views = sum(len(scene["file_path"]) for scene in self.scenes)
        self.kept: dict[int, dict[str, Tensor]] = {}
        self.kept_size: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.scenes) * self.draws

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw, place = divmod(index, len(self.scenes))
        rng, scene = random_of(self.run_seed, self.epoch, draw, place), self.scenes[place]
        inputs, targets = sample_views(len(scene["file_path"]), self.num_input, self.num_target, rng)
        if self.processor.normalize_scene or not self.fit():
            return self.sample(scene, inputs, targets)
        views = self.views_of(place)
        chosen = {f"target_{name}": value[targets] for name, value in views.items()}
        return {**{name: value[inputs] for name, value in views.items()}, **chosen}

    def fit(self) -> bool:
        """Whether all views fit into `KEPT_BYTES`."""
        height, width = self.processor.size.values()
        return 3 * 4 * height * width * self.num_views <= KEPT_BYTES

    def views_of(self, place: int) -> dict[str, Tensor]:
        """All views of a scene as the model takes them."""
        if self.kept_size != self.processor.size:
            self.kept, self.kept_size = {}, self.processor.size
        if place not in self.kept:
            scene = self.scenes[place]
            views = self._views(scene, range(len(scene["file_path"])))
            found = self.processor(**views, camera_convention="opencv")
            self.kept[place] = {name: value[0] for name, value in found.items()}
        return self.kept[place]


class Curriculum(TrainerCallback):
    """Changes how many views are drawn, and their size, at steps of training; and tells the views their epoch.

    Batches are drawn ahead of their step, so that a stage reaches the model a step or two after it begins.

    Args:
        stages: of `parse_curriculum`.
        views: the data set to train on; its processor should be its own.
    """

    def __init__(self, stages: list[Stage], views: TrainingViews):
        self.stages, self.views = stages, views

    def on_train_begin(self, args, state, control, **kwargs):
        self.apply(state)

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.views.epoch = int(state.epoch)

    def on_step_end(self, args, state, control, **kwargs):
        self.apply(state)

    def apply(self, state: TrainerState) -> None:
        """Set what holds from the last stage on that has begun."""
        for start, fields in self.stages:
            first = start if start >= 1 else start * state.max_steps
            for name, value in fields.items() if first <= state.global_step else ():
                if name == "size":
                    self.views.processor.size = dict(zip(("height", "width"), value, strict=True))
                else:
                    setattr(self.views, name, value)


class GradientNormGuard(TrainerCallback):
    """Clips gradients by their norm, and leaves out the steps where it is not finite or too great.

    `Trainer` itself must not clip (`max_grad_norm=0`), so that the norm is seen as it is. Without gradients an
    optimizer changes nothing: neither weights nor its averages.

    Args:
        clip: norm to which gradients are scaled down; 0 for never.
        bound: norm above which a step is left out; 0 for none.
        start: number of steps before the first that is left out for being above it.
    """

    def __init__(self, clip: float, bound: float, start: int):
        self.clip, self.bound, self.start, self.skipped = clip, bound, start, 0

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        parameters = [p for p in model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters])
        too_great = self.bound > 0 and state.global_step >= self.start and norm > self.bound
        if too_great or not torch.isfinite(norm):
            logger.warning(f"Step {state.global_step} is left out: its gradient has norm {norm:.3g}.")
            self.skipped += 1
            model.zero_grad(set_to_none=True)
        elif self.clip > 0:
            clip_grads_with_norm_(parameters, self.clip, norm)


class ViewScores:
    """PSNR, SSIM and, where there is a function for it, LPIPS of views, added up over batches.

    An instance is also `compute_metrics` of a `Trainer` with `batch_eval_metrics`.
    """

    def __init__(self, lpips: Callable[[Tensor, Tensor], Tensor] | None = None):
        self.lpips = lpips
        self.metrics = [PSNR(keep_in_memory=True), SSIM(keep_in_memory=True)]
        self.metrics += [] if lpips is None else [LPIPS(keep_in_memory=True)]

    def add(self, rendered: Tensor, target: Tensor) -> None:
        """Views [..., 3, h, w] in [0, 1]."""
        error, count = view_squared_error(rendered, target)
        rows = [{"squared_error": error, "num_values": count}, {"ssim": view_ssim(rendered, target)}]
        if self.lpips is not None:
            with torch.no_grad():
                rows.append({"lpips": self.lpips(rendered, target)})
        for metric, row in zip(self.metrics, rows, strict=True):
            metric.add_batch(**{name: values.flatten().tolist() for name, values in row.items()})

    def compute(self) -> dict[str, float]:
        """Results of all views since the last call."""
        return {name: value for metric in self.metrics for name, value in metric.compute().items()}

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        self.add(prediction.predictions, prediction.label_ids)
        return self.compute() if compute_result else {}


class NVSTrainer(TrainerCardMixin, Trainer):
    """A `Trainer` whose loss in training is that of the model and, from a step on, LPIPS.

    Args:
        recipe: its loss, its curriculum, and what is done about great gradients.
        processor: saved with the model.
    """

    def __init__(self, recipe: RecipeArguments, processor: Any, **kwargs: Any):
        self.lpips = load_lpips() if recipe.lpips_weight > 0 else None
        super().__init__(compute_metrics=ViewScores(self.lpips), data_collator=collate_scenes, **kwargs)
        self.recipe, self.processor = recipe, processor
        self.guard = GradientNormGuard(recipe.clip_grad_norm, recipe.skip_grad_norm, recipe.skip_start)
        self.add_callback(self.guard)
        if self.train_dataset is not None:
            self.add_callback(Curriculum(recipe.stages, self.train_dataset))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs["loss"]
        if model.training and self.lpips is not None and self.state.global_step >= self.recipe.lpips_start:
            distance = self.lpips(outputs["rendered"], inputs["target_pixel_values"]).mean()
            loss = loss + self.recipe.lpips_weight * distance
        return (loss, outputs) if return_outputs else loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model and its processor, which as a `processing_class` would need a tokenizer."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            self.processor.save_pretrained(Path(output_dir or self.args.output_dir))
