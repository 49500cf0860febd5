# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Tiny LaCT configurations and models that the tests share."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from hf_ttt import LaCTConfig, LaCTForCausalLM

GOLDEN = Path(__file__).with_name("golden") / "lact"
VARIANTS = ("baseline", "variant1", "variant2", "variant3", "variant4", "variant5", "variant6")
OTHER_RULES = {  # what no variant of the paper has
    "ascent": {"ttt_direction": "ascent"},
    "no_query": {"ttt_read_with": "key"},
    "mse": {"ttt_loss_type": "mse"},
    "prenorm": {"ttt_weight_norm": "pre"},
    "prenorm_last": {"ttt_weight_norm": "pre", "ttt_update": "last"},
    "two_steps": {"ttt_inner_steps": 2},
    "low_rank": {"w0_w2_low_rank": 4},
    "fixed_rate_low_rank": {"ttt_learnable_lr": False, "w0_w2_low_rank": 4},
    "no_scale": {"learnable_ttt_scale": False},
    "qk_norm": {"attn_qk_norm": True, "qkv_bias": True},
}
TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attn_heads": 4,
    "num_lact_heads": 8,
    "lact_chunk_size": 8,
    "window_size": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_config(variant: str = "baseline", **fields) -> LaCTConfig:
    """A model of 2 layers with chunks and a window of 8 tokens; `variant` is one of the paper or of `OTHER_RULES`."""
    if variant in OTHER_RULES:
        return LaCTConfig(**{**TINY, "use_muon": True, **OTHER_RULES[variant], **fields})
    return LaCTConfig.variant(variant, **{**TINY, **fields})


def busy_model(config: LaCTConfig, model_class=LaCTForCausalLM, seed: int = 0, **arguments):
    """A model in which every part matters: larger weights than freshly initialised ones, and biases other than zero."""
    torch.manual_seed(seed)
    model = model_class(config, **arguments)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lr_proj.bias"):
                parameter.add_(torch.rand_like(parameter) * 4)
            elif parameter.dim() == 1 or name.endswith(("qk_scale", "qk_offset")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif ".attn.w" not in name:
                parameter.normal_(std=0.2)
    return model.eval()


def token_ids(batch: int, length: int, seed: int = 0, vocab_size: int = TINY["vocab_size"]) -> torch.Tensor:
    """Random tokens [batch, length] without the padding id 0."""
    return torch.randint(1, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model) -> dict[str, torch.Tensor | None]:
    """The gradients of the parameters, by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def golden_index() -> dict:
    """What the golden files of whole models hold: configurations, orders and tolerances."""
    return json.loads((GOLDEN / "models.json").read_text())


def golden_tensors(name: str) -> dict[str, torch.Tensor]:
    """The tensors of a golden file."""
    return load_file(GOLDEN / name)
