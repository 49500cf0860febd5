# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Tiny ViTTT and H-ViTTT configurations, models and images that the tests share."""

import torch

from hf_ttt import (
    HViTTTBackbone,
    HViTTTConfig,
    HViTTTForImageClassification,
    HViTTTModel,
    ViTTTBackbone,
    ViTTTConfig,
    ViTTTForImageClassification,
    ViTTTModel,
)

IMPLEMENTATIONS = ("recurrent", "parallel")
CONFIGS = {"vittt": ViTTTConfig, "h_vittt": HViTTTConfig}
MODELS = {"vittt": ViTTTModel, "h_vittt": HViTTTModel}
CLASSIFIERS = {"vittt": ViTTTForImageClassification, "h_vittt": HViTTTForImageClassification}
BACKBONES = {"vittt": ViTTTBackbone, "h_vittt": HViTTTBackbone}
FAMILIES = tuple(CONFIGS)
TINY = {
    "vittt": {
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "mlp_ratio": 2,
        "num_labels": 5,
    },
    "h_vittt": {
        "image_size": 32,
        "hidden_sizes": [8, 16, 16, 24],
        "depths": [1, 1, 2, 1],
        "num_attention_heads": [2, 2, 4, 3],
        "mlp_ratio": 2,
        "num_labels": 5,
    },
}


def tiny_config(family: str, **fields) -> ViTTTConfig | HViTTTConfig:
    """ViTTT with two blocks and patches of 8, or H-ViTTT with four stages; 5 classes."""
    return CONFIGS[family](**{**TINY[family], **fields})


def busy_model(model_class: type, config, seed: int = 0):
    """A model in evaluation in which every part matters: weights and statistics larger than freshly initialised."""
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.2))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(std=0.3)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
    return model.eval()


def images(batch: int, height: int = 32, width: int = 32, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Random images [batch, 3, height, width]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, height, width, generator=generator, dtype=torch.float64).to(dtype)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The greatest difference over the greatest value."""
    return ((got - want).abs().max() / want.abs().max()).item()
