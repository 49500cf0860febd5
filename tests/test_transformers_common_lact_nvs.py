# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""transformers' own tests of models on LaCT-NVS (`transformers_suite` says where they come from)."""

import unittest

import pytest
import torch
from nvs_cases import TINY, all_views, tiny_config
from transformers.models.auto import modeling_auto
from transformers_suite import import_common

from hf_ttt.configuration_lact_nvs import LaCTNVSConfig
from hf_ttt.modeling_lact_nvs import LaCTNVSModel

common = import_common("test_modeling_common")
ConfigTester = import_common("test_configuration_common").ConfigTester


class LaCTNVSModelTester:
    """What transformers' tests ask of a model: a configuration and inputs."""

    is_training = True
    batch_size = 3

    def __init__(self, **fields):
        self.fields = fields

    def get_config(self) -> LaCTNVSConfig:
        return tiny_config(**self.fields)

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), all_views(batch=self.batch_size)


class LaCTNVSTests(common.ModelTesterMixin):
    all_model_classes = (LaCTNVSModel,)
    has_attentions = False  # rendered views are the only output
    test_resize_embeddings = False  # there is no vocabulary
    test_hidden_states_output = None  # as above
    test_retain_grad_hidden_states_attentions = None  # as above
    test_model_outputs_equivalence = None  # as above; both kinds of output are compared in test_modeling_lact_nvs
    fields: dict = {}

    def setUp(self):
        self.model_tester = LaCTNVSModelTester(**self.fields)

    @pytest.fixture(autouse=True)
    def known_to_auto_classes(self, monkeypatch):
        monkeypatch.setitem(modeling_auto.MODEL_MAPPING_NAMES, LaCTNVSConfig.model_type, LaCTNVSModel.__name__)

    def test_model_get_set_embeddings(self):
        """The embedding is that of the rays and colours of patches, and can be replaced."""
        model = LaCTNVSModel(self.model_tester.get_config())
        assert model.get_input_embeddings() is model.input_linear
        replacement = torch.nn.Identity()
        model.set_input_embeddings(replacement)
        assert model.get_input_embeddings() is model.input_linear is replacement
        assert model.get_output_embeddings() is None


class TestLaCTNVS(LaCTNVSTests, unittest.TestCase):
    """As published. Without Muon: float32 numbers are compared more tightly than it allows."""

    fields = {"use_muon": False}

    def test_config(self):
        properties = ["hidden_size", "num_hidden_layers"]  # heads are those of a block's modules
        arguments = {"has_text_modality": False, "common_properties": properties}
        ConfigTester(self, LaCTNVSConfig, **arguments, **TINY, ttt_inner_steps=2).run_common_tests()


class TestLaCTNVSParallel(LaCTNVSTests, unittest.TestCase):
    """Linear attention with fixed rates, read with the key, whose gate and rates are kept unused."""

    fields = {"rule": "variant6", "ttt_read_with": "key"}
    test_bc_torch_dtype = None  # takes seconds, and is about loading: once is enough
