# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What is known of a training run and its metrics, from a `Trainer` or from the files that it writes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.modeling_utils import PreTrainedModel

import hf_ttt

from ..ttt_interface import CallSize

if TYPE_CHECKING:
    from transformers import Trainer

SETTING = "eval_setting"  # in an entry of `log_history`, beside the metrics that were computed with it
_PREFIX = "eval_"
_NO_METRICS = ("runtime", "_per_second", "_time")  # ends of the names of what an evaluation logs beside metrics


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a number was computed with.

    Attributes:
        implementation: "recurrent" or "parallel".
        backend: "torch" or "triton"; "auto" where it depended on the size of each call.
        dtype: of the weights, and of autocast where it was on.
        device: "cpu", or the name of the GPU.
        torch, transformers, hf_ttt: versions.
    """

    implementation: str
    backend: str
    dtype: str
    device: str
    torch: str = str(torch.__version__)
    transformers: str = transformers.__version__
    hf_ttt: str = hf_ttt.__version__

    @classmethod
    def of(cls, model: PreTrainedModel, autocast: str | None = None) -> Setting:
        """The setting in which a model's next call is computed.

        Args:
            model: a model of this package.
            autocast: "bfloat16" or "float16" where calls run under autocast.
        """
        dtype = str(model.dtype).removeprefix("torch.")
        return cls(
            implementation=model.get_ttt_implementation(),
            backend=_backend_of(model),
            dtype=f"{dtype} under {autocast} autocast" if autocast else dtype,
            device=torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
        )

    def to_dict(self) -> dict[str, str]:
        """The attributes as a dictionary: `Setting(**setting.to_dict()) == setting`."""
        return dataclasses.asdict(self)


def _backend_of(model: PreTrainedModel) -> str:
    """The backend of a model's calls: one name where it is the same for the smallest and the greatest."""
    choice = model.config.rule, model.config.ttt_implementation, model.config.ttt_backend
    sizes = [CallSize(model.device, width, tokens) for width in (1, 1024) for tokens in (1, 2**40)]
    backends = {model._ttt_functions.resolve(*choice, size)[1] for size in sizes}
    return backends.pop() if len(backends) == 1 else "auto"


@dataclasses.dataclass(frozen=True)
class Run:
    """What is known of a training run; None and empty where nothing is.

    Attributes:
        steps: optimizer steps.
        epochs: passes over the training data.
        settings: of the training, as a card lists them.
        metrics: of the evaluation, without the prefix "eval_".
        metrics_step: after how many steps they were measured.
        measured: what they were computed with.
    """

    steps: int | None = None
    epochs: float | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    metrics_step: int | None = None
    measured: Setting | None = None


def run_in(folder: str | Path) -> Run:
    """What the files `trainer_state.json` and `eval_results.json` (or `all_results.json`) of a folder say of a run.

    Args:
        folder: the output directory of a `Trainer`, or any other.

    Returns:
        The run; an empty one if the folder has none of the files.

    Raises:
        ValueError: for a file that is not what a `Trainer` writes.
    """
    folder = Path(folder)
    state = _read_object(folder / "trainer_state.json")
    history = state.get("log_history", [])
    entry = _last_evaluation(history)
    saved = _metrics(_read_object(folder / "eval_results.json")) or _metrics(
        _read_object(folder / "all_results.json"), prefixed=True
    )
    rates = [log["learning_rate"] for log in history if "learning_rate" in log]
    settings = {"highest learning rate logged": max(rates, default=None), "batch size": state.get("train_batch_size")}
    return Run(
        steps=state.get("global_step"),
        epochs=state.get("epoch"),
        settings={name: value for name, value in settings.items() if value is not None},
        metrics=saved or _metrics(entry, prefixed=True),
        metrics_step=None if saved else entry.get("step"),
        measured=_setting(entry),
    )


def run_of(trainer: Trainer) -> Run:
    """What a `Trainer` knows of its run: settings, steps, and its last evaluation.

    Args:
        trainer: after training. With `load_best_model_at_end`, the evaluation is the best one unless there was another
            one after training.
    """
    from transformers.modelcard import extract_hyperparameters_from_trainer

    args, state = trainer.args, trainer.state
    entry = _last_evaluation(state.log_history)
    after_training = "train_runtime" not in {name for log in _after(state.log_history, entry) for name in log}
    if args.load_best_model_at_end and state.best_global_step is not None and not after_training:
        entry = _last_evaluation([log for log in state.log_history if log.get("step") == state.best_global_step])
    settings = {name.replace("_", " "): value for name, value in extract_hyperparameters_from_trainer(trainer).items()}
    settings |= {"weight decay": args.weight_decay, "gradient clipping": args.max_grad_norm}
    settings["precision"] = f"{_autocast(trainer)} autocast" if _autocast(trainer) else "that of the weights"
    return Run(
        steps=state.global_step,
        epochs=state.epoch,
        settings=settings,
        metrics=_metrics(entry, prefixed=True),
        metrics_step=entry.get("step"),
        measured=_setting(entry),
    )


def is_ttt_model(model: Any) -> bool:
    """Whether a model is of this package, installed or remote, and no adapter around one."""
    return isinstance(model, PreTrainedModel) and hasattr(model, "get_ttt_implementation")


def note_setting(trainer: Trainer) -> None:
    """Write what a `Trainer` has just evaluated with beside the metrics in its log."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.state.log_history and is_ttt_model(model):
        trainer.state.log_history[-1][SETTING] = Setting.of(model, _autocast(trainer)).to_dict()


def _autocast(trainer: Trainer) -> str | None:
    return "bfloat16" if trainer.args.bf16 else "float16" if trainer.args.fp16 else None


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error}); repair it or take it away") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} holds a {type(content).__name__}; expected an object, as a Trainer writes")
    return content


def _last_evaluation(history: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return next((log for log in reversed(history) if _metrics(log, prefixed=True)), {})


def _after(history: Sequence[Mapping[str, Any]], entry: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What was logged after an entry."""
    index = max((i for i, log in enumerate(history) if log is entry), default=-1)
    return history[index + 1 :]


def _metrics(values: Mapping[str, Any], prefixed: bool = False) -> dict[str, float]:
    """The metrics among named values: finite floats (integers are counts) that are no times.

    Args:
        prefixed: whether only names with the prefix "eval_" count.
    """
    return {
        name.removeprefix(_PREFIX): value
        for name, value in values.items()
        if isinstance(value, float)
        and math.isfinite(value)
        and (name.startswith(_PREFIX) or not prefixed and name not in ("epoch", "step"))
        and not name.endswith(_NO_METRICS)
    }


def _setting(entry: Mapping[str, Any]) -> Setting | None:
    return Setting(**entry[SETTING]) if SETTING in entry else None
