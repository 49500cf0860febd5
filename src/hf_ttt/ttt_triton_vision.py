# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The ViTTT block by Triton kernels: what `ttt_vision` computes, from the kernels of its two branches."""

from __future__ import annotations

import torch
from torch import Tensor

from .ttt_triton import check_available
from .ttt_triton_depthwise import conv_read, conv_step
from .ttt_triton_gated import glu_read, glu_step
from .ttt_vision import VisionRule, VisionTokens
from .ttt_vision import glu_read as glu_read_torch


def _check(x: Tensor) -> None:
    if not x.is_meta:
        check_available(x.device)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"tokens of type {x.dtype} are not narrowed to the float32 in which the kernels sum: use float32, bfloat16 "
            "or float16, or backend='torch' (ttt_backend='torch' in a model)"
        )


def glu_step_triton(
    k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, rule: VisionRule, lr: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`ttt_vision.glu_step`: w1' and w2' [B, H, D, D] of the gated branch after its inner steps, in float32.

    Args:
        k, v: [B, H, N, D] in float32, bfloat16 or float16.
        w1, w2: [1 or B, H, D, D].
        rule: the inner step.
        lr: inner learning rate.

    Raises:
        ValueError: for another type.
        ImportError: where kernels do not run.
    """
    _check(k)
    both = rule.updates_gate
    for _ in range(rule.inner_steps):
        new, _ = glu_step(
            k, v, w1, w2, rule.fast_weight, rule.loss == "mse", both, rule.sign, rule.normalise, float(lr)
        )
        w1, w2 = (new[0], new[1]) if both else (new[0], w2)
    return w1, w2.to(w1.dtype).expand_as(w1)


def glu_read_triton(q: Tensor, w1: Tensor, w2: Tensor, rule: VisionRule) -> Tensor:
    """`ttt_vision.glu_read`: the gated branch at q [B, H, N, D] → [B, H, N, D]; w1, w2 [B, H, D, D]. A linear fast
    network is one product, which no kernel does better than `torch.matmul`."""
    _check(q)
    return glu_read(q, w1, w2) if rule.fast_weight == "swiglu" else glu_read_torch(q, w1, w2, rule)


def conv_step_triton(k: Tensor, v: Tensor, w: Tensor, rule: VisionRule, lr: float = 1.0) -> Tensor:
    """`ttt_vision.conv_step`: the kernels [B, 9, D] of the depthwise branch after its inner steps, in float32.

    Args:
        k, v: maps [B, h, w, D] in float32, bfloat16 or float16.
        w: kernels [D, 1, 3, 3].
        rule: the inner step, of which only `inner_steps` applies.
        lr: inner learning rate.

    Raises:
        ValueError: for another type.
        ImportError: where kernels do not run.
    """
    _check(k)
    return conv_step(k, v, w.flatten(1).mT, float(lr * rule.inner_steps))[0]


def conv_read_triton(q: Tensor, w: Tensor) -> Tensor:
    """`ttt_vision.conv_read`: the depthwise branch at q [B, h, w, D] with kernels [B, 9, D] of each image."""
    _check(q)
    return conv_read(q, w)


def vision_triton(
    tokens: VisionTokens, w1: Tensor, w2: Tensor, w3: Tensor, *, rule: VisionRule
) -> tuple[Tensor, Tensor]:
    """`ttt_vision.vision_recurrent` by kernels: take the inner steps of both branches, then read the new weights.

    Args:
        tokens: of both branches, in float32, bfloat16 or float16.
        w1, w2: [1, H, D, D].
        w3: [D, 1, 3, 3].
        rule: the inner step.

    Returns:
        The gated branch's output [B, H, N, D] and the depthwise one's [B, h, w, D].

    Raises:
        ValueError: for tokens of another type.
        ImportError: where kernels do not run.
    """
    q, k, v, q_map, k_map, v_map = tokens
    gated = glu_read_triton(q, *glu_step_triton(k, v, w1, w2, rule), rule)
    return gated, conv_read_triton(q_map, conv_step_triton(k_map, v_map, w3, rule))
