# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What a parallel evaluation does with tokens, as Triton kernels: the gradient of each chunk, and reads of its state.

    parallel_gradient    G_c = Σ_{t in chunk c} v_t (η_t φ(k_t))ᵀ
    parallel_read        o_t = S_c φ(q_t)

φ is the static feature map of `ttt_parallel`. Both have one backward, that of Σ_t y_tᵀ X_c (η_t φ(x_t)): with y = v and
X = ∂G for a gradient, with y = ∂o and X = S for a read.

Up to a width of 128 (64 in float32) no feature reaches memory: the kernels hold φ in registers, and the backward
computes it again. `ttt_triton_wide` is for wider heads.

Tokens are [B, T, H, D]; states are [B·H, n, Dv, Dh] and static weights [B·H, Dh, Dk], both float32. Each state belongs
to a chunk of C tokens, but the chunk of the last one goes on to token END. Products take their operands in the type of
the tokens, everything that accumulates is float32. Offsets are 64-bit, and grids have one dimension, which is the one
without a limit of 65,535.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ttt_recurrent import no_second_derivative
from .ttt_triton import (
    TARGETS,
    AOTCase,
    block,
    contiguous,
    dot,
    jit,
    kernel_context,
    launch,
    load_tile,
    namespace,
    processors,
    register_vmap,
    store_tile,
    tl,
    triton,
)
from .ttt_triton_wide import Gradients, load_rate, wide_backward, wide_read, wide_sums

_NAMESPACE = namespace(__file__)
NARROW = 128  # the greatest width whose features stay in registers


# ------------------------------------------------------------------------------------------------------------- kernels


@jit
def rows_of(bh, tokens, T, H):
    """The rows of some tokens of a head in [B, T, H, D]; `bh` is a 64-bit number."""
    return (bh // H * T + tokens) * H + bh % H


@jit
def _end_of(chunk, C, END, STATES):
    """Where a chunk ends."""
    return tl.where(chunk < STATES - 1, (chunk + 1) * C, END)


@jit
def _tile(TILES, C, END, STATES, BT: tl.constexpr):
    """A program's head and chunk, and its tile of BT tokens, with their mask; tiles do not cross chunks."""
    pid = tl.program_id(0).to(tl.int64)
    tile = pid % TILES
    per_chunk = tl.cdiv(C, BT)
    chunk = tl.minimum(tile // per_chunk, STATES - 1)
    tokens = chunk * C + (tile - chunk * per_chunk) * BT + tl.arange(0, BT)
    return pid // TILES, chunk, tokens, tokens < _end_of(chunk, C, END, STATES)


@jit
def _part(SPLITS, SPAN, C, END, STATES, DH: tl.constexpr, BH: tl.constexpr):
    """A program's place in a result [B·H, STATES, SPLITS, ·]; its head and chunk; the SPAN tokens of that, as start and
    stop; and its hidden channels."""
    pid = tl.program_id(0).to(tl.int64)
    HIDDEN: tl.constexpr = (DH + BH - 1) // BH
    place = pid // HIDDEN
    chunk = place // SPLITS % STATES
    start = chunk * C + place % SPLITS * SPAN
    stop = tl.minimum(start + SPAN, _end_of(chunk, C, END, STATES))
    return place, place // (SPLITS * STATES), chunk, start, stop, pid % HIDDEN * BH + tl.arange(0, BH)


@jit
def _sums_kernel(
    x, y, lr, w0, w2, sums, T, H, C, END, STATES, SPLITS, SPAN,
    DK: tl.constexpr, DH: tl.constexpr, DV: tl.constexpr, RATES: tl.constexpr, LINEAR: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """sums [B·H, STATES, SPLITS, Dv, Dh] of y_t (η_t φ(x_t))ᵀ: one hidden tile over one part of a chunk."""
    place, bh, _, start, stop, o_h = _part(SPLITS, SPAN, C, END, STATES, DH, BH)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_h, m_k, m_v = o_h < DH, o_k < DK, o_v < DV
    if not LINEAR:
        b_w0 = tl.trans(load_tile(w0 + bh * DH * DK, o_h, o_k, m_h, m_k, DK))
        b_w2 = tl.trans(load_tile(w2 + bh * DH * DK, o_h, o_k, m_h, m_k, DK))
    total = tl.zeros([BV, BH], dtype=tl.float32)
    for t in range(start, stop, BT):
        tokens = t + tl.arange(0, BT)
        m_t = tokens < stop
        rows = rows_of(bh, tokens, T, H)
        if LINEAR:
            h = load_tile(x, rows, o_h, m_t, m_h, DK).to(tl.float32)
        else:
            b_x = load_tile(x, rows, o_k, m_t, m_k, DK)
            z = dot(b_x, b_w0)
            h = z * tl.sigmoid(z) * dot(b_x, b_w2)
        if RATES > 0:
            h = h * load_rate(lr, rows, o_h, m_t, m_h, RATES)
        b_y = load_tile(y, rows, o_v, m_t, m_v, DV)
        total += dot(tl.trans(b_y), h.to(b_y.dtype))
    store_tile(sums + place * DV * DH, total, o_v, o_h, m_v, m_h, DH)


@jit
def _read_kernel(
    x, w0, w2, states, out, T, H, C, END, STATES, TILES,
    DK: tl.constexpr, DH: tl.constexpr, DV: tl.constexpr, LINEAR: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """X_c φ(x_t) of one tile of tokens."""
    bh, chunk, tokens, m_t = _tile(TILES, C, END, STATES, BT)
    rows = rows_of(bh, tokens, T, H)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_k, m_v = o_k < DK, o_v < DV
    state = states + (bh * STATES + chunk) * DV * DH
    b_x = load_tile(x, rows, o_k, m_t, m_k, DK)
    total = tl.zeros([BT, BV], dtype=tl.float32)
    for start in range(0, DH, BH):
        o_h = start + tl.arange(0, BH)
        m_h = o_h < DH
        if LINEAR:
            h = load_tile(x, rows, o_h, m_t, m_h, DK)
        else:
            z = dot(b_x, tl.trans(load_tile(w0 + bh * DH * DK, o_h, o_k, m_h, m_k, DK)))
            u = dot(b_x, tl.trans(load_tile(w2 + bh * DH * DK, o_h, o_k, m_h, m_k, DK)))
            h = (z * tl.sigmoid(z) * u).to(b_x.dtype)
        total += dot(h, tl.trans(load_tile(state, o_v, o_h, m_v, m_h, DH).to(b_x.dtype)))
    store_tile(out, total, rows, o_v, m_t, m_v, DV)


@jit
def _token_backward_kernel(
    x, y, lr, w0, w2, states, dx, dy, dlr, T, H, C, END, STATES, TILES,
    DK: tl.constexpr, DH: tl.constexpr, DV: tl.constexpr, RATES: tl.constexpr, LINEAR: tl.constexpr,
    HAS_DY: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of Σ_t y_tᵀ X_c (η_t φ(x_t)) with respect to x, y and η for one tile of tokens."""
    bh, chunk, tokens, m_t = _tile(TILES, C, END, STATES, BT)
    rows = rows_of(bh, tokens, T, H)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_k, m_v = o_k < DK, o_v < DV
    state = states + (bh * STATES + chunk) * DV * DH
    b_x, b_y = load_tile(x, rows, o_k, m_t, m_k, DK), load_tile(y, rows, o_v, m_t, m_v, DV)
    total_x = tl.zeros([BT, BK], dtype=tl.float32)
    total_y = tl.zeros([BT, BV], dtype=tl.float32)
    total_lr = tl.zeros([BT], dtype=tl.float32)
    for start in range(0, DH, BH):
        o_h = start + tl.arange(0, BH)
        m_h = o_h < DH
        b_state = load_tile(state, o_v, o_h, m_v, m_h, DH).to(b_x.dtype)
        dh = dot(b_y, b_state)
        if LINEAR:
            h = load_tile(x, rows, o_h, m_t, m_h, DK).to(tl.float32)
        else:
            b_w0 = load_tile(w0 + bh * DH * DK, o_h, o_k, m_h, m_k, DK)
            b_w2 = load_tile(w2 + bh * DH * DK, o_h, o_k, m_h, m_k, DK)
            z, u = dot(b_x, tl.trans(b_w0)), dot(b_x, tl.trans(b_w2))
            s = tl.sigmoid(z)
            a = z * s
            h = a * u
        if RATES > 0:
            rate = load_rate(lr, rows, o_h, m_t, m_h, RATES)
            if RATES == 1:
                total_lr += tl.sum(dh * h, 1)
            else:
                store_tile(dlr, dh * h, rows, o_h, m_t, m_h, RATES)
            h = h * rate
            dh = dh * rate
        if HAS_DY:
            total_y += dot(h.to(b_x.dtype), tl.trans(b_state))
        if LINEAR:
            store_tile(dx, dh, rows, o_h, m_t, m_h, DK)
        else:
            dz, du = dh * u * (s + a * (1 - s)), dh * a
            total_x += dot(dz.to(b_x.dtype), b_w0)
            total_x += dot(du.to(b_x.dtype), b_w2)
    if not LINEAR:
        store_tile(dx, total_x, rows, o_k, m_t, m_k, DK)
    if HAS_DY:
        store_tile(dy, total_y, rows, o_v, m_t, m_v, DV)
    if RATES == 1:
        tl.store(dlr + rows, total_lr, mask=m_t)


@jit
def _weight_backward_kernel(
    x, y, lr, w0, w2, states, dw0, dw2, dstates, T, H, C, END, STATES, SPLITS, SPAN,
    DK: tl.constexpr, DH: tl.constexpr, DV: tl.constexpr, RATES: tl.constexpr, HAS_DSTATES: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """As `_token_backward_kernel`, with respect to w0, w2 [B·H, STATES, SPLITS, Dh, Dk] and to the states; one hidden
    tile over one part of a chunk, as in `_sums_kernel`."""
    place, bh, chunk, start, stop, o_h = _part(SPLITS, SPAN, C, END, STATES, DH, BH)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_h, m_k, m_v = o_h < DH, o_k < DK, o_v < DV
    b_w0 = tl.trans(load_tile(w0 + bh * DH * DK, o_h, o_k, m_h, m_k, DK))
    b_w2 = tl.trans(load_tile(w2 + bh * DH * DK, o_h, o_k, m_h, m_k, DK))
    b_state = load_tile(states + (bh * STATES + chunk) * DV * DH, o_v, o_h, m_v, m_h, DH).to(b_w0.dtype)
    total_w0 = tl.zeros([BK, BH], dtype=tl.float32)
    total_w2 = tl.zeros([BK, BH], dtype=tl.float32)
    total_state = tl.zeros([BV, BH], dtype=tl.float32)
    for t in range(start, stop, BT):
        tokens = t + tl.arange(0, BT)
        m_t = tokens < stop
        rows = rows_of(bh, tokens, T, H)
        b_x, b_y = load_tile(x, rows, o_k, m_t, m_k, DK), load_tile(y, rows, o_v, m_t, m_v, DV)
        z, u, dh = dot(b_x, b_w0), dot(b_x, b_w2), dot(b_y, b_state)
        s = tl.sigmoid(z)
        a = z * s
        if HAS_DSTATES:
            total_state += dot(tl.trans(b_y), (a * u).to(b_x.dtype))
        if RATES > 0:
            dh = dh * load_rate(lr, rows, o_h, m_t, m_h, RATES)
        dz, du = dh * u * (s + a * (1 - s)), dh * a
        total_w0 += dot(tl.trans(b_x), dz.to(b_x.dtype))
        total_w2 += dot(tl.trans(b_x), du.to(b_x.dtype))
    store_tile(dw0 + place * DH * DK, tl.trans(total_w0), o_h, o_k, m_h, m_k, DK)
    store_tile(dw2 + place * DH * DK, tl.trans(total_w2), o_h, o_k, m_h, m_k, DK)
    if HAS_DSTATES:
        store_tile(dstates + place * DV * DH, total_state, o_v, o_h, m_v, m_h, DH)


# ------------------------------------------------------------------------------------------------------------ launches


class _Tiles(NamedTuple):
    """Tokens and hidden channels of a program at a time, and how it is launched."""

    tokens: int
    hidden: int
    num_warps: int
    num_stages: int


def is_narrow(width: int, dtype: torch.dtype) -> bool:
    """Whether the features of heads of this width stay in registers; those of float32 take twice the room."""
    return width <= (NARROW // 2 if dtype == torch.float32 else NARROW)


def _tiles(width: int, dtype: torch.dtype, amd: bool = torch.version.hip is not None) -> _Tiles:
    """The configuration for the greatest width of a head. Products of float32 are not for matrix units, and their
    operands take many more registers; an AMD GPU has fewer for wide accumulators."""
    if dtype == torch.float32:
        return _Tiles(16, 16, 4, 1) if amd else _Tiles(32, 32, 8, 1)
    if width <= 64:
        return _Tiles(64, 32, 4, 2)
    return _Tiles(32, 16, 8, 2) if amd else _Tiles(64, 32, 8, 2)


class _Layer(NamedTuple):
    """Sizes of a call, and what of them its kernels are compiled for."""

    batch: int
    length: int
    heads: int
    dk: int
    dh: int
    dv: int
    rates: int  # width of the rates; 0 where there are none
    linear: bool
    chunk_size: int
    end: int
    states: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.batch * self.heads

    @property
    def width(self) -> int:
        return max(self.dk, self.dh, self.dv)

    @property
    def last(self) -> int:
        """Tokens of the last chunk."""
        return self.end - (self.states - 1) * self.chunk_size

    def sizes(self) -> tuple[int, int, int, int, int]:
        """T, H, C, END and STATES, as the kernels take them."""
        return self.length, self.heads, self.chunk_size, self.end, self.states

    def tiles_of_head(self, tokens: int) -> int:
        """How many tiles of so many tokens a head has; see `_tile`."""
        return (self.states - 1) * triton.cdiv(self.chunk_size, tokens) + triton.cdiv(self.last, tokens)

    def splits(self, tiles: _Tiles, processors: int) -> tuple[int, int]:
        """Into how many parts the programs of a chunk share its tokens to keep so many processors busy, and the tokens
        of a part; see `_part`."""
        longest = max(self.last, self.chunk_size if self.states > 1 else 0)
        most = max(1, triton.cdiv(longest, tiles.tokens))
        programs = max(1, self.rows * self.states * triton.cdiv(self.dh, tiles.hidden))
        span = triton.cdiv(most, min(most, max(1, processors // programs))) * tiles.tokens
        return max(1, triton.cdiv(longest, span)), span

    def constexprs(self, tiles: _Tiles, *names: str) -> dict[str, int | bool]:
        """The widths and blocks that a kernel is compiled for, and the named ones of `RATES` and `LINEAR`."""
        widths = {"DK": self.dk, "DH": self.dh, "DV": self.dv}
        blocks = {"BT": tiles.tokens, "BK": block(self.dk), "BH": tiles.hidden, "BV": block(self.dv)}
        options = {"RATES": self.rates, "LINEAR": self.linear}
        return widths | blocks | {name: options[name] for name in names}


def _layer(x: Tensor, lr: Tensor | None, w0: Tensor | None, shape: Sequence[int], chunk_size: int, end: int) -> _Layer:
    """For tokens x [B, T, H, Dk] and states of the given shape (n, Dv, Dh)."""
    (batch, length, heads, dk), (states, dv, dh) = x.shape, shape
    rates = 0 if lr is None else lr.shape[-1]
    return _Layer(batch, length, heads, dk, dh, dv, rates, w0 is None, chunk_size, end, states, x.dtype)


def _parts(layer: _Layer, x: Tensor) -> tuple[int, int, int]:
    """For a kernel with `_part`: into how many parts a chunk is split, the tokens of a part, and the programs."""
    tiles = _tiles(layer.width, layer.dtype)
    splits, span = layer.splits(tiles, processors(x.device))
    return splits, span, layer.rows * layer.states * splits * triton.cdiv(layer.dh, tiles.hidden)


def _partial(layer: _Layer, splits: int, like: Tensor, *shape: int) -> Tensor:
    """A result of each part of each chunk, in float32."""
    return like.new_empty(layer.rows, layer.states, splits, *shape, dtype=torch.float32)


def _per_chunk(x: Tensor) -> Tensor:
    """The sums of such results over the parts."""
    return x.sum(2) if x.shape[2] > 1 else x.squeeze(2)


def _narrow_sums(layer: _Layer, x: Tensor, y: Tensor, lr, w0, w2) -> Tensor:
    """Σ_t y_t (η_t φ(x_t))ᵀ over each chunk [B·H, n, Dv, Dh]."""
    tiles, (splits, span, programs) = _tiles(layer.width, layer.dtype), _parts(layer, x)
    sums = _partial(layer, splits, x, layer.dv, layer.dh)
    arguments = x, y, lr, w0, w2, sums, *layer.sizes(), splits, span
    launch(_sums_kernel, programs, tiles, *arguments, **layer.constexprs(tiles, "RATES", "LINEAR"))
    return _per_chunk(sums)


def _narrow_read(layer: _Layer, x: Tensor, w0, w2, states: Tensor) -> Tensor:
    """X_c φ(x_t) [B, T, H, Dv]."""
    tiles, out = _tiles(layer.width, layer.dtype), x.new_empty(*x.shape[:3], layer.dv)
    count = layer.tiles_of_head(tiles.tokens)
    arguments = x, w0, w2, states, out, *layer.sizes(), count
    launch(_read_kernel, layer.rows * count, tiles, *arguments, **layer.constexprs(tiles, "LINEAR"))
    return out


def _narrow_backward(layer: _Layer, x: Tensor, y: Tensor, lr, w0, w2, states: Tensor, updating: bool) -> Gradients:
    """As `wide_backward`."""
    dx, dy, dlr = _token_backward(layer, x, y, lr, w0, w2, states, updating)
    if w0 is not None:
        return Gradients(dx, dy, dlr, *_weight_backward(layer, x, y, lr, w0, w2, states, updating))
    return Gradients(dx, dy, dlr, None, None, None if updating else _narrow_sums(layer, x, y, lr, w0, w2))


def _token_backward(layer: _Layer, x: Tensor, y: Tensor, lr, w0, w2, states: Tensor, updating: bool):
    """Gradients of x, y (None unless `updating`) and lr; zeros from `layer.end` on."""
    tiles, dx, dy = _tiles(layer.width, layer.dtype), torch.empty_like(x), torch.empty_like(y) if updating else None
    dlr = None if lr is None else torch.empty_like(lr)
    for grad in (dx, dy, dlr):
        if grad is not None:
            grad[:, layer.end :] = 0
    count = layer.tiles_of_head(tiles.tokens)
    arguments = x, y, lr, w0, w2, states, dx, dy, dlr, *layer.sizes(), count
    constexprs = layer.constexprs(tiles, "RATES", "LINEAR")
    launch(_token_backward_kernel, layer.rows * count, tiles, *arguments, **constexprs, HAS_DY=updating)
    return dx, dy, dlr


def _weight_backward(layer: _Layer, x: Tensor, y: Tensor, lr, w0, w2, states: Tensor, updating: bool):
    """Gradients of w0, w2 and the states (None if `updating`)."""
    tiles, (splits, span, programs) = _tiles(layer.width, layer.dtype), _parts(layer, x)
    dw0, dw2 = (_partial(layer, splits, x, layer.dh, layer.dk) for _ in range(2))
    dstates = None if updating else _partial(layer, splits, x, layer.dv, layer.dh)
    arguments = x, y, lr, w0, w2, states, dw0, dw2, dstates, *layer.sizes(), splits, span
    constexprs = layer.constexprs(tiles, "RATES")
    launch(_weight_backward_kernel, programs, tiles, *arguments, **constexprs, HAS_DSTATES=not updating)
    return dw0.sum((1, 2)), dw2.sum((1, 2)), None if dstates is None else _per_chunk(dstates)


# ----------------------------------------------------------------------------------------------------------- operators


def _typed(dtype: torch.dtype, *weights: Tensor | None) -> list[Tensor | None]:
    """Contiguous, in the type of the tokens."""
    return contiguous(*(None if w is None else w.to(dtype) for w in weights))


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """An operator cannot return None: an empty tensor stands for it."""
    return like.new_empty(0) if x is None else x


def _or_none(x: Tensor, like: Tensor | None) -> Tensor | None:
    """The inverse of `_or_empty`; `like` is the input whose gradient x is."""
    return None if like is None else x


def _likes(*tensors: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
    """Contiguous tensors of these shapes and types."""
    return tuple(like.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)


def _backward(layer: _Layer, x: Tensor, y: Tensor, lr, w0, w2, states: Tensor, updating: bool) -> Gradients:
    """Of Σ_t y_tᵀ X_c (η_t φ(x_t)), by the kernels for heads of this width."""
    x, y, lr, states = contiguous(x, y, lr, states)
    w0, w2 = _typed(x.dtype, w0, w2)
    if is_narrow(layer.width, layer.dtype):
        return _narrow_backward(layer, x, y, lr, w0, w2, states, updating)
    return wide_backward(x, y, lr, w0, w2, states, layer.chunk_size, layer.end, updating)


@torch.library.custom_op(f"{_NAMESPACE}::parallel_gradient", mutates_args=())
def parallel_gradient(
    k: Tensor, v: Tensor, lr: Tensor | None, w0: Tensor | None, w2: Tensor | None, dh: int, chunk_size: int,
    updates: int,
) -> Tensor:  # fmt: skip
    """G of each chunk [B·H, N, Dv, Dh]: k, v, lr [B, T, H, ·], w0, w2 [B·H, Dh, Dk] or None for φ(x) = x."""
    with kernel_context(k):
        end = updates * chunk_size
        layer = _layer(k, lr, w0, (updates, v.shape[-1], dh), chunk_size, end)
        w0, w2 = _typed(k.dtype, w0, w2)
        if is_narrow(layer.width, layer.dtype):
            k, v, lr = contiguous(k, v, lr)
            return _narrow_sums(layer, k, v, lr, w0, w2)
        k, v, lr = (None if x is None else x[:, :end] for x in (k, v, lr))
        return wide_sums(k, v, lr, w0, w2, updates, chunk_size)


@parallel_gradient.register_fake
def _(k, v, lr, w0, w2, dh, chunk_size, updates):
    return k.new_empty(k.shape[0] * k.shape[2], updates, v.shape[-1], dh, dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::parallel_gradient_backward", mutates_args=())
def _gradient_backward(
    dg: Tensor, k: Tensor, v: Tensor, lr: Tensor | None, w0: Tensor | None, w2: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of k, v, lr, w0, w2; empty for what is None."""
    with kernel_context(k):
        layer = _layer(k, lr, w0, dg.shape[1:], chunk_size, dg.shape[1] * chunk_size)
        grads = _backward(layer, k, v, lr, w0, w2, dg, updating=True)
        return grads.x, grads.y, _or_empty(grads.lr, dg), _or_empty(grads.w0, dg), _or_empty(grads.w2, dg)


@_gradient_backward.register_fake
def _(dg, k, v, lr, w0, w2, chunk_size):
    return _likes(k, v, lr, w0, w2, like=dg)


def _gradient_setup(ctx, inputs, output):
    *tensors, _, ctx.chunk_size, _ = inputs
    ctx.save_for_backward(*tensors)


@no_second_derivative
def _gradient_autograd(ctx, dg):
    tensors = ctx.saved_tensors
    grads = _gradient_backward(dg, *tensors, ctx.chunk_size)
    return *map(_or_none, grads, tensors), None, None, None


@torch.library.custom_op(f"{_NAMESPACE}::parallel_read", mutates_args=())
def parallel_read(q: Tensor, w0: Tensor | None, w2: Tensor | None, states: Tensor, chunk_size: int) -> Tensor:
    """o [B, T, H, Dv]: q [B, T, H, Dk] reads states [B·H, N + 1, Dv, Dh], the last one after N chunks."""
    with kernel_context(q):
        layer = _layer(q, None, w0, states.shape[1:], chunk_size, q.shape[1])
        q, states = contiguous(q, states)
        w0, w2 = _typed(q.dtype, w0, w2)
        if is_narrow(layer.width, layer.dtype):
            return _narrow_read(layer, q, w0, w2, states)
        return wide_read(q, w0, w2, states, chunk_size)


@parallel_read.register_fake
def _(q, w0, w2, states, chunk_size):
    return q.new_empty(*q.shape[:3], states.shape[-2])


@torch.library.custom_op(f"{_NAMESPACE}::parallel_read_backward", mutates_args=())
def _read_backward(
    dout: Tensor, q: Tensor, w0: Tensor | None, w2: Tensor | None, states: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, w0, w2, states; empty for what is None."""
    with kernel_context(q):
        layer = _layer(q, None, w0, states.shape[1:], chunk_size, q.shape[1])
        grads = _backward(layer, q, dout, None, w0, w2, states, updating=False)
        return grads.x, _or_empty(grads.w0, states), _or_empty(grads.w2, states), grads.states


@_read_backward.register_fake
def _(dout, q, w0, w2, states, chunk_size):
    return _likes(q, w0, w2, states, like=states)


def _read_setup(ctx, inputs, output):
    *tensors, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


@no_second_derivative
def _read_autograd(ctx, dout):
    tensors = ctx.saved_tensors
    return *map(_or_none, _read_backward(dout, *tensors, ctx.chunk_size), tensors), None


parallel_gradient.register_autograd(_gradient_autograd, setup_context=_gradient_setup)
parallel_read.register_autograd(_read_autograd, setup_context=_read_setup)
for _operator in (parallel_gradient, _gradient_backward, parallel_read, _read_backward):
    register_vmap(_operator)


# ------------------------------------------------------------------------------------------------- ahead of time


def aot_cases() -> Iterator[AOTCase]:
    """Every kernel with every configuration, in the variant that takes the most registers: gated features, rates, all
    results. A linear network leaves parts of the code out; its kernels are here once."""
    for dtype, width in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 64)):
        for linear, amd in itertools.product((False, True), repeat=2):
            if not linear or width == NARROW:
                layer = _Layer(1, 0, 1, width, width, width, 1, linear, 0, 0, 1, dtype)
                yield from _cases(layer, _tiles(width, dtype, amd), amd)


def _cases(layer: _Layer, tiles: _Tiles, amd: bool) -> Iterator[AOTCase]:
    """The kernels of a layer."""
    targets = tuple(target for target in TARGETS if target.startswith("gfx") == amd)
    pointer = "*fp32" if layer.dtype == torch.float32 else "*bf16"
    kinds = dict.fromkeys(("x", "y", "w0", "w2", "dx", "dy", "out"), pointer)
    kinds |= dict.fromkeys(("lr", "dlr", "states", "dstates", "sums", "dw0", "dw2"), "*fp32")
    sizes = ("T", "H", "C", "END", "STATES")
    both = {"RATES": layer.rates, "LINEAR": layer.linear}
    variants: dict[Any, tuple[str, dict[str, Any]]] = {
        _sums_kernel: ("x y lr w0 w2 sums SPLITS SPAN", both),
        _read_kernel: ("x w0 w2 states out TILES", {"LINEAR": layer.linear}),
        _token_backward_kernel: ("x y lr w0 w2 states dx dy dlr TILES", both | {"HAS_DY": True}),
    }
    if not layer.linear:
        names = "x y w0 w2 states dw0 dw2 dstates SPLITS SPAN"
        variants[_weight_backward_kernel] = names, {"lr": None, "RATES": 0, "HAS_DSTATES": True}
    for kernel, (names, constexprs) in variants.items():
        types = {name: kinds.get(name, "i32") for name in (*names.split(), *sizes)}
        if layer.linear:
            constexprs = constexprs | {name: None for name in ("w0", "w2") if types.pop(name)}
        yield AOTCase(kernel, types, constexprs | layer.constexprs(tiles), tiles.num_warps, tiles.num_stages, targets)
