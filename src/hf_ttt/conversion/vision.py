# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Configurations of ViTTT and H-ViTTT out of the arguments of the published code and out of the weights themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..configuration_vittt import HViTTTConfig, ViTTTConfig
from .facts import Fact, check_facts, count_in, facts_in, own_names, ratio_of, size_in

DENSE_NORM = re.compile(r"norm(\d+)\.weight")  # of a backbone for detection or segmentation, one for each feature map
_NAMES = {  # of the published constructors
    "img_size": "image_size",
    "in_chans": "num_channels",
    "num_classes": "num_labels",
    "embed_dim": "hidden_size",
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "dim": "hidden_sizes",
    "out_indices": "out_features",
}
_WITHOUT_EFFECT = ("attn_drop_rate", "init_cfg", "pretrained", "use_checkpoint")
_NOT_THERE = ("distilled", "drop_rate", "representation_size")  # False, 0 or None in all published models
_STEM_STRIDE = 4


def vision_config(architecture: str, state: Mapping[str, Tensor], arguments: Mapping[str, Any]):
    """The configuration of a published state dict.

    Args:
        architecture: "vittt" or "h_vittt".
        state: the state dict, with `rope.rotations` if it has them.
        arguments: of the published constructor, or fields of the configuration.

    Raises:
        ValueError: for arguments that are not known, contradict the weights or each other, or that no model has.
    """
    config_class = ViTTTConfig if architecture == "vittt" else HViTTTConfig
    given = own_names(
        config_class,
        arguments,
        _NAMES,
        also=("num_labels", "out_features"),
        ignored=_WITHOUT_EFFECT,
        absent=_NOT_THERE,
        own_value=_own_value,
    )
    if "id2label" in given:
        given.setdefault("num_labels", ("id2label", len(given["id2label"][1])))
    facts = list(vittt_facts(state) if architecture == "vittt" else h_vittt_facts(state))
    check_facts([fact for fact in facts if fact.field != "image_size"], given, arguments, state)
    fields = {fact.field: fact.value for fact in facts}
    return config_class(**{**fields, **{field: value for field, (_, value) in given.items()}})


def _own_value(name: str, field: str, value: Any) -> Any:
    """The value of an argument as the configuration has it."""
    if name == "out_indices":  # numbered from the first stage, here "stage1"
        return [f"stage{index + 1}" for index in value]
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = list(value)
    if field == "image_size":
        sides = value if isinstance(value, list) else [value, value]
        if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
            raise ValueError(f"{name}={value!r} must be the side of an image in pixels, or [height, width]")
    if field in ("image_size", "patch_size") and isinstance(value, list) and len(set(value)) == 1:
        return value[0]
    return value


# ---- what the weights say ----


def _mlp_ratio(widths: Sequence[int], hidden: Sequence[int], key: str) -> Fact:
    """The ratio that gives each width its hidden width, rounded down."""

    def same(a: float, b: float) -> bool:
        return all(int(w * a) == int(w * b) for w in widths)

    return Fact("mlp_ratio", ratio_of(widths, hidden), key, same)


def _qkv_bias(state: Mapping[str, Tensor], block: str) -> Iterator[Fact]:
    weight, bias = (size_in(state, rf"{block}attn\.qkv\.{name}", 0) for name in ("weight", "bias"))
    if weight or bias:
        yield Fact("qkv_bias", bias is not None, (bias or weight)[1])


def vittt_facts(state: Mapping[str, Tensor]) -> Iterator[Fact]:
    """What a state dict of ViTTT says of its configuration."""
    block = r"blocks\.\d+\."
    yield from facts_in(
        state,
        {
            "hidden_size": (rf"({block})?norm\d?\.(weight|bias)", 0, 1),
            "num_attention_heads": (rf"{block}attn\.w[12]", 1, 4),
            "patch_size": (r"patch_embed\.proj\.weight", 2, 4),
            "num_channels": (r"patch_embed\.proj\.weight", 1, 4),
            "num_labels": (r"head\.(weight|bias)", 0, None),
        },
    )
    yield from _qkv_bias(state, block)
    if depth := count_in(state, r"blocks\.(\d+)\."):
        yield Fact("num_hidden_layers", *depth)
    width = size_in(state, rf"{block}norm\d\.(weight|bias)", 0, 1)
    hidden = size_in(state, rf"{block}mlp\.fc1\.(weight|bias)", 0)
    if width and hidden:
        yield _mlp_ratio([width[0]], [hidden[0]], hidden[1])


def h_vittt_facts(state: Mapping[str, Tensor]) -> Iterator[Fact]:
    """What a state dict of H-ViTTT, a classifier or a backbone, says of its configuration."""
    any_block = r"layers\.\d+\.blocks\.\d+\."
    yield from facts_in(
        state,
        {
            "num_channels": (r"patch_embed\.conv\.0\.conv\.weight", 1, 4),
            "num_labels": (r"head\.(weight|bias)", 0, None),
        },
    )
    yield from _qkv_bias(state, any_block)
    stages, _ = count_in(state, r"layers\.(\d+)\.") or (0, "")
    blocks = [rf"layers\.{stage}\.blocks\.\d+\." for stage in range(stages)]
    widths = [size_in(state, rf"{block}norm\d\.(weight|bias)", 0, 1) for block in blocks]
    hidden = [size_in(state, rf"{block}mlp\.(fc1|dwc)\.(weight|bias)", 0) for block in blocks]
    of_stages = {
        "hidden_sizes": widths,
        "depths": [count_in(state, rf"layers\.{stage}\.blocks\.(\d+)\.") for stage in range(stages)],
        "num_attention_heads": [size_in(state, rf"{block}attn\.w[12]", 1, 4) for block in blocks],
    }
    for field, found in of_stages.items():
        if found and all(found):
            yield Fact(field, [value for value, _ in found], found[0][1])
    if stages and all(widths) and all(hidden):
        yield _mlp_ratio([width for width, _ in widths], [value for value, _ in hidden], hidden[0][1])
    rotations = r"layers\.0\.blocks\.0\.(attn\.)?rope\.rotations"
    sides = [size_in(state, rotations, axis, 4) for axis in (0, 1)]
    if all(sides):
        height, width = (_STEM_STRIDE * side for side, _ in sides)
        yield Fact("image_size", height if height == width else [height, width], sides[0][1])
    if maps := [(f"stage{int(match[1]) + 1}", key) for key in state if (match := DENSE_NORM.fullmatch(key))]:
        yield Fact("out_features", sorted(name for name, _ in maps), maps[0][1])
