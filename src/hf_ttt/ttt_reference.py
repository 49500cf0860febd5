# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The definition of a TTT layer: slow, in float64, with autograd through the stated inner loss.

Nothing here is derived by hand. Each token's loss is written down, autograd differentiates it, and the outer gradient
is autograd through that. Every fast evaluation is tested against these functions.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from .ttt_rule import TTTRule

LACT = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
NVS = (3.4445, -4.7750, 2.0315)


def reference_network(x: Tensor, w0: Tensor | None, w1: Tensor, w2: Tensor | None, rule: TTTRule) -> Tensor:
    """f(x) for one token per row: x [B, H, Dk] → [B, H, Dv]."""
    if rule.fast_weight == "swiglu":
        x = silu(torch.einsum("bhij,bhj->bhi", w0, x)) * torch.einsum("bhij,bhj->bhi", w2, x)
    return torch.einsum("bhij,bhj->bhi", w1, x)


def reference_loss(k: Tensor, v: Tensor, w0, w1, w2, rule: TTTRule) -> Tensor:
    """The inner loss of one token, summed over rows and heads (they do not share weights)."""
    out = reference_network(k, w0, w1, w2, rule)
    return -(out * v).sum() if rule.loss == "dot_product" else 0.5 * ((out - v) ** 2).sum()


def reference_muon(g: Tensor, rule: TTTRule) -> Tensor:
    """Newton–Schulz iteration on matrices [..., m, n] in the type of `g`."""
    if rule.muon is None:
        return g
    x = g.mT if g.shape[-2] > g.shape[-1] else g
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for a, b, c in LACT if rule.muon == "lact" else [NVS] * rule.muon_steps:
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x.mT if g.shape[-2] > g.shape[-1] else x


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w0: Tensor | None,
    w1: Tensor,
    w2: Tensor | None,
    lr0: Tensor | None = None,
    lr1: Tensor | None = None,
    lr2: Tensor | None = None,
    momentum: Tensor | None = None,
    *,
    rule: TTTRule,
    chunk_size: int,
) -> tuple[Tensor, list[Tensor | None]]:
    """Chunk-causal TTT by its definition, in float64 and differentiable: token t reads the weights after ⌊t/C⌋ steps.

    Shapes as in `ttt_attention`.

    Returns:
        The output [B, T, H, Dv] and the weights [w0, w1, w2], each [B, H, ·, ·], after all full chunks.
    """
    q, k, v = q.double(), k.double(), v.double()
    batch, length = k.shape[:2]
    w = [None if x is None else x.double().expand(batch, *x.shape[-3:]) for x in (w0, w1, w2)]
    rates = [None if x is None else x.double() for x in (lr0, lr1, lr2)]
    row_norm = lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # noqa: E731
    norm = [None if x is None else row_norm(x.detach() if rule.detach_norms else x) for x in w]
    main, buffer = list(w), [0.0, 0.0, 0.0]
    outputs = []
    for start in range(0, length, chunk_size):
        chunk = range(start, min(start + chunk_size, length))
        reads = q if rule.read_with == "query" else k
        outputs += [reference_network(reads[:, t], w[0], w[1], w[2], rule) for t in chunk]
        for _ in range(rule.inner_steps if len(chunk) == chunk_size else 0):
            w, main, buffer = _reference_step(w, main, buffer, norm, k, v, rates, momentum, chunk, rule)
    out = torch.stack(outputs, 1) if outputs else v.new_zeros(v.shape)
    return out, w


def _reference_step(w, main, buffer, norm, k, v, rates, momentum, chunk, rule):
    gradient, create_graph = {i: torch.zeros_like(w[i]) for i in rule.updated}, torch.is_grad_enabled()
    for t in chunk:
        with torch.enable_grad():
            at = list(w)
            for i in rule.updated:
                at[i] = w[i] if create_graph and w[i].requires_grad else w[i].detach().requires_grad_()
            loss = reference_loss(k[:, t], v[:, t], at[0], at[1], at[2], rule)
            token = torch.autograd.grad(loss, [at[i] for i in rule.updated], create_graph=create_graph)
        for i, g in zip(rule.updated, token, strict=True):
            gradient[i] = gradient[i] - (g if rates[i] is None else rates[i][:, t, :, None, :] * g)
    w, main, buffer = list(w), list(main), list(buffer)
    for i, g in gradient.items():
        if momentum is not None:
            m = momentum[:, chunk.start : chunk.stop].double().mean(1)[..., None]
            buffer[i] = g + m * buffer[i]
            g = buffer[i]
        step = rule.sign * reference_muon(g, rule)
        if rule.weight_norm == "pre":
            main[i] = main[i] + step
            w[i] = main[i] / (torch.linalg.vector_norm(main[i], dim=-1, keepdim=True) + 1e-5) * norm[i]
        elif rule.weight_norm == "post":
            x = w[i] + step
            w[i] = x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-5) * norm[i]
        else:
            w[i] = w[i] + step
    return w, main, buffer
