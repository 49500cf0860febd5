# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Fine-tune a saved LaCT language model on text with LoRA: the model stays frozen, a small adapter is trained.

Adapted are the linear layers of the blocks and, unless --fast_weights says otherwise, the initial fast weights. The
text is read as by train_lact_text.py, with the model's own tokenizer. Evaluation gives loss, perplexity and bits per
byte of the held-out text, for the model alone ("base_…") and with its adapter ("eval_…").

    python examples/finetune_lora.py --model_name_or_path my-lact --train_file book.txt --output_dir my-adapter \\
        --do_train --do_eval --max_steps 300 --learning_rate 3e-3 --merge

The output directory gets the adapter and, with --merge, in its folder "merged" a model that needs no PEFT. A run that
finds a checkpoint there goes on from it. Needs `pip install hf-ttt[examples,peft]`.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import train_lact_text as text
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import HfArgumentParser, PreTrainedModel, Trainer, TrainingArguments, set_seed

from hf_ttt.adapters import lora_targets, merge_and_unload

logger = logging.getLogger(__name__)

MERGED = "merged"


@dataclass
class BaseModelArguments:
    """The model that is fine-tuned."""

    model_name_or_path: str = field(metadata={"help": "Saved LaCT language model, a folder or a repository."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run code that comes with a model or tokenizer that is not of hf-ttt."}
    )
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = field(
        default="float32", metadata={"help": "Type of the frozen parameters; the adapter and fast weights are float32."}
    )
    ttt_implementation: Literal["auto", "recurrent", "parallel"] | None = field(
        default=None, metadata={"help": "Evaluation of the TTT layers. Default: what the configuration says."}
    )
    tokenizer_name = None  # what `load_tokenizer` reads: an adapter fits the model's own tokenizer


@dataclass
class AdapterArguments:
    """The adapter."""

    adapter_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Saved adapter to go on with or evaluate. The options of a new one are then not used."},
    )
    lora_r: int = field(default=8, metadata={"help": "Rank of the adapter of each matrix."})
    lora_alpha: int = field(default=16, metadata={"help": "The adapter is scaled by lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Needs --fast_weights false."})
    fast_weights: bool = field(default=True, metadata={"help": "Adapt the initial fast weights too."})
    merge: bool = field(default=False, metadata={"help": "Also write the model with the adapter merged into it."})

    def __post_init__(self):
        for name in ("lora_r", "lora_alpha"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"--lora_dropout {self.lora_dropout} must be at least 0 and below 1")
        if self.lora_dropout and self.fast_weights:
            raise ValueError(
                f"--lora_dropout {self.lora_dropout} is not possible on fast weights: add --fast_weights false"
            )


Parsed = tuple[BaseModelArguments, AdapterArguments, text.DataArguments, TrainingArguments]


def parse_arguments(args: list[str] | None) -> Parsed:
    """Arguments from a list of strings (default: the command line), or from the one JSON or YAML file that it names."""
    parser = HfArgumentParser(
        (BaseModelArguments, AdapterArguments, text.DataArguments, text.TextTrainingArguments),
        description=__doc__.split("\n\n    ")[0],
        allow_abbrev=False,
    )
    args = sys.argv[1:] if args is None else args
    if len(args) == 1 and args[0].endswith(".json"):
        parsed = parser.parse_json_file(args[0])
    elif len(args) == 1 and args[0].endswith((".yaml", ".yml")):
        parsed = parser.parse_yaml_file(args[0])
    else:
        parsed = parser.parse_args_into_dataclasses(args)
    _, adapter_args, data_args, training_args = parsed
    if not training_args.do_train and not training_args.do_eval:
        raise ValueError("nothing to do: give --do_train, --do_eval or both")
    if not training_args.do_train and adapter_args.adapter_name_or_path is None:
        raise ValueError("no adapter: give --do_train, --adapter_name_or_path or both")
    if training_args.do_train and not (data_args.train_file or data_args.dataset_name):
        raise ValueError("--do_train needs text to train on: give --train_file or --dataset_name")
    return parsed


def add_adapter(model: PreTrainedModel, adapter_args: AdapterArguments) -> PeftModel:
    """The frozen model with the adapter that was named, or with a new one, which changes nothing yet."""
    if adapter_args.adapter_name_or_path is not None:
        return PeftModel.from_pretrained(model, adapter_args.adapter_name_or_path, is_trainable=True)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter_args.lora_r,
        lora_alpha=adapter_args.lora_alpha,
        lora_dropout=adapter_args.lora_dropout,
        **lora_targets(model, fast_weights=adapter_args.fast_weights),
    )
    return get_peft_model(model, config)


def evaluate_base(trainer: Trainer) -> dict[str, float]:
    """Evaluate the model without its adapter on the validation text, and save the metrics."""
    with trainer.model.disable_adapter():
        metrics = trainer.evaluate(metric_key_prefix="base")
    trainer.log_metrics("base", metrics)
    trainer.save_metrics("base", metrics)
    return metrics


def save_merged(trainer: text.TextTrainer) -> None:
    """Write the model with the adapter added to its weights, and the tokenizer; the adapter is gone afterwards."""
    folder = Path(trainer.args.output_dir) / MERGED
    model = merge_and_unload(trainer.model)
    model.config.use_cache = trainer.saved_use_cache
    model.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
    logger.info(f"The merged model is in {folder}.")


def main(args: list[str] | None = None) -> dict[str, float]:
    """Run the whole job and return its metrics; `args` as on the command line."""
    model_args, adapter_args, data_args, training_args = parse_arguments(args)
    text.set_up_logging(training_args)
    logger.setLevel(text.logger.level)
    checkpoint = text.find_checkpoint(training_args)
    set_seed(training_args.seed)

    documents = text.load_documents(data_args, training_args)
    tokenizer = text.load_tokenizer(model_args, documents, None)
    rows = text.pack_documents(documents, tokenizer, data_args, training_args)
    model = text.load_model(model_args, tokenizer, data_args.block_size, None)
    model = add_adapter(model, adapter_args)
    trained, total = model.get_nb_trainable_parameters()
    logger.info(f"{trained:,} of {total:,} parameters are trained; rows of {data_args.block_size}: {rows.num_rows}")

    trainer = text.build_trainer(model, tokenizer, documents, rows, training_args)
    metrics: dict[str, float] = {}
    if training_args.do_eval:
        metrics |= evaluate_base(trainer)
    if training_args.do_train:
        metrics |= text.train(trainer, checkpoint)
    if training_args.do_eval:
        metrics |= text.evaluate(trainer)
    if training_args.do_train:
        if trainer.is_world_process_zero():
            text.plot_history(trainer.state.log_history, Path(training_args.output_dir) / "loss_curve.png")
        text.publish(trainer, model_args, data_args)
    if adapter_args.merge and trainer.is_world_process_zero():
        save_merged(trainer)
    return metrics


if __name__ == "__main__":
    main()
