# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Perplexity, bits per byte, accuracy, and the metrics of rendered views, against sums by hand."""

import math
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

evaluate = pytest.importorskip("evaluate")

from hf_ttt.metrics import (  # noqa: E402
    LPIPS,
    PSNR,
    SSIM,
    Accuracy,
    BitsPerByte,
    Perplexity,
    load_lpips,
    sum_token_nll,
    view_squared_error,
    view_ssim,
)

NLL = [3.5, 0.0, 120.25, 7.0]
TOKENS = [2, 0, 40, 5]
BYTES = [9, 0, 150, 20]


def expected_bits() -> float:
    return sum(NLL) / math.log(2) / sum(BYTES)


def test_perplexity_by_hand():
    loss = sum(NLL) / sum(TOKENS)
    result = Perplexity(keep_in_memory=True).compute(nll=NLL, num_tokens=TOKENS)
    assert result == pytest.approx({"loss": loss, "perplexity": math.exp(loss)}, rel=1e-15)


def test_bits_per_byte_by_hand():
    result = BitsPerByte(keep_in_memory=True).compute(nll=NLL, num_bytes=BYTES)
    assert result == pytest.approx({"bits_per_byte": expected_bits()}, rel=1e-15)


def test_a_uniform_model_of_bytes_needs_eight_bits():
    assert BitsPerByte(keep_in_memory=True).compute(nll=[math.log(256)] * 7, num_bytes=[1] * 7) == {
        "bits_per_byte": pytest.approx(8, rel=1e-15)
    }


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
@pytest.mark.parametrize("keep_in_memory", [True, False])
def test_result_does_not_depend_on_how_rows_are_batched(convert, keep_in_memory, tmp_path):
    options = {"keep_in_memory": keep_in_memory, "cache_dir": str(tmp_path)}
    metric = Perplexity(**options)
    whole = metric.compute(nll=convert(NLL), num_tokens=convert(TOKENS))
    metric.add(nll=NLL[0], num_tokens=TOKENS[0])
    metric.add_batch(nll=convert(NLL[1:3]), num_tokens=convert(TOKENS[1:3]))
    assert metric.compute(nll=convert(NLL[3:]), num_tokens=convert(TOKENS[3:])) == whole
    bits = BitsPerByte(**options)
    bits.add_batch(nll=convert(NLL), num_bytes=convert(BYTES))
    assert bits.compute()["bits_per_byte"] == pytest.approx(expected_bits(), rel=1e-15)


def test_many_small_rows_lose_nothing():
    """Float64 rows are added exactly: a plain sum of 1e5 times 0.1 is already wrong in the eleventh digit."""
    rows = 100_000
    result = Perplexity(keep_in_memory=True).compute(nll=[0.1] * rows, num_tokens=[1] * rows)
    assert result["loss"] == 0.1


def test_a_loss_too_great_for_a_perplexity():
    assert Perplexity(keep_in_memory=True).compute(nll=[1e4], num_tokens=[1]) == {"loss": 1e4, "perplexity": math.inf}


def test_a_nan_is_not_hidden():
    result = Perplexity(keep_in_memory=True).compute(nll=[1.0, math.nan], num_tokens=[1, 1])
    assert math.isnan(result["loss"]) and math.isnan(result["perplexity"])


@pytest.mark.parametrize("counts", [[0, 0], [3, -1]], ids=["none", "negative"])
def test_impossible_counts(counts):
    with pytest.raises(ValueError, match="num_tokens must be counts"):
        Perplexity(keep_in_memory=True).compute(nll=[1.0, 2.0], num_tokens=counts)
    with pytest.raises(ValueError, match="num_bytes must be counts"):
        BitsPerByte(keep_in_memory=True).compute(nll=[1.0, 2.0], num_bytes=counts)


def test_rows_of_unequal_number():
    with pytest.raises(ValueError, match="Mismatch in the number"):
        Perplexity(keep_in_memory=True).compute(nll=[1.0, 2.0], num_tokens=[1])


def test_both_metrics_combined():
    both = evaluate.combine([Perplexity(keep_in_memory=True), BitsPerByte(keep_in_memory=True)])
    both.add_batch(nll=NLL, num_tokens=TOKENS, num_bytes=BYTES)
    assert set(both.compute()) == {"loss", "perplexity", "bits_per_byte"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sum_token_nll_by_hand(dtype):
    torch.manual_seed(0)
    logits = (3 * torch.randn(3, 6, 11)).to(dtype)
    labels = torch.randint(11, (3, 6))
    labels[0, 4:] = labels[1, 0] = labels[2] = -100
    expected, count = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    for b in range(3):
        for t in range(5):
            if labels[b, t + 1] != -100:
                expected[b] -= logits[b, t].double().log_softmax(0)[labels[b, t + 1]]
                count[b] += 1
    nll, num_tokens = sum_token_nll(logits, labels)
    assert num_tokens.tolist() == count.tolist() == [3, 5, 0]
    torch.testing.assert_close(nll.double(), expected, rtol=1e-6, atol=1e-6)


def test_sum_token_nll_of_one_token_predicts_nothing():
    nll, num_tokens = sum_token_nll(torch.randn(2, 1, 5), torch.zeros(2, 1, dtype=torch.long))
    assert nll.tolist() == [0, 0] and num_tokens.tolist() == [0, 0]


def test_sum_token_nll_with_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"\(2, 4, 5\) and \(2, 3\)"):
        sum_token_nll(torch.randn(2, 4, 5), torch.zeros(2, 3, dtype=torch.long))


def test_importing_the_package_loads_no_metrics():
    code = "import sys, hf_ttt; assert not {'evaluate', 'datasets', 'hf_ttt.metrics'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_accuracy_by_hand(convert):
    metric = Accuracy(keep_in_memory=True)
    metric.add_batch(predictions=convert([0, 2, 1]), references=convert([0, 1, 1]))
    metric.add(predictions=3, references=3)
    assert metric.compute() == {"accuracy": 0.75}


def test_accuracy_of_nothing():
    with pytest.raises(ValueError, match="references is empty"):
        Accuracy(keep_in_memory=True).compute(predictions=[], references=[])


def test_psnr_by_hand():
    """Two views with mean errors 0.01 and 0.0001 have 20 and 40 dB; together they are far from the mean, 30 dB."""
    rendered = torch.zeros(2, 3, 4, 5)
    target = torch.tensor([0.1, 0.01]).view(2, 1, 1, 1).expand_as(rendered)
    error, count = view_squared_error(rendered, target)
    assert count.tolist() == [60, 60] and error.tolist() == pytest.approx([0.6, 0.006], rel=1e-6)
    result = PSNR(keep_in_memory=True).compute(squared_error=error, num_values=count)
    assert result == pytest.approx({"psnr": 30.0, "psnr_pooled": -10 * math.log10(0.00505)}, rel=1e-6)


def test_pooled_psnr_weighs_views_by_their_pixels():
    result = PSNR(keep_in_memory=True).compute(squared_error=[3.0, 0.0], num_values=[3, 297])
    assert result == {"psnr": math.inf, "psnr_pooled": pytest.approx(20.0)}


def test_errors_of_views_keep_the_dimensions_before_them_and_low_precision():
    """bfloat16 would lose what is added to a sum of 256 (its next number is 258)."""
    rendered, target = torch.ones(2, 3, 3, 20, 20, dtype=torch.bfloat16), torch.zeros(2, 3, 3, 20, 20)
    assert view_squared_error(rendered, target)[0].tolist() == [[1200.0] * 3] * 2
    assert view_ssim(rendered, target).shape == (2, 3)


def ssim_by_loops(x: np.ndarray, y: np.ndarray) -> float:
    """The definition, window by window, over images [3, h, w]."""
    places = np.arange(11) - 5
    window = np.exp(-(places[:, None] ** 2 + places**2) / (2 * 1.5**2))
    window /= window.sum()
    values = []
    for a, b in zip(x, y, strict=True):
        for i in range(a.shape[0] - 10):
            for j in range(a.shape[1] - 10):
                p, q = a[i : i + 11, j : j + 11], b[i : i + 11, j : j + 11]
                mp, mq = (window * p).sum(), (window * q).sum()
                vp, vq = (window * (p - mp) ** 2).sum(), (window * (q - mq) ** 2).sum()
                c = (window * (p - mp) * (q - mq)).sum()
                top = (2 * mp * mq + 1e-4) * (2 * c + 9e-4)
                values.append(top / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4)))
    return float(np.mean(values))


def test_ssim_by_loops():
    """The window fits into the image 3 × 6 times, and nothing is added around it."""
    x, y = np.random.default_rng(0).random((2, 3, 13, 16))
    y = 0.7 * x + 0.3 * y
    found = view_ssim(torch.tensor(x)[None], torch.tensor(y)[None])
    assert found.item() == pytest.approx(ssim_by_loops(x, y), rel=1e-10)


def test_ssim_of_plain_images_by_hand():
    """Without variance only the means count; an image is like itself, whatever is in it."""
    plain = torch.full((1, 3, 11, 11), 0.5, dtype=torch.float64)
    expected = (2 * 0.5 * 0.25 + 1e-4) / (0.5**2 + 0.25**2 + 1e-4)
    assert view_ssim(plain, plain / 2).item() == pytest.approx(expected, rel=1e-9)
    noise = torch.rand(4, 3, 12, 15)
    assert view_ssim(noise, noise).tolist() == pytest.approx([1.0] * 4, rel=1e-12)


def test_means_of_views():
    assert SSIM(keep_in_memory=True).compute(ssim=[0.25, 0.75]) == {"ssim": 0.5}
    assert LPIPS(keep_in_memory=True).compute(lpips=[0.1, 0.2, 0.6]) == {"lpips": pytest.approx(0.3)}


@pytest.mark.parametrize(
    "metric, row, message",
    [
        (PSNR, {"squared_error": [], "num_values": []}, "num_values must be at least 1"),
        (PSNR, {"squared_error": [1.0, 1.0], "num_values": [3, 0]}, "num_values must be at least 1"),
        (SSIM, {"ssim": []}, "ssim is empty"),
        (LPIPS, {"lpips": []}, "lpips is empty"),
    ],
)
def test_metrics_of_no_views(metric, row, message):
    with pytest.raises(ValueError, match=message):
        metric(keep_in_memory=True).compute(**row)


@pytest.mark.parametrize("measure", [view_squared_error, view_ssim])
@pytest.mark.parametrize("shapes", [((2, 3, 16, 16), (1, 3, 16, 16)), ((3, 16, 16),) * 2, ((1, 16, 16, 3),) * 2])
def test_what_is_no_pair_of_views(measure, shapes):
    with pytest.raises(ValueError, match="expected both to be"):
        measure(*(torch.zeros(shape) for shape in shapes))


def test_ssim_of_images_smaller_than_its_window():
    with pytest.raises(ValueError, match="10 × 16; the window needs 11 × 11"):
        view_ssim(torch.zeros(1, 3, 10, 16), torch.zeros(1, 3, 10, 16))


def test_lpips_gets_batches_of_images_in_its_range(monkeypatch):
    """Its network takes [N, 3, h, w] and, with normalize, values from 0 to 1; no gradient reaches its weights."""

    class Network(torch.nn.Module):
        def __init__(self, net, verbose):
            super().__init__()
            self.net, self.weight = net, torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x, y, normalize):
            assert normalize and x.dim() == 4 and not self.training and self.net == "alex"
            return self.weight * (x - y).abs().mean((1, 2, 3), keepdim=True)

    monkeypatch.setitem(sys.modules, "lpips", types.SimpleNamespace(LPIPS=Network))
    rendered = torch.zeros(2, 3, 3, 8, 8, requires_grad=True)
    target = torch.linspace(0, 0.5, 6).view(2, 3, 1, 1, 1).expand_as(rendered)
    distance = load_lpips("alex")(rendered, target)
    torch.testing.assert_close(distance, 2 * target[:, :, 0, 0, 0])
    distance.sum().backward()
    assert rendered.grad.abs().sum() > 0


def test_lpips_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "lpips", None)
    with pytest.raises(ImportError, match="pip install lpips"):
        load_lpips()
