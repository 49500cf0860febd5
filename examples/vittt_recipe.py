# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""How `train_vittt_images.py` trains: augmentation, mixup, cutmix, a moving average of the weights and distillation.

Everything random here is drawn by torch, and a checkpoint keeps the state of its generators, so a run that goes on from
one equals an unbroken run; only RandAugment, if asked for, draws elsewhere.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import EvalPrediction, PreTrainedModel, Trainer, TrainerCallback

from hf_ttt.hub import TrainerCardMixin
from hf_ttt.metrics import Accuracy

EMA_FOLDER = "ema"


@dataclass
class RecipeArguments:
    """What is done to the images and the loss in training. The defaults are for handwritten digits."""

    rotation: float = field(default=12.0, metadata={"help": "Rotate by up to this many degrees."})
    zoom: float = field(default=0.15, metadata={"help": "Enlarge or shrink by up to this share."})
    shift: float = field(default=0.08, metadata={"help": "Shift by up to this share of a side."})
    crop_scale: float = field(default=1.0, metadata={"help": "Cut out a square of at least this share of the area."})
    horizontal_flip: bool = field(default=False, metadata={"help": "Mirror half of the images."})
    rand_augment: str | None = field(
        default=None, metadata={"help": "RandAugment before all that, 'rand-m9-mstd0.5-inc1' as published; needs timm."}
    )
    mixup: float = field(default=0.0, metadata={"help": "Mixup's alpha; 0 for none. Published: 0.8."})
    cutmix: float = field(default=0.0, metadata={"help": "Cutmix's alpha; 0 for none. Published: 1.0."})
    ema: bool = field(default=False, metadata={"help": "Keep a moving average of the weights, and evaluate it too."})
    ema_decay: float | None = field(
        default=None, metadata={"help": "Its decay in a step. Default: as published, 0.9996^(batch / 4096)."}
    )
    ema_warmup: bool = field(
        default=True, metadata={"help": "Hold the decay at step t below (1 + t) / (10 + t), which short runs need."}
    )
    mesa: float = field(
        default=0.0, metadata={"help": "Weight of the distillation from the moving average. Published: 1.0 to 2.0."}
    )
    mesa_start: float = field(default=0.25, metadata={"help": "Share of the training before the distillation."})

    def __post_init__(self):
        limits = {
            "rotation": (0, 180),
            "zoom": (0, 1),
            "shift": (0, 1),
            "crop_scale": (0, 1),
            "mixup": (0, math.inf),
            "cutmix": (0, math.inf),
            "ema_decay": (0, 1),
            "mesa": (0, math.inf),
            "mesa_start": (0, 1),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"--{name} {value} must be from {low} to {high}")
        if self.mesa and not self.ema:
            raise ValueError(f"--mesa {self.mesa} distils from the moving average: add --ema")


def timm_rand_augment(name: str | None) -> Any:
    """timm's RandAugment of PIL images; None for no name."""
    if name is None:
        return None
    try:
        from timm.data.auto_augment import rand_augment_transform
    except ImportError as error:
        raise ImportError(f"--rand_augment {name} needs timm (pip install timm), or leave it out") from error
    return rand_augment_transform(name, {"translate_const": 100, "img_mean": (124, 116, 104)})


def augment(pixels: Tensor, recipe: RecipeArguments) -> Tensor:
    """Images, each rotated, zoomed, shifted, cropped and mirrored at random; what is outside repeats the border.

    Args:
        pixels: [B, C, h, w].
        recipe: how much of each.

    Returns:
        [B, C, h, w].
    """
    count, (height, width) = len(pixels), pixels.shape[-2:]

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(count, *shape, device=pixels.device).uniform_(low, high)

    angle = uniform(-1, 1) * math.radians(recipe.rotation)
    side = uniform(recipe.crop_scale, 1).sqrt()
    scale = side * (1 + uniform(-1, 1) * recipe.zoom)
    shift = uniform(-1, 1, 2) * (2 * recipe.shift + 1 - side[:, None])
    mirror = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0) if recipe.horizontal_flip else torch.ones_like(side)
    cos, sin, aspect = scale * angle.cos(), scale * angle.sin(), height / width
    rows = [cos * mirror, -sin * aspect, shift[:, 0], sin * mirror / aspect, cos, shift[:, 1]]
    grid = F.affine_grid(torch.stack(rows, -1).view(-1, 2, 3), list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid.to(pixels.dtype), padding_mode="border", align_corners=False)


def soft_targets(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Classes [B] as probabilities [B, K]: 1 − smoothing for the class, and smoothing spread over all."""
    return F.one_hot(labels, num_classes).float() * (1 - smoothing) + smoothing / num_classes


def mix_images(pixels: Tensor, targets: Tensor, mixup: float, cutmix: float) -> tuple[Tensor, Tensor]:
    """Mix each image with the one at the mirrored place of the batch: blend (mixup), or paste a rectangle (cutmix).

    Args:
        pixels: [B, C, h, w].
        targets: [B, K].
        mixup, cutmix: α of the share ~ Beta(α, α); 0 leaves the way out. With both, a coin decides for each batch.

    Returns:
        pixels and targets, mixed in the same proportion.
    """
    if not mixup and not cutmix:
        return pixels, targets
    cut = bool(cutmix) and (not mixup or torch.rand(()).item() < 0.5)
    alpha = torch.tensor(cutmix if cut else mixup, dtype=torch.float64)
    share = torch.distributions.Beta(alpha, alpha).sample().item()
    if cut:
        top, bottom, left, right = random_box(*pixels.shape[-2:], 1 - share)
        share = 1 - (bottom - top) * (right - left) / math.prod(pixels.shape[-2:])
        mixed = pixels.clone()
        mixed[..., top:bottom, left:right] = pixels.flip(0)[..., top:bottom, left:right]
    else:
        mixed = share * pixels + (1 - share) * pixels.flip(0)
    return mixed, share * targets + (1 - share) * targets.flip(0)


def random_box(height: int, width: int, area: float) -> tuple[int, int, int, int]:
    """Top, bottom, left and right of a rectangle of a share `area`, less where it leaves the image."""
    edges = []
    for side in (height, width):
        half, centre = int(side * area**0.5) // 2, int(torch.randint(side, ()))
        edges += [max(centre - half, 0), min(centre + half, side)]
    return edges[0], edges[1], edges[2], edges[3]


class MovingAverage(TrainerCallback):
    """Keeps θ̄ ← d θ̄ + (1 − d) θ of weights and buffers after each step, in evaluation mode, and saves it.

    Args:
        model: a copy of the model in training.
        decay: d.
        warmup: whether d is at most (1 + t) / (10 + t) after step t.
    """

    def __init__(self, model: PreTrainedModel, decay: float, warmup: bool):
        self.model = model.eval().requires_grad_(False)
        self.decay, self.warmup = decay, warmup

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.model.to(args.device)

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        step = state.global_step
        decay = min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay
        new = model.state_dict()
        for name, old in self.model.state_dict().items():
            if old.is_floating_point():
                old.lerp_(new[name].to(old.dtype), 1 - decay)
            else:
                old.copy_(new[name])

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.model.save_pretrained(Path(args.output_dir) / f"checkpoint-{state.global_step}" / EMA_FOLDER)


def load_average(
    model: PreTrainedModel, recipe: RecipeArguments, batch_size: int, checkpoint: str | None
) -> MovingAverage | None:
    """The moving average that `--ema` asks for, of the model as it is, or as the checkpoint has it."""
    if not recipe.ema:
        return None
    if checkpoint is None:
        average = copy.deepcopy(model)
    elif (Path(checkpoint) / EMA_FOLDER).is_dir():
        average = type(model).from_pretrained(Path(checkpoint) / EMA_FOLDER, dtype=model.dtype)
    else:
        raise ValueError(f"--ema: the checkpoint {checkpoint!r} was made without it; leave it out or start anew")
    decay = 0.9996 ** (batch_size / 4096) if recipe.ema_decay is None else recipe.ema_decay
    return MovingAverage(average, decay, recipe.ema_warmup)


class ClassMetrics:
    """For `Trainer`: the accuracy; keeps the confusion matrix of the last evaluation, [true class, predicted class]."""

    def __init__(self, num_classes: int):
        self.num_classes = num_classes
        self.confusion = np.zeros((num_classes, num_classes), dtype=np.int64)

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        predicted, labels = prediction.predictions, prediction.label_ids
        pairs = np.bincount(labels * self.num_classes + predicted, minlength=self.num_classes**2)
        self.confusion = pairs.reshape(self.num_classes, self.num_classes)
        return Accuracy(keep_in_memory=True).compute(predictions=predicted, references=labels)


def predicted_class(logits: Any, labels: Tensor) -> Tensor:
    """For `Trainer`: keep the class of each image instead of its logits."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


class ImageTrainer(TrainerCardMixin, Trainer):
    """A `Trainer` that augments and mixes batches, and distils from a moving average of the weights."""

    def __init__(self, recipe: RecipeArguments, average: MovingAverage | None, **kwargs: Any):
        super().__init__(**kwargs)
        self.recipe, self.average = recipe, average
        self.model_accepts_loss_kwargs = False  # the loss is the mean of a batch
        if average is not None:
            self.add_callback(average)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not model.training:
            outputs = model(**inputs)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]
        pixels, targets = self.mixed_batch(inputs["pixel_values"], inputs["labels"])
        outputs = model(pixel_values=pixels)
        logits = outputs["logits"].float()
        loss = F.cross_entropy(logits, targets)
        if self.recipe.mesa and self.state.global_step >= self.recipe.mesa_start * self.state.max_steps:
            loss = loss + self.recipe.mesa * F.cross_entropy(logits, self.teacher_probabilities(pixels))
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def mixed_batch(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Augmented and mixed images, and their targets [B, K]."""
        targets = soft_targets(labels, self.model.config.num_labels, self.args.label_smoothing_factor)
        return mix_images(augment(pixels, self.recipe), targets, self.recipe.mixup, self.recipe.cutmix)

    @torch.no_grad()
    def teacher_probabilities(self, pixels: Tensor) -> Tensor:
        """Class probabilities [B, K] by the moving average."""
        with self.accelerator.autocast():
            return self.average.model(pixel_values=pixels).logits.float().softmax(-1)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """As in `Trainer`; the moving average is evaluated too, first, with "_ema" in the names of its metrics."""
        metrics = {}
        if self.average is not None:
            own = self.model, self.model_wrapped
            self.model = self.model_wrapped = self.average.model.to(self.args.device)
            try:
                metrics = super().evaluate(eval_dataset, ignore_keys, f"{metric_key_prefix}_ema")
            finally:
                self.model, self.model_wrapped = own
        return {**metrics, **super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)}
