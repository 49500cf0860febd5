# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Triton kernels of what LaCT's queries and keys of the TTT branch go through before their rotation, and its gradient:

    y = x · scale + offset      z = silu(y) or y      out = z / (‖z‖ + ε)      the norm over the channels of a head

A program has one head of some tokens and computes in float32. The backward computes y and z again; gradients of scale
and offset are summed over a fixed number of tokens by each program, and then over programs in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .ttt_recurrent import no_second_derivative
from .ttt_triton import (
    AOTCase,
    block,
    check_available,
    contiguous,
    jit,
    kernel_context,
    load_tile,
    namespace,
    register_vmap,
    store_tile,
    tl,
    triton,
)

_NAMESPACE = namespace(__file__)
_TILE = 2048  # elements that a program has at a time
_SPAN = 256  # tokens whose gradients of scale and offset a program sums
_WARPS, _STAGES = 4, 1


# ------------------------------------------------------------------------------------------------------------- kernels


@jit
def _activate(x, scale, offset, columns, inside, SILU: tl.constexpr):
    """y, its sigmoid (1 without SILU) and z in float32 [tokens, channels]; z is 0 past the channels."""
    b_scale = tl.load(scale + columns, mask=inside, other=0.0).to(tl.float32)
    b_offset = tl.load(offset + columns, mask=inside, other=0.0).to(tl.float32)
    y = x.to(tl.float32) * b_scale[None, :] + b_offset[None, :]
    if SILU:
        gate = tl.sigmoid(y)
        z = y * gate
    else:
        gate = tl.full(y.shape, 1.0, tl.float32)
        z = y
    return y, gate, z, b_scale


@jit
def _forward_kernel(
    x,
    scale,
    offset,
    out,
    tokens,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    SILU: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """out [tokens, HEADS · D] for x, whose rows are STRIDE apart. Grid: blocks of tokens · HEADS."""
    i, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    rows = i.to(tl.int64) * BT + tl.arange(0, BT)
    channels = tl.arange(0, BD)
    columns = head * D + channels
    b_x = load_tile(x, rows, columns, rows < tokens, channels < D, STRIDE)
    z = _activate(b_x, scale, offset, columns, channels < D, SILU)[2]
    norm = tl.sqrt(tl.sum(z * z, 1))
    store_tile(out, z / (norm + EPS)[:, None], rows, columns, rows < tokens, channels < D, HEADS * D)


@jit
def _backward_kernel(
    x,
    scale,
    offset,
    grad,
    dx,
    sums,
    tokens,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    SILU: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    SPAN: tl.constexpr,
):
    """dx [tokens, HEADS · D], and the gradients of scale and offset of SPAN tokens into sums [parts, 2, HEADS · D].
    Grid: parts · HEADS."""
    i, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    channels = tl.arange(0, BD)
    columns = head * D + channels
    inside = channels < D
    dscale = tl.zeros([BT, BD], dtype=tl.float32)
    doffset = tl.zeros([BT, BD], dtype=tl.float32)
    first = i.to(tl.int64) * SPAN
    for start in range(0, tl.minimum(SPAN, tokens - first), BT):
        rows = first + start + tl.arange(0, BT)
        b_x = load_tile(x, rows, columns, rows < tokens, inside, STRIDE).to(tl.float32)
        b_grad = load_tile(grad, rows, columns, rows < tokens, inside, HEADS * D).to(tl.float32)
        y, gate, z, b_scale = _activate(b_x, scale, offset, columns, inside, SILU)
        norm = tl.sqrt(tl.sum(z * z, 1))
        # the norm's gradient at a vector of zeros is zero
        along = tl.sum(b_grad * z, 1) / ((norm + EPS) * tl.where(norm > 0, norm, 1.0))
        dy = (b_grad - z * along[:, None]) / (norm + EPS)[:, None]
        if SILU:
            dy *= gate * (1 + y * (1 - gate))
        store_tile(dx, dy * b_scale[None, :], rows, columns, rows < tokens, inside, HEADS * D)
        dscale += dy * b_x
        doffset += dy
    sums += i.to(tl.int64) * 2 * HEADS * D
    tl.store(sums + columns, tl.sum(dscale, 0), mask=inside)
    tl.store(sums + HEADS * D + columns, tl.sum(doffset, 0), mask=inside)


# ----------------------------------------------------------------------------------------------------------- operators


def _constexprs(width: int, stride: int, heads: int, eps: float, silu: bool) -> dict[str, Any]:
    """What the kernels know of heads · D = `width` channels in rows that are `stride` apart."""
    channels = block(width // heads)
    sizes = {"HEADS": heads, "D": width // heads, "BT": max(1, _TILE // channels), "BD": channels}
    return {**sizes, "STRIDE": stride, "EPS": eps, "SILU": silu}


def _rows(x: Tensor) -> Tensor:
    """[B, T, C] → [B · T, C] with channels side by side: a view where possible, as of queries beside keys."""
    rows = x.flatten(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@torch.library.custom_op(f"{_NAMESPACE}::head_norm", mutates_args=())
def _head_norm(
    x: Tensor, scale: Tensor, offset: Tensor, heads: int, eps: float, silu: bool, dtype: torch.dtype
) -> Tensor:
    """[B, T, heads, D] of x [B, T, heads · D]."""
    check_available(x.device)
    with kernel_context(x):
        out = x.new_empty(*x.shape[:2], heads, x.shape[2] // heads, dtype=dtype)
        if out.numel():
            rows, scale, offset = _rows(x), *contiguous(scale, offset)
            tokens, width = rows.shape
            constexprs = _constexprs(width, rows.stride(0), heads, eps, silu)
            grid = (triton.cdiv(tokens, constexprs["BT"]) * heads,)
            _forward_kernel[grid](rows, scale, offset, out, tokens, **constexprs, num_warps=_WARPS, num_stages=_STAGES)
        return out


@torch.library.custom_op(f"{_NAMESPACE}::head_norm_backward", mutates_args=())
def _head_norm_backward(
    x: Tensor, scale: Tensor, offset: Tensor, grad: Tensor, heads: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, scale and offset from that of the result."""
    check_available(x.device)
    with kernel_context(x):
        parts = triton.cdiv(x.shape[0] * x.shape[1], _SPAN)
        dx, sums = x.new_empty(x.shape), x.new_empty(parts, 2, x.shape[2], dtype=torch.float32)
        if x.numel():
            rows, scale, offset, grad = _rows(x), *contiguous(scale, offset, grad)
            tokens, width = rows.shape
            constexprs = {**_constexprs(width, rows.stride(0), heads, eps, silu), "SPAN": _SPAN}
            arguments = rows, scale, offset, grad, dx, sums, tokens
            _backward_kernel[(parts * heads,)](*arguments, **constexprs, num_warps=_WARPS, num_stages=_STAGES)
        dscale, doffset = sums.sum(0).unbind(0)
        return dx, dscale.to(scale.dtype, copy=True), doffset.to(offset.dtype, copy=True)


@_head_norm.register_fake
def _(x, scale, offset, heads, eps, silu, dtype):
    return x.new_empty(x.shape[0], x.shape[1], heads, x.shape[2] // heads, dtype=dtype)


@_head_norm_backward.register_fake
def _(x, scale, offset, grad, heads, eps, silu):
    return tuple(t.new_empty(t.shape) for t in (x, scale, offset))


def _save_inputs(ctx, inputs, output):
    *tensors, ctx.heads, ctx.eps, ctx.silu, _ = inputs
    ctx.save_for_backward(*tensors)


@no_second_derivative
def _head_norm_vjp(ctx, grad):
    grads = _head_norm_backward(*ctx.saved_tensors, grad, ctx.heads, ctx.eps, ctx.silu)
    return *grads, None, None, None, None


_head_norm.register_autograd(_head_norm_vjp, setup_context=_save_inputs)
register_vmap(_head_norm)
register_vmap(_head_norm_backward)


def head_norm(
    x: Tensor, scale: Tensor, offset: Tensor, *, heads: int, eps: float, silu: bool, dtype: torch.dtype
) -> Tensor:
    """z / (‖z‖ + eps) for each head of z = silu(x · scale + offset), in float32.

    Args:
        x: [B, T, heads · D], in float32, bfloat16 or float16.
        scale, offset: of each channel [heads · D].
        heads: divides the channels.
        eps: added to the norm.
        silu: whether there is a silu.
        dtype: of the result.

    Returns:
        [B, T, heads, D]; differentiable once.

    Raises:
        ValueError: for another type of x.
        ImportError: where kernels do not run.
    """
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"backend='triton' got a {x.dtype} tensor, but its kernels compute in float32: use float32, bfloat16 or "
            "float16, or backend='torch' (ttt_backend='torch' in a model)"
        )
    return _head_norm(x, scale, offset, heads, eps, silu, dtype)


def aot_cases() -> Iterator[AOTCase]:
    """Narrow, published and widest heads, of queries beside keys and values, in each type."""
    for kind, heads, width, silu in (
        ("*bf16", 4, 384, True),
        ("*fp16", 12, 64, True),
        ("*bf16", 1, 1024, True),
        ("*fp32", 2, 48, False),
    ):
        constexprs = _constexprs(heads * width, 3 * heads * width, heads, 1e-5, silu)
        types = {"x": kind, "scale": "*fp32", "offset": "*fp32"}
        yield AOTCase(_forward_kernel, {**types, "out": kind, "tokens": "i32"}, constexprs, _WARPS, _STAGES)
        types |= {"grad": kind, "dx": kind, "sums": "*fp32", "tokens": "i32"}
        yield AOTCase(_backward_kernel, types, {**constexprs, "SPAN": _SPAN}, _WARPS, _STAGES)
