# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Metrics of language models and classifiers, as `evaluate.Metric` classes that work offline.

Those of language models add up negative log-likelihoods in nats, so they take a row per token, per sequence or per
batch, whatever is at hand, and the result does not depend on how the text was cut into rows. `import hf_ttt` does not
load this module: it needs the extra `train` (`pip install hf-ttt[train]`).

    metric = Perplexity()
    for batch in batches:
        nll, num_tokens = sum_token_nll(model(batch).logits, batch["labels"])
        metric.add_batch(nll=nll, num_tokens=num_tokens)
    metric.compute()  # {"loss": 1.25, "perplexity": 3.49}
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import datasets
import evaluate
import torch
import torch.nn.functional as F
from torch import Tensor


def sum_token_nll(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of each row's labels under logits that predict the next position.

        nll[b] = Σ_t −log softmax(logits[b, t])[labels[b, t + 1]]

    Args:
        logits: [B, T, V], any floating type; the softmax is taken in at least float32.
        labels: [B, T] token ids, not shifted, as transformers' causal language models take them.
        ignore_index: label that is neither counted nor added.

    Returns:
        `nll` [B] in nats and `num_tokens` [B] (int64), the number of labels that were predicted.

    Raises:
        ValueError: if the first two dimensions of `logits` are not those of `labels`.
    """
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise ValueError(
            f"logits must be [B, T, V] and labels [B, T]; got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    targets = labels[:, 1:].to(logits.device)
    scores = logits[:, :-1]
    scores = scores if scores.dtype == torch.float64 else scores.float()
    losses = F.cross_entropy(scores.transpose(1, 2), targets, ignore_index=ignore_index, reduction="none")
    return losses.sum(1), (targets != ignore_index).sum(1)


def _total(name: str, counts: Sequence[int]) -> int:
    total = sum(counts)
    if min(counts, default=0) < 0 or total == 0:
        raise ValueError(f"{name} must be counts ≥ 0 with a positive sum; got {len(counts)} rows with sum {total}")
    return total


class Perplexity(evaluate.Metric):
    """Loss in nats per token and perplexity.

        loss = Σ nll / Σ num_tokens        perplexity = exp(loss)

    `add`, `add_batch` and `compute` take `nll`, summed negative log-likelihoods in nats (float64), and `num_tokens`,
    how many tokens each sum covers (int64); a row may be a token (1), a sequence or a batch. `compute` returns
    `{"loss": float, "perplexity": float}` (infinite where the exponential overflows) and raises a ValueError if no
    token was counted.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Loss in nats per token, and perplexity, from summed negative log-likelihoods.",
            citation="",
            inputs_description="nll: summed negative log-likelihoods in nats. num_tokens: tokens that each covers.",
            features=datasets.Features({"nll": datasets.Value("float64"), "num_tokens": datasets.Value("int64")}),
        )

    def _compute(self, nll: Sequence[float], num_tokens: Sequence[int]) -> dict[str, float]:
        loss = math.fsum(nll) / _total("num_tokens", num_tokens)
        try:
            perplexity = math.exp(loss)
        except OverflowError:
            perplexity = math.inf
        return {"loss": loss, "perplexity": perplexity}


class BitsPerByte(evaluate.Metric):
    """Bits that the model needs for a byte of text: comparable between tokenizers, and with file compressors.

        bits_per_byte = Σ nll / (ln 2 · Σ num_bytes)

    `add`, `add_batch` and `compute` take `nll`, summed negative log-likelihoods in nats (float64), and `num_bytes`, the
    UTF-8 bytes of the text that each sum covers (int64). A token that stands for no text, such as a separator between
    documents, adds its likelihood and no byte. `compute` returns `{"bits_per_byte": float}` and raises a ValueError if
    no byte was counted.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Bits per UTF-8 byte of text, from summed negative log-likelihoods.",
            citation="",
            inputs_description="nll: summed negative log-likelihoods in nats. num_bytes: UTF-8 bytes that each covers.",
            features=datasets.Features({"nll": datasets.Value("float64"), "num_bytes": datasets.Value("int64")}),
        )

    def _compute(self, nll: Sequence[float], num_bytes: Sequence[int]) -> dict[str, float]:
        return {"bits_per_byte": math.fsum(nll) / (math.log(2) * _total("num_bytes", num_bytes))}


class Accuracy(evaluate.Metric):
    """Share of the examples that a classifier gives their class.

    `add`, `add_batch` and `compute` take `predictions` and `references`, classes as integers. `compute` returns
    `{"accuracy": float}` and raises a ValueError if there are no examples.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of the predicted classes that are right.",
            citation="",
            inputs_description="predictions: predicted classes. references: true classes.",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        if len(references) == 0:
            raise ValueError("references is empty: the accuracy of no examples is not defined; give at least one")
        right = sum(int(p == r) for p, r in zip(predictions, references, strict=True))
        return {"accuracy": right / len(references)}
