# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""transformers' own tests of models on LaCT (`transformers_suite` says where they come from)."""

import unittest

import pytest
import torch
from lact_cases import TINY
from transformers.models.auto import modeling_auto
from transformers_suite import GenerationTesterMixin, import_common

from hf_ttt import LaCTConfig, LaCTForCausalLM, LaCTForSequenceClassification, LaCTModel

common = import_common("test_modeling_common")
ConfigTester = import_common("test_configuration_common").ConfigTester


class LaCTModelTester:
    """What transformers' tests ask of a model: a configuration and inputs."""

    is_training = True
    batch_size, seq_length = 3, 13
    vocab_size, hidden_size = TINY["vocab_size"], TINY["hidden_size"]
    num_hidden_layers, num_attention_heads = TINY["num_hidden_layers"], TINY["num_attn_heads"]

    def __init__(self, **fields):
        self.fields = {**TINY, **fields}

    def get_config(self) -> LaCTConfig:
        return LaCTConfig(**self.fields)

    def prepare_config_and_inputs_for_common(self):
        shape = self.batch_size, self.seq_length
        ids = torch.randint(1, self.vocab_size, shape)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones(shape, dtype=torch.long)}


class LaCTTests(common.ModelTesterMixin, GenerationTesterMixin):
    all_model_classes = (LaCTModel, LaCTForCausalLM, LaCTForSequenceClassification)
    fields: dict = {}

    def setUp(self):
        self.model_tester = LaCTModelTester(**self.fields)

    @pytest.fixture(autouse=True)
    def known_to_auto_classes(self, monkeypatch):
        for mapping, name in (
            (modeling_auto.MODEL_MAPPING_NAMES, "LaCTModel"),
            (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "LaCTForCausalLM"),
            (modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, "LaCTForSequenceClassification"),
        ):
            monkeypatch.setitem(mapping, LaCTConfig.model_type, name)


class TestLaCT(LaCTTests, unittest.TestCase):
    """Chunk after chunk, full matrices. Without Muon: float32 numbers are compared more tightly than it allows."""

    def test_config(self):
        ConfigTester(self, config_class=LaCTConfig, hidden_size=32, ttt_inner_steps=2).run_common_tests()


class TestLaCTParallel(LaCTTests, unittest.TestCase):
    """All chunks at once, low-rank matrices, attention to all tokens before."""

    fields = {
        "ttt_update": "last",
        "ttt_weight_norm": "pre",
        "w0_w2_low_rank": 3,
        "window_size": None,
        "qkv_bias": True,
        "attn_qk_norm": True,
    }
    test_bc_torch_dtype = None  # takes seven seconds, and is about loading: once is enough
