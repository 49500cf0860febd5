# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Attention maps of TTT layers, which are linear attention: who reads what from whom."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def _ttt_layers(model: nn.Module) -> list[Any]:
    """The TTT blocks of a vision model in order; by name, since each revision of remote code has a class of its own."""
    return [module for module in model.modules() if type(module).__name__ == "ViTTTAttention"]


def _checked_index(name: str, index: int, count: int) -> int:
    if not -count <= index < count:
        raise ValueError(f"{name}={index} is not there: the model has {count}, so {-count} to {count - 1} would do")
    return index


@torch.no_grad()
def attention_map(model: nn.Module, image: Tensor, layer: int, head: int) -> Tensor:
    """The effective attention weights of one head of a ViTTT block's gated branch on an image.

    The block is linear attention, o_p = q_p S0 + Σ_n ⟨q̂_p, k̂_n⟩ v̂_n, so that a map exists although the block never
    computes one: `map[y, x]` is how much the patch in row y and column x takes of the value of every other patch. There
    is no softmax: weights have both signs and no fixed sum. They are those of both linear attentions that make up the
    branch (w1 and w2), which share queries and keys. Memory grows with the square of the number of patches.

    Args:
        model: a ViTTT or H-ViTTT model of any head, also one of remote code.
        image: pixel values [channels, height, width], or a batch of one.
        layer: index of the block, counted through all stages; negative from the end.
        head: index of the head; negative from the end.

    Returns:
        ⟨q̂, k̂⟩ [h, w, h, w] in float32 (float64 for float64): query row and column, then key row and column.

    Raises:
        ValueError: for a model without ViTTT blocks, a layer or head that is not there, or more than one image.
    """
    layers = _ttt_layers(model)
    if not layers:
        raise ValueError(f"model={type(model).__name__} has no ViTTT block; expected a ViTTT or H-ViTTT model")
    if image.dim() == 3:
        image = image[None]
    if image.dim() != 4 or image.shape[0] != 1:
        raise ValueError(f"image of shape {list(image.shape)} must be [channels, height, width], or a batch of one")
    block = layers[_checked_index("layer", layer, len(layers))]
    _checked_index("head", head, block.heads)
    seen: list[tuple] = []
    hook = block.register_forward_pre_hook(lambda module, arguments: seen.append(arguments))
    training = model.training
    try:
        model.eval()(image)
    finally:
        hook.remove()
        model.train(training)
    q, k = block.tokens(*seen[0])[:2]
    grid = seen[0][0].shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = q[0, head].to(wide) @ k[0, head].to(wide).mT
    return weights.unflatten(1, grid).unflatten(0, grid)
