# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Sums over chunks and reads of their states for wide heads: batched products around kernels for the features.

A program that held a wide head's features in registers, as those of `ttt_triton_features` do, would read each weight
too often. So here a gated product with a fused epilogue writes η φ(x), in the backward ∂Z and ∂U as well, and batched
matrix products do the rest. The products Z = x w0ᵀ and U = x w2ᵀ themselves never reach memory.

Tokens come as [B, T, H, D] and are worked on heads first, [B·H, t, D]. The n states of a head belong to its chunks of C
tokens; the last of them has all tokens that follow, be they more or fewer than C.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .ttt_inner import heads_first
from .ttt_triton import AOTCase, dot, jit, load_tile, product, store_tile, tl, triton

# ------------------------------------------------------------------------------------------------------------- kernels


@jit
def load_rate(lr, rows, columns, row_mask, column_mask, RATES: tl.constexpr):
    """η as [rows, 1] or, for a rate of each channel, [rows, columns]."""
    if RATES == 1:
        return tl.load(lr + rows, mask=row_mask, other=0.0)[:, None]
    else:
        return load_tile(lr, rows, columns, row_mask, column_mask, RATES)


@jit
def _place(T, DH: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr):
    """A program's head, hidden tile, rows of heads-first tokens and hidden channels, with their masks."""
    pid = tl.program_id(0).to(tl.int64)
    HIDDEN: tl.constexpr = (DH + BH - 1) // BH
    tiles = tl.cdiv(T, BT)
    bh = pid // (HIDDEN * tiles)
    tokens = pid // HIDDEN % tiles * BT + tl.arange(0, BT)
    channels = pid % HIDDEN * BH + tl.arange(0, BH)
    return bh, pid % HIDDEN, bh * T + tokens, channels, tokens < T, channels < DH


@jit
def _gates(
    x, w02, rows, o_h, m_t, m_h, DK: tl.constexpr, DH: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BH: tl.constexpr,
):  # fmt: skip
    """Z and U of some rows of x and some hidden channels."""
    z = tl.zeros([BT, BH], dtype=tl.float32)
    u = tl.zeros([BT, BH], dtype=tl.float32)
    for start in range(0, DK, BK):
        o_k = start + tl.arange(0, BK)
        m_k = o_k < DK
        b_x = load_tile(x, rows, o_k, m_t, m_k, DK)
        z += dot(b_x, tl.trans(load_tile(w02, o_h, o_k, m_h, m_k, DK)))
        u += dot(b_x, tl.trans(load_tile(w02 + DH * DK, o_h, o_k, m_h, m_k, DK)))
    return z, u


@jit
def _features_kernel(
    x, lr, w02, h, T,
    DK: tl.constexpr, DH: tl.constexpr, RATES: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """h [B·H, T, Dh] = η φ(x)."""
    bh, _, rows, o_h, m_t, m_h = _place(T, DH, BT, BH)
    z, u = _gates(x, w02 + bh * (2 * DH * DK), rows, o_h, m_t, m_h, DK, DH, BT, BK, BH)
    out = z * tl.sigmoid(z) * u
    if RATES > 0:
        out = out * load_rate(lr, rows, o_h, m_t, m_h, RATES)
    store_tile(h, out, rows, o_h, m_t, m_h, DH)


@jit
def _features_backward_kernel(
    x, lr, w02, dh, h, dzu, dlr, T,
    DK: tl.constexpr, DH: tl.constexpr, RATES: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """From dh, the gradient of `_features_kernel`'s h: h itself, ∂Z beside ∂U [B·H, T, 2 Dh], and dlr [B·H, T, Dh] or,
    for a rate of each token, its part from each hidden tile [B·H, T, hidden tiles]."""
    HIDDEN: tl.constexpr = (DH + BH - 1) // BH
    bh, part, rows, o_h, m_t, m_h = _place(T, DH, BT, BH)
    z, u = _gates(x, w02 + bh * (2 * DH * DK), rows, o_h, m_t, m_h, DK, DH, BT, BK, BH)
    s = tl.sigmoid(z)
    a = z * s
    out = a * u
    grad = load_tile(dh, rows, o_h, m_t, m_h, DH).to(tl.float32)
    if RATES > 0:
        rate = load_rate(lr, rows, o_h, m_t, m_h, RATES)
        if RATES == 1:
            tl.store(dlr + rows * HIDDEN + part, tl.sum(grad * out, 1), mask=m_t)
        else:
            store_tile(dlr, grad * out, rows, o_h, m_t, m_h, DH)
        out = out * rate
        grad = grad * rate
    store_tile(h, out, rows, o_h, m_t, m_h, DH)
    store_tile(dzu, grad * u * (s + a * (1 - s)), rows, o_h, m_t, m_h, 2 * DH)
    store_tile(dzu + DH, grad * a, rows, o_h, m_t, m_h, 2 * DH)


# ------------------------------------------------------------------------------------------------------------ launches


class _Tiles(NamedTuple):
    """What a program has of tokens, of hidden channels and, at a time, of key channels; and how it is launched."""

    BT: int
    BK: int
    BH: int
    num_warps: int
    num_stages: int


def _tiles(kernel, dtype: torch.dtype) -> _Tiles:
    """Products of float32 are not for matrix units, and their operands take many more registers; so does what the
    backward keeps."""
    if dtype == torch.float32:
        return _Tiles(32, 32, 64, 4, 2)
    return _Tiles(64, 64, 64, 8 if kernel is _features_backward_kernel else 4, 3)


def _launch(kernel, x: Tensor, lr: Tensor | None, w02: Tensor, *others: Tensor | None) -> None:
    """A kernel on heads-first tokens x [B·H, T, Dk] with stacked weights w02 [B·H, 2 Dh, Dk]."""
    (rows, length, dk), dh, tiles = x.shape, w02.shape[1] // 2, _tiles(kernel, x.dtype)
    programs = rows * triton.cdiv(length, tiles.BT) * triton.cdiv(dh, tiles.BH)
    if programs:
        rates = 0 if lr is None else lr.shape[-1]
        kernel[(programs,)](x, lr, w02, *others, length, DK=dk, DH=dh, RATES=rates, **tiles._asdict())


def _features(x: Tensor, lr: Tensor | None, w02: Tensor | None) -> Tensor:
    """η φ(x) [B·H, t, Dh] for x [B·H, t, Dk]; φ(x) = x without weights."""
    if w02 is None:
        return x if lr is None else (x * lr).to(x.dtype)
    h = x.new_empty(*x.shape[:2], w02.shape[1] // 2)
    _launch(_features_kernel, x, lr, w02, h)
    return h


def _features_backward(x: Tensor, lr: Tensor | None, w02: Tensor, dh: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """h = η φ(x), ∂Z beside ∂U, and the gradient of η."""
    h, dzu, dlr = torch.empty_like(dh), dh.new_empty(*dh.shape[:2], w02.shape[1]), None
    per_token = lr is not None and lr.shape[-1] == 1
    if lr is not None:
        hidden = _tiles(_features_backward_kernel, x.dtype).BH
        parts = triton.cdiv(dh.shape[-1], hidden) if per_token else dh.shape[-1]
        dlr = lr.new_empty(*dh.shape[:2], parts)
    _launch(_features_backward_kernel, x, lr, w02, dh, h, dzu, dlr)
    return h, dzu, dlr.sum(-1, keepdim=True) if per_token else dlr


# ------------------------------------------------------------------------------------------------------------ products


def _heads_first(x: Tensor | None) -> Tensor | None:
    """[B, T, H, D] → [B·H, T, D]"""
    return None if x is None else heads_first(x).flatten(0, 1).contiguous()


def _heads_last(x: Tensor, like: Tensor) -> Tensor:
    """[B·H, t, D] → [B, T, H, D] with B, T and H of `like`; zeros after the first t tokens."""
    out, length = x.new_empty(*like.shape[:3], x.shape[-1]), x.shape[1]
    out[:, :length] = heads_first(x.unflatten(0, (like.shape[0], like.shape[2])))
    out[:, length:] = 0
    return out


def _stacked(w0: Tensor | None, w2: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """w0 above w2 [B·H, 2 Dh, Dk]."""
    return None if w0 is None else torch.cat([w0, w2], 1).to(dtype)


def _whole_chunks(x: Tensor, states: int, chunk_size: int) -> int:
    """How many of the first chunks are of one size: all, or all but the last."""
    return states if x.shape[1] == states * chunk_size else states - 1


def _cut(x: Tensor, count: int, chunk_size: int) -> Tensor:
    """The first `count` chunks of x [B·H, t, D] as [B·H·count, C, D]."""
    return x[:, : count * chunk_size].unflatten(1, (count, chunk_size)).flatten(0, 1)


def _by_chunk(x: Tensor, states: Tensor, chunk_size: int) -> Tensor:
    """Each token times the state of its chunk: x [B·H, t, m], states [B·H, n, m, p] → [B·H, t, p]."""
    count = _whole_chunks(x, states.shape[1], chunk_size)
    done = count * chunk_size
    whole = torch.bmm(_cut(x, count, chunk_size), states[:, :count].flatten(0, 1))
    whole = whole.view(x.shape[0], done, states.shape[-1])
    if count == states.shape[1]:
        return whole
    return torch.cat([whole, torch.bmm(x[:, done:], states[:, count])], 1)


def _chunk_sums(a: Tensor, b: Tensor, states: int, chunk_size: int) -> Tensor:
    """Σ_t a_t b_tᵀ over each chunk: a [B·H, t, m], b [B·H, t, p] → [B·H, n, m, p] in float32."""
    count = _whole_chunks(a, states, chunk_size)
    done = count * chunk_size
    whole = product(_cut(a, count, chunk_size).mT, _cut(b, count, chunk_size))
    whole = whole.view(a.shape[0], count, a.shape[-1], b.shape[-1])
    if count == states:
        return whole
    return torch.cat([whole, product(a[:, done:].mT, b[:, done:])[:, None]], 1)


class Gradients(NamedTuple):
    """Gradients of Σ_t y_tᵀ X_c (η_t φ(x_t)); None where there is no such input, or it was not asked for."""

    x: Tensor
    y: Tensor | None
    lr: Tensor | None
    w0: Tensor | None
    w2: Tensor | None
    states: Tensor | None


def wide_sums(
    x: Tensor, y: Tensor, lr: Tensor | None, w0: Tensor | None, w2: Tensor | None, states: int, chunk_size: int
) -> Tensor:
    """Σ_t y_t (η_t φ(x_t))ᵀ over each chunk [B·H, states, Dv, Dh] in float32: x, y, lr [B, t, H, ·]."""
    x, y, lr = map(_heads_first, (x, y, lr))
    return _chunk_sums(y, _features(x, lr, _stacked(w0, w2, x.dtype)), states, chunk_size)


def wide_read(q: Tensor, w0: Tensor | None, w2: Tensor | None, states: Tensor, chunk_size: int) -> Tensor:
    """X_c φ(q_t) [B, T, H, Dv]: states X [B·H, n, Dv, Dh]."""
    h = _features(_heads_first(q), None, _stacked(w0, w2, q.dtype))
    return _heads_last(_by_chunk(h, states.to(q.dtype).mT, chunk_size), q)


def wide_backward(
    x: Tensor,
    y: Tensor,
    lr: Tensor | None,
    w0: Tensor | None,
    w2: Tensor | None,
    states: Tensor,
    chunk_size: int,
    end: int,
    updating: bool,
) -> Gradients:
    """Gradients of Σ_t y_tᵀ X_c (η_t φ(x_t)) over the first `end` tokens. A chunk's step (`updating`: y = v, X = ∂G)
    needs that of y, a read (y = ∂o, X = S) that of the states."""
    like = x
    x, y, lr = (_heads_first(None if t is None else t[:, :end]) for t in (x, y, lr))
    states, w02, dw0, dw2 = states.to(x.dtype), _stacked(w0, w2, x.dtype), None, None
    dh = _by_chunk(y, states, chunk_size)
    if w02 is None:
        h = _features(x, lr, None)
        dx = dh if lr is None else (dh * lr).to(x.dtype)
        dlr = None if lr is None else dh.float() * x
        dlr = dlr.sum(-1, keepdim=True) if dlr is not None and lr.shape[-1] == 1 else dlr
    else:
        h, dzu, dlr = _features_backward(x, lr, w02, dh)
        dx = torch.bmm(dzu, w02)
        dw0, dw2 = (w.clone() for w in product(dzu.mT, x).chunk(2, 1))  # results of an operator share no memory
    dy = _heads_last(_by_chunk(h, states.mT, chunk_size), like) if updating else None
    dstates = None if updating else _chunk_sums(y, h, states.shape[1], chunk_size)
    dlr = None if dlr is None else _heads_last(dlr, like)
    return Gradients(_heads_last(dx, like), dy, dlr, dw0, dw2, dstates)


def aot_cases() -> Iterator[AOTCase]:
    """Both kernels with both configurations; rates of each channel, or of each token, which adds a reduction."""
    variants = (_features_kernel, 384), (_features_backward_kernel, 384), (_features_backward_kernel, 1)
    for dtype, pointer in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        for kernel, rates in variants:
            blocks = _tiles(kernel, dtype)._asdict()
            num_warps, num_stages = blocks.pop("num_warps"), blocks.pop("num_stages")
            types = {"x": pointer, "lr": "*fp32", "w02": pointer, "h": pointer, "T": "i32"}
            if kernel is _features_backward_kernel:
                types |= {"dh": pointer, "dzu": pointer, "dlr": "*fp32"}
            yield AOTCase(kernel, types, {"DK": 384, "DH": 384, "RATES": rates, **blocks}, num_warps, num_stages)
