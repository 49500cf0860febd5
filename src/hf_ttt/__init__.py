# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Test-time-training (TTT) models for transformers: importing this package registers them with the Auto classes."""

from typing import Any

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoProcessor,
)
from transformers.utils import is_vision_available

from .cache_ttt import TTTCache, TTTStaticCache
from .configuration_lact import LaCTConfig
from .configuration_lact_nvs import LaCTNVSConfig
from .configuration_vittt import HViTTTConfig, ViTTTConfig
from .image_processing_vittt import ViTTTImageProcessor
from .modeling_lact import LaCTForCausalLM, LaCTForSequenceClassification, LaCTModel
from .modeling_lact_nvs import LaCTNVSModel, LaCTNVSScene
from .modeling_vittt import (
    HViTTTBackbone,
    HViTTTForImageClassification,
    HViTTTModel,
    ViTTTBackbone,
    ViTTTForImageClassification,
    ViTTTModel,
)
from .processing_lact_nvs import LaCTNVSProcessor
from .ttt_ops import TTTInterface, ttt_attention, ttt_read, ttt_update
from .ttt_rule import TTTRule
from .ttt_state import TTTState, ttt_init

__version__ = "0.1.0"

__all__ = [
    "HViTTTBackbone",
    "HViTTTConfig",
    "HViTTTForImageClassification",
    "HViTTTModel",
    "LaCTConfig",
    "LaCTForCausalLM",
    "LaCTForSequenceClassification",
    "LaCTModel",
    "LaCTNVSConfig",
    "LaCTNVSModel",
    "LaCTNVSProcessor",
    "LaCTNVSScene",
    "TTTCache",
    "TTTInterface",
    "TTTRule",
    "TTTState",
    "TTTStaticCache",
    "ViTTTBackbone",
    "ViTTTConfig",
    "ViTTTForImageClassification",
    "ViTTTImageProcessor",
    "ViTTTModel",
    "ttt_attention",
    "ttt_init",
    "ttt_read",
    "ttt_update",
]

_MODELS: dict[type[Any], dict[type[Any], type[Any]]] = {
    LaCTConfig: {
        AutoModel: LaCTModel,
        AutoModelForCausalLM: LaCTForCausalLM,
        AutoModelForSequenceClassification: LaCTForSequenceClassification,
    },
    LaCTNVSConfig: {AutoModel: LaCTNVSModel},
    ViTTTConfig: {
        AutoModel: ViTTTModel,
        AutoModelForImageClassification: ViTTTForImageClassification,
        AutoBackbone: ViTTTBackbone,
    },
    HViTTTConfig: {
        AutoModel: HViTTTModel,
        AutoModelForImageClassification: HViTTTForImageClassification,
        AutoBackbone: HViTTTBackbone,
    },
}

for _config, _classes in _MODELS.items():
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    _config.register_for_auto_class()
    for _auto, _model in _classes.items():
        _auto.register(_config, _model, exist_ok=True)
        _model.register_for_auto_class(_auto.__name__)

LaCTNVSProcessor.register_for_auto_class()
AutoProcessor.register(LaCTNVSConfig, LaCTNVSProcessor, exist_ok=True)
ViTTTImageProcessor.register_for_auto_class()
if is_vision_available():  # AutoImageProcessor is a placeholder without Pillow, which text models do not need
    for _config in (ViTTTConfig, HViTTTConfig):
        AutoImageProcessor.register(_config, image_processor_classes={"pil": ViTTTImageProcessor}, exist_ok=True)
