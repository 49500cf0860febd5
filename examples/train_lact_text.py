# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Train, fine-tune or evaluate a LaCT language model on text.

The text comes from files (any UTF-8 text, one document a file) or from a data set with a text column. It is read as
bytes, by a tokenizer of your choice, or by a BPE tokenizer that is trained on it first. The model is a new one in one
of the paper's variants, or one that was saved before. Evaluation gives the loss in nats per token, the perplexity, and
bits per byte, which compare across tokenizers.

    python examples/train_lact_text.py --train_file book.txt --output_dir out --do_train --do_eval \\
        --variant variant2 --max_steps 1000 --learning_rate 2e-3 --eval_strategy steps --eval_steps 200

A run that finds a checkpoint in its output directory goes on from there. Needs `pip install hf-ttt[examples]`.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch
import transformers
from datasets import Dataset, DatasetDict, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import hf_ttt
from hf_ttt.hub import TrainerCardMixin
from hf_ttt.metrics import BitsPerByte, Perplexity, sum_token_nll

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
IGNORED_LABEL = -100
PIECE_CHARACTERS = 2**16  # a document is tokenized in pieces: some tokenizers take long for a long string


@dataclass
class ModelArguments:
    """The model and its tokenizer."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Saved model to go on with, instead of a new one. The sizes below are then not used."},
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run code that comes with a model or tokenizer that is not of hf-ttt."}
    )
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = field(
        default="float32", metadata={"help": "Type of the parameters. For mixed precision keep float32, use --bf16."}
    )
    variant: Literal["baseline", "variant1", "variant2", "variant3", "variant4", "variant5", "variant6"] = field(
        default="baseline", metadata={"help": "Row of the paper's Table 2; the parallel form exists from variant2 on."}
    )
    ttt_implementation: Literal["auto", "recurrent", "parallel"] | None = field(
        default=None, metadata={"help": "Evaluation of the TTT layers. Default: what the configuration says."}
    )
    hidden_size: int = field(default=256, metadata={"help": "Width of a new model."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Layers of a new model."})
    num_attn_heads: int = field(default=4, metadata={"help": "Heads of the window attention."})
    num_lact_heads: int = field(default=2, metadata={"help": "Heads of the TTT branch."})
    lact_chunk_size: int = field(default=64, metadata={"help": "Tokens per update of the fast weights."})
    window_size: int = field(default=64, metadata={"help": "Tokens that the attention sees."})
    config_overrides: str | None = field(
        default=None,
        metadata={"help": "Further fields of LaCTConfig: 'use_muon=false,inter_multi=2,initializer_range=0.02'."},
    )
    tokenizer_name: str | None = field(
        default=None,
        metadata={"help": "Tokenizer for AutoTokenizer. Default: that of the model; for a new model, UTF-8 bytes."},
    )
    train_bpe_vocab_size: int | None = field(
        default=None, metadata={"help": "Train a byte-level BPE tokenizer of this size on the training text."}
    )

    def __post_init__(self):
        if self.train_bpe_vocab_size is not None:
            for other in ("tokenizer_name", "model_name_or_path"):
                if getattr(self, other) is not None:
                    raise ValueError(f"--train_bpe_vocab_size makes a new tokenizer: leave out --{other}, or it")
            if self.train_bpe_vocab_size < 257:
                raise ValueError(
                    f"--train_bpe_vocab_size {self.train_bpe_vocab_size} must be at least 257: 256 bytes, a separator"
                )


@dataclass
class DataArguments:
    """The text and how it is cut into rows."""

    train_file: list[str] | None = field(default=None, metadata={"help": "Text files to train on."})
    validation_file: list[str] | None = field(default=None, metadata={"help": "Text files to evaluate on."})
    dataset_name: str | None = field(default=None, metadata={"help": "Data set for datasets.load_dataset."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    text_column: str = field(default="text", metadata={"help": "Column of the data set that holds the text."})
    validation_fraction: float = field(
        default=0.1,
        metadata={
            "help": "Without validation text: the last part of each training file (of a data set: its last documents) "
            "that is held out for evaluation. 0 holds out nothing."
        },
    )
    block_size: int = field(default=512, metadata={"help": "Tokens in a row."})
    max_train_bytes: int | None = field(default=None, metadata={"help": "Train on this much of the text at most."})
    max_eval_bytes: int | None = field(default=None, metadata={"help": "Evaluate on this much of the text at most."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again what was tokenized before."})

    def __post_init__(self):
        if self.train_file is None and self.validation_file is None and self.dataset_name is None:
            raise ValueError("no text: give --train_file, --validation_file or --dataset_name")
        if self.dataset_name is not None and (self.train_file or self.validation_file):
            raise ValueError("--dataset_name excludes --train_file and --validation_file: give one kind")
        for path in (self.train_file or []) + (self.validation_file or []):
            if not Path(path).is_file():
                raise ValueError(f"--train_file/--validation_file: there is no file {path!r}")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"--validation_fraction {self.validation_fraction} must be at least 0 and below 1")
        if self.block_size < 2:
            raise ValueError(f"--block_size {self.block_size} must be at least 2: one token to read, one to predict")
        for name in ("max_train_bytes", "max_eval_bytes"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1")


@dataclass
class TextTrainingArguments(TrainingArguments):
    """`TrainingArguments` that need no --use_cpu, also with --bf16, where there is nothing but a CPU."""

    def __post_init__(self):
        if not torch.accelerator.is_available():
            self.use_cpu, self.dataloader_pin_memory = True, False
        super().__post_init__()


def parse_arguments(args: list[str] | None) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    """Arguments from a list of strings (default: the command line), or from the one JSON or YAML file that it names."""
    parser = HfArgumentParser(
        (ModelArguments, DataArguments, TextTrainingArguments),
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
    training_args = parsed[2]
    if not training_args.do_train and not training_args.do_eval:
        raise ValueError("nothing to do: give --do_train, --do_eval or both")
    if training_args.do_train and not (parsed[1].train_file or parsed[1].dataset_name):
        raise ValueError("--do_train needs text to train on: give --train_file or --dataset_name")
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


def split_text(text: str, fraction: float) -> tuple[str, str]:
    """Cut a text in two: the first part, and the last `fraction` of its characters."""
    cut = len(text) - round(len(text) * fraction)
    return text[:cut], text[cut:]


def first_bytes(documents: Dataset, max_bytes: int | None) -> Dataset:
    """The first documents, as far as `max_bytes` bytes of UTF-8 go; the last one is cut between two characters."""
    if max_bytes is None:
        return documents
    kept: list[str] = []
    for text in documents["text"]:
        kept.append(text.encode()[:max_bytes].decode(errors="ignore"))
        max_bytes -= len(text.encode())
        if max_bytes <= 0:
            break
    return Dataset.from_dict({"text": kept})


def load_files(data_args: DataArguments) -> DatasetDict:
    """Each file as one document, in a column "text"; without validation files, the last part of each is held out."""
    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    files = {split: paths for split, paths in files.items() if paths}
    try:
        documents = load_dataset("text", data_files=files, sample_by="document")
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"could not read {files} as UTF-8 text: {error.__cause__}") from error
    if data_args.validation_file is None and data_args.validation_fraction > 0:
        parts = [split_text(text, data_args.validation_fraction) for text in documents["train"]["text"]]
        for split, texts in zip(("train", "validation"), zip(*parts, strict=True), strict=True):
            documents[split] = Dataset.from_dict({"text": list(texts)})
    return documents


def load_named_dataset(data_args: DataArguments) -> DatasetDict:
    """The data set's text in a column "text"; without a split for validation, its last documents are held out."""
    loaded = load_dataset(data_args.dataset_name, data_args.dataset_config_name)
    column = data_args.text_column
    documents = DatasetDict({split: loaded[split] for split in ("train", "validation") if split in loaded})
    if "train" not in documents:
        raise ValueError(f"--dataset_name {data_args.dataset_name!r} has no split 'train', only {list(loaded)}")
    if column not in documents["train"].column_names:
        raise ValueError(f"--text_column {column!r} is not one of {documents['train'].column_names}")
    documents = documents.select_columns(column)
    documents = documents if column == "text" else documents.rename_column(column, "text")
    if "validation" not in documents and data_args.validation_fraction > 0:
        parts = documents["train"].train_test_split(test_size=data_args.validation_fraction, shuffle=False)
        documents = DatasetDict({"train": parts["train"], "validation": parts["test"]})
    return documents


def load_documents(data_args: DataArguments, training_args: TrainingArguments) -> DatasetDict:
    """The documents to train on ("train") and to evaluate on ("validation"), those that the run needs, none empty."""
    documents = load_named_dataset(data_args) if data_args.dataset_name else load_files(data_args)
    needed = {"train": training_args.do_train, "validation": training_args.do_eval}
    needed["validation"] |= training_args.eval_strategy != "no"
    limits = {"train": data_args.max_train_bytes, "validation": data_args.max_eval_bytes}
    result = DatasetDict()
    for split in (split for split in needed if needed[split]):
        if split not in documents:
            raise ValueError(
                "evaluation needs text that is not trained on: give --validation_file or a --validation_fraction"
            )
        result[split] = first_bytes(documents[split], limits[split])
        if not any(result[split]["text"]):
            raise ValueError(f"the {split} text is empty")
    return result


def train_bpe(documents: Dataset, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that is trained on the documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in documents["text"] for piece in text_pieces(text)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def load_tokenizer(model_args: ModelArguments, documents: DatasetDict, checkpoint: str | None):
    """The tokenizer of the checkpoint or model, the one that was named, one that is trained here, or plain bytes."""
    name = checkpoint or model_args.tokenizer_name or model_args.model_name_or_path
    if name is not None:
        options: dict[str, Any] = {"trust_remote_code": model_args.trust_remote_code}
        if name == model_args.model_name_or_path:
            options["revision"] = model_args.model_revision
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    elif model_args.train_bpe_vocab_size is not None:
        if "train" not in documents:
            raise ValueError("--train_bpe_vocab_size trains the tokenizer on the training text: it needs --do_train")
        tokenizer = train_bpe(documents["train"], model_args.train_bpe_vocab_size)
    else:
        tokenizer = ByT5Tokenizer(extra_ids=0)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer {name!r} has no eos_token, which stands between documents")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def text_pieces(text: str) -> list[str]:
    """A text in pieces of about `PIECE_CHARACTERS`, each of whole lines unless a line is longer than that."""
    pieces, start = [], 0
    while start < len(text):
        end = start + PIECE_CHARACTERS
        end = text.rfind("\n", start, end) + 1 if end < len(text) else len(text)
        end = end if end > start else start + PIECE_CHARACTERS
        pieces.append(text[start:end])
        start = end
    return pieces


def pack(texts: list[str], tokenizer: PreTrainedTokenizerBase, block_size: int) -> dict[str, np.ndarray]:
    """Rows of `block_size` tokens from texts one after the other, in which every token of the texts is predicted once.

    The stream is end-of-text, text, end-of-text, text, …; a row begins with the last token of the row before, which it
    only reads. The last row is padded on the right; its padding has no labels, so a causal model needs no mask.

    Returns:
        "input_ids" and "labels" (not shifted), both [rows, block_size].
    """
    stream: list[int] = []
    for text in texts:
        stream.append(tokenizer.eos_token_id)
        for piece in text_pieces(text):
            # "</s>" in a text is text
            stream += tokenizer(piece, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    rows = max(1, math.ceil((len(stream) - 1) / (block_size - 1)))
    length = rows * (block_size - 1) + 1
    ids = np.pad(np.array(stream), (0, length - len(stream)), constant_values=tokenizer.pad_token_id)
    index = np.arange(rows)[:, None] * (block_size - 1) + np.arange(block_size)
    predicted = (index < len(stream)) & (np.arange(block_size) > 0)
    return {"input_ids": ids[index], "labels": np.where(predicted, ids[index], IGNORED_LABEL)}


def pack_documents(
    documents: DatasetDict, tokenizer: PreTrainedTokenizerBase, data_args: DataArguments, training_args: Any
) -> DatasetDict:
    """Tokenize and pack all documents, a thousand of them at a time."""
    with training_args.main_process_first(desc="tokenizing"):
        return documents.map(
            lambda batch: pack(batch["text"], tokenizer, data_args.block_size),
            batched=True,
            remove_columns="text",
            num_proc=data_args.preprocessing_num_workers,
            load_from_cache_file=not data_args.overwrite_cache,
            desc="Tokenizing",
        )


def parse_overrides(text: str | None) -> dict[str, Any]:
    """'use_muon=false,inter_multi=2' → {"use_muon": False, "inter_multi": 2}, fields of LaCTConfig only."""
    overrides = {}
    known = {config_field.name for config_field in fields(hf_ttt.LaCTConfig)}
    for item in filter(None, (text or "").split(",")):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name not in known:
            raise ValueError(f"--config_overrides: {item!r} is not field=value with a field of LaCTConfig")
        try:
            overrides[name] = json.loads(value)
        except json.JSONDecodeError:
            overrides[name] = value
    return overrides


def new_config(model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase, block_size: int):
    """The configuration of a new model; what `--config_overrides` says wins."""
    settings = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": max(block_size, 2048),
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name in ("hidden_size", "num_hidden_layers", "num_attn_heads", "num_lact_heads", "lact_chunk_size"):
        settings[name] = getattr(model_args, name)
    settings["window_size"] = model_args.window_size
    if model_args.ttt_implementation is not None:
        settings["ttt_implementation"] = model_args.ttt_implementation
    return hf_ttt.LaCTConfig.variant(model_args.variant, **{**settings, **parse_overrides(model_args.config_overrides)})


def load_model(
    model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase, block_size: int, checkpoint: str | None
) -> PreTrainedModel:
    """A new model, or the one of the checkpoint or of `--model_name_or_path`."""
    name = checkpoint or model_args.model_name_or_path
    if name is None:
        config = new_config(model_args, tokenizer, block_size)
        dtype = torch.float32 if model_args.dtype == "auto" else getattr(torch, model_args.dtype)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    options: dict[str, Any] = {"dtype": model_args.dtype, "trust_remote_code": model_args.trust_remote_code}
    if checkpoint is None:
        options["revision"] = model_args.model_revision
    if model_args.ttt_implementation is not None:
        options["ttt_implementation"] = model_args.ttt_implementation
    model = AutoModelForCausalLM.from_pretrained(name, **options)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    return model


def make_compute_metrics(num_bytes: int):
    """For `Trainer`: the metrics from each row's (nll, number of tokens), over a text of `num_bytes` bytes in all."""

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        nll, num_tokens = prediction.predictions
        perplexity = Perplexity(keep_in_memory=True).compute(nll=nll, num_tokens=num_tokens)
        bits = BitsPerByte(keep_in_memory=True).compute(nll=[math.fsum(nll)], num_bytes=[num_bytes])
        return {**perplexity, **bits}

    return compute_metrics


def sum_token_nll_of_batch(logits: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For `Trainer`: keep two numbers of each row instead of its logits."""
    return sum_token_nll(logits[0] if isinstance(logits, tuple) else logits, labels)


def count_bytes(documents: Dataset) -> int:
    """UTF-8 bytes of all documents."""
    return sum(len(text.encode()) for text in documents["text"])


class TextTrainer(TrainerCardMixin, Trainer):
    """A `Trainer` that turns the model's cache off for training, as all do, but not in what it saves."""

    def __init__(self, model: PreTrainedModel, **kwargs):
        self.saved_use_cache = model.config.use_cache
        super().__init__(model=model, **kwargs)

    def save_model(self, *args, **kwargs) -> None:
        config = self.model.config
        use_cache, config.use_cache = config.use_cache, self.saved_use_cache
        super().save_model(*args, **kwargs)
        config.use_cache = use_cache


def build_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: DatasetDict,
    rows: DatasetDict,
    training_args: TrainingArguments,
) -> Trainer:
    """A `Trainer` that reports loss, perplexity and bits per byte of the validation text."""
    has_validation = "validation" in rows
    return TextTrainer(
        model=model,
        args=training_args,
        train_dataset=rows.get("train"),
        eval_dataset=rows.get("validation"),
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=make_compute_metrics(count_bytes(documents["validation"])) if has_validation else None,
        preprocess_logits_for_metrics=sum_token_nll_of_batch if has_validation else None,
    )


def plot_history(history: list[dict[str, float]], path: str | Path, references: dict[str, float] | None = None) -> bool:
    """Draw the loss and the bits per byte over the steps; without matplotlib say so and go on.

    Args:
        history: `trainer.state.log_history`.
        path: the picture to write.
        references: names and values in bits per byte to compare with, drawn as lines.

    Returns:
        Whether it was written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        logger.warning("No loss curve: it needs matplotlib (pip install hf-ttt[examples]).")
        return False
    figure = Figure(figsize=(8, 7), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True)
    curves = (
        (top, "loss", "training", "-", "tab:blue"),
        (top, "eval_loss", "held out", "o-", "tab:orange"),
        (bottom, "eval_bits_per_byte", "held out", "o-", "tab:orange"),
    )
    for axes, name, label, style, color in curves:
        points = [(log["step"], log[name]) for log in history if name in log]
        if points:
            axes.plot(*zip(*points, strict=True), style, color=color, label=f"{label}, last {points[-1][1]:.3f}")
    for (name, value), style in zip((references or {}).items(), ("--", ":", "-."), strict=False):
        bottom.axhline(value, linestyle=style, color="tab:gray", label=f"{name}, {value:.3f}")
    top.set(ylabel="loss (nats per token)")
    bottom.set(ylabel="bits per byte", xlabel="step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
    figure.savefig(path, dpi=150)
    return True


def train(trainer: Trainer, checkpoint: str | None) -> dict[str, float]:
    """Train, then save model, tokenizer, metrics and state."""
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    metrics["train_rows"] = len(trainer.train_dataset)
    trainer.save_model()
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    return metrics


def evaluate(trainer: Trainer) -> dict[str, float]:
    """Evaluate on the validation text, and save the metrics."""
    metrics = trainer.evaluate()
    metrics["eval_rows"] = len(trainer.eval_dataset)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    return metrics


def publish(trainer: Trainer, model_args: ModelArguments, data_args: DataArguments) -> None:
    """Write the model card, and push all to the Hub where `--push_to_hub` asks for it."""
    card: dict[str, Any] = {"finetuned_from": model_args.model_name_or_path}
    if data_args.dataset_name is not None:
        card["dataset_tags"] = card["dataset"] = data_args.dataset_name
    else:
        card["dataset"] = ", ".join(Path(path).name for path in data_args.train_file or [])
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**card)
    else:
        trainer.create_model_card(**card)


def main(args: list[str] | None = None) -> dict[str, float]:
    """Run the whole job and return its metrics; `args` as on the command line."""
    model_args, data_args, training_args = parse_arguments(args)
    set_up_logging(training_args)
    checkpoint = find_checkpoint(training_args)
    set_seed(training_args.seed)

    documents = load_documents(data_args, training_args)
    tokenizer = load_tokenizer(model_args, documents, checkpoint)
    rows = pack_documents(documents, tokenizer, data_args, training_args)
    model = load_model(model_args, tokenizer, data_args.block_size, checkpoint)
    logger.info(f"{model.num_parameters():,} parameters; rows of {data_args.block_size} tokens: {rows.num_rows}")

    trainer = build_trainer(model, tokenizer, documents, rows, training_args)
    metrics: dict[str, float] = {}
    if training_args.do_train:
        metrics |= train(trainer, checkpoint)
    if training_args.do_eval:
        metrics |= evaluate(trainer)
    if training_args.do_train:
        if trainer.is_world_process_zero():
            plot_history(trainer.state.log_history, Path(training_args.output_dir) / "loss_curve.png")
        publish(trainer, model_args, data_args)
    return metrics


if __name__ == "__main__":
    main()
