# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Triton kernels of the gated branch of a ViTTT block, forward and backward: `ttt_vision` says what they compute.

A step is three launches at most: the sums Kᵀ U of a part of an image's tokens, with U in registers; then, over all
parts and in float32, the mean and the new weights (`ttt_triton_columns`, which also leads back to P̄, the gradient of
the sums). The gradient of the sums computes Z = K w and U anew:

    Ū = K P̄      K̄ = U P̄ᵀ + Z̄ wᵀ      w̄ = w̄' + Kᵀ Z̄

P̄ is narrowed column by column relative to its greatest entry, so that float16 loses no small gradient. Up to a width
of 64 (in float32: 32) a program holds all channels of its tokens and writes nothing but results; above, it holds a
block of columns of U or Z̄ and writes them, and plain products follow.

Products take the tokens' type and are summed in float32. No sum depends on the order in which programs run. An image
has fewer than 2³⁰ tokens; offsets are 64-bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .ttt_recurrent import no_second_derivative
from .ttt_triton import (
    AOTCase,
    contiguous,
    dot,
    jit,
    kernel_context,
    load_tile,
    namespace,
    register_vmap,
    store_tile,
    tl,
)
from .ttt_triton_columns import per_image, split, update, update_backward
from .ttt_triton_products import aot_case, backward_launches, forward_launch, outer, products, weight_gradient
from .ttt_vision import SCALE

_NAMESPACE = namespace(__file__)


# ----------------------------------------------------------------------------------------------------- parts of kernels


@jit
def _values(z1, z2, v, SWIGLU: tl.constexpr, LINEAR: tl.constexpr, MSE: tl.constexpr, BOTH: tl.constexpr):
    """U1 and U2 (U1 again where w2 stays) from z = k w and v, all float32 [tokens, columns]."""
    u1 = v
    u2 = v
    if LINEAR:
        u1 = v * z1
    if SWIGLU:
        s = tl.sigmoid(z2)
        gate = z2 * s
        error = v
        if MSE:
            error = v - gate
        u1 = error * gate
        if BOTH:
            u2 = error * z1 * (gate + s * (1 - gate))
    return u1, u2


@jit
def _values_backward(
    g1, g2, z1, z2, v, SWIGLU: tl.constexpr, LINEAR: tl.constexpr, MSE: tl.constexpr, BOTH: tl.constexpr
):
    """Gradients of v, z1 and z2 from those of U1 and U2; what is not used is g1."""
    dv = g1
    dz1 = g1
    dz2 = g1
    if LINEAR:
        dv = g1 * z1
        dz1 = g1 * v
    if SWIGLU:
        s = tl.sigmoid(z2)
        gate = z2 * s
        slope = gate + s * (1 - gate)
        error = v
        if MSE:
            error = v - gate
        dv = g1 * gate
        dz2 = error * slope * g1
        if BOTH:
            dv += g2 * z1 * slope
            dz1 = g2 * error * slope
            dz2 += error * z1 * s * (1 - s) * (2 + z2 * (1 - 2 * s)) * g2
        if MSE:
            dz2 -= dv * slope
    return dv, dz1, dz2


# -------------------------------------------------------------------------------------------------------------- kernels


@jit
def _step_kernel(
    k,
    v,
    w1,
    w2,
    sums,
    values,
    tokens,
    span,
    heads,
    w1_image,
    w2_image,
    D: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    FUSED: tl.constexpr,
    SWIGLU: tl.constexpr,
    LINEAR: tl.constexpr,
    MSE: tl.constexpr,
    BOTH: tl.constexpr,
):
    """Kᵀ U of `span` tokens into sums [parts, 1 or 2, images · heads, D, D]; not FUSED, U into values
    [images · heads, tokens, 1 or 2, D]. Grid: images · heads, parts, blocks of columns."""
    COUNT: tl.constexpr = 2 if BOTH else 1
    i_bh, i_s, images = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0).to(tl.int64)
    o_k = tl.arange(0, BK)
    o_c = tl.program_id(2) * BC + tl.arange(0, BC)
    k += i_bh * tokens * D
    v += i_bh * tokens * D
    w1 += i_bh // heads * w1_image + i_bh % heads * D * D
    w2 += i_bh // heads * w2_image + i_bh % heads * D * D
    values += i_bh * tokens * COUNT * D
    sums += (i_s * COUNT * images + i_bh) * D * D
    sum1 = tl.zeros([BK, BC], dtype=tl.float32)
    sum2 = tl.zeros([BK, BC], dtype=tl.float32)
    for t in range(i_s * span, tl.minimum(i_s * span + span, tokens), BT):
        o_t = t + tl.arange(0, BT)
        b_v = load_tile(v, o_t, o_c, o_t < tokens, o_c < D, D).to(tl.float32)
        z1, z2 = products(k, w1, w2, o_t, o_c, tokens, D, BT, BC, BK, LINEAR or BOTH, SWIGLU)
        u1, u2 = _values(z1, z2, b_v, SWIGLU, LINEAR, MSE, BOTH)
        if FUSED:
            b_k = tl.trans(load_tile(k, o_t, o_k, o_t < tokens, o_k < D, D))
            sum1 += dot(b_k, u1.to(b_k.dtype))
            if BOTH:
                sum2 += dot(b_k, u2.to(b_k.dtype))
        else:
            store_tile(values, u1, o_t, o_c, o_t < tokens, o_c < D, COUNT * D)
            if BOTH:
                store_tile(values + D, u2, o_t, o_c, o_t < tokens, o_c < D, COUNT * D)
    if FUSED:
        store_tile(sums, sum1, o_k, o_c, o_k < D, o_c < D, D)
        if BOTH:
            store_tile(sums + images * D * D, sum2, o_k, o_c, o_k < D, o_c < D, D)


@jit
def _step_backward_kernel(
    k,
    v,
    w1,
    w2,
    slopes,
    scales,
    dk,
    dv,
    sums,
    left,
    tokens,
    span,
    heads,
    w1_image,
    w2_image,
    D: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    INPUTS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    SWIGLU: tl.constexpr,
    LINEAR: tl.constexpr,
    MSE: tl.constexpr,
    BOTH: tl.constexpr,
):
    """INPUTS: K̄ and V̄. WEIGHTS: the Kᵀ Z̄ of `span` tokens as sums [parts, 0 to 2, images · heads, D, D]. Neither: V̄
    and the factors U · scales and Z̄, side by side into left [images · heads, tokens, 1 to 4, D].
    Grid: as `_step_kernel`."""
    COUNT: tl.constexpr = 2 if BOTH else 1
    READS: tl.constexpr = (1 if LINEAR or BOTH else 0) + (1 if SWIGLU else 0)
    STRIDE: tl.constexpr = (COUNT + READS) * D
    i_bh, i_s, images = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0).to(tl.int64)
    dtype = k.dtype.element_ty
    o_k = tl.arange(0, BK)
    o_c = tl.program_id(2) * BC + tl.arange(0, BC)
    k += i_bh * tokens * D
    v += i_bh * tokens * D
    dk += i_bh * tokens * D
    dv += i_bh * tokens * D
    w1 += i_bh // heads * w1_image + i_bh % heads * D * D
    w2 += i_bh // heads * w2_image + i_bh % heads * D * D
    slopes1 = slopes + i_bh * D * D
    slopes2 = slopes1 + images * D * D
    left += i_bh * tokens * STRIDE
    sums += (i_s * READS * images + i_bh) * D * D
    scale1 = tl.load(scales + i_bh * D + o_c, mask=o_c < D, other=0.0)[None, :]
    scale2 = scale1
    if BOTH:
        scale2 = tl.load(scales + (images + i_bh) * D + o_c, mask=o_c < D, other=0.0)[None, :]
    sum1 = tl.zeros([BK, BC], dtype=tl.float32)
    sum2 = tl.zeros([BK, BC], dtype=tl.float32)
    for t in range(i_s * span, tl.minimum(i_s * span + span, tokens), BT):
        o_t = t + tl.arange(0, BT)
        inside = o_t < tokens
        b_v = load_tile(v, o_t, o_c, inside, o_c < D, D).to(tl.float32)
        z1, z2 = products(k, w1, w2, o_t, o_c, tokens, D, BT, BC, BK, LINEAR or BOTH, SWIGLU)
        g1, g2 = products(k, slopes1, slopes2, o_t, o_c, tokens, D, BT, BC, BK, True, BOTH)
        u1, u2 = _values(z1, z2, b_v, SWIGLU, LINEAR, MSE, BOTH)
        b_dv, dz1, dz2 = _values_backward(g1 * scale1, g2 * scale2, z1, z2, b_v, SWIGLU, LINEAR, MSE, BOTH)
        if INPUTS or not WEIGHTS:
            store_tile(dv, b_dv, o_t, o_c, inside, o_c < D, D)
        u1 = (u1 * scale1).to(dtype)
        u2 = (u2 * scale2).to(dtype)
        dz1 = dz1.to(dtype)
        dz2 = dz2.to(dtype)
        if INPUTS:
            b_dk = dot(u1, tl.trans(load_tile(slopes1, o_k, o_c, o_k < D, o_c < D, D)))
            if BOTH:
                b_dk += dot(u2, tl.trans(load_tile(slopes2, o_k, o_c, o_k < D, o_c < D, D)))
            if LINEAR or BOTH:
                b_dk += dot(dz1, tl.trans(load_tile(w1, o_k, o_c, o_k < D, o_c < D, D).to(dtype)))
            if SWIGLU:
                b_dk += dot(dz2, tl.trans(load_tile(w2, o_k, o_c, o_k < D, o_c < D, D).to(dtype)))
            store_tile(dk, b_dk, o_t, o_k, inside, o_k < D, D)
        if WEIGHTS:
            b_k = tl.trans(load_tile(k, o_t, o_k, inside, o_k < D, D))
            if LINEAR or BOTH:
                sum1 += dot(b_k, dz1)
            if SWIGLU:
                sum2 += dot(b_k, dz2)
        if not INPUTS and not WEIGHTS:
            store_tile(left, u1, o_t, o_c, inside, o_c < D, STRIDE)
            if BOTH:
                store_tile(left + D, u2, o_t, o_c, inside, o_c < D, STRIDE)
            if LINEAR or BOTH:
                store_tile(left + COUNT * D, dz1, o_t, o_c, inside, o_c < D, STRIDE)
            if SWIGLU:
                store_tile(left + (COUNT + READS - 1) * D, dz2, o_t, o_c, inside, o_c < D, STRIDE)
    if WEIGHTS:
        if LINEAR or BOTH:
            store_tile(sums, sum1, o_k, o_c, o_k < D, o_c < D, D)
        if SWIGLU:
            store_tile(sums + (READS - 1) * images * D * D, sum2, o_k, o_c, o_k < D, o_c < D, D)


@jit
def _read_kernel(
    q,
    w1,
    w2,
    out,
    tokens,
    heads,
    w1_image,
    w2_image,
    D: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    """(q w1) ⊙ silu(q w2). Grid: images · heads · tiles of tokens, blocks of columns."""
    tiles = tl.cdiv(tokens, BT)
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    o_t = tl.program_id(0) % tiles * BT + tl.arange(0, BT)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    q += i_bh * tokens * D
    w1 += i_bh // heads * w1_image + i_bh % heads * D * D
    w2 += i_bh // heads * w2_image + i_bh % heads * D * D
    y1, y2 = products(q, w1, w2, o_t, o_c, tokens, D, BT, BC, BK, True, True)
    store_tile(out + i_bh * tokens * D, y1 * y2 * tl.sigmoid(y2), o_t, o_c, o_t < tokens, o_c < D, D)


@jit
def _read_backward_kernel(
    do,
    q,
    w1,
    w2,
    dq,
    sums,
    left,
    tokens,
    span,
    heads,
    w1_image,
    w2_image,
    D: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    INPUTS: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    """INPUTS: Q̄. WEIGHTS: the Qᵀ Ȳ of `span` tokens as sums [parts, 2, images · heads, D, D]. Neither: Ȳ, the gradients
    of q w1 and q w2 side by side, into left [images · heads, tokens, 2, D]. Grid: as `_step_kernel`."""
    i_bh, i_s, images = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0).to(tl.int64)
    dtype = q.dtype.element_ty
    o_k = tl.arange(0, BK)
    o_c = tl.program_id(2) * BC + tl.arange(0, BC)
    do += i_bh * tokens * D
    q += i_bh * tokens * D
    dq += i_bh * tokens * D
    w1 += i_bh // heads * w1_image + i_bh % heads * D * D
    w2 += i_bh // heads * w2_image + i_bh % heads * D * D
    left += i_bh * tokens * 2 * D
    sums += (i_s * 2 * images + i_bh) * D * D
    sum1 = tl.zeros([BK, BC], dtype=tl.float32)
    sum2 = tl.zeros([BK, BC], dtype=tl.float32)
    for t in range(i_s * span, tl.minimum(i_s * span + span, tokens), BT):
        o_t = t + tl.arange(0, BT)
        inside = o_t < tokens
        b_do = load_tile(do, o_t, o_c, inside, o_c < D, D).to(tl.float32)
        y1, y2 = products(q, w1, w2, o_t, o_c, tokens, D, BT, BC, BK, True, True)
        s = tl.sigmoid(y2)
        gate = y2 * s
        dy1 = (b_do * gate).to(dtype)
        dy2 = (b_do * y1 * (gate + s * (1 - gate))).to(dtype)
        if INPUTS:
            b_dq = dot(dy1, tl.trans(load_tile(w1, o_k, o_c, o_k < D, o_c < D, D).to(dtype)))
            b_dq += dot(dy2, tl.trans(load_tile(w2, o_k, o_c, o_k < D, o_c < D, D).to(dtype)))
            store_tile(dq, b_dq, o_t, o_k, inside, o_k < D, D)
        if WEIGHTS:
            b_q = tl.trans(load_tile(q, o_t, o_k, inside, o_k < D, D))
            sum1 += dot(b_q, dy1)
            sum2 += dot(b_q, dy2)
        if not INPUTS and not WEIGHTS:
            store_tile(left, dy1, o_t, o_c, inside, o_c < D, 2 * D)
            store_tile(left + D, dy2, o_t, o_c, inside, o_c < D, 2 * D)
    if WEIGHTS:
        store_tile(sums, sum1, o_k, o_c, o_k < D, o_c < D, D)
        store_tile(sums + images * D * D, sum2, o_k, o_c, o_k < D, o_c < D, D)


# ------------------------------------------------------------------------------------------------------------- launches


def _flags(fast_weight: str, mse: bool, both: bool) -> dict[str, bool]:
    """The compile-time facts of a rule."""
    return {"SWIGLU": fast_weight == "swiglu", "LINEAR": fast_weight == "linear", "MSE": mse, "BOTH": both}


# ------------------------------------------------------------------------------------------------------------ operators


@torch.library.custom_op(f"{_NAMESPACE}::glu_step", mutates_args=())
def glu_step(
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    fast_weight: str,
    mse: bool,
    both: bool,
    sign: int,
    normalise: bool,
    lr: float,
) -> tuple[Tensor, Tensor]:
    """One step: the new weights [1 or 2, B, H, D, D] and Δ, which the gradient needs, both float32.

    Args:
        k, v: [B, H, N, D].
        w1, w2: [1 or B, H, D, D].
        fast_weight, mse, both, sign, normalise: those of `VisionRule`; `both` where w2 is updated.
        lr: inner learning rate.
    """
    with kernel_context(k):
        (batch, heads, tokens, width), rows, count = k.shape, k.shape[0] * k.shape[1], 1 + both
        k, v = contiguous(k, v)
        (first, w1_image), (second, w2_image) = per_image(w1), per_image(w2)
        launch = forward_launch(width, k.dtype)
        parts, span = split(k, rows * launch.blocks, tokens, launch.sizes["BT"])
        sums = k.new_empty(parts if launch.fused else 0, count, rows, width, width, dtype=torch.float32)
        values = k.new_empty(0 if launch.fused else batch, heads, tokens, count, width)
        _step_kernel[rows, parts, launch.blocks](
            *(k, v, first, second, sums, values, tokens, span, heads, w1_image, w2_image),
            **_flags(fast_weight, mse, both),
            **launch.options,
            FUSED=launch.fused,
        )
        if not launch.fused:
            sums = outer(k, values, 0)
        new, steps = update(sums, w1, w2, heads, sign * SCALE / tokens, lr, normalise)
        return tuple(x.unflatten(1, (batch, heads)) for x in (new, steps))


@glu_step.register_fake
def _(k, v, w1, w2, fast_weight, mse, both, sign, normalise, lr):
    batch, heads, _, width = k.shape
    new = k.new_empty(1 + both, batch, heads, width, width, dtype=torch.float32)
    return new, torch.empty_like(new)


@torch.library.custom_op(f"{_NAMESPACE}::glu_step_backward", mutates_args=())
def glu_step_backward(
    grad: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    steps: Tensor,
    fast_weight: str,
    mse: bool,
    both: bool,
    sign: int,
    normalise: bool,
    lr: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of k, v, w1 and w2 from that of the new weights."""
    with kernel_context(k):
        (batch, heads, tokens, width), rows, count = k.shape, k.shape[0] * k.shape[1], 1 + both
        k, v, grad, steps = contiguous(k, v, grad, steps)
        slopes, scales = update_backward(grad, steps, sign * SCALE / tokens, lr, normalise, k.dtype)
        (first, w1_image), (second, w2_image) = per_image(w1), per_image(w2)
        read = [i for i, used in enumerate((fast_weight == "linear" or both, fast_weight == "swiglu")) if used]
        dk, dv, launches = torch.empty_like(k), torch.empty_like(v), backward_launches(width, k.dtype)
        left = k.new_empty(0 if launches[0].fused else batch, heads, tokens, count + len(read), width)
        for launch in launches:
            parts, span = split(k, rows * launch.blocks, tokens, launch.sizes["BT"])
            sums = k.new_empty(parts, len(read), rows, width, width, dtype=torch.float32)
            _step_backward_kernel[rows, parts, launch.blocks](
                *(k, v, first, second, slopes, scales, dk, dv, sums, left, tokens, span, heads, w1_image, w2_image),
                **_flags(fast_weight, mse, both),
                **launch.options,
            )
        if left.numel():
            right = [*slopes, *((w1, w2)[i].to(k.dtype).expand_as(slopes[0]) for i in read)]
            dk, sums = left.flatten(-2) @ torch.cat(right, -1).mT, outer(k, left, count)
        terms = [[grad[i]] if i < count else [] for i in range(2)]
        for i, term in zip(read, sums.sum(0).unflatten(1, (batch, heads)), strict=True):
            terms[i].append(term)
        return dk, dv, weight_gradient(w1, *terms[0]), weight_gradient(w2, *terms[1])


@glu_step_backward.register_fake
def _(grad, k, v, w1, w2, steps, fast_weight, mse, both, sign, normalise, lr):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v, w1, w2))


def _save_step(ctx, inputs, output):
    k, v, w1, w2, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(k, v, w1, w2, output[1])


@no_second_derivative
def _step_vjp(ctx, grad, _):
    return *glu_step_backward(grad, *ctx.saved_tensors, *ctx.options), *[None] * len(ctx.options)


glu_step.register_autograd(_step_vjp, setup_context=_save_step)


@torch.library.custom_op(f"{_NAMESPACE}::glu_read", mutates_args=())
def glu_read(q: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """(q w1) ⊙ silu(q w2): q [B, H, N, D] and weights [1 or B, H, D, D] → [B, H, N, D]."""
    with kernel_context(q):
        batch, heads, tokens, width = q.shape
        (q,) = contiguous(q)
        (w1, w1_image), (w2, w2_image) = per_image(w1), per_image(w2)
        launch, out = forward_launch(width, q.dtype), torch.empty_like(q)
        _read_kernel[batch * heads * -(-tokens // launch.sizes["BT"]), launch.blocks](
            q, w1, w2, out, tokens, heads, w1_image, w2_image, **launch.options
        )
        return out


@glu_read.register_fake
def _(q, w1, w2):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.custom_op(f"{_NAMESPACE}::glu_read_backward", mutates_args=())
def glu_read_backward(grad: Tensor, q: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, w1 and w2."""
    with kernel_context(q):
        (batch, heads, tokens, width), rows = q.shape, q.shape[0] * q.shape[1]
        grad, q = contiguous(grad, q)
        (first, w1_image), (second, w2_image) = per_image(w1), per_image(w2)
        dq, launches = torch.empty_like(q), backward_launches(width, q.dtype)
        left = q.new_empty(0 if launches[0].fused else batch, heads, tokens, 2, width)
        for launch in launches:
            parts, span = split(q, rows * launch.blocks, tokens, launch.sizes["BT"])
            sums = q.new_empty(parts, 2, rows, width, width, dtype=torch.float32)
            _read_backward_kernel[rows, parts, launch.blocks](
                *(grad, q, first, second, dq, sums, left, tokens, span, heads, w1_image, w2_image), **launch.options
            )
        if left.numel():
            dq, sums = left.flatten(-2) @ torch.cat([w1, w2], -1).to(q.dtype).mT, outer(q, left, 0)
        dw1, dw2 = sums.sum(0).unflatten(1, (batch, heads))
        return dq, weight_gradient(w1, dw1), weight_gradient(w2, dw2)


@glu_read_backward.register_fake
def _(grad, q, w1, w2):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, w1, w2))


def _save_read(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@no_second_derivative
def _read_vjp(ctx, grad):
    return glu_read_backward(grad, *ctx.saved_tensors)


glu_read.register_autograd(_read_vjp, setup_context=_save_read)

for _operator in (glu_step, glu_step_backward, glu_read, glu_read_backward):
    register_vmap(_operator)


def aot_cases() -> Iterator[AOTCase]:
    """All launches at a width of 64 under the baseline rule, which has the most products; those of wider and narrower
    heads and of float32 that have other blocks; and another rule."""
    both, mse = _flags("swiglu", False, True), _flags("swiglu", True, True)
    for width in (64, 128):
        launch = forward_launch(width, torch.bfloat16)
        step = launch._replace(sizes={**launch.sizes, **both, "FUSED": launch.fused})
        yield aot_case(_step_kernel, step, "k v values", "*bf16")
        yield aot_case(_read_kernel, launch, "q out", "*bf16")
        yield from _backward_cases(width, torch.bfloat16, "*bf16", both)
    yield from _backward_cases(32, torch.float32, "*fp32", both)
    yield from _backward_cases(32, torch.float16, "*fp16", mse)


def _backward_cases(width: int, dtype: torch.dtype, kind: str, flags: dict[str, bool]) -> Iterator[AOTCase]:
    for launch in backward_launches(width, dtype):
        step = launch._replace(sizes={**launch.sizes, **flags})
        yield aot_case(_step_backward_kernel, step, "k v slopes dk dv left", kind)
        yield aot_case(_read_backward_kernel, launch, "do q dq left", kind)
