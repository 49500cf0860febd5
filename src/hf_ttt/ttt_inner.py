# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""One chunk of the inner loop, and its backward: the arithmetic that the evaluations of a TTT layer are made of.

Notation, per row and head: C tokens of a chunk, keys K [C, Dk], values V [C, Dv], rates η.

    Z = K w0ᵀ    U = K w2ᵀ    H = silu(Z) ⊙ U          features φ(K); H = K for a linear fast network
    E = V  (dot product)   or   V − H w1ᵀ  (MSE)        −∂loss/∂f
    g1 = Eᵀ (η1 H)                                      [Dv, Dh]
    D = E w1    dZ = D ⊙ U ⊙ silu'(Z)    dU = D ⊙ silu(Z)
    g0 = dZᵀ (η0 K)    g2 = dUᵀ (η2 K)                  [Dh, Dk]

Hidden tensors are kept with the channels first, [Dh, C]: then w0 and w2 are one matrix whose halves of the product lie
apart. Tokens come heads first, [..., C, D], and are worked on in tiles of [N, t, D] that stay in a CPU's cache. Matrix
products are in the tokens' type, everything that accumulates is in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
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
    """What an update takes of some tokens, heads first: [..., T, D] each; rates are None for 1."""

    k: Tensor
    v: Tensor
    lr0: Tensor | None = None
    lr1: Tensor | None = None
    lr2: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Tokens:
        """`function` of each tensor."""
        return Tokens(*(None if x is None else function(x) for x in self))


def heads_first(x: Tensor | None) -> Tensor | None:
    """[..., T, H, D] → [..., H, T, D], a view; its own inverse."""
    return None if x is None else x.transpose(-3, -2)


def _cut(x: Tensor | None, start: int, stop: int) -> Tensor | None:
    """Tokens [start, stop) of x [..., T, D], a view."""
    return x if x is None or stop - start == x.shape[-2] else x[..., start:stop, :]


def _fold(x: Tensor | None, start: int, stop: int) -> Tensor | None:
    """Tokens [start, stop) of x [..., T, D] as a tile [N, t, D]; a view for a single row."""
    return None if x is None else _cut(x, start, stop).flatten(0, -3)


def _copy(x: Tensor | None, start: int, stop: int) -> Tensor | None:
    """`_fold` for a backward, which takes each tile into many products: contiguous."""
    return None if x is None else _fold(x, start, stop).contiguous()


def _put(total: Tensor | None, x: Tensor | None, start: int, stop: int, add: bool) -> None:
    """Add a tile [N, t, D] to tokens [start, stop) of total [..., T, D], or write it there."""
    if total is not None and x is not None:
        part, x = _cut(total, start, stop), x.unflatten(0, total.shape[:-2])
        part.add_(x) if add else part.copy_(x)


def gradient_buffer(x: Tensor | None, written: int) -> Tensor | None:
    """A contiguous buffer for the gradient of x [B, T, ·, ·]: zeros but for the first `written` tokens, which will be
    written before they are read."""
    if x is None:
        return None
    buffer = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    buffer[:, written:] = 0
    return buffer


def tile_length(rows: int, width: int, like: Tensor) -> int:
    """How many tokens make a tile [rows, t, width] of the type of `like` that stays in cache."""
    if torch.compiler.is_compiling():  # a compiler tiles by itself, and a size must not depend on the batch
        return 1 << 30
    size = TILE_BYTES if like.device.type == "cpu" else ACCELERATOR_TILE_BYTES
    return max(MIN_TILE, size // max(rows * width * like.element_size(), 1))


def _tiles(x: Tensor, width: int) -> list[tuple[int, int]]:
    """The tiles of x [..., T, D] as ranges of tokens."""
    length = x.shape[-2]
    step = tile_length(prod(x.shape[:-2]), width, x)
    if length <= step:
        return [(0, length)] if length else []
    return [(start, min(start + step, length)) for start in range(0, length, step)]


class Net(NamedTuple):
    """Fast weights as the products take them, or accumulators for their gradients.

    Attributes:
        w02: w0 above w2 [N, 2 Dh, Dk]; None for a linear fast network.
        w1: [N, Dv, Dh].
    """

    w02: Tensor | None
    w1: Tensor | None


def make_net(work: Sequence[Tensor | None], rule: TTTRule, dtype: torch.dtype) -> Net:
    """A `Net` of w0, w1, w2 [N, ·, ·] in the type of the tokens."""
    w0, w1, w2 = work
    w02 = None if rule.fast_weight == "linear" else torch.cat([w0, w2], 1).to(dtype)
    return Net(w02, w1.to(dtype))


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b in the type of `total`: a [N, m, t], b [N, t, n]."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    else:
        total.add_(torch.bmm(a, b))


def _accumulated(total: dict[int, Tensor], i: int, a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    """total[i] += a b in `dtype`, from nothing."""
    if i in total:
        accumulate(total[i], a, b)
    else:
        total[i] = torch.bmm(a, b).to(dtype)


def _channels_first(rate: Tensor | None) -> Tensor | None:
    """[N, t, D] → [N, D, t] in memory: rates come interleaved, which would slow down every product with them."""
    return None if rate is None else rate.mT.contiguous()


def scaled(x: Tensor, rate: Tensor | None) -> Tensor:
    """x · rate in the rate's precision, in the type of x."""
    return x if rate is None else (x * rate).to(x.dtype)


def scaled_backward(grad: Tensor, x: Tensor, rate: Tensor | None, dim: int) -> tuple[Tensor, Tensor | None]:
    """Gradients of `scaled` with respect to x and the rate, whose channels are dimension `dim`; `grad` is used up."""
    if rate is None:
        return grad, None
    drate = grad.to(rate.dtype) * x
    drate = drate.sum(dim, keepdim=True) if rate.shape[dim] == 1 else drate
    return (grad.mul_(rate) if grad.dtype == rate.dtype else (grad * rate).to(grad.dtype)), drate


def _gate_products(x: Tensor, net: Net) -> tuple[Tensor, Tensor]:
    """Z and U [N, Dh, t], which may be changed in place (what `chunk` returns may not, under autograd)."""
    zu, width = torch.bmm(net.w02, x.mT), net.w02.shape[1] // 2
    return zu[:, :width], zu[:, width:]


def features(x: Tensor, net: Net) -> Tensor:
    """φ(x): [N, t, Dk] → [N, Dh, t]."""
    if net.w02 is None:
        return x.mT
    z, u = _gate_products(x, net)
    return silu(z, inplace=True).mul_(u)


class _Gate(NamedTuple):
    """Z, U, σ(Z), silu(Z) and its derivative [N, Dh, t], kept for a backward."""

    z: Tensor
    u: Tensor
    s: Tensor
    a: Tensor
    da: Tensor


def _gate(x: Tensor, net: Net) -> _Gate:
    z, u = _gate_products(x, net)
    s = torch.sigmoid(z)
    a = z * s
    return _Gate(z, u, s, a, torch.addcmul(s + a, a, s, value=-1))  # silu' = s (1 + z (1 − s)) = s + a − a s


def read_forward(q: Tensor, net: Net, out: Tensor) -> None:
    """out = w1 φ(q): q [..., T, Dk], out [..., T, Dv]."""
    for start, stop in _tiles(q, net.w1.shape[-1]):
        h = features(_fold(q, start, stop), net)
        _cut(out, start, stop).copy_(torch.bmm(h.mT, net.w1.mT).unflatten(0, out.shape[:-2]))


def read_backward(q: Tensor, grad: Tensor, net: Net, dq: Tensor, dnet: Net, add: bool) -> None:
    """Backward of `read_forward`: adds to dnet, and adds to dq [..., T, Dk] or, without `add`, writes it."""
    for start, stop in _tiles(q, net.w1.shape[-1]):
        x, dout = _copy(q, start, stop), _copy(grad, start, stop)
        if net.w02 is None:
            accumulate(dnet.w1, dout.mT, x)
            dx = torch.bmm(dout, net.w1)
        else:
            z, u = _gate_products(x, net)
            a, dh = silu(z), torch.bmm(net.w1.mT, dout.mT)
            accumulate(dnet.w1, dout.mT, (a * u).mT)
            dz, du = torch.ops.aten.silu_backward(u.mul_(dh), z), dh.mul_(a)
            dx = _features_backward(x, dz, du, net, dnet)
        _put(dq, dx, start, stop, add)


def _features_backward(x: Tensor, dz: Tensor, du: Tensor, net: Net, dnet: Net) -> Tensor:
    """From the gradients of Z and U [N, Dh, t] to that of x; adds to dnet.w02."""
    width = dz.shape[1]
    accumulate(dnet.w02[:, :width], dz, x)
    accumulate(dnet.w02[:, width:], du, x)
    return torch.bmm(dz.mT, net.w02[:, :width]).baddbmm_(du.mT, net.w02[:, width:])


def gradient_forward(tokens: Tokens, net: Net, rule: TTTRule, dtype: torch.dtype) -> dict[int, Tensor]:
    """The gradient step of a chunk, g_i = Σ_t −η_i,t ∂loss_t/∂w_i, per updated weight [N, ·, ·] in `dtype`.

    Where only w1 is updated on a dot-product loss, only the width of `net.w1` is used.
    """
    total: dict[int, Tensor] = {}
    for start, stop in _tiles(tokens.k, net.w1.shape[-1]):
        k, v, lr0, lr1, lr2 = (_fold(x, start, stop) for x in tokens)
        if 0 in rule.updated:
            gate = _gate(k, net)
            h = gate.a * gate.u
        else:
            h = features(k, net)
        e = v if rule.loss == "dot_product" else torch.baddbmm(v, h.mT, net.w1.mT, alpha=-1)
        _accumulated(total, 1, e.mT, scaled(h, _channels_first(lr1)).mT, dtype)
        if 0 in rule.updated:
            d = torch.bmm(net.w1.mT, e.mT)
            _accumulated(total, 0, d * gate.u * gate.da, scaled(k, lr0), dtype)
            _accumulated(total, 2, d * gate.a, scaled(k, lr2), dtype)
    return total


def gradient_backward(
    tokens: Tokens, grad: dict[int, Tensor], net: Net, rule: TTTRule, dtokens: Tokens, dnet: Net, add: bool
) -> None:
    """Backward of `gradient_forward` for `grad` = ∂L/∂g_i: adds to dnet, and adds to the tokens' gradients or, without
    `add`, writes them."""
    grad = {i: g.to(tokens.k.dtype) for i, g in grad.items()}
    for start, stop in _tiles(tokens.k, net.w1.shape[-1]):
        part = Tokens(*(_copy(x, start, stop) for x in tokens))
        if net.w02 is None:
            parts = _linear_gradient_backward(part, grad, net, rule, dnet)
        else:
            parts = _swiglu_gradient_backward(part, grad, net, rule, dnet)
        for total, x in zip(dtokens, parts, strict=True):
            _put(total, x, start, stop, add)


def _linear_gradient_backward(tokens: Tokens, grad: dict[int, Tensor], net: Net, rule: TTTRule, dnet: Net) -> Tokens:
    k, v, _, lr1, _ = tokens
    e = v if rule.loss == "dot_product" else torch.baddbmm(v, k, net.w1.mT, alpha=-1)
    de = torch.bmm(scaled(k, lr1), grad[1].mT)
    dk, dlr1 = scaled_backward(torch.bmm(e, grad[1]), k, lr1, -1)
    if rule.loss == "mse":
        dk = torch.baddbmm(dk, de, net.w1, alpha=-1)
        accumulate(dnet.w1, -de.mT, k)
    return Tokens(dk, de, None, dlr1, None)


def _swiglu_gradient_backward(tokens: Tokens, grad: dict[int, Tensor], net: Net, rule: TTTRule, dnet: Net) -> Tokens:
    k, v, lr0, lr1, lr2 = tokens
    lr1 = _channels_first(lr1)
    gate = _gate(k, net)
    h = gate.a * gate.u
    e = v if rule.loss == "dot_product" else torch.baddbmm(v, h.mT, net.w1.mT, alpha=-1)
    de = torch.bmm(scaled(h, lr1).mT, grad[1].mT)
    dh, dlr1 = scaled_backward(torch.bmm(grad[1].mT, e.mT), h, lr1, -2)
    h = h if rule.loss == "mse" else None
    dk = dlr0 = dlr2 = dz = du = None
    if 0 in rule.updated:
        d = torch.bmm(net.w1.mT, e.mT)
        dk, dlr0 = scaled_backward(torch.bmm((d * gate.u).mul_(gate.da).mT, grad[0]), k, lr0, -1)
        dk2, dlr2 = scaled_backward(torch.bmm((d * gate.a).mT, grad[2]), k, lr2, -1)
        dk = dk.add_(dk2)
        del dk2
        ddz, ddu = torch.bmm(grad[0], scaled(k, lr0).mT), torch.bmm(grad[2], scaled(k, lr2).mT)
        dd = (ddz * gate.u).mul_(gate.da).addcmul_(ddu, gate.a)
        accumulate(dnet.w1, e.mT, dd.mT)
        de.baddbmm_(dd.mT, net.w1.mT)
        del dd
        du = torch.mul(ddz, d).mul_(gate.da)
        dz = ddz.mul_(d).mul_(gate.u).mul_(_silu_second(gate)).addcmul_(ddu.mul_(d), gate.da)
        del d, ddu, ddz
    if rule.loss == "mse":
        dh = torch.baddbmm(dh, net.w1.mT, de.mT, alpha=-1)
        accumulate(dnet.w1, -de.mT, h.mT)
    du = dh * gate.a if du is None else du.addcmul_(dh, gate.a)
    dh.mul_(gate.u)
    dz = dh.mul_(gate.da) if dz is None else dz.addcmul_(dh, gate.da)
    dx = _features_backward(k, dz, du, net, dnet)
    return Tokens(dx if dk is None else dx.add_(dk), de, dlr0, None if dlr1 is None else dlr1.mT, dlr2)


def _silu_second(gate: _Gate) -> Tensor:
    """silu'' = s (1 − s) (2 + z − 2 a)."""
    slope = torch.addcmul(gate.s, gate.s, gate.s, value=-1)
    return torch.add(gate.z, gate.a, alpha=-2).add_(2).mul_(slope)


def normalise(raw: Tensor, norm: Tensor) -> Tensor:
    """Rows of `raw` [N, m, n] scaled to `norm` [N, m, 1], with the published 1e-5 under the fraction."""
    return raw * (norm / (row_norm(raw) + EPS))


def normalise_backward(raw: Tensor, norm: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `normalise` with respect to `raw` and `norm`."""
    length = row_norm(raw)
    inner = (grad * raw).sum(-1, keepdim=True) / (length + EPS)
    factor = norm / (length + EPS)
    return grad * factor - raw * (inner * factor / torch.where(length > 0, length, 1.0)), inner
