# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Perplexity, bits per byte and accuracy, against sums by hand."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

evaluate = pytest.importorskip("evaluate")

from hf_ttt.metrics import Accuracy, BitsPerByte, Perplexity, sum_token_nll  # noqa: E402

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
