# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Metrics of language models, classifiers and rendered views, as `evaluate.Metric` classes that work offline.

Those of language models add up negative log-likelihoods in nats, so they take a row per token, per sequence or per
batch, whatever is at hand, and the result does not depend on how the text was cut into rows. Those of views likewise
take numbers of each view. `import hf_ttt` does not load this module: it needs the extra `train`
(`pip install hf-ttt[train]`).

    metric = Perplexity()
    for batch in batches:
        nll, num_tokens = sum_token_nll(model(batch).logits, batch["labels"])
        metric.add_batch(nll=nll, num_tokens=num_tokens)
    metric.compute()  # {"loss": 1.25, "perplexity": 3.49}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import datasets
import evaluate
import torch
import torch.nn.functional as F
from torch import Tensor

SSIM_WINDOW, SSIM_SIGMA = 11, 1.5  # pixels


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


def view_squared_error(rendered: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of each view, summed over its pixels and channels.

    Args:
        rendered, target: [..., 3, h, w], floats in [0, 1]; computed in at least float32.

    Returns:
        `squared_error` [...] (float64) and `num_values` [...] (int64), how many values were added up.

    Raises:
        ValueError: for shapes that differ, or are not of images.
    """
    rendered, target = _as_views(rendered, target)
    error = (rendered - target).square().double().sum((-3, -2, -1))
    return error, torch.full_like(error, math.prod(rendered.shape[-3:]), dtype=torch.int64)


def view_ssim(rendered: Tensor, target: Tensor) -> Tensor:
    """Structural similarity of each view (Wang et al. 2004), between −1 and 1, which is equality.

        ssim = mean of (2 μx μy + c1) (2 σxy + c2) / ((μx² + μy² + c1) (σx² + σy² + c2))

    with c1 = 0.01², c2 = 0.03², and means under a Gaussian window of 11 × 11 pixels and standard deviation 1.5, taken
    where the window fits into the image, over all three channels.

    Args:
        rendered, target: [..., 3, h, w], floats in [0, 1], with h and w at least 11; computed in float64.

    Returns:
        [...] (float64).

    Raises:
        ValueError: for shapes that differ, are not of images, or are smaller than the window.
    """
    rendered, target = _as_views(rendered, target)
    *views, channels, height, width = rendered.shape
    if min(height, width) < SSIM_WINDOW:
        raise ValueError(f"rendered has images of {height} × {width}; the window needs {SSIM_WINDOW} × {SSIM_WINDOW}")
    x, y = (t.double().reshape(-1, 1, height, width) for t in (rendered, target))
    offsets = torch.arange(SSIM_WINDOW, dtype=torch.float64, device=x.device) - SSIM_WINDOW // 2
    window = torch.exp(-offsets.square() / (2 * SSIM_SIGMA**2))
    window = window / window.sum()

    def blur(t: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(t, window.view(1, 1, -1, 1)), window.view(1, 1, 1, -1))

    mean_x, mean_y = blur(x), blur(y)
    var_x, var_y = blur(x * x) - mean_x**2, blur(y * y) - mean_y**2
    covariance = blur(x * y) - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    ssim = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    ssim = ssim / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return ssim.mean((1, 2, 3)).reshape(*views, channels).mean(-1)


def load_lpips(net: str = "vgg") -> Callable[[Tensor, Tensor], Tensor]:
    """Learned perceptual distance of views (Zhang et al. 2018), by the package lpips; differentiable.

    Args:
        net: the network that compares, "vgg" (as published with LaCT), "alex" or "squeeze"; lpips has torchvision
            fetch its weights.

    Returns:
        A function of `rendered` and `target` [..., 3, h, w] in [0, 1] that gives distances [...].

    Raises:
        ImportError: without lpips.
    """
    try:
        import lpips
    except ImportError as error:
        raise ImportError("LPIPS needs the package lpips (and with it torchvision): pip install lpips") from error
    network = lpips.LPIPS(net=net, verbose=False).eval().requires_grad_(False)

    def distance(rendered: Tensor, target: Tensor) -> Tensor:
        rendered, target = _as_views(rendered, target)
        network.to(rendered.device)
        flat = (t.flatten(0, -4) for t in (rendered, target))
        return network(*flat, normalize=True).reshape(rendered.shape[:-3])

    return distance


def _as_views(rendered: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The same, in one floating type of at least float32."""
    if rendered.shape != target.shape or rendered.dim() < 4 or rendered.shape[-3] != 3 or 0 in rendered.shape:
        raise ValueError(
            f"rendered has shape {list(rendered.shape)} and target {list(target.shape)}; expected both to be "
            "[views, 3, height, width], with any further dimensions before"
        )
    dtype = torch.promote_types(torch.promote_types(rendered.dtype, target.dtype), torch.float32)
    return rendered.to(dtype), target.to(dtype)


def _decibels(mean_squared_error: float) -> float:
    return -10 * math.log10(mean_squared_error) if mean_squared_error > 0 else math.inf


class PSNR(evaluate.Metric):
    """Peak signal-to-noise ratio of rendered views with values in [0, 1], in decibels.

        psnr = mean of −10 log10(squared_error / num_values)
        psnr_pooled = −10 log10(Σ squared_error / Σ num_values)

    `add`, `add_batch` and `compute` take what `view_squared_error` gives: `squared_error` (float64) and `num_values`
    (int64) of each view. `compute` returns `{"psnr": float, "psnr_pooled": float}`, infinite where there is no error
    (`psnr` already where one view has none), and raises a ValueError if there are no views or a view has no values.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Peak signal-to-noise ratio of views in [0, 1]: mean of the views', and of the pooled error.",
            citation="",
            inputs_description="squared_error: summed over each view. num_values: pixels times channels of each.",
            features=datasets.Features(
                {"squared_error": datasets.Value("float64"), "num_values": datasets.Value("int64")}
            ),
        )

    def _compute(self, squared_error: Sequence[float], num_values: Sequence[int]) -> dict[str, float]:
        if min(num_values, default=0) < 1:
            raise ValueError(f"num_values must be at least 1 for each view; got {len(num_values)} views, {num_values}")
        each = [_decibels(error / count) for error, count in zip(squared_error, num_values, strict=True)]
        return {
            "psnr": math.fsum(each) / len(each),
            "psnr_pooled": _decibels(math.fsum(squared_error) / sum(num_values)),
        }


class SSIM(evaluate.Metric):
    """Mean structural similarity of rendered views.

    `add`, `add_batch` and `compute` take `ssim` (float64) of each view, as `view_ssim` gives it. `compute` returns
    `{"ssim": float}` and raises a ValueError if there are no views.
    """

    def _info(self) -> evaluate.MetricInfo:
        return _info_of_means("ssim", "Mean structural similarity of views.")

    def _compute(self, ssim: Sequence[float]) -> dict[str, float]:
        return _mean_of_views("ssim", ssim)


class LPIPS(evaluate.Metric):
    """Mean learned perceptual distance of rendered views; 0 is best.

    `add`, `add_batch` and `compute` take `lpips` (float64) of each view, as the function that `load_lpips` returns
    gives it. `compute` returns `{"lpips": float}` and raises a ValueError if there are no views.
    """

    def _info(self) -> evaluate.MetricInfo:
        return _info_of_means("lpips", "Mean learned perceptual distance of views.")

    def _compute(self, lpips: Sequence[float]) -> dict[str, float]:
        return _mean_of_views("lpips", lpips)


def _info_of_means(name: str, description: str) -> evaluate.MetricInfo:
    return evaluate.MetricInfo(
        description=description,
        citation="",
        inputs_description=f"{name}: of each view.",
        features=datasets.Features({name: datasets.Value("float64")}),
    )


def _mean_of_views(name: str, values: Sequence[float]) -> dict[str, float]:
    if len(values) == 0:
        raise ValueError(f"{name} is empty: the mean of no views is not defined; give at least one")
    return {name: math.fsum(values) / len(values)}
