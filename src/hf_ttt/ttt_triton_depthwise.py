# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Triton kernels of the depthwise branch of a ViTTT block, forward and backward: `ttt_vision` says what they compute.

Two kernels, the sums Σ_p x[p + δ] y[p] of the nine taps δ and the correlation Σ_δ w[δ] x[p ± δ], make up the step, the
reading and both of their gradients; `ttt_triton_columns` has the end of the step.

All is computed in float32, and no sum depends on the order in which programs run. An image has fewer than 2³⁰ pixels;
offsets are 64-bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .ttt_recurrent import no_second_derivative
from .ttt_triton import (
    AOTCase,
    block,
    contiguous,
    jit,
    kernel_context,
    load_tile,
    namespace,
    register_vmap,
    store_tile,
    tl,
)
from .ttt_triton_columns import split, update, update_backward
from .ttt_vision import SCALE, TAPS

_NAMESPACE = namespace(__file__)
_WARPS = 4


# -------------------------------------------------------------------------------------------------------------- kernels


@jit
def _taps_kernel(x, y, sums, height, width, span, D: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """Σ_p x[p + δ] y[p] of `span` pixels into sums [parts, images, 9, D], for the three taps of a row.
    Grid: images, parts, 3 · blocks of channels."""
    i_b, i_s, row = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) % 3
    o_c = tl.program_id(2) // 3 * BC + tl.arange(0, BC)
    pixels = height * width
    x += i_b * pixels * D
    y += i_b * pixels * D
    sum0 = tl.zeros([BP, BC], dtype=tl.float32)
    sum1 = tl.zeros([BP, BC], dtype=tl.float32)
    sum2 = tl.zeros([BP, BC], dtype=tl.float32)
    for p in range(i_s * span, tl.minimum(i_s * span + span, pixels), BP):
        o_p = p + tl.arange(0, BP)
        column = o_p % width
        shifted = o_p + (row - 1) * width
        inside = (o_p < pixels) & (shifted >= 0) & (shifted < pixels)
        b_y = load_tile(y, o_p, o_c, o_p < pixels, o_c < D, D).to(tl.float32)
        sum0 += b_y * load_tile(x, shifted - 1, o_c, inside & (column > 0), o_c < D, D).to(tl.float32)
        sum1 += b_y * load_tile(x, shifted, o_c, inside, o_c < D, D).to(tl.float32)
        sum2 += b_y * load_tile(x, shifted + 1, o_c, inside & (column < width - 1), o_c < D, D).to(tl.float32)
    sums += ((i_s * tl.num_programs(0).to(tl.int64) + i_b) * 9 + row * 3) * D + o_c
    tl.store(sums, tl.sum(sum0, 0), mask=o_c < D)
    tl.store(sums + D, tl.sum(sum1, 0), mask=o_c < D)
    tl.store(sums + 2 * D, tl.sum(sum2, 0), mask=o_c < D)


@jit
def _correlate_kernel(
    x, w, out, height, width, D: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, FLIPPED: tl.constexpr
):
    """Σ_δ w[δ] x[p + δ] with kernels w [images, 9, D]; FLIPPED, x[p − δ]. Grid: images · tiles of pixels, blocks of
    channels."""
    pixels = height * width
    tiles = tl.cdiv(pixels, BP)
    i_b = (tl.program_id(0) // tiles).to(tl.int64)
    o_p = tl.program_id(0) % tiles * BP + tl.arange(0, BP)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    row, column = o_p // width, o_p % width
    x += i_b * pixels * D
    out += i_b * pixels * D
    w += i_b * 9 * D + o_c
    total = tl.zeros([BP, BC], dtype=tl.float32)
    for tap in tl.static_range(9):
        down = 1 - tap // 3 if FLIPPED else tap // 3 - 1
        right = 1 - tap % 3 if FLIPPED else tap % 3 - 1
        inside = (o_p < pixels) & (row + down >= 0) & (row + down < height)
        inside = inside & (column + right >= 0) & (column + right < width)
        b_w = tl.load(w + tap * D, mask=o_c < D, other=0.0).to(tl.float32)
        b_x = load_tile(x, o_p + down * width + right, o_c, inside, o_c < D, D)
        total += b_x.to(tl.float32) * b_w[None, :]
    store_tile(out, total, o_p, o_c, o_p < pixels, o_c < D, D)


# ------------------------------------------------------------------------------------------------------------- launches


def _sizes(channels: int) -> dict[str, int]:
    """Of a block: 2,048 entries."""
    columns = min(block(channels), 64)
    return {"D": channels, "BP": 2048 // columns, "BC": columns}


def _tap_sums(x: Tensor, y: Tensor) -> Tensor:
    """Σ_p x[p + δ] y[p] of maps [B, h, w, D], as sums [parts, 1, B, 9, D]."""
    (batch, height, width, channels), sizes = x.shape, _sizes(x.shape[-1])
    programs = 3 * -(-channels // sizes["BC"])
    parts, span = split(x, batch * programs, height * width, sizes["BP"])
    sums = x.new_empty(parts, 1, batch, TAPS, channels, dtype=torch.float32)
    _taps_kernel[batch, parts, programs](x, y, sums, height, width, span, **sizes, num_warps=_WARPS)
    return sums


def _correlate(x: Tensor, w: Tensor, flipped: bool = False) -> Tensor:
    """Σ_δ w[δ] x[p + δ], flipped x[p − δ], of maps [B, h, w, D] with kernels [B, 9, D] of each image."""
    (batch, height, width, channels), sizes, out = x.shape, _sizes(x.shape[-1]), torch.empty_like(x)
    _correlate_kernel[batch * -(-height * width // sizes["BP"]), -(-channels // sizes["BC"])](
        *(x, w, out, height, width), **sizes, FLIPPED=flipped, num_warps=_WARPS
    )
    return out


# ------------------------------------------------------------------------------------------------------------ operators


@torch.library.custom_op(f"{_NAMESPACE}::conv_step", mutates_args=())
def conv_step(k: Tensor, v: Tensor, w: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """The new kernels [B, 9, D] and Δ, which the gradient needs, both float32, from maps [B, h, w, D] and the initial
    kernels [9, D]."""
    with kernel_context(k):
        k, v = contiguous(k, v)
        w = w[None, None]
        new, steps = update(_tap_sums(k, v), w, w, 1, SCALE / (k.shape[1] * k.shape[2]), lr, True)
        return new[0], steps[0]


@conv_step.register_fake
def _(k, v, w, lr):
    new = k.new_empty(k.shape[0], TAPS, k.shape[-1], dtype=torch.float32)
    return new, torch.empty_like(new)


@torch.library.custom_op(f"{_NAMESPACE}::conv_step_backward", mutates_args=())
def conv_step_backward(
    grad: Tensor, k: Tensor, v: Tensor, w: Tensor, steps: Tensor, lr: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of k, v and w from that of the new kernels."""
    with kernel_context(k):
        grad, k, v, steps = contiguous(grad, k, v, steps)
        factor = SCALE / (k.shape[1] * k.shape[2])
        slopes, scales = update_backward(grad, steps, factor, lr, True, torch.float32)
        slopes *= scales[:, None]
        return _correlate(v, slopes, flipped=True), _correlate(k, slopes), grad.sum(0).to(w.dtype)


@conv_step_backward.register_fake
def _(grad, k, v, w, steps, lr):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v, w))


def _save_step(ctx, inputs, output):
    k, v, w, ctx.lr = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(k, v, w, output[1])


@no_second_derivative
def _step_vjp(ctx, grad, _):
    return *conv_step_backward(grad, *ctx.saved_tensors, ctx.lr), None


conv_step.register_autograd(_step_vjp, setup_context=_save_step)


@torch.library.custom_op(f"{_NAMESPACE}::conv_read", mutates_args=())
def conv_read(q: Tensor, w: Tensor) -> Tensor:
    """A 3 × 3 depthwise convolution of maps [B, h, w, D] with kernels [B, 9, D] of each image."""
    with kernel_context(q):
        q, w = contiguous(q, w)
        return _correlate(q, w)


@conv_read.register_fake
def _(q, w):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.custom_op(f"{_NAMESPACE}::conv_read_backward", mutates_args=())
def conv_read_backward(grad: Tensor, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of q and w."""
    with kernel_context(q):
        grad, q, w = contiguous(grad, q, w)
        return _correlate(grad, w, flipped=True), _tap_sums(q, grad).sum((0, 1)).to(w.dtype)


@conv_read_backward.register_fake
def _(grad, q, w):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, w))


def _save_read(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@no_second_derivative
def _read_vjp(ctx, grad):
    return conv_read_backward(grad, *ctx.saved_tensors)


conv_read.register_autograd(_read_vjp, setup_context=_save_read)

for _operator in (conv_step, conv_step_backward, conv_read, conv_read_backward):
    register_vmap(_operator)


def aot_cases() -> Iterator[AOTCase]:
    """Both kernels for the published widths, 32 and 64."""
    for kind, width, flipped in (("*bf16", 32, False), ("*fp16", 64, True), ("*fp32", 64, False)):
        sizes, integers = _sizes(width), {"height": "i32", "width": "i32"}
        types = {"x": kind, "y": kind, "sums": "*fp32", **integers, "span": "i32"}
        yield AOTCase(_taps_kernel, types, sizes, num_warps=_WARPS, num_stages=3)
        types = {"x": kind, "w": "*fp32", "out": kind, **integers}
        yield AOTCase(_correlate_kernel, types, {**sizes, "FLIPPED": flipped}, num_warps=_WARPS, num_stages=3)
