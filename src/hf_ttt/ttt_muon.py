# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Newton–Schulz orthogonalisation of an update ("Muon"), with a hand-written backward.

Coefficients: the five triples of LaCT's language model and the single triple of LaCT's novel-view model (Zhang et al.,
arXiv 2505.23884), after Muon (Jordan et al., 2024). The published code iterates in bfloat16. Rounding is amplified by
up to Π a ≈ 490 in weak singular directions, so that two kernels in bfloat16 do not agree; float32 is the default here.
"""

import torch
from torch import Tensor

from .ttt_rule import TTTRule

COEFFICIENTS_LACT = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
COEFFICIENTS_NVS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # added to the Frobenius norm, as published


def muon_coefficients(rule: TTTRule) -> tuple[tuple[float, float, float], ...]:
    """The (a, b, c) of each iteration of a rule that has Muon."""
    return COEFFICIENTS_LACT if rule.muon == "lact" else (COEFFICIENTS_NVS,) * rule.muon_steps


def _start(g: Tensor, rule: TTTRule) -> tuple[Tensor, Tensor, Tensor]:
    """The cast, wide matrix, its norm, and the normalised matrix that the iteration starts from."""
    x = g.bfloat16() if rule.muon_dtype == "bfloat16" else g
    x = x.mT if x.shape[-2] > x.shape[-1] else x
    norm = torch.linalg.matrix_norm(x, keepdim=True)
    return x, norm, x / (norm + EPS)


def _polynomial(x: Tensor, b: float, c: float) -> tuple[Tensor, Tensor]:
    """A = X Xᵀ and P = b A + c A A."""
    a = torch.bmm(x, x.mT)
    return a, torch.baddbmm(a, a, a, beta=b, alpha=c)


def muon_forward(g: Tensor, rule: TTTRule) -> Tensor:
    """X ← a X + (b A + c A²) X with A = X Xᵀ, from X = G/(‖G‖ + 1e-7): near the orthogonal factor of G.

    Args:
        g: updates [N, m, n], float32 or float64.
        rule: gives coefficients, steps and type; returns `g` itself where `rule.muon` is None.

    Returns:
        [N, m, n] in the type of `g`.
    """
    if rule.muon is None:
        return g
    _, _, x = _start(g, rule)
    for a, b, c in muon_coefficients(rule):
        x = torch.baddbmm(x, _polynomial(x, b, c)[1], x, beta=a)
    return (x.mT if g.shape[-2] > g.shape[-1] else x).to(g.dtype)


def muon_backward(g: Tensor, grad: Tensor, rule: TTTRule) -> Tensor:
    """Gradient of `muon_forward` at `g` [N, m, n] for the output gradient `grad`; the iterates are computed again.

    With P symmetric, the gradient of X ↦ aX + PX needs only the symmetric part D of grad·Xᵀ: four products an
    iteration.
    """
    if rule.muon is None:
        return grad
    tall = g.shape[-2] > g.shape[-1]
    raw, norm, start = _start(g, rule)
    coefficients = muon_coefficients(rule)
    steps, x = [], start
    for i, (a, b, c) in enumerate(coefficients):
        gram, poly = _polynomial(x, b, c)
        steps.append((x, gram, poly))
        if i + 1 < len(coefficients):
            x = torch.baddbmm(x, poly, x, beta=a)
    dx = (grad.mT if tall else grad).to(raw.dtype)
    for a, b, c in reversed(coefficients):
        x, gram, poly = steps.pop()
        d = torch.bmm(dx, x.mT)
        d = 0.5 * (d + d.mT)
        s = torch.bmm(d, gram)
        s = b * d + c * (s + s.mT)  # symmetric part of the gradient of A
        dx = torch.baddbmm(torch.baddbmm(dx, poly, dx, beta=a), s, x, alpha=2.0)
    # X = G/(n + ε): the norm's gradient at a matrix of zeros is zero
    inner = (dx * start).sum((-2, -1), keepdim=True)
    dg = (dx - raw * (inner / torch.where(norm > 0, norm, 1.0))) / (norm + EPS)
    return (dg.mT if tall else dg).to(g.dtype)
