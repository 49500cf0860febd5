# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""A `Trainer` that writes the card of this package."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from .cards import is_generated, model_card, save_card
from .training import is_ttt_model, note_setting, run_of

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

logger = logging.get_logger(__name__)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class TrainerCardMixin(_Base):
    """For a `Trainer`: `create_model_card`, and so `push_to_hub`, write the card of `hf_ttt.hub.model_card`.

    Use it as `class MyTrainer(TrainerCardMixin, Trainer)`. Each evaluation notes in the log what it was computed with.
    """

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As in `Trainer`."""
        metrics = super().evaluate(*args, **kwargs)
        note_setting(self)
        return metrics

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Save the state of the run, and write `README.md` in the output directory.

        A card that is there and was edited by hand stays as it is, with a warning. Adapters and other models get
        `Trainer`'s card.

        Args:
            language, license, tags: of the metadata.
            model_name, tasks, dataset_args: of `Trainer`'s card, without effect: this one takes them from the model.
            finetuned_from: the model that this one was trained from; by default where it was loaded from. What is no
                id on the Hub is left out.
            dataset_tags: ids of data sets on the Hub.
            dataset: how the text names the data.
            metrics: measured ones, name → value, instead of those of the last evaluation in the log.
        """
        model = self.accelerator.unwrap_model(self.model)
        if not is_ttt_model(model):  # such as adapters, whose card is that of peft
            super().create_model_card(
                language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, dataset_args
            )
            return
        if not self.is_world_process_zero():
            return
        self.save_state()
        path = Path(self.args.output_dir) / "README.md"
        if path.is_file() and not is_generated(path.read_text(encoding="utf-8")):
            logger.warning(f"{path} was not written by hf-ttt, or edited since, so it stays as it is.")
            return
        run = run_of(self)
        if metrics is not None:
            run = dataclasses.replace(run, metrics=dict(metrics), metrics_step=self.state.global_step)
        base = finetuned_from or getattr(model.config, "_name_or_path", "")
        names = _listed(dataset)
        card = model_card(
            model,
            repo_id=self.hub_model_id,
            license=license,
            language=language,
            base_model=base if _HUB_ID.fullmatch(base) and not Path(base).exists() else None,
            datasets=_listed(dataset_tags),
            dataset_name=", ".join(names) or None,
            tags=_listed(tags),
            run=run,
        )
        save_card(card, path)


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])
