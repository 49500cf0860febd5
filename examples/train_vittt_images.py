# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Train, fine-tune or evaluate a ViTTT or H-ViTTT image classifier.

The images come from a folder with one subfolder for each class, from a data set of your choice, or, by default, from
scikit-learn: 1,797 handwritten digits, which need no download. Whole batches are augmented on the device; mixup,
cutmix, label smoothing, an exponential moving average of the weights (EMA) and distillation from it (MESA) are there.

    python examples/train_vittt_images.py --output_dir digits --do_train --do_eval
    python examples/train_vittt_images.py --output_dir digits --do_train --do_eval --split writers --seeds 0 1 2
    python examples/train_vittt_images.py --output_dir flowers --do_train --do_eval --train_dir flowers/ \\
        --model h_vittt --size tiny --horizontal_flip --crop_scale 0.25 --rotation 0 --zoom 0 --shift 0 \\
        --mixup 0.8 --cutmix 1.0 --ema --mesa 1.0

A run that finds a checkpoint in its output directory goes on from there. Needs `pip install hf-ttt[examples]`.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch
import transformers
from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from vittt_recipe import (
    EMA_FOLDER,
    ClassMetrics,
    ImageTrainer,
    RecipeArguments,
    load_average,
    predicted_class,
    timm_rand_augment,
)

import hf_ttt

logger = logging.getLogger(__name__)

CONFIGS = {"vittt": hf_ttt.ViTTTConfig, "h_vittt": hf_ttt.HViTTTConfig}
SIZE_FIELDS = {
    "vittt": ("hidden_size", "num_hidden_layers", "num_attention_heads", "drop_path_rate", "patch_size"),
    "h_vittt": ("hidden_sizes", "depths", "num_attention_heads", "drop_path_rate"),
}
MINI = {
    "vittt": {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3, "patch_size": 8},
    "h_vittt": {"hidden_sizes": [32, 64, 128], "depths": [1, 2, 1]},
}
CACHED_BYTES = 2**30  # a data set whose processed images take no more than this is processed once


@dataclass
class ModelArguments:
    """The model."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Saved model to go on with, instead of a new one; its head is replaced if it has other classes. "
            "The architecture below is then not used."
        },
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run code that comes with a model that is not of hf-ttt."}
    )
    model: Literal["vittt", "h_vittt"] = field(default="vittt", metadata={"help": "Architecture of a new model."})
    size: Literal["mini", "tiny", "small", "base"] = field(
        default="mini", metadata={"help": "A published size, or one for small images on a CPU (mini)."}
    )
    variant: Literal["baseline", "variant1", "variant2", "variant3", "variant4", "variant5", "variant6"] = field(
        default="baseline", metadata={"help": "Row of the paper's Table 2."}
    )
    ttt_implementation: Literal["auto", "recurrent", "parallel"] | None = field(
        default=None, metadata={"help": "Evaluation of the TTT blocks. Default: what the configuration says."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Further fields of the configuration: 'patch_size=4,drop_path_rate=0.1'."}
    )


@dataclass
class DataArguments:
    """The images, and which of them are held out."""

    train_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder of images, with a subfolder for each class. Default: scikit-learn's handwritten digits."
        },
    )
    validation_dir: str | None = field(default=None, metadata={"help": "Such a folder to evaluate on."})
    dataset_name: str | None = field(default=None, metadata={"help": "Data set for datasets.load_dataset."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    image_column: str = field(default="image", metadata={"help": "Column of the data set that holds the images."})
    label_column: str = field(default="label", metadata={"help": "Column of the data set that holds the classes."})
    validation_fraction: float = field(
        default=0.2, metadata={"help": "Without validation images: share of the images that is held out."}
    )
    split: Literal["random", "writers"] = field(
        default="random",
        metadata={
            "help": "What is held out: images at random, by the seed, or (digits only) the last ones, "
            "which are by other writers than the first."
        },
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on this many images at most."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on this many images at most."})
    image_size: int | None = field(
        default=None, metadata={"help": "Side of the images in pixels. Default: the model's; else 224, digits 32."}
    )

    def __post_init__(self):
        if self.dataset_name is not None and (self.train_dir or self.validation_dir):
            raise ValueError("--dataset_name excludes --train_dir and --validation_dir: give one kind")
        if self.validation_dir is not None and self.train_dir is None:
            raise ValueError("--validation_dir needs --train_dir, whose subfolders say what the classes are")
        if self.split == "writers" and not self.digits:
            raise ValueError("--split writers is for the digits: leave it out, or leave out the other images")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"--validation_fraction {self.validation_fraction} must be at least 0 and below 1")
        for name in ("max_train_samples", "max_eval_samples", "image_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1")

    @property
    def digits(self) -> bool:
        """Whether no other images are named."""
        return self.train_dir is None and self.dataset_name is None


@dataclass
class ImageTrainingArguments(TrainingArguments):
    """`TrainingArguments` with defaults for handwritten digits, and no need for --use_cpu without an accelerator."""

    seeds: list[int] | None = field(
        default=None, metadata={"help": "Run with each of these seeds, in subfolders seed-N, and print the means."}
    )
    per_device_train_batch_size: int = field(default=64, metadata={"help": "Images in a batch of training."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Images in a batch of evaluation."})
    num_train_epochs: float = field(default=30.0, metadata={"help": "Times to go through the images."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Greatest learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "How the learning rate falls."})
    warmup_steps: float = field(default=0.1, metadata={"help": "Steps of warm-up; below 1, their share."})
    weight_decay: float = field(default=0.05, metadata={"help": "Weight decay, except of biases and norms."})
    label_smoothing_factor: float = field(default=0.1, metadata={"help": "Share of a label given to all classes."})
    logging_steps: float = field(default=20, metadata={"help": "Steps between two values of the loss."})
    eval_strategy: str = field(default="steps", metadata={"help": "When to evaluate in training: no, steps or epoch."})
    eval_steps: float | None = field(default=0.1, metadata={"help": "Steps between two evaluations, or their share."})

    def __post_init__(self):
        if not torch.accelerator.is_available():
            self.use_cpu, self.dataloader_pin_memory = True, False
        if not self.do_train:
            self.eval_strategy = "no"  # transformers takes any other as --do_eval
        super().__post_init__()


@dataclass
class Arguments:
    """All arguments of a run."""

    model: ModelArguments
    data: DataArguments
    recipe: RecipeArguments
    training: ImageTrainingArguments


def parse_arguments(args: list[str] | None) -> Arguments:
    """Arguments from a list of strings (default: the command line), or from the one JSON or YAML file that it names."""
    parser = HfArgumentParser(
        (ModelArguments, DataArguments, RecipeArguments, ImageTrainingArguments),
        description=__doc__.split("\n\n    ")[0],
        allow_abbrev=False,
    )
    args = sys.argv[1:] if args is None else args
    if len(args) == 1 and args[0].endswith(".json"):
        parsed = Arguments(*parser.parse_json_file(args[0]))
    elif len(args) == 1 and args[0].endswith((".yaml", ".yml")):
        parsed = Arguments(*parser.parse_yaml_file(args[0]))
    else:
        parsed = Arguments(*parser.parse_args_into_dataclasses(args))
    if not parsed.training.do_train and not parsed.training.do_eval:
        raise ValueError("nothing to do: give --do_train, --do_eval or both")
    return parsed


def set_up_logging(training_args: TrainingArguments) -> None:
    """Log as the command line says, on the main process; the libraries log the same way."""
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        handlers=[logging.StreamHandler(sys.stdout)],
    )
    level = training_args.get_process_log_level()
    logger.setLevel(logging.INFO if training_args.should_log else level)
    datasets.utils.logging.set_verbosity(level)
    transformers.utils.logging.set_verbosity(level)
    if training_args.disable_tqdm:
        datasets.disable_progress_bars()


def find_checkpoint(training_args: TrainingArguments) -> str | None:
    """The checkpoint to go on from: the one that was asked for, else the last one in the output directory."""
    asked = training_args.resume_from_checkpoint
    if not training_args.do_train or (asked or "").lower() == "false":
        return None
    if asked is not None and asked.lower() != "true":
        if not Path(asked).is_dir():
            raise ValueError(f"--resume_from_checkpoint: there is no directory {asked!r}")
        return asked
    found = get_last_checkpoint(training_args.output_dir) if Path(training_args.output_dir).is_dir() else None
    if found is None and asked is not None:
        raise ValueError(f"--resume_from_checkpoint: there is no checkpoint in {training_args.output_dir!r}")
    if found is not None and asked is None:
        logger.warning(f"Going on from {found}. For a new run give another --output_dir.")
    return found


def load_digits() -> DatasetDict:
    """scikit-learn's handwritten digits: 1,797 images of 8 × 8 pixels, here with a black margin of one pixel."""
    from PIL import Image
    from sklearn import datasets as sklearn_datasets

    digits = sklearn_datasets.load_digits()
    pixels = (np.pad(digits.images, ((0, 0), (1, 1), (1, 1))) * (255 / 16)).round().astype(np.uint8)
    features = datasets.Features({"image": datasets.Image(), "label": ClassLabel(names=[str(i) for i in range(10)])})
    columns = {"image": [Image.fromarray(image) for image in pixels], "label": digits.target.tolist()}
    return DatasetDict({"train": Dataset.from_dict(columns, features=features)})


def load_folder(path: str, argument: str) -> DatasetDict:
    """The images of a folder, whose subfolders are the classes (or splits, and theirs are)."""
    if not Path(path).is_dir():
        raise ValueError(f"{argument}: there is no directory {path!r}")
    try:
        loaded = load_dataset("imagefolder", data_dir=path)
    except (datasets.exceptions.DatasetGenerationError, FileNotFoundError, ValueError) as error:
        raise ValueError(f"{argument}: {path!r} has no images in subfolders, one for each class: {error}") from error
    if "train" not in loaded:
        raise ValueError(f"{argument}: {path!r} has no images to train on, only the splits {list(loaded)}")
    return loaded


def load_named(data_args: DataArguments) -> DatasetDict:
    """The data set's images and classes, in columns "image" and "label"."""
    loaded = load_dataset(data_args.dataset_name, data_args.dataset_config_name)
    splits = {split: loaded[split] for split in ("train", "validation", "test") if split in loaded}
    if "train" not in splits:
        raise ValueError(f"--dataset_name {data_args.dataset_name!r} has no split 'train', only {list(loaded)}")
    for name, wanted in (("image_column", "image"), ("label_column", "label")):
        column, known = getattr(data_args, name), splits["train"].column_names
        if column not in known:
            raise ValueError(f"--{name} {column!r} is not one of {known}")
        if column != wanted:
            splits = {split: images.rename_column(column, wanted) for split, images in splits.items()}
    return DatasetDict(splits).select_columns(["image", "label"])


def check_classes(images: DatasetDict) -> DatasetDict:
    """The same images, their labels of the type `ClassLabel`, once it is sure that all splits have the same classes."""
    if "label" not in images["train"].column_names:
        raise ValueError("the images have no classes: give each its subfolder of --train_dir, two at least")
    if not isinstance(images["train"].features["label"], ClassLabel):
        images = DatasetDict({split: rows.class_encode_column("label") for split, rows in images.items()})
    names = images["train"].features["label"].names
    if len(names) < 2:
        raise ValueError(f"the images have the one class {names[0]!r}, and a classifier needs two at least")
    for split, rows in images.items():
        found = getattr(rows.features.get("label"), "names", None)
        if found != names:
            raise ValueError(f"the {split} images have the classes {found}, those of training are {names}")
    return images


def load_images(data_args: DataArguments, seed: int) -> DatasetDict:
    """The images to train on ("train") and, unless nothing is held out, to evaluate on ("validation")."""
    if data_args.digits:
        images = load_digits()
    elif data_args.dataset_name is not None:
        images = load_named(data_args)
    else:
        images = load_folder(data_args.train_dir, "--train_dir")
    if data_args.validation_dir is not None:
        images["validation"] = load_folder(data_args.validation_dir, "--validation_dir")["train"]
    images = check_classes(images)
    if "validation" not in images and "test" in images:
        images["validation"] = images["test"]
    if "validation" not in images and data_args.validation_fraction > 0:
        held_out = max(1, int(len(images["train"]) * data_args.validation_fraction))
        shuffle = data_args.split == "random"
        parts = images["train"].train_test_split(held_out, shuffle=shuffle, seed=seed if shuffle else None)
        images = DatasetDict({"train": parts["train"], "validation": parts["test"]})
    for split, most in (("train", data_args.max_train_samples), ("validation", data_args.max_eval_samples)):
        if split in images and most is not None:
            images[split] = images[split].select(range(min(most, len(images[split]))))
    return images


class ProcessedImages(torch.utils.data.Dataset):
    """Images as a model takes them.

    Args:
        images: with the columns "image" and "label".
        processor: makes `pixel_values` of them.
        transform: changes each PIL image before that, anew each time.

    Without `transform`, images that take no more than `CACHED_BYTES` are processed once.
    """

    def __init__(self, images: Dataset, processor: Any, transform: Any = None):
        self.images, self.processor, self.transform = images, processor, transform
        self.labels = list(images["label"])
        size = self.process([images[0]["image"]]).numel() * 4
        keep = transform is None and size * len(images) <= CACHED_BYTES
        batches = images.select_columns("image").iter(256) if keep else ()
        self.pixels = torch.cat([self.process(batch["image"]) for batch in batches]) if keep else None

    def process(self, images: list[Any]) -> Tensor:
        """Pixel values [B, channels, height, width] of PIL images."""
        return self.processor(images, return_tensors="pt")["pixel_values"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.pixels is not None:
            return {"pixel_values": self.pixels[index], "labels": self.labels[index]}
        image = self.images[index]["image"].convert("RGB")
        image = image if self.transform is None else self.transform(image)
        return {"pixel_values": self.process([image])[0], "labels": self.labels[index]}


def parse_overrides(text: str | None, config_class: type) -> dict[str, Any]:
    """'use_muon=false,depths=[1,2]' → {"use_muon": False, "depths": [1, 2]}, fields of the configuration only."""
    overrides = {}
    known = {config_field.name for config_field in fields(config_class)}
    for item in filter(None, re.split(r",(?![^\[]*\])", text or "")):  # no comma of a list
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name not in known:
            raise ValueError(f"--config_overrides: {item!r} is not field=value with a field of {config_class.__name__}")
        try:
            overrides[name] = json.loads(value)
        except json.JSONDecodeError:
            overrides[name] = value
    return overrides


def new_config(model_args: ModelArguments, image_size: int, labels: dict[str, Any]) -> Any:
    """The configuration of a new model; what `--config_overrides` says wins."""
    config_class = CONFIGS[model_args.model]
    if model_args.size == "mini":
        settings = dict(MINI[model_args.model])
    else:
        published = config_class.size(model_args.size)
        settings = {name: getattr(published, name) for name in SIZE_FIELDS[model_args.model]}
    if model_args.ttt_implementation is not None:
        settings["ttt_implementation"] = model_args.ttt_implementation
    settings |= {"image_size": image_size, **labels, **parse_overrides(model_args.config_overrides, config_class)}
    return config_class.variant(model_args.variant, **settings)


def load_model(
    model_args: ModelArguments, image_size: int, names: list[str], checkpoint: str | None, head_may_change: bool
) -> PreTrainedModel:
    """A new model, or the one of the checkpoint or of `--model_name_or_path`, for classes of these names."""
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    name = checkpoint or model_args.model_name_or_path
    if name is None:
        return AutoModelForImageClassification.from_config(new_config(model_args, image_size, labels))
    options: dict[str, Any] = {"trust_remote_code": model_args.trust_remote_code, "dtype": torch.float32}
    if checkpoint is None:
        options["revision"] = model_args.model_revision
    if model_args.ttt_implementation is not None:
        options["ttt_implementation"] = model_args.ttt_implementation
    if head_may_change:
        return AutoModelForImageClassification.from_pretrained(name, **labels, **options, ignore_mismatched_sizes=True)
    model = AutoModelForImageClassification.from_pretrained(name, **options)
    if list(model.config.id2label.values()) != names:
        raise ValueError(
            f"{name!r} tells the classes {list(model.config.id2label.values())} apart, and the images have {names}: "
            "give images of its classes, or train it on these with --do_train"
        )
    return model


def load_processor(model_args: ModelArguments, data_args: DataArguments, checkpoint: str | None) -> Any:
    """The image processor of the checkpoint or model, unless another `--image_size` is asked for, or a new one."""
    name = checkpoint or model_args.model_name_or_path
    if name is None or data_args.image_size is not None:
        return hf_ttt.ViTTTImageProcessor(crop_size=data_args.image_size or (32 if data_args.digits else 224))
    options = {} if checkpoint else {"revision": model_args.model_revision}
    return AutoImageProcessor.from_pretrained(
        name, trust_remote_code=model_args.trust_remote_code, backend="pil", **options
    )


def build_trainer(args: Arguments, model: PreTrainedModel, images: DatasetDict, processor: Any, checkpoint: str | None):
    """A `Trainer` of the images that the run needs."""
    training = args.training
    transform = timm_rand_augment(args.recipe.rand_augment)
    train_images = ProcessedImages(images["train"], processor, transform) if training.do_train else None
    eval_images = None
    if training.do_eval or training.eval_strategy != "no":
        if "validation" not in images:
            raise ValueError("evaluation needs images that are not trained on: give a --validation_fraction above 0")
        eval_images = ProcessedImages(images["validation"], processor)
    batch_size = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    return ImageTrainer(
        recipe=args.recipe,
        average=load_average(model, args.recipe, batch_size, checkpoint) if training.do_train else None,
        model=model,
        args=training,
        train_dataset=train_images,
        eval_dataset=eval_images,
        processing_class=processor,
        data_collator=default_data_collator,
        compute_metrics=ClassMetrics(model.config.num_labels),
        preprocess_logits_for_metrics=predicted_class,
    )


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure, or None, which is logged, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning("No pictures: they need matplotlib (pip install hf-ttt[examples]).")
        return None
    return Figure(figsize=(width, height), layout="constrained")


def plot_history(history: list[dict[str, float]], path: str | Path) -> bool:
    """Draw the loss and the accuracy over the steps; returns whether it was written, False without matplotlib.

    Args:
        history: `trainer.state.log_history`.
        path: the picture to write.
    """
    figure = new_figure(8, 7)
    if figure is None:
        return False
    top, bottom = figure.subplots(2, sharex=True)
    curves = (
        (top, "loss", "training (augmented)", "-", "tab:blue"),
        (top, "eval_loss", "held out", "o-", "tab:orange"),
        (top, "eval_ema_loss", "held out, moving average", "s--", "tab:green"),
        (bottom, "eval_accuracy", "held out", "o-", "tab:orange"),
        (bottom, "eval_ema_accuracy", "held out, moving average", "s--", "tab:green"),
    )
    for axes, name, label, style, color in curves:
        points = [(log["step"], log[name]) for log in history if name in log]
        if points:
            axes.plot(
                *zip(*points, strict=True), style, color=color, markersize=4, label=f"{label}, last {points[-1][1]:.4g}"
            )
    top.set(ylabel="loss (nats)")
    bottom.set(ylabel="accuracy", xlabel="step")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    bottom.set_ylim(top=1)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
    figure.savefig(path, dpi=150)
    return True


def plot_confusion(confusion: np.ndarray, names: list[str], path: str | Path) -> bool:
    """Draw a confusion matrix; returns whether it was written, False without matplotlib.

    The diagonal is blue by the share of each class that was right, the rest red by the number of errors.

    Args:
        confusion: counts [true class, predicted class].
        names: of the classes.
        path: the picture to write.
    """
    count = len(names)
    figure = new_figure(*[min(max(4.5, 1.5 + 0.55 * count), 20)] * 2)
    if figure is None:
        return False
    axes = figure.subplots()
    diagonal = np.eye(count, dtype=bool)
    shares = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    errors = np.where(diagonal, 0, confusion)
    axes.imshow(np.ma.masked_array(shares, ~diagonal), cmap="Blues", vmin=0, vmax=1.5)
    axes.imshow(
        np.ma.masked_array(errors, diagonal | (errors == 0)), cmap="Reds", vmin=0, vmax=1.5 * max(errors.max(), 1)
    )
    if count <= 40:
        for true, predicted in np.argwhere(confusion):
            axes.text(predicted, true, confusion[true, predicted], ha="center", va="center")
        axes.set_xticks(range(count), names, rotation=0 if max(map(len, names)) <= 3 else 90)
        labels = [f"{name}  {share:.0%}" for name, share in zip(names, shares.diagonal(), strict=True)]
        axes.set_yticks(range(count), labels)
        axes.set_xticks(np.arange(count + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(count + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="0.9")
        axes.tick_params(which="both", length=0)
    right, total = confusion.trace(), confusion.sum()
    axes.set(xlabel="predicted class", ylabel="true class, and the share of it that was right")
    axes.set_title(f"{right} of {total} images right ({right / max(total, 1):.2%})")
    figure.savefig(path, dpi=150)
    return True


def train(trainer: ImageTrainer, checkpoint: str | None) -> dict[str, float]:
    """Train, then save model, moving average, processor, metrics and state."""
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    metrics["train_images"] = len(trainer.train_dataset)
    trainer.save_model()
    if trainer.average is not None and trainer.is_world_process_zero():
        folder = Path(trainer.args.output_dir) / EMA_FOLDER
        trainer.average.model.save_pretrained(folder)
        trainer.processing_class.save_pretrained(folder)
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    return metrics


def evaluate(trainer: ImageTrainer) -> dict[str, float]:
    """Evaluate on the validation images, draw the confusion matrix, and save the metrics."""
    metrics = trainer.evaluate()
    metrics["eval_images"] = len(trainer.eval_dataset)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        names = list(trainer.model.config.id2label.values())
        plot_confusion(trainer.compute_metrics.confusion, names, Path(trainer.args.output_dir) / "confusion_matrix.png")
    return metrics


def publish(trainer: Trainer, args: Arguments) -> None:
    """Write the model card, and push all to the Hub where `--push_to_hub` asks for it."""
    card: dict[str, Any] = {"finetuned_from": args.model.model_name_or_path}
    if args.data.dataset_name is not None:
        card["dataset_tags"] = card["dataset"] = args.data.dataset_name
    else:
        card["dataset"] = "scikit-learn digits" if args.data.digits else Path(args.data.train_dir).name
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**card)
    else:
        trainer.create_model_card(**card)


def run(args: Arguments) -> dict[str, float]:
    """Run the whole job with one seed and return its metrics."""
    training = args.training
    checkpoint = find_checkpoint(training)
    set_seed(training.seed)
    images = load_images(args.data, training.seed)
    names = images["train"].features["label"].names
    processor = load_processor(args.model, args.data, checkpoint)
    image_size = dict(processor.crop_size or processor.size).get("height", 224)
    model = load_model(args.model, image_size, names, checkpoint, head_may_change=training.do_train)
    logger.info(f"{model.num_parameters():,} parameters; {len(names)} classes; images: {images.num_rows}")

    trainer = build_trainer(args, model, images, processor, checkpoint)
    metrics: dict[str, float] = {}
    if training.do_train:
        metrics |= train(trainer, checkpoint)
    if training.do_eval:
        metrics |= evaluate(trainer)
    if training.do_train:
        if trainer.is_world_process_zero():
            plot_history(trainer.state.log_history, Path(training.output_dir) / "loss_curve.png")
        publish(trainer, args)
    return metrics


def run_seeds(args: Arguments) -> dict[str, float]:
    """Run the job with each of `--seeds`, and return and print the means of the metrics."""
    results = []
    for seed in args.training.seeds:
        training = copy.copy(args.training)
        training.seed, training.output_dir = seed, str(Path(args.training.output_dir) / f"seed-{seed}")
        results.append(run(Arguments(args.model, args.data, args.recipe, training)))
    means = {name: float(np.mean([result[name] for result in results])) for name in results[0]}
    for name in ("eval_accuracy", "eval_ema_accuracy"):
        if name in means:
            values = ", ".join(f"{result[name]:.4f}" for result in results)
            print(f"{name}: mean {means[name]:.4f} of {values} (seeds {args.training.seeds})")
    return means


def main(args: list[str] | None = None) -> dict[str, float]:
    """Run the whole job and return its metrics (with `--seeds` their means); `args` as on the command line."""
    parsed = parse_arguments(args)
    set_up_logging(parsed.training)
    return run(parsed) if parsed.training.seeds is None else run_seeds(parsed)


if __name__ == "__main__":
    main()
