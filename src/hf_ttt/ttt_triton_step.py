# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""One chunk of a SwiGLU fast network as Triton kernels and operators, in the notation of `ttt_inner`.

Up to a width of 128 (64 in float32) a forward is one kernel, which holds Z, U, H and D in registers. For wider heads,
where a program would read each weight too often, for rates of each key channel, which take too many registers, and in
every backward, batched matrix products alternate with one kernel that does all that is between them.

Tokens are [B, H, C, D] with any strides but that of the channels: a chunk of [B, T, H, D] is read where it lies.
Weights, and what is only between two products, are contiguous [N, ·, ·] with N = B·H. Products take their operands in
the type of the tokens, everything that accumulates is float32. Offsets are 64-bit, and grids have one dimension, which
is the one without a limit of 65,535.

The operators are called by the hand-written forward and backward of `ttt_recurrent`, below autograd: they have no
backward of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .ttt_inner import scaled
from .ttt_triton import (
    TARGETS,
    AOTCase,
    block,
    dot,
    jit,
    kernel_context,
    launch,
    load_tile,
    namespace,
    processors,
    product,
    register_vmap,
    store_tile,
    tl,
    triton,
)
from .ttt_triton_features import is_narrow

_NAMESPACE = namespace(__file__)


# ------------------------------------------------------------------------------------------------------------- kernels


@jit
def _rate(lr, rows, columns, row_mask, column_mask, WIDTH: tl.constexpr):
    """η as [rows, 1] or, for a rate of each channel, [rows, columns]; `rows` are offsets."""
    if WIDTH == 1:
        return tl.load(lr + rows, mask=row_mask, other=0.0)[:, None]
    else:
        return load_tile(lr, rows, columns, row_mask, column_mask, 1)


@jit
def _step_kernel(
    k, e, lr0, lr1, lr2, w02, w1, g0, g1, g2,
    k_b, k_h, k_t, e_b, e_h, e_t, r0_b, r0_h, r0_t, r1_b, r1_h, r1_t, r2_b, r2_h, r2_t, T, H, SPLITS, SPAN,
    DK: tl.constexpr, DH: tl.constexpr, DV: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr,
    ALL: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """g1 [N, SPLITS, Dv, Dh] and, for ALL, g0, g2 [N, SPLITS, Dh, Dk]: one hidden tile, one part of the tokens.
    Rates R0 and R2 are those of a token, or 0."""
    pid = tl.program_id(0).to(tl.int64)
    HIDDEN: tl.constexpr = (DH + BH - 1) // BH
    cell = pid // HIDDEN
    n = cell // SPLITS
    row, head = n // H, n % H
    o_h = pid % HIDDEN * BH + tl.arange(0, BH)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_h, m_k, m_v = o_h < DH, o_k < DK, o_v < DV
    k += row * k_b + head * k_h
    e += row * e_b + head * e_h
    w02 += n * 2 * DH * DK
    b_w0 = tl.trans(load_tile(w02, o_h, o_k, m_h, m_k, DK))
    b_w2 = tl.trans(load_tile(w02 + DH * DK, o_h, o_k, m_h, m_k, DK))
    total1 = tl.zeros([BV, BH], dtype=tl.float32)
    if ALL:
        b_w1 = load_tile(w1 + n * DV * DH, o_v, o_h, m_v, m_h, DH)
        total0 = tl.zeros([BK, BH], dtype=tl.float32)
        total2 = tl.zeros([BK, BH], dtype=tl.float32)
    start = cell % SPLITS * SPAN
    stop = tl.minimum(start + SPAN, T)
    for t in range(start, stop, BT):
        tokens = (t + tl.arange(0, BT)).to(tl.int64)
        m_t = tokens < stop
        b_k = load_tile(k, tokens * k_t, o_k, m_t, m_k, 1)
        b_e = load_tile(e, tokens * e_t, o_v, m_t, m_v, 1)
        z, u = dot(b_k, b_w0), dot(b_k, b_w2)
        s = tl.sigmoid(z)
        a = z * s
        h = a * u
        if R1 > 0:
            h *= _rate(lr1 + row * r1_b + head * r1_h, tokens * r1_t, o_h, m_t, m_h, R1)
        total1 += dot(tl.trans(b_e), h.to(b_e.dtype))
        if ALL:
            d = dot(b_e, b_w1)
            dz, du = d * u * (s + a * (1 - s)), d * a
            if R0 == 1:
                dz *= _rate(lr0 + row * r0_b + head * r0_h, tokens * r0_t, o_h, m_t, m_h, R0)
            if R2 == 1:
                du *= _rate(lr2 + row * r2_b + head * r2_h, tokens * r2_t, o_h, m_t, m_h, R2)
            total0 += dot(tl.trans(b_k), dz.to(b_k.dtype))
            total2 += dot(tl.trans(b_k), du.to(b_k.dtype))
    store_tile(g1 + cell * DV * DH, total1, o_v, o_h, m_v, m_h, DH)
    if ALL:
        store_tile(g0 + cell * DH * DK, tl.trans(total0), o_h, o_k, m_h, m_k, DK)
        store_tile(g2 + cell * DH * DK, tl.trans(total2), o_h, o_k, m_h, m_k, DK)


@jit
def _read_kernel(
    q, w02, w1, out, q_b, q_h, q_t, T, H,
    DK: tl.constexpr, DH: tl.constexpr, DV: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """out [N, T, Dv] = w1 φ(q) for one tile of tokens."""
    pid = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(T, BT)
    n = pid // tiles
    tokens = pid % tiles * BT + tl.arange(0, BT)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_t, m_k, m_v = tokens < T, o_k < DK, o_v < DV
    x = load_tile(q + n // H * q_b + n % H * q_h, tokens * q_t, o_k, m_t, m_k, 1)
    w02 += n * 2 * DH * DK
    total = tl.zeros([BT, BV], dtype=tl.float32)
    for start in range(0, DH, BH):
        o_h = start + tl.arange(0, BH)
        m_h = o_h < DH
        z = dot(x, tl.trans(load_tile(w02, o_h, o_k, m_h, m_k, DK)))
        u = dot(x, tl.trans(load_tile(w02 + DH * DK, o_h, o_k, m_h, m_k, DK)))
        h = (z * tl.sigmoid(z) * u).to(x.dtype)
        total += dot(h, tl.trans(load_tile(w1 + n * DV * DH, o_v, o_h, m_v, m_h, DH)))
    store_tile(out, total, n * T + tokens, o_v, m_t, m_v, DV)


@jit
def _gate_kernel(
    zu, d, lr0, lr1, lr2, h, dz, du, r0_b, r0_h, r0_t, r1_b, r1_h, r1_t, r2_b, r2_h, r2_t, T, H,
    DH: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, ALL: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """From Z beside U [N, T, 2 Dh]: η1 H and, for ALL, η0 dZ and η2 dU from D [N, T, Dh]. Rates of each key channel are
    left to the product with K."""
    pid = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(T, BT)
    n = pid // tiles
    tokens = pid % tiles * BT + tl.arange(0, BT)
    m_t = tokens < T
    rows, row, head = n * T + tokens, n // H, n % H
    for start in range(0, DH, BH):
        o_h = start + tl.arange(0, BH)
        m_h = o_h < DH
        z = load_tile(zu, rows, o_h, m_t, m_h, 2 * DH).to(tl.float32)
        u = load_tile(zu + DH, rows, o_h, m_t, m_h, 2 * DH).to(tl.float32)
        s = tl.sigmoid(z)
        a = z * s
        b_h = a * u
        if R1 > 0:
            b_h *= _rate(lr1 + row * r1_b + head * r1_h, tokens * r1_t, o_h, m_t, m_h, R1)
        store_tile(h, b_h, rows, o_h, m_t, m_h, DH)
        if ALL:
            b_d = load_tile(d, rows, o_h, m_t, m_h, DH).to(tl.float32)
            b_dz, b_du = b_d * u * (s + a * (1 - s)), b_d * a
            if R0 == 1:
                b_dz *= _rate(lr0 + row * r0_b + head * r0_h, tokens * r0_t, o_h, m_t, m_h, R0)
            if R2 == 1:
                b_du *= _rate(lr2 + row * r2_b + head * r2_h, tokens * r2_t, o_h, m_t, m_h, R2)
            store_tile(dz, b_dz, rows, o_h, m_t, m_h, DH)
            store_tile(du, b_du, rows, o_h, m_t, m_h, DH)


@jit
def _gate_backward_kernel(
    zu, dh, lr1, h, dzu, dlr1, r1_b, r1_h, r1_t, T, H,
    DH: tl.constexpr, R1: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """From the gradient dh of η1 H: η1 H itself, ∂Z beside ∂U [N, T, 2 Dh], and ∂η1 [N, T, 1 or Dh]."""
    pid = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(T, BT)
    n = pid // tiles
    tokens = pid % tiles * BT + tl.arange(0, BT)
    m_t = tokens < T
    rows, row, head = n * T + tokens, n // H, n % H
    total = tl.zeros([BT], dtype=tl.float32)
    for start in range(0, DH, BH):
        o_h = start + tl.arange(0, BH)
        m_h = o_h < DH
        z = load_tile(zu, rows, o_h, m_t, m_h, 2 * DH).to(tl.float32)
        u = load_tile(zu + DH, rows, o_h, m_t, m_h, 2 * DH).to(tl.float32)
        grad = load_tile(dh, rows, o_h, m_t, m_h, DH).to(tl.float32)
        s = tl.sigmoid(z)
        a = z * s
        b_h = a * u
        if R1 > 0:
            rate = _rate(lr1 + row * r1_b + head * r1_h, tokens * r1_t, o_h, m_t, m_h, R1)
            if R1 == 1:
                total += tl.sum(grad * b_h, 1)
            else:
                store_tile(dlr1, grad * b_h, rows, o_h, m_t, m_h, DH)
            b_h *= rate
            grad *= rate
        store_tile(h, b_h, rows, o_h, m_t, m_h, DH)
        store_tile(dzu, grad * u * (s + a * (1 - s)), rows, o_h, m_t, m_h, 2 * DH)
        store_tile(dzu + DH, grad * a, rows, o_h, m_t, m_h, 2 * DH)
    if R1 == 1:
        tl.store(dlr1 + rows, total, mask=m_t)


@jit
def _step_backward_kernel(
    x, y, lr0, lr1, lr2, dx, dy, dlr0, dlr1, dlr2, r0_b, r0_h, r0_t, r1_b, r1_h, r1_t, r2_b, r2_h, r2_t, T, H,
    DH: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """From x = Z, U, ∂(η0 dZ), ∂(η2 dU) [N, T, 4 Dh] and y = D, ∂(η1 H) [N, T, 2 Dh] side by side:
    dx = ∂Z, ∂U, η0 dZ, η2 dU and dy = ∂D, η1 H, and ∂η. Rates R0 and R2 are those of a token, or 0."""
    pid = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(T, BT)
    n = pid // tiles
    tokens = pid % tiles * BT + tl.arange(0, BT)
    m_t = tokens < T
    rows, row, head = n * T + tokens, n // H, n % H
    total0 = tl.zeros([BT], dtype=tl.float32)
    total1 = tl.zeros([BT], dtype=tl.float32)
    total2 = tl.zeros([BT], dtype=tl.float32)
    for start in range(0, DH, BH):
        o_h = start + tl.arange(0, BH)
        m_h = o_h < DH
        z = load_tile(x, rows, o_h, m_t, m_h, 4 * DH).to(tl.float32)
        u = load_tile(x + DH, rows, o_h, m_t, m_h, 4 * DH).to(tl.float32)
        ddz = load_tile(x + 2 * DH, rows, o_h, m_t, m_h, 4 * DH).to(tl.float32)
        ddu = load_tile(x + 3 * DH, rows, o_h, m_t, m_h, 4 * DH).to(tl.float32)
        d = load_tile(y, rows, o_h, m_t, m_h, 2 * DH).to(tl.float32)
        dh = load_tile(y + DH, rows, o_h, m_t, m_h, 2 * DH).to(tl.float32)
        s = tl.sigmoid(z)
        a = z * s
        h, slope = a * u, s + a * (1 - s)
        dz, du = d * u * slope, d * a
        if R0 == 1:
            rate0 = _rate(lr0 + row * r0_b + head * r0_h, tokens * r0_t, o_h, m_t, m_h, R0)
            total0 += tl.sum(ddz * dz, 1)
            ddz *= rate0
            dz *= rate0
        if R2 == 1:
            rate2 = _rate(lr2 + row * r2_b + head * r2_h, tokens * r2_t, o_h, m_t, m_h, R2)
            total2 += tl.sum(ddu * du, 1)
            ddu *= rate2
            du *= rate2
        if R1 > 0:
            rate1 = _rate(lr1 + row * r1_b + head * r1_h, tokens * r1_t, o_h, m_t, m_h, R1)
            if R1 == 1:
                total1 += tl.sum(dh * h, 1)
            else:
                store_tile(dlr1, dh * h, rows, o_h, m_t, m_h, DH)
            dh *= rate1
            h *= rate1
        second = s * (1 - s) * (2 + z - 2 * a)  # silu''
        store_tile(dx, ddz * d * u * second + (ddu * d + dh * u) * slope, rows, o_h, m_t, m_h, 4 * DH)
        store_tile(dx + DH, ddz * d * slope + dh * a, rows, o_h, m_t, m_h, 4 * DH)
        store_tile(dx + 2 * DH, dz, rows, o_h, m_t, m_h, 4 * DH)
        store_tile(dx + 3 * DH, du, rows, o_h, m_t, m_h, 4 * DH)
        store_tile(dy, ddz * u * slope + ddu * a, rows, o_h, m_t, m_h, 2 * DH)
        store_tile(dy + DH, h, rows, o_h, m_t, m_h, 2 * DH)
    if R0 == 1:
        tl.store(dlr0 + rows, total0, mask=m_t)
    if R1 == 1:
        tl.store(dlr1 + rows, total1, mask=m_t)
    if R2 == 1:
        tl.store(dlr2 + rows, total2, mask=m_t)


# ----------------------------------------------------------------------------------------------------- configurations


class _Tiles(NamedTuple):
    """How a kernel is launched: tokens and hidden channels of a program."""

    tokens: int
    hidden: int
    num_warps: int
    num_stages: int


def _tiles(width: int, dtype: torch.dtype, amd: bool = torch.version.hip is not None) -> _Tiles:
    """The configuration of the fused kernels for the greatest width of a head. Products of float32 are not for matrix
    units, and their operands take more registers; an AMD GPU has fewer for wide accumulators."""
    if dtype == torch.float32:
        return _Tiles(16, 16, 4, 1) if amd else _Tiles(32, 32, 8, 1)
    if width <= 64:
        return _Tiles(64, 32, 4, 2)
    return _Tiles(32, 16, 8, 1) if amd else _Tiles(64, 32, 8, 2)


def _between(dh: int) -> _Tiles:
    """The configuration of a kernel between two products."""
    return _Tiles(8, min(128, block(dh)), 4, 1)


class _Sizes(NamedTuple):
    """The sizes of a chunk."""

    rows: int
    heads: int
    tokens: int
    dk: int
    dh: int
    dv: int

    @property
    def n(self) -> int:
        return self.rows * self.heads

    def fused(self, tiles: _Tiles) -> dict[str, int]:
        """The compile-time sizes of a fused kernel."""
        return {
            "DK": self.dk,
            "DH": self.dh,
            "DV": self.dv,
            "BT": tiles.tokens,
            "BK": block(self.dk),
            "BH": min(tiles.hidden, block(self.dh)),
            "BV": block(self.dv),
        }


def _sizes(x: Tensor, w1: Tensor) -> _Sizes:
    """Of tokens [B, H, C, Dk] and w1 [N, Dv, Dh]."""
    rows, heads, tokens, width = x.shape
    return _Sizes(rows, heads, tokens, width, w1.shape[-1], w1.shape[-2])


def _launch_between(kernel, n: int, *args, dh: int, **constexprs) -> None:
    """Launch a kernel between two products; the last two arguments are T and H."""
    tiles, tokens = _between(dh), args[-2]
    programs = n * triton.cdiv(tokens, tiles.tokens)
    launch(kernel, programs, tiles, *args, DH=dh, BT=tiles.tokens, BH=tiles.hidden, **constexprs)


def _strides(*tensors: Tensor | None) -> list[int]:
    """Those of row, head and token of each."""
    return [stride for x in tensors for stride in ((0, 0, 0) if x is None else x.stride()[:3])]


def _widths(*rates: Tensor | None) -> list[int]:
    return [0 if lr is None else lr.shape[-1] for lr in rates]


def _channels_together(x: Tensor | None) -> Tensor | None:
    """x itself where its channels lie side by side."""
    return x if x is None or x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def _splits(sizes: _Sizes, tiles: _Tiles, device: torch.device) -> tuple[int, int]:
    """Into how many parts the programs of a hidden tile share the tokens, and the tokens of a part."""
    most = max(1, -(-sizes.tokens // tiles.tokens))
    programs = sizes.n * -(-sizes.dh // tiles.hidden)
    wanted = min(most, max(1, processors(device) // max(1, programs)))
    span = -(-most // wanted) * tiles.tokens
    return max(1, -(-sizes.tokens // span)), span


# ----------------------------------------------------------------------------------------------------------- operators


def _empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=like.dtype if dtype is None else dtype, device=like.device)


def flat(x: Tensor) -> Tensor:
    """[B, H, C, D] → [N, C, D]; a copy where there are several rows and heads."""
    return x.flatten(0, 1)


@torch.library.custom_op(f"{_NAMESPACE}::step", mutates_args=())
def step(
    k: Tensor, e: Tensor, lr0: Tensor | None, lr1: Tensor | None, lr2: Tensor | None, w02: Tensor, w1: Tensor,
    update_all: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient step of a chunk in float32: g0, g1, g2 [N, ·, ·], or empty ones for g0, g2 without `update_all`.

    k [B, H, C, Dk], e = −∂loss/∂f [B, H, C, Dv], lr0, lr2 [B, H, C, 1 or Dk], lr1 [B, H, C, 1 or Dh]; w02
    [N, 2 Dh, Dk], w1 [N, Dv, Dh] in the type of the tokens.
    """
    with kernel_context(k):
        k, e, lr0, lr1, lr2 = map(_channels_together, (k, e, lr0, lr1, lr2))
        w02, w1 = w02.contiguous(), w1.contiguous()
        sizes = _sizes(k, w1)
        if is_narrow(max(sizes[3:]), k.dtype) and max(_widths(lr0, lr2)) <= 1:
            return _fused_step(sizes, k, e, (lr0, lr1, lr2), w02, w1, update_all)
        return _step_by_products(sizes, k, e, (lr0, lr1, lr2), w02, w1, update_all)


@step.register_fake
def _(k, e, lr0, lr1, lr2, w02, w1, update_all):
    n, width = w1.shape[0], w1.shape[-1]
    g0, g2 = (_empty(k, *_step_shape(n, width, k.shape[-1], update_all), dtype=torch.float32) for _ in range(2))
    return g0, _empty(k, *w1.shape, dtype=torch.float32), g2


def _step_shape(n: int, dh: int, dk: int, update_all: bool) -> tuple[int, ...]:
    """That of g0 and g2."""
    return (n, dh, dk) if update_all else (0,)


def _fused_step(sizes: _Sizes, k, e, rates, w02, w1, update_all: bool) -> tuple[Tensor, Tensor, Tensor]:
    tiles = _tiles(max(sizes[3:]), k.dtype)
    splits, span = _splits(sizes, tiles, k.device)
    g1 = _empty(k, sizes.n, splits, sizes.dv, sizes.dh, dtype=torch.float32)
    shape = (sizes.n, splits, sizes.dh, sizes.dk) if update_all else (0, 1)
    g0, g2 = (_empty(k, *shape, dtype=torch.float32) for _ in range(2))
    constexprs = sizes.fused(tiles)
    programs = sizes.n * splits * triton.cdiv(sizes.dh, constexprs["BH"])
    constexprs |= dict(zip(("R0", "R1", "R2"), _widths(*rates), strict=True))
    strides = _strides(k, e, *rates)
    arguments = k, e, *rates, w02, w1, g0, g1, g2, *strides, sizes.tokens, sizes.heads, splits, span
    launch(_step_kernel, programs, tiles, *arguments, **constexprs, ALL=update_all)
    g0, g1, g2 = (g.sum(1) if g.shape[1] > 1 else g.squeeze(1) for g in (g0, g1, g2))
    return g0, g1, g2


def _step_by_products(sizes: _Sizes, k, e, rates, w02, w1, update_all: bool) -> tuple[Tensor, Tensor, Tensor]:
    x, y = flat(k), flat(e)
    zu, d = torch.bmm(x, w02.mT), torch.bmm(y, w1) if update_all else None
    h = _empty(k, sizes.n, sizes.tokens, sizes.dh)
    dz, du = (torch.empty_like(h) if update_all else None for _ in range(2))
    names = dict(zip(("R0", "R1", "R2"), _widths(*rates), strict=True))
    arguments = zu, d, *rates, h, dz, du, *_strides(*rates), sizes.tokens, sizes.heads
    _launch_between(_gate_kernel, sizes.n, *arguments, dh=sizes.dh, **names, ALL=update_all)
    g1 = product(y.mT, h)
    if not update_all:
        return _empty(g1, 0), g1, _empty(g1, 0)
    g0, g2 = (
        product(grad.mT, scaled(x, flat(lr)) if lr is not None and lr.shape[-1] > 1 else x)
        for grad, lr in ((dz, rates[0]), (du, rates[2]))
    )
    return g0, g1, g2


@torch.library.custom_op(f"{_NAMESPACE}::step_read", mutates_args=())
def read(q: Tensor, w02: Tensor, w1: Tensor) -> Tensor:
    """w1 φ(q) [B, H, C, Dv]: q [B, H, C, Dk], weights as in `step`."""
    with kernel_context(q):
        q, w02, w1 = _channels_together(q), w02.contiguous(), w1.contiguous()
        sizes = _sizes(q, w1)
        if not is_narrow(max(sizes[3:]), q.dtype):
            zu, h = torch.bmm(flat(q), w02.mT), _empty(q, sizes.n, sizes.tokens, sizes.dh)
            arguments = zu, *[None] * 4, h, *[None] * 2, *[0] * 9, sizes.tokens, sizes.heads
            _launch_between(_gate_kernel, sizes.n, *arguments, dh=sizes.dh, R0=0, R1=0, R2=0, ALL=False)
            return torch.bmm(h, w1.mT).view(sizes.rows, sizes.heads, sizes.tokens, sizes.dv)
        tiles, out = _tiles(max(sizes[3:]), q.dtype), _empty(q, *q.shape[:3], sizes.dv)
        programs = sizes.n * triton.cdiv(sizes.tokens, tiles.tokens)
        arguments = q, w02, w1, out, *_strides(q), sizes.tokens, sizes.heads
        launch(_read_kernel, programs, tiles, *arguments, **sizes.fused(tiles))
        return out


@read.register_fake
def _(q, w02, w1):
    return _empty(q, *q.shape[:3], w1.shape[-2])


@torch.library.custom_op(f"{_NAMESPACE}::gate_backward", mutates_args=())
def gate_backward(zu: Tensor, dh: Tensor, lr1: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient dh [N, C, Dh] of η1 H: η1 H, ∂Z beside ∂U [N, C, 2 Dh], and ∂η1 [N, C, 1 or Dh], empty where
    there is no rate; zu: Z beside U, lr1 [B, H, C, 1 or Dh]."""
    with kernel_context(zu):
        zu, dh, lr1 = zu.contiguous(), dh.contiguous(), _channels_together(lr1)
        h, dzu, dlr1 = torch.empty_like(dh), torch.empty_like(zu), _rate_gradient(dh, lr1)
        heads = 1 if lr1 is None else lr1.shape[1]
        arguments = zu, dh, lr1, h, dzu, dlr1, *_strides(lr1), dh.shape[1], heads
        _launch_between(_gate_backward_kernel, dh.shape[0], *arguments, dh=dh.shape[-1], R1=_widths(lr1)[0])
        return h, dzu, dlr1


@gate_backward.register_fake
def _(zu, dh, lr1):
    return _empty(dh, *dh.shape), _empty(zu, *zu.shape), _rate_gradient(dh, lr1)


def _rate_gradient(like: Tensor, lr: Tensor | None) -> Tensor:
    """Room for the gradient [N, C, ·] of a rate [B, H, C, ·]; an operator cannot return None: an empty tensor."""
    shape = (0,) if lr is None else (*like.shape[:2], lr.shape[-1])
    return _empty(like, *shape, dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::step_backward", mutates_args=())
def step_backward(
    x: Tensor, y: Tensor, lr0: Tensor | None, lr1: Tensor | None, lr2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What is between the products of the backward of `step`, as `_step_backward_kernel` says: dx, dy, ∂η0, ∂η1, ∂η2.

    x [N, C, 4 Dh], y [N, C, 2 Dh]; lr0, lr2 [B, H, C, 1], lr1 [B, H, C, 1 or Dh].
    """
    with kernel_context(x):
        x, y, lr1 = x.contiguous(), y.contiguous(), _channels_together(lr1)
        rates = lr0, lr1, lr2
        dx, dy, drates = torch.empty_like(x), torch.empty_like(y), [_rate_gradient(x, lr) for lr in rates]
        heads = next((lr.shape[1] for lr in rates if lr is not None), 1)
        names = dict(zip(("R0", "R1", "R2"), _widths(*rates), strict=True))
        arguments = x, y, *rates, dx, dy, *drates, *_strides(*rates), x.shape[1], heads
        _launch_between(_step_backward_kernel, x.shape[0], *arguments, dh=x.shape[-1] // 4, **names)
        return dx, dy, drates[0], drates[1], drates[2]


@step_backward.register_fake
def _(x, y, lr0, lr1, lr2):
    return _empty(x, *x.shape), _empty(y, *y.shape), *(_rate_gradient(x, lr) for lr in (lr0, lr1, lr2))


for operator in (step, read, gate_backward, step_backward):
    register_vmap(operator)


# -------------------------------------------------------------------------------------------- ahead-of-time compilation


def aot_cases() -> Iterator[AOTCase]:
    """The fused kernels for bfloat16 up to 64 and 128 and for float32, and those between products. Rates are those of a
    token, but η1 where it takes most, at a width of 128: there it is one of each channel."""
    for dtype, pointer, widths in ((torch.bfloat16, "*bf16", (48, 128)), (torch.float32, "*fp32", (64,))):
        for width in widths:
            for amd in (False, True):
                targets = tuple(target for target in TARGETS if target.startswith("gfx") == amd)
                for case in _fused_cases(width, dtype, pointer, amd):
                    yield case._replace(targets=targets)
    yield from _between_cases("*bf16")


STRIDES = ("b", "h", "t")


def _types(pointers: dict[str, str], strided: tuple[str, ...], *sizes: str) -> dict[str, str]:
    """The types of a kernel's arguments: pointers, the strides of some of them, and sizes."""
    names = [f"{name}_{stride}" for name in strided for stride in STRIDES]
    return pointers | dict.fromkeys((*names, *sizes), "i32")


def _fused_cases(width: int, dtype: torch.dtype, pointer: str, amd: bool) -> Iterator[AOTCase]:
    tiles = _tiles(width, dtype, amd)
    options, constexprs = tiles[2:], _Sizes(1, 1, 1, width, width, width).fused(tiles)
    tokens = lambda *names: dict.fromkeys(names, pointer)  # noqa: E731
    floats = lambda *names: dict.fromkeys(names, "*fp32")  # noqa: E731
    yield AOTCase(
        _read_kernel, _types(tokens("q", "w02", "w1", "out"), ("q",), "T", "H"), constexprs, *options
    )  # fmt: skip
    pointers = tokens("k", "e", "w02", "w1") | floats("lr0", "lr1", "lr2", "g0", "g1", "g2")
    types = _types(pointers, ("k", "e", "r0", "r1", "r2"), "T", "H", "SPLITS", "SPAN")
    yield AOTCase(
        _step_kernel, types, constexprs | {"R0": 1, "R1": 1 if width < 128 else width, "R2": 1, "ALL": True}, *options
    )


def _between_cases(pointer: str) -> Iterator[AOTCase]:
    tiles = _between(384)
    sizes = {"DH": 384, "BT": tiles.tokens, "BH": tiles.hidden}
    tokens = lambda *names: dict.fromkeys(names, pointer)  # noqa: E731
    rates = {"R0": 1, "R1": 1, "R2": 1}
    floats = lambda *names: dict.fromkeys(names, "*fp32")  # noqa: E731
    lrs = floats("lr0", "lr1", "lr2")
    strided = ("r0", "r1", "r2")
    cases = (
        (_gate_kernel, tokens("zu", "d", "h", "dz", "du") | lrs, strided, rates | {"ALL": True}),
        (_gate_backward_kernel, tokens("zu", "dh", "h", "dzu") | floats("lr1", "dlr1"), strided[1:2], {"R1": 1}),
        (
            _step_backward_kernel,
            tokens("x", "y", "dx", "dy") | lrs | floats("dlr0", "dlr1", "dlr2"),
            strided,
            rates,
        ),
    )
    for kernel, pointers, names, constexprs in cases:
        yield AOTCase(kernel, _types(pointers, names, "T", "H"), sizes | constexprs, *tiles[2:])
