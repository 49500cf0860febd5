# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The definition of the two inner models of a ViTTT block: float64, autograd through the inner loss itself, slow."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .ttt_vision import SCALE, VisionRule, VisionTokens


def _probe(w: Tensor) -> Tensor:
    """w, to be differentiated by the inner loss apart from everything else that was computed with it."""
    return w * 1 if w.requires_grad else w.detach().clone().requires_grad_()


def _updated(w: Tensor, gradient: Tensor, dims: tuple[int, ...], normalise: bool) -> Tensor:
    norm = torch.linalg.vector_norm(gradient, dim=dims, keepdim=True)
    return w - (gradient / (1 + norm) if normalise else gradient)


def _gated_gradients(k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, rule: VisionRule) -> tuple[Tensor, Tensor]:
    """Gradients of the inner loss with respect to w1 and w2."""
    p1, p2, rate = _probe(w1), _probe(w2), SCALE / k.shape[-2]
    if rule.fast_weight == "linear_plain":
        loss = -rate * ((k @ p1) * v).sum()
    elif rule.fast_weight == "linear":  # what the published code differentiates: its values carry a factor k w1
        loss = -rate * ((k @ p1).square() * v).sum() / 2
    else:  # the published "mse" puts v − silu(k w2) in the place of v
        target = v if rule.loss == "dot_product" else v - F.silu(k @ w2)
        loss = -rate * ((k @ p1) * F.silu(k @ p2) * target).sum()
    g1, g2 = torch.autograd.grad(rule.sign * loss, (p1, p2), create_graph=True, materialize_grads=True)
    return g1, g2


def _gated(q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, rule: VisionRule) -> Tensor:
    """Take the steps on one image [H, N, D] and read the result."""
    for _ in range(rule.inner_steps):
        g1, g2 = _gated_gradients(k, v, w1, w2, rule)
        w1 = _updated(w1, g1, (-2,), rule.normalise)
        if rule.update == "all" and rule.fast_weight == "swiglu":
            w2 = _updated(w2, g2, (-2,), rule.normalise)
    return (q @ w1) * F.silu(q @ w2) if rule.fast_weight == "swiglu" else q @ w1


def _depthwise(q: Tensor, k: Tensor, v: Tensor, w: Tensor, rule: VisionRule) -> Tensor:
    """The same for the 3 × 3 kernels [D, 1, 3, 3] and one image's maps [D, h, w]."""
    for _ in range(rule.inner_steps):
        p = _probe(w)
        loss = -SCALE / v[0].numel() * (F.conv2d(k, p, padding=1, groups=len(w)) * v).sum()
        (gradient,) = torch.autograd.grad(loss, p, create_graph=True)
        w = _updated(w, gradient, (-2, -1), True)
    return F.conv2d(q, w, padding=1, groups=len(w))


def reference_vision(tokens: VisionTokens, w1: Tensor, w2: Tensor, w3: Tensor, *, rule: VisionRule):
    """Arguments and results of `vision_recurrent`, in float64; differentiable."""
    with torch.enable_grad():
        tokens = VisionTokens(*(x.double() for x in tokens))
        w1, w2, w3 = w1[0].double(), w2[0].double(), w3.double()
        gated = [_gated(q, k, v, w1, w2, rule) for q, k, v in zip(*tokens[:3], strict=True)]
        maps = [x.permute(0, 3, 1, 2) for x in tokens[3:]]
        depthwise = [_depthwise(q, k, v, w3, rule).permute(1, 2, 0) for q, k, v in zip(*maps, strict=True)]
        return torch.stack(gated), torch.stack(depthwise)
