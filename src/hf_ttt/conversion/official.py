# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Models out of state dicts of the published code."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.initialization import no_init_weights
from transformers.modeling_utils import PreTrainedModel

from ..configuration_lact import LaCTConfig
from ..modeling_lact import LaCTForCausalLM
from ..modeling_lact_nvs import LaCTNVSModel
from ..modeling_vittt import HViTTTBackbone, HViTTTForImageClassification, ViTTTForImageClassification
from .nvs import nvs_config
from .vision import DENSE_NORM, vision_config

# A tensor that each architecture has and the others lack.
_MARKS = {
    "vittt": "patch_embed.proj.weight",
    "h_vittt": "patch_embed.conv.0.conv.weight",
    "lact": "model.embeddings.weight",
    "lact_nvs": "image_token_decoder.1.weight",
}
ARCHITECTURES = tuple(_MARKS)
_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
_BACKBONE = "backbone."  # of a detector or segmenter
_NOT_OF_LACT_CONFIG = ("architectures", "auto_map", "model_type", "transformers_version")
_MOST_LISTED = 20


def from_official(architecture: str, state_dict: Mapping[str, Tensor], **config: Any) -> PreTrainedModel:
    """A model with the weights of the published code, in evaluation mode.

    `rope.rotations`, which the models here compute, and prefixes of wrappers (`module.`) are dropped.

    Args:
        architecture: "vittt", "h_vittt", "lact" or "lact_nvs".
        state_dict: name → tensor. One of H-ViTTT with `norm0.weight`, as detection and segmentation have it, becomes a
            backbone; of a whole detector or segmenter only the backbone is taken.
        config: arguments of the published constructor (`img_size`, `embed_dim`, `depth`, `dim`, `num_heads`,
            `num_classes`, `ttt_loss_type`, …; `layers`, `block_config`, `no_query`, … of "lact_nvs") or fields of the
            configuration. All models but "lact" need none of those that the weights show, which are only compared.
            `out_indices` numbers feature maps as published, from the first stage on. In "lact_nvs", arguments override
            those of TTT layers in `block_config`, and those that choose kernels are ignored. For "lact", the fields of
            the published JSON files.

    Returns:
        A `ViTTTForImageClassification`, `HViTTTForImageClassification`, `HViTTTBackbone`, `LaCTForCausalLM` or
        `LaCTNVSModel`.

    Raises:
        ValueError: for another architecture; for arguments that are not known or contradict the weights; and, all in
            one, for tensors that are missing, unexpected or of a wrong shape.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture={architecture!r} cannot be converted; expected one of {', '.join(map(repr, ARCHITECTURES))}"
        )
    state = _unwrapped(state_dict)
    _check_architecture(architecture, state)
    model_class: type[PreTrainedModel]
    if architecture == "lact":
        model_class = LaCTForCausalLM
        fields = {name: value for name, value in config.items() if name not in _NOT_OF_LACT_CONFIG}
        configuration = LaCTConfig(**fields)
    elif architecture == "lact_nvs":
        model_class = LaCTNVSModel
        configuration = nvs_config(state, config)
    else:
        model_class = _vision_class(architecture, state)
        configuration = vision_config(architecture, state, config)
    with no_init_weights():
        model = model_class(configuration)
    state = {key: tensor for key, tensor in state.items() if not f".{key}".endswith(".rope.rotations")}
    _check_tensors(model, state)
    model.load_state_dict(state, strict=False)  # what is missing is tied, which was not done without initialisation
    model.tie_weights()
    return model.eval()


def _unwrapped(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """A state dict without the prefixes of wrappers, and of a detector or segmenter its backbone alone."""
    others = [f"{key!r} ({type(value).__name__})" for key, value in state_dict.items() if not isinstance(value, Tensor)]
    if others or not state_dict:
        raise ValueError(f"state_dict must map names to tensors; it has {', '.join(others[:8]) or 'nothing'}")
    state = dict(state_dict)
    while prefix := next((p for p in _WRAPPERS if all(key.startswith(p) for key in state)), None):
        state = {key.removeprefix(prefix): tensor for key, tensor in state.items()}
    if f"{_BACKBONE}{_MARKS['h_vittt']}" in state:
        rest = sorted({key.split(".")[0] for key in state if not key.startswith(_BACKBONE)})
        if rest:
            warnings.warn(f"left out {', '.join(rest)}: only the backbone is converted", stacklevel=3)
        state = {key.removeprefix(_BACKBONE): value for key, value in state.items() if key.startswith(_BACKBONE)}
    return state


def _check_architecture(architecture: str, state: Mapping[str, Tensor]) -> None:
    for other, mark in _MARKS.items():
        if mark in state and other != architecture and _MARKS[architecture] not in state:
            raise ValueError(f"architecture={architecture!r} contradicts state_dict, which has {mark} of {other!r}")


def _vision_class(architecture: str, state: Mapping[str, Tensor]) -> type[PreTrainedModel]:
    if architecture == "vittt":
        return ViTTTForImageClassification
    return HViTTTBackbone if any(map(DENSE_NORM.fullmatch, state)) else HViTTTForImageClassification


def _check_tensors(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Raise one `ValueError` that lists all tensors that do not fit a model, if there are any."""
    expected, tied = model.state_dict(), model.all_tied_weights_keys
    wrong = [
        f"{key} ({_kind(state[key])} instead of {_kind(tensor)})"
        for key, tensor in expected.items()
        if key in state and _kind(state[key]) != _kind(tensor)
    ]
    problems = {
        "missing": [key for key in expected if key not in state and key not in tied],
        "unexpected": [key for key in state if key not in expected],
        "of a wrong shape": wrong,
    }
    lists = [f"{_listed(keys)} {what}" for what, keys in problems.items() if keys]
    if lists:
        raise ValueError(f"state_dict does not fit {type(model).__name__}: {'; '.join(lists)}")


def _kind(tensor: Tensor) -> str:
    """Shape of a tensor, and whether it holds integers."""
    return f"{list(tensor.shape)}{'' if tensor.is_floating_point() else ' of integers'}"


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - _MOST_LISTED} more" if len(keys) > _MOST_LISTED else ""
    return ", ".join(keys[:_MOST_LISTED]) + more + (" are" if len(keys) > 1 else " is")
