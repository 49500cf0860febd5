# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""LoRA of PEFT on TTT models: what to adapt, read off the model itself, and how to merge it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

RATE_LAYERS = ("lr_proj", "lr_fc")  # which a model with fixed rates keeps without using them
HEADS = ("lm_head", "score", "head")
ADAPTABLE_DIMENSIONS = (2, 3)  # of PEFT's `target_parameters`


def lora_targets(model: PreTrainedModel, *, fast_weights: bool = False, head: bool = False) -> dict[str, Any]:
    """The arguments of `peft.LoraConfig` that say what is adapted: `LoraConfig(r=8, **lora_targets(model))`.

    Args:
        model: a model of this package, before an adapter is put into it.
        fast_weights: whether to adapt the initial fast weights too, each head's by itself, but for those of LaCT that
            are products of low rank. PEFT then takes no dropout and no DoRA, and its own `merge_and_unload` leaves a
            part: take the one of this module.
        head: whether to train the head in full.

    Returns:
        `target_modules`: the linear layers of the blocks.
        `target_parameters`: the fast weights, or None. Of both, what the model's rule leaves unused is left out.
        `modules_to_save`: what is trained in full and saved with the adapter, or None: the head, and batch norms
        (of H-ViTTT), whose statistics follow the data in training and would otherwise be lost.

    Raises:
        ValueError: for another model or one with an adapter, for fast weights that PEFT does not adapt, or for a head
            that is not there or shares its weights with the embeddings.
    """
    _check_model(model)
    weights = _fast_weights(model) if fast_weights else []
    if fast_weights and not weights:
        raise ValueError(
            f"fast_weights=True: those of {type(model).__name__} have four dimensions and PEFT adapts two or three; "
            "leave it False, or train whole TTT layers in full with modules_to_save=['attn']"
        )
    saved = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    return {
        "target_modules": _block_linears(model),
        "target_parameters": weights or None,
        "modules_to_save": (saved + (_heads(model) if head else [])) or None,
    }


def merge_and_unload(model: Any) -> PreTrainedModel:
    """The model with its adapter added to the weights, as it was without PEFT.

    That of PEFT 0.21 leaves layers with their adapters in place within a module whose parameters are adapted as well,
    so that the model computes the same but what it saves does not load.

    Args:
        model: a `peft.PeftModel`, which is used up.

    Raises:
        ValueError: for a model without an adapter.
        NotImplementedError: of PEFT, where it cannot merge: convolutions with groups.
    """
    return _unload(model, "merge_and_unload")


def unload(model: Any) -> PreTrainedModel:
    """The model without its adapter; `modules_to_save` stay as they were trained. Else as `merge_and_unload`."""
    return _unload(model, "unload")


def _unload(model: Any, method: str) -> PreTrainedModel:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not isinstance(model, PeftModel):
        raise ValueError(f"model={type(model).__name__} has no adapter: expected a PeftModel")
    while True:  # each call takes off one layer of wrappers
        base = getattr(model.base_model, method)()
        if not any(isinstance(module, BaseTunerLayer) for module in base.modules()):
            return base


def _block_linears(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers of a model's blocks that its rule uses, as they are called within a block."""
    unused = () if getattr(model.config, "ttt_learnable_lr", True) else RATE_LAYERS
    names = (_within_block(model, name) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return sorted({name for name in names if name is not None and not name.endswith(unused)})


def _check_model(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if getattr(model, "peft_config", None) is not None:
        raise ValueError(f"model={name} has an adapter already: ask for the targets before it is put in")
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "get_ttt_implementation"):
        raise ValueError(f"model={name} is not a model of hf-ttt, such as LaCTForCausalLM")


def _within_block(model: nn.Module, name: str) -> str | None:
    """The part of a module's or parameter's name behind its last place in a list; None for what is in no list."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if isinstance(model.get_submodule(".".join(parts[: end - 1])), nn.ModuleList):
            return ".".join(parts[end:])
    return None


def _fast_weights(model: PreTrainedModel) -> list[str]:
    """Names of the raw fast weights that the rule uses and PEFT can adapt, within a block."""
    names = set(model._keep_in_fp32_modules_strict)
    if model.config.ttt_fast_weight != "swiglu":
        names &= {"w1"}
    found = {
        _within_block(model, name)
        for name, parameter in model.named_parameters()
        if name.rsplit(".", 1)[-1] in names and parameter.dim() in ADAPTABLE_DIMENSIONS
    }
    return sorted(found)


def _heads(model: PreTrainedModel) -> list[str]:
    heads = [name for name in HEADS if isinstance(getattr(model, name, None), nn.Linear)]
    if not heads:
        raise ValueError(f"head=True: {type(model).__name__} has no head that could be trained")
    if "lm_head" in heads and model.config.tie_word_embeddings:
        raise ValueError(
            "head=True: lm_head shares its weights with the embeddings (tie_word_embeddings), which a trained copy "
            "would no longer do; leave it False"
        )
    return heads
