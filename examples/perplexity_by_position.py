# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Loss of language models by the number of tokens before the predicted one, as a table and a plot.

A model that uses its context predicts later tokens better: the curve falls until the model's memory is full. A text is
cut into rows of so many tokens, each of which is read from the start, piece after piece with a cache, so that a context
needs no more memory than a piece. Curves of several models and evaluations go into the same plot:

    python examples/perplexity_by_position.py my-lact another-lact --text_file book.txt --length 4096
    python examples/perplexity_by_position.py my-lact --implementation recurrent parallel --text_file book.txt

Writes `perplexity_by_position.csv` and `.png` into the output directory; both are complete after each curve. Compare
losses per token only between models with the same tokenizer. Needs `pip install hf-ttt[examples]`.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ttt  # noqa: F401  (registers the models)
from hf_ttt.metrics import Perplexity

READ_CHARACTERS = 2**16  # the text is tokenized in pieces: some tokenizers take long for a long string
COLUMNS = ("model", "implementation", "first_position", "last_position", "num_tokens", "loss", "perplexity")


@dataclass
class Bin:
    """Tokens with `first` to `last` tokens before them: how many they are, their mean loss in nats, its exponential."""

    first: int
    last: int
    num_tokens: int
    loss: float
    perplexity: float


@dataclass
class Curve:
    """The bins of one model in one evaluation of its TTT layers."""

    model: str
    implementation: str
    bins: list[Bin]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """As rows of `COLUMNS`."""
        for b in self.bins:
            yield self.model, self.implementation, b.first, b.last, b.num_tokens, b.loss, b.perplexity


def read_rows(path: Path, tokenizer, length: int, max_rows: int | None) -> Tensor:
    """The first tokens of a text as rows [rows, length]; what does not fill a row is left out.

    Raises:
        ValueError: for a text that has not enough tokens for one row, or is not UTF-8.
    """
    ids: list[int] = []
    try:
        with path.open(encoding="utf-8") as file:
            while (max_rows is None or len(ids) < max_rows * length) and (text := file.read(READ_CHARACTERS)):
                ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except UnicodeDecodeError as error:
        raise ValueError(f"--text_file {str(path)!r} is not UTF-8 text: {error}") from error
    rows = len(ids) // length if max_rows is None else min(len(ids) // length, max_rows)
    if rows == 0:
        raise ValueError(f"--text_file {str(path)!r} has {len(ids)} tokens; --length {length} needs at least as many")
    return torch.tensor(ids[: rows * length]).view(rows, length)


@torch.no_grad()
def nll_by_position(model, ids: Tensor, piece: int) -> Tensor:
    """Negative log-likelihood of each token but the first [rows, length - 1], in nats, float64 on the CPU.

    Args:
        model: a causal language model.
        ids: [rows, length], at least two tokens long.
        piece: tokens that the model reads in one call, after those before them in its cache.
    """
    ids = ids.to(model.device)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    cache: dict[str, Any] = {}
    losses = []
    for part, target in zip(inputs.split(piece, 1), targets.split(piece, 1), strict=True):
        out = model(part, use_cache=True, **cache)
        key = "cache" if "cache" in out else "past_key_values"  # transformers 5.24 renamed it
        cache = {key: out[key]}
        logits = out.logits if out.logits.dtype == torch.float64 else out.logits.float()
        losses.append(cross_entropy(logits.transpose(1, 2), target, reduction="none").double().cpu())
    return torch.cat(losses, 1)


def bin_losses(nll: Tensor, rows: int, num_bins: int) -> list[Bin]:
    """Mean losses of neighbouring positions.

    Args:
        nll: [positions], summed over rows; the first entry is of the token that has one before it.
        rows: how many rows were summed.
        num_bins: at most this many bins, of equal width but for the last.
    """
    width = -(-len(nll) // num_bins)
    bins = []
    for start in range(0, len(nll), width):
        part = nll[start : start + width]
        metric = Perplexity(keep_in_memory=True)
        result = metric.compute(nll=part.tolist(), num_tokens=[rows] * len(part))
        bins.append(Bin(start + 1, start + len(part), rows * len(part), result["loss"], result["perplexity"]))
    return bins


def measure(model, ids: Tensor, *, piece: int, batch_size: int, num_bins: int, label: str) -> list[Bin]:
    """The curve of a model over rows of tokens [rows, length], with a progress bar."""
    total = torch.zeros(ids.shape[1] - 1, dtype=torch.float64)
    with tqdm(total=ids.numel(), unit="token", desc=label) as bar:
        for batch in ids.split(batch_size):
            total += nll_by_position(model, batch, piece).sum(0)
            bar.update(batch.numel())
    return bin_losses(total, ids.shape[0], num_bins)


def write_csv(curves: list[Curve], path: Path) -> None:
    """All curves as one table; the file is replaced as a whole."""
    part = path.with_suffix(".csv.part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(row for curve in curves for row in curve.rows())
    os.replace(part, path)


def draw(curves: list[Curve], path: Path) -> None:
    """All curves in one plot: loss over position; a colour for each model, a line style for each evaluation."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    styles = ("-", "--", ":", "-.")
    names = list(dict.fromkeys(curve.implementation for curve in curves))
    colours = {model: f"C{i % 10}" for i, model in enumerate(dict.fromkeys(curve.model for curve in curves))}
    for curve in curves:
        middle = [(b.first + b.last) / 2 for b in curve.bins]
        label = f"{curve.model} ({curve.implementation})" if len(names) > 1 else curve.model
        style = styles[names.index(curve.implementation) % len(styles)]
        axes.plot(middle, [b.loss for b in curve.bins], style, color=colours[curve.model], label=label)
    axes.set_xlabel("tokens before the predicted one")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def load(name: str, args: argparse.Namespace):
    """A model, on the device and in the type that were asked for."""
    model = AutoModelForCausalLM.from_pretrained(
        name, revision=args.revision, trust_remote_code=args.trust_remote_code, dtype=args.dtype
    )
    return model.to(args.device).eval()


def choose_implementation(model, name: str, implementation: str) -> None:
    """Evaluate the TTT layers so; "as saved" leaves the model as it is.

    Raises:
        ValueError: for a model without TTT layers.
    """
    if implementation == "as saved":
        return
    if not hasattr(model, "set_ttt_implementation"):
        raise ValueError(f"--implementation {implementation}: {name!r} is no model of hf-ttt; leave the option out")
    model.set_ttt_implementation(implementation)


def labels_of(models: list[str]) -> list[str]:
    """A short name for each model: the last part of its path where these differ, else all of it."""
    short = [Path(name).name for name in models]
    return short if len(set(short)) == len(models) else models


def parse_arguments(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="saved folders or Hub ids of causal language models")
    parser.add_argument("--text_file", type=Path, required=True, help="UTF-8 text that no model was trained on")
    parser.add_argument("--length", type=int, default=2048, help="tokens in a row (2048)")
    parser.add_argument("--piece", type=int, default=1024, help="tokens that a model reads in one call (1024)")
    parser.add_argument("--batch_size", type=int, default=1, help="rows that are read together (1)")
    parser.add_argument("--max_rows", type=int, help="read this many rows at most; default: the whole text")
    parser.add_argument("--num_bins", type=int, default=64, help="points of a curve (64)")
    parser.add_argument(
        "--implementation",
        nargs="+",
        default=["as saved"],
        choices=["auto", "recurrent", "parallel"],
        help="evaluations of the TTT layers, a curve each; default: the one that a model was saved with",
    )
    parser.add_argument("--tokenizer", help="default: each model's own")
    parser.add_argument("--revision", default="main", help="branch, tag or commit of models from the Hub (main)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with a model")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output_dir", type=Path, default=Path("perplexity-by-position"))
    parsed = parser.parse_args(args)
    for name, least in (("length", 2), ("piece", 1), ("batch_size", 1), ("max_rows", 1), ("num_bins", 1)):
        value = getattr(parsed, name)
        if value is not None and value < least:
            parser.error(f"--{name} {value} must be at least {least}")
    if not parsed.text_file.is_file():
        parser.error(f"--text_file: there is no file {str(parsed.text_file)!r}")
    return parsed


def main(arguments: list[str] | None = None) -> list[Curve]:
    """Run the command line `arguments` (default: that of the process) and return the curves."""
    args = parse_arguments(arguments)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    curves: list[Curve] = []
    for name, label in zip(args.models, labels_of(args.models), strict=True):
        tokenizer = AutoTokenizer.from_pretrained(
            args.tokenizer or name, revision=args.revision, trust_remote_code=args.trust_remote_code
        )
        ids = read_rows(args.text_file, tokenizer, args.length, args.max_rows)
        model = load(name, args)
        for implementation in args.implementation:
            choose_implementation(model, name, implementation)
            settings = {"piece": args.piece, "batch_size": args.batch_size, "num_bins": args.num_bins}
            bins = measure(model, ids, label=f"{label} ({implementation})", **settings)
            curves.append(Curve(label, implementation, bins))
            write_csv(curves, args.output_dir / "perplexity_by_position.csv")
            draw(curves, args.output_dir / "perplexity_by_position.png")
            tokens = sum(b.num_tokens for b in bins)
            loss = sum(b.loss * b.num_tokens for b in bins) / tokens
            print(f"{label} ({implementation}): {tokens} tokens, loss {loss:.4f}, last bin {bins[-1].loss:.4f}")
        del model
    print(f"Written to {args.output_dir}")
    return curves


if __name__ == "__main__":
    main()
