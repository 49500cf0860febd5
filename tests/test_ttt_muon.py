# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Newton–Schulz orthogonalisation and its backward against autograd through the iteration."""

import pytest
import torch

from hf_ttt import TTTRule
from hf_ttt.ttt_muon import muon_backward, muon_forward
from hf_ttt.ttt_reference import reference_muon

RULES = [TTTRule(muon="lact")] + [TTTRule(muon="nvs", muon_steps=n) for n in (0, 1, 5)]
SHAPES = [(3, 4, 6), (3, 6, 4), (2, 5, 5), (1, 1, 3), (2, 3, 1)]
by_coefficients = pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.muon}{rule.muon_steps}")
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[1]}x{s[2]}")


def random(shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(a, b):
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


@by_coefficients
@by_shape
def test_forward_and_backward_equal_autograd(rule, shape):
    g, grad = random(shape).requires_grad_(), random(shape, seed=1)
    want = reference_muon(g, rule)
    (want_grad,) = torch.autograd.grad((want * grad).sum(), g)
    assert relative(muon_forward(g.detach(), rule), want) < 1e-12
    assert relative(muon_backward(g.detach(), grad, rule), want_grad) < 1e-11


@by_coefficients
@by_shape
def test_float32(rule, shape):
    """Roundings of 2⁻²⁴ grow by up to Π a ≈ 490 ("lact": 493; "nvs" × 5: 485); measured at most 0.5 of that."""
    g, grad = random(shape).requires_grad_(), random(shape, seed=1)
    want = reference_muon(g, rule)
    (want_grad,) = torch.autograd.grad((want * grad).sum(), g)
    g, grad = g.detach().float(), grad.float()
    out = muon_forward(g, rule)
    assert out.dtype == torch.float32
    assert relative(out, want) < 490 * 2**-24
    assert relative(muon_backward(g, grad, rule), want_grad) < 490 * 2**-24


@pytest.mark.parametrize("muon", ["lact", "nvs"])
def test_singular_values_come_near_one(muon):
    """What the iteration is for; the published coefficients oscillate around 1 rather than converge."""
    for shape in [(2, 8, 12), (2, 12, 8)]:
        values = torch.linalg.svdvals(muon_forward(random(shape), TTTRule(muon=muon)))
        assert values.min() > 0.5
        assert values.max() < 1.5


@by_coefficients
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_matrix_of_zeros_stays_zero(rule, dtype):
    rule = TTTRule(muon=rule.muon, muon_steps=rule.muon_steps, muon_dtype=dtype)
    zeros, grad = torch.zeros(2, 4, 6), random((2, 4, 6), torch.float32)
    assert torch.equal(muon_forward(zeros, rule), zeros)
    assert muon_backward(zeros, grad, rule).isfinite().all()


def test_without_muon_nothing_happens():
    g = random((2, 4, 6))
    assert muon_forward(g, TTTRule()) is g
    assert muon_backward(g, g, TTTRule()) is g


def test_no_steps_still_divide_by_the_norm():
    """As published: muon with 0 steps is not the same as no muon."""
    out = muon_forward(random((2, 4, 6)), TTTRule(muon="nvs", muon_steps=0))
    torch.testing.assert_close(torch.linalg.matrix_norm(out), torch.ones(2, dtype=torch.float64), rtol=1e-6, atol=0)


@by_coefficients
@by_shape
def test_bfloat16(rule, shape):
    """The published type. In a strong direction each of an iteration's 4 products adds a rounding of 2⁻⁹ (measured: at
    most 1.0 for each, cast and division included). In a weak one roundings grow by up to Π a, so that only the greatest
    singular value can be asked for (measured: within 2.3 %)."""
    g = random(shape, torch.float32)
    exact = TTTRule(muon=rule.muon, muon_steps=rule.muon_steps)
    rough = TTTRule(muon=rule.muon, muon_steps=rule.muon_steps, muon_dtype="bfloat16")
    out = muon_forward(g, rough)
    assert out.dtype == torch.float32
    assert torch.equal(out, out.bfloat16().float())  # the last iterate comes as it is
    strongest = torch.linalg.svdvals(muon_forward(g, exact)).max()
    assert torch.linalg.svdvals(out).max() < 1.1 * strongest
    one = random((*shape[:-2], 1, shape[-1]), torch.float32)  # a single direction, and a strong one
    roundings = 4 * rule.muon_steps + 4
    assert relative(muon_forward(one, rough), muon_forward(one, exact)) < 2 * roundings * 2**-9
    assert muon_backward(g, g, rough).isfinite().all()
