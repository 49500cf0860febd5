# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""One chunk of the inner loop, and its backward: the arithmetic that the evaluations of a TTT layer are made of.

Notation, per row and head: C tokens of a chunk, keys K [C, Dk], values V [C, Dv], rates η.

    Z = K w0ᵀ    U = K w2ᵀ    H = silu(Z) ⊙ U          features φ(K); H = K for a linear fast network
    E = V  (dot product)   or   V − H w1ᵀ  (MSE)        −∂loss/∂f
    g1 = Eᵀ (η1 H)                                      [Dv, Dh]
    D = E w1    dZ = D ⊙ U ⊙ silu'(Z)    dU = D ⊙ silu(Z)
    g0 = dZᵀ (η0 K)    g2 = dUᵀ (η2 K)                  [Dh, Dk]

Tokens come as [..., C, H, D] and are worked on in tiles of [N, t, D] that stay in a CPU's cache. Matrix
products are in the tokens' type, everything that accumulates is in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from .ttt_rule import TTTRule
from .ttt_state import EPS, row_norm

TILE_BYTES = 3 << 20  # of one [N, t, D] operand; measured on CPUs with 0.5 MiB of level-2 cache a core
ACCELERATOR_TILE_BYTES = 1 << 30
MIN_TILE = 64


class Tokens(NamedTuple):
    """What an update takes of some tokens: [..., T, H, D] each; rates are None for 1."""

    k: Tensor
    v: Tensor
    lr0: Tensor | None = None
    lr1: Tensor | None = None
    lr2: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Tokens:
        """`function` of each tensor."""
        return Tokens(*(None if x is None else function(x) for x in self))


def tokens_between(x: Tensor | None, start: int, stop: int) -> Tensor | None:
    """Tokens [start, stop) of x [..., T, H, D], a view."""
    return None if x is None else x[..., start:stop, :, :]


def fold(x: Tensor | None) -> Tensor | None:
    """[..., t, H, D] → [N, t, D] with N all leading dimensions and the heads; a view for a single row."""
    return None if x is None else x.transpose(-3, -2).reshape(-1, x.shape[-3], x.shape[-1])


def unfold(x: Tensor, like: Tensor) -> Tensor:
    """[N, t, D] → [..., t, H, D] with the leading dimensions and heads of `like` [..., T, H, ·], a view."""
    return x.unflatten(0, (*like.shape[:-3], like.shape[-2])).transpose(-3, -2)


def tile_length(x: Tensor, width: int) -> int:
    """How many tokens of x [..., T, H, D] make a tile [N, t, width] that stays in cache."""
    size = TILE_BYTES if x.device.type == "cpu" else ACCELERATOR_TILE_BYTES
    rows = x.shape[:-3].numel() * x.shape[-2]
    return max(MIN_TILE, size // max(rows * width * x.element_size(), 1))


def tiles(x: Tensor, width: int) -> Iterator[tuple[int, int]]:
    """The tiles of x [..., T, H, D] as ranges of tokens."""
    length = x.shape[-3]
    step = tile_length(x, width)
    return ((start, min(start + step, length)) for start in range(0, length, step))


def accumulate(total: Tensor | None, a: Tensor, b: Tensor) -> None:
    """total += aᵀ b in the type of `total`: a [N, t, m], b [N, t, n]."""
    if total is None:
        return
    if total.dtype == a.dtype:
        total.baddbmm_(a.mT, b)
    else:
        total.add_(torch.bmm(a.mT, b))


def scaled(x: Tensor, rate: Tensor | None) -> Tensor:
    """x · rate in the rate's precision, in the type of x."""
    return x if rate is None else (x * rate).to(x.dtype)


def scaled_backward(grad: Tensor, x: Tensor, rate: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of `scaled` with respect to x and the rate."""
    if rate is None:
        return grad, None
    product = grad.to(rate.dtype) * x
    return (grad * rate).to(x.dtype), product.sum(-1, keepdim=True) if rate.shape[-1] == 1 else product


def features(x: Tensor, w0: Tensor | None, w2: Tensor | None, rule: TTTRule) -> Tensor:
    """φ(x): [N, t, Dk] → [N, t, Dh]."""
    if rule.fast_weight == "linear":
        return x
    return silu(torch.bmm(x, w0.mT), inplace=True).mul_(torch.bmm(x, w2.mT))


class _Gate(NamedTuple):
    """Z, U, σ(Z), silu(Z) and its derivative, kept for a backward."""

    z: Tensor
    u: Tensor
    s: Tensor
    a: Tensor
    da: Tensor


def _gate(x: Tensor, w0: Tensor, w2: Tensor) -> _Gate:
    z, u = torch.bmm(x, w0.mT), torch.bmm(x, w2.mT)
    s = torch.sigmoid(z)
    a = z * s
    return _Gate(z, u, s, a, torch.addcmul(s, a, 1 - s))  # silu' = s (1 + z (1 − s)) = s + a (1 − s)


def read_forward(q: Tensor, w: list[Tensor | None], rule: TTTRule, out: Tensor) -> None:
    """out = w1 φ(q): q [..., T, H, Dk], weights [N, ·, ·] in the type of q, out [..., T, H, Dv]."""
    for start, stop in tiles(q, w[1].shape[-1]):
        h = features(fold(tokens_between(q, start, stop)), w[0], w[2], rule)
        tokens_between(out, start, stop).copy_(unfold(torch.bmm(h, w[1].mT), q))


def read_backward(
    q: Tensor, grad: Tensor, w: list[Tensor | None], rule: TTTRule, dq: Tensor, dw: list[Tensor | None]
) -> None:
    """Backward of `read_forward`: adds to dq [..., T, H, Dk] and, where it is not None, to each dw [N, ·, ·]."""
    for start, stop in tiles(q, w[1].shape[-1]):
        x, dout = fold(tokens_between(q, start, stop)), fold(tokens_between(grad, start, stop))
        dh = torch.bmm(dout, w[1])
        if rule.fast_weight == "linear":
            accumulate(dw[1], dout, x)
            dx = dh
        else:
            gate = _gate(x, w[0], w[2])
            accumulate(dw[1], dout, gate.a * gate.u)
            dx = _features_backward(x, gate, dh * gate.u * gate.da, dh * gate.a, w, dw)
        tokens_between(dq, start, stop).add_(unfold(dx, q))


def _features_backward(x: Tensor, gate: _Gate, dz: Tensor, du: Tensor, w, dw) -> Tensor:
    accumulate(dw[0], dz, x)
    accumulate(dw[2], du, x)
    return torch.bmm(dz, w[0]).baddbmm_(du, w[2])


def gradient_forward(tokens: Tokens, w: list[Tensor | None], rule: TTTRule, dtype: torch.dtype) -> dict[int, Tensor]:
    """The gradient step of a chunk, g_i = Σ_t −η_i,t ∂loss_t/∂w_i, per updated weight [N, ·, ·] in `dtype`."""
    total = {i: torch.zeros(w[i].shape, dtype=dtype, device=w[i].device) for i in rule.updated}
    for start, stop in tiles(tokens.k, w[1].shape[-1]):
        k, v, lr0, lr1, lr2 = (fold(tokens_between(x, start, stop)) for x in tokens)
        if 0 in rule.updated:
            gate = _gate(k, w[0], w[2])
            h = gate.a * gate.u
        else:
            h = features(k, w[0], w[2], rule)
        e = v if rule.loss == "dot_product" else torch.baddbmm(v, h, w[1].mT, alpha=-1)
        accumulate(total[1], e, scaled(h, lr1))
        if 0 in rule.updated:
            d = torch.bmm(e, w[1])
            accumulate(total[0], d * gate.u * gate.da, scaled(k, lr0))
            accumulate(total[2], d * gate.a, scaled(k, lr2))
    return total


def gradient_backward(
    tokens: Tokens, grad: dict[int, Tensor], w: list[Tensor | None], rule: TTTRule, dtokens: Tokens, dw
) -> None:
    """Backward of `gradient_forward` for `grad` = ∂L/∂g_i: adds to the tokens' gradients and to dw [N, ·, ·]."""
    linear, mse = rule.fast_weight == "linear", rule.loss == "mse"
    grad = {i: g.to(tokens.k.dtype) for i, g in grad.items()}
    for start, stop in tiles(tokens.k, w[1].shape[-1]):
        k, v, lr0, lr1, lr2 = (fold(tokens_between(x, start, stop)) for x in tokens)
        gate = None if linear else _gate(k, w[0], w[2])
        h = k if linear else gate.a * gate.u
        e = torch.baddbmm(v, h, w[1].mT, alpha=-1) if mse else v
        de = torch.bmm(scaled(h, lr1), grad[1].mT)
        dh, dlr1 = scaled_backward(torch.bmm(e, grad[1]), h, lr1)
        dk = dlr0 = dlr2 = dz = du = None
        if 0 in rule.updated:
            d = torch.bmm(e, w[1])
            ddz, ddu = torch.bmm(scaled(k, lr0), grad[0].mT), torch.bmm(scaled(k, lr2), grad[2].mT)
            du_gate = d * gate.u
            dk, dlr0 = scaled_backward(torch.bmm(du_gate * gate.da, grad[0]), k, lr0)
            dk2, dlr2 = scaled_backward(torch.bmm(d * gate.a, grad[2]), k, lr2)
            dk = dk + dk2
            dd = (ddz * gate.u).mul_(gate.da).addcmul_(ddu, gate.a)
            accumulate(dw[1], e, dd)
            de.baddbmm_(dd, w[1].mT)
            du = ddz.mul(d).mul_(gate.da)
            # silu'' = s (1 − s) (2 + z (1 − 2 s))
            dz = ddz.mul_(du_gate).mul_(_silu_second(gate)).addcmul_(ddu.mul_(d), gate.da)
        if mse:
            dh = torch.baddbmm(dh, de, w[1], alpha=-1)
            accumulate(dw[1], -de, h)
        if linear:
            dk = dh
        else:
            dz = dh * gate.u * gate.da if dz is None else dz.addcmul_(dh * gate.u, gate.da)
            du = dh * gate.a if du is None else du.addcmul_(dh, gate.a)
            dx = _features_backward(k, gate, dz, du, w, dw)
            dk = dx if dk is None else dk.add_(dx)
        for total, part in zip(dtokens, (dk, de, dlr0, dlr1, dlr2), strict=True):
            if total is not None and part is not None:
                tokens_between(total, start, stop).add_(unfold(part, tokens.k))


def _silu_second(gate: _Gate) -> Tensor:
    return gate.s * (1 - gate.s) * (2 + gate.z * (1 - 2 * gate.s))


def normalise(raw: Tensor, norm: Tensor) -> Tensor:
    """Rows of `raw` [N, m, n] scaled to `norm` [N, m, 1], with the published 1e-5 under the fraction."""
    return raw * (norm / (row_norm(raw) + EPS))


def normalise_backward(raw: Tensor, norm: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `normalise` with respect to `raw` and `norm`."""
    length = row_norm(raw)
    inner = (grad * raw).sum(-1, keepdim=True) / (length + EPS)
    factor = norm / (length + EPS)
    return grad * factor - raw * (inner * factor / torch.where(length > 0, length, 1.0)), inner
