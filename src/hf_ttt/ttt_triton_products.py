# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Products of the gated branch of a ViTTT block that its step and its reading share: x w of tokens, xᵀ y over tokens.

How a program holds them depends on the head's width and the tokens' type alone. Products take the tokens' type and are
summed in float32; those of float32, which no matrix unit takes, have small tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ttt_triton import AOTCase, block, dot, jit, load_tile, store_tile, tl
from .ttt_triton_columns import split


@jit
def products(
    x,
    w1,
    w2,
    o_t,
    o_c,
    tokens,
    D: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    """x w1 and x w2 in float32 [BT, BC], for x [tokens, D]; zeros for what is not asked for."""
    z1 = tl.zeros([BT, BC], dtype=tl.float32)
    z2 = tl.zeros([BT, BC], dtype=tl.float32)
    for start in range(0, D, BK):
        o_k = start + tl.arange(0, BK)
        b_x = load_tile(x, o_t, o_k, o_t < tokens, o_k < D, D)
        if FIRST:
            z1 += dot(b_x, load_tile(w1, o_k, o_c, o_k < D, o_c < D, D).to(b_x.dtype))
        if SECOND:
            z2 += dot(b_x, load_tile(w2, o_k, o_c, o_k < D, o_c < D, D).to(b_x.dtype))
    return z1, z2


@jit
def _outer_kernel(
    x,
    y,
    sums,
    tokens,
    span,
    D: tl.constexpr,
    COUNT: tl.constexpr,
    STRIDE: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """xᵀ y of `span` tokens into sums [parts, COUNT, images · heads, D, D], for x [images · heads, tokens, D] and COUNT
    matrices y side by side in rows that are STRIDE apart. Grid: images · heads, parts, COUNT · blocks · blocks."""
    BLOCKS: tl.constexpr = (D + BC - 1) // BC
    i_bh, i_s, images = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0).to(tl.int64)
    i_y, i_tile = tl.program_id(2) // (BLOCKS * BLOCKS), tl.program_id(2) % (BLOCKS * BLOCKS)
    o_r = i_tile // BLOCKS * BC + tl.arange(0, BC)
    o_c = i_tile % BLOCKS * BC + tl.arange(0, BC)
    x += i_bh * tokens * D
    y += i_bh * tokens * STRIDE + i_y * D
    total = tl.zeros([BC, BC], dtype=tl.float32)
    for t in range(i_s * span, tl.minimum(i_s * span + span, tokens), BT):
        o_t = t + tl.arange(0, BT)
        b_x = load_tile(x, o_t, o_r, o_t < tokens, o_r < D, D)
        total += dot(tl.trans(b_x), load_tile(y, o_t, o_c, o_t < tokens, o_c < D, STRIDE))
    sums += ((i_s * COUNT + i_y) * images + i_bh) * D * D
    store_tile(sums, total, o_r, o_c, o_r < D, o_c < D, D)


class Launch(NamedTuple):
    """How a kernel is launched."""

    sizes: dict[str, int | bool]  # constexprs
    num_stages: int
    num_warps: int = 4

    @property
    def blocks(self) -> int:
        """Blocks of columns."""
        return -(-self.sizes["D"] // self.sizes["BC"])

    @property
    def fused(self) -> bool:
        """Whether a program holds all channels of its tokens."""
        return self.sizes["BK"] >= self.sizes["D"]

    @property
    def options(self) -> dict[str, int | bool]:
        """What a launch takes beside its arguments."""
        return {**self.sizes, "num_warps": self.num_warps, "num_stages": self.num_stages}


def forward_launch(width: int, dtype: torch.dtype) -> Launch:
    """Of the kernels that read a block of columns of two weights."""
    side = 32 if dtype == torch.float32 else 64
    rows = min(block(width), side)
    return Launch({"D": width, "BT": side, "BC": min(rows, 32), "BK": rows}, num_stages=3)


def backward_launches(width: int, dtype: torch.dtype) -> list[Launch]:
    """Of the gradients' kernels.

    Those of the inputs need all columns, those of the weights all rows: narrow heads have both in one launch, wider
    ones in a launch each, which both compute the products with the weights, and the widest write the factors of both.
    """
    launch = forward_launch(width, dtype)
    if not launch.fused:
        return [launch._replace(sizes={**launch.sizes, "INPUTS": False, "WEIGHTS": False})]
    inputs = {**launch.sizes, "BT": launch.sizes["BT"] // 2, "BC": launch.sizes["BK"], "INPUTS": True}
    if launch.blocks == 1:
        return [Launch({**inputs, "WEIGHTS": True}, num_stages=1)]
    weights = {**launch.sizes, "INPUTS": False, "WEIGHTS": True}
    return [Launch({**inputs, "WEIGHTS": False}, num_stages=1), Launch(weights, num_stages=1)]


def _outer_launch(width: int, dtype: torch.dtype, count: int, total: int) -> Launch:
    """Of xᵀ y for the last `count` of `total` matrices y that lie side by side."""
    side = 32 if dtype == torch.float32 else 64
    return Launch({"D": width, "COUNT": count, "STRIDE": total * width, "BT": side, "BC": side}, num_stages=3)


def outer(x: Tensor, left: Tensor, first: int) -> Tensor:
    """xᵀ y [parts, n, B · H, D, D] for x [B, H, N, D] and the matrices y of left [B, H, N, n', D] from the first on."""
    (batch, heads, tokens, width), total = x.shape, left.shape[-2]
    rows, count = batch * heads, total - first
    launch = _outer_launch(width, x.dtype, count, total)
    tiles = count * launch.blocks**2
    parts, span = split(x, rows * tiles, tokens, launch.sizes["BT"])
    sums = x.new_empty(parts, count, rows, width, width, dtype=torch.float32)
    _outer_kernel[rows, parts, tiles](x, left[..., first:, :], sums, tokens, span, **launch.options)
    return sums


def weight_gradient(w: Tensor, *terms: Tensor) -> Tensor:
    """The sum of at most two terms [B, H, D, D], over all images where they share w [1, H, D, D]."""
    if not terms:
        return torch.zeros_like(w, memory_format=torch.contiguous_format)
    total = terms[0].clone() if len(terms) == 1 else terms[0] + terms[1]
    return (total.sum(0, keepdim=True) if len(w) == 1 else total).to(w.dtype)


def aot_case(kernel: Any, launch: Launch, tokens: str, kind: str) -> AOTCase:
    """A launch whose matrices of tokens have a type; weights and sums are float32."""
    integers = ("tokens", "span", "heads", "w1_image", "w2_image")
    names = [name for name in kernel.arg_names if name not in launch.sizes]
    types = {name: kind if name in tokens.split() else "i32" if name in integers else "*fp32" for name in names}
    return AOTCase(kernel, types, launch.sizes, launch.num_warps, launch.num_stages)


def aot_cases() -> Iterator[AOTCase]:
    """xᵀ y of wide heads, in 16-bit types and in float32."""
    for kind, dtype in (("*bf16", torch.bfloat16), ("*fp32", torch.float32)):
        yield aot_case(_outer_kernel, _outer_launch(128, dtype, 2, 4), "x y", kind)
