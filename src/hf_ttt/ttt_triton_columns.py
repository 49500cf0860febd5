# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The end of an inner step of a ViTTT block, forward and backward: `ttt_vision` says what it computes.

Of both branches the step is Δ = g Σ, a mean of the products that other kernels sum, and the new weights are w + c ⊙ Δ
with n = ‖Δ‖ and c = lr / (1 + n) per column. With bars for gradients of the outer loss

    Σ̄ = g (c ⊙ w̄' − Δ ⊙ (c Σ_rows Δ ⊙ w̄') / ((1 + n) n))

where the second term is 0 for n = 0. A program has all rows of a few columns. Sums come in parts, so that many
programs can compute them, and are added here in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .ttt_triton import INTERPRETED, AOTCase, block, jit, load_tile, store_tile, tl

_COLUMNS = 16  # of a program
_WARPS = 4


@jit
def _update_kernel(
    sums,
    w1,
    w2,
    new,
    steps,
    parts,
    heads,
    w1_image,
    w2_image,
    factor,
    lr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Δ = factor · the sum of all parts into steps, and w + c Δ into new, both [1 or 2, images · heads, ROWS, D].
    Grid: images · heads, blocks of columns, 1 or 2 weights."""
    i_bh, i_w, count = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.num_programs(0).to(tl.int64)
    o_r = tl.arange(0, BR)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    matrix = (i_w * count + i_bh) * ROWS * D
    step = tl.zeros([BR, BC], dtype=tl.float32)
    for part in range(parts):
        b_sums = sums + part * tl.num_programs(2) * count * ROWS * D + matrix
        step += load_tile(b_sums, o_r, o_c, o_r < ROWS, o_c < D, D)
    step *= factor
    store_tile(steps + matrix, step, o_r, o_c, o_r < ROWS, o_c < D, D)
    if NORMALISE:
        step *= (lr / (1 + tl.sqrt(tl.sum(step * step, 0))))[None, :]
    else:
        step *= lr
    w1 += i_bh // heads * w1_image + i_bh % heads * ROWS * D
    w2 += i_bh // heads * w2_image + i_bh % heads * ROWS * D
    b_w = load_tile(w1, o_r, o_c, (o_r < ROWS) & (i_w == 0), o_c < D, D).to(tl.float32)
    b_w += load_tile(w2, o_r, o_c, (o_r < ROWS) & (i_w == 1), o_c < D, D).to(tl.float32)
    store_tile(new + matrix, b_w + step, o_r, o_c, o_r < ROWS, o_c < D, D)


@jit
def _update_backward_kernel(
    grad,
    steps,
    slopes,
    scales,
    factor,
    lr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """The gradient of the sums, as slopes [matrices, ROWS, D] of at most 1 times scales [matrices, D].
    Grid: matrices, blocks of columns."""
    i_m = tl.program_id(0).to(tl.int64)
    o_r = tl.arange(0, BR)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    matrix = i_m * ROWS * D
    b_g = load_tile(grad + matrix, o_r, o_c, o_r < ROWS, o_c < D, D)
    slope = b_g * lr
    if NORMALISE:
        step = load_tile(steps + matrix, o_r, o_c, o_r < ROWS, o_c < D, D)
        norm = tl.sqrt(tl.sum(step * step, 0))
        rate = lr / (1 + norm)
        along = rate * tl.sum(step * b_g, 0) / ((1 + norm) * tl.where(norm > 0, norm, 1.0))
        slope = b_g * rate[None, :] - step * along[None, :]
    slope *= factor
    scale = tl.max(tl.abs(slope), 0)
    scale = tl.where(scale > 0, scale, 1.0)
    store_tile(slopes + matrix, slope / scale[None, :], o_r, o_c, o_r < ROWS, o_c < D, D)
    tl.store(scales + i_m * D + o_c, scale, mask=o_c < D)


def split(x: Tensor, programs: int, tokens: int, tile: int) -> tuple[int, int]:
    """How many parts tokens are summed in, and the tokens of a part, in whole tiles.

    Args:
        x: a tensor of the device.
        programs: how many there are for each part. As many parts as keep the device busy are wanted.
        tokens: of an image.
        tile: tokens that a program takes at once; a part has at least four tiles.
    """
    wanted = 8 if INTERPRETED else 4 * torch.cuda.get_device_properties(x.device).multi_processor_count
    parts = max(1, min(-(-wanted // max(programs, 1)), -(-tokens // (4 * tile))))
    span = -(-tokens // (parts * tile)) * tile
    return -(-tokens // max(span, 1)), span


def per_image(w: Tensor) -> tuple[Tensor, int]:
    """w [1 or B, H, R, D] in one piece, and the distance between the weights of images: 0 where all share them."""
    shared = w.shape[0] == 1 or w.stride(0) == 0
    return (w[:1] if shared else w).contiguous(), 0 if shared else w.shape[1:].numel()


def update(
    sums: Tensor, w1: Tensor, w2: Tensor, heads: int, factor: float, lr: float, normalise: bool
) -> tuple[Tensor, Tensor]:
    """New weights and Δ [1 or 2, B · H, R, D] from sums [parts, 1 or 2, B · H, R, D] and weights [1 or B, H, R, D].

    Args:
        factor: g, which turns sums into means.
        lr, normalise: c = lr / (1 + n), or lr.
    """
    parts, count, rows, height, width = sums.shape
    new, steps = (sums.new_empty(sums.shape[1:]) for _ in range(2))
    (w1, w1_image), (w2, w2_image) = per_image(w1), per_image(w2)
    _update_kernel[rows, -(-width // _COLUMNS), count](
        *(sums, w1, w2, new, steps, parts, heads, w1_image, w2_image, factor, lr),
        **_sizes(height, width, normalise),
        num_warps=_WARPS,
    )
    return new, steps


def update_backward(
    grad: Tensor, steps: Tensor, factor: float, lr: float, normalise: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradient of the sums [..., R, D], as slopes of at most 1 in a type times scales [..., D].

    Args:
        grad: of the new weights, like `steps` in one piece.
        steps: Δ [..., R, D].
    """
    height, width = steps.shape[-2:]
    slopes = torch.empty_like(steps, dtype=dtype)
    scales = steps.new_empty(*steps.shape[:-2], width)
    _update_backward_kernel[steps[..., 0, 0].numel(), -(-width // _COLUMNS)](
        *(grad, steps, slopes, scales, factor, lr), **_sizes(height, width, normalise), num_warps=_WARPS
    )
    return slopes, scales


def _sizes(rows: int, width: int, normalise: bool) -> dict[str, int | bool]:
    return {"ROWS": rows, "D": width, "BR": block(rows), "BC": _COLUMNS, "NORMALISE": normalise}


def aot_cases() -> Iterator[AOTCase]:
    """Both kernels, for the taps of the depthwise branch and for heads up to the greatest width."""
    update_types = {name: "*fp32" for name in ("sums", "w1", "w2", "new", "steps")}
    update_types |= {name: "i32" for name in ("parts", "heads", "w1_image", "w2_image")}
    backward_types = {name: "*fp32" for name in ("grad", "steps", "scales")}
    for rows, width, normalise, kind in ((9, 64, True, "*fp32"), (64, 64, False, "*fp16"), (512, 512, True, "*bf16")):
        sizes, numbers = _sizes(rows, width, normalise), {"factor": "fp32", "lr": "fp32"}
        yield AOTCase(_update_kernel, update_types | numbers, sizes, _WARPS, num_stages=3)
        types = backward_types | {"slopes": kind} | numbers
        yield AOTCase(_update_backward_kernel, types, sizes, _WARPS, num_stages=3)
