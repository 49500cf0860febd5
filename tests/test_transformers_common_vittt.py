# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""transformers' own tests of models and backbones on ViTTT and H-ViTTT (`transformers_suite` has their origin)."""

import unittest

import pytest
import torch
from transformers.models.auto import modeling_auto
from transformers_suite import import_common
from vittt_cases import BACKBONES, CLASSIFIERS, CONFIGS, MODELS, TINY, images, tiny_config

common = import_common("test_modeling_common")
backbone_common = import_common("test_backbone_common")
ConfigTester = import_common("test_configuration_common").ConfigTester


class VisionModelTester:
    """What transformers' tests ask of a model: a configuration and inputs."""

    is_training = True
    batch_size = 3

    def __init__(self, family: str, **fields):
        self.family, self.fields = family, fields
        self.num_labels = TINY[family]["num_labels"]

    def get_config(self):
        return tiny_config(self.family, **self.fields)

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {"pixel_values": images(self.batch_size)}


class KnownToAutoClasses:
    """The tests choose what they do with a model by the names in the Auto classes' tables."""

    family: str
    fields: dict = {}

    @pytest.fixture(autouse=True)
    def known_to_auto_classes(self, monkeypatch):
        for mapping, classes in (
            (modeling_auto.MODEL_MAPPING_NAMES, MODELS),
            (modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, CLASSIFIERS),
            (modeling_auto.MODEL_FOR_BACKBONE_MAPPING_NAMES, BACKBONES),
        ):
            monkeypatch.setitem(mapping, self.family, classes[self.family].__name__)


class VisionModelTests(KnownToAutoClasses, common.ModelTesterMixin):
    has_attentions = False  # the weights of the queries over the keys are not computed
    test_resize_embeddings = False  # there is no vocabulary

    def setUp(self):
        self.all_model_classes = (MODELS[self.family], CLASSIFIERS[self.family])
        self.model_tester = VisionModelTester(self.family, **self.fields)

    def test_config(self):
        fields = {**TINY[self.family], "ttt_inner_steps": 2}
        del fields["num_labels"]  # is written as id2label
        tester = ConfigTester(self, config_class=CONFIGS[self.family], has_text_modality=False, **fields)
        tester.run_common_tests()

    def test_hidden_states_output(self):
        """Of the embedding and each block or stage, asked for in the call and in the configuration."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            config.output_hidden_states = False
            model = model_class(config).eval()
            assert model(**inputs).hidden_states is None
            asked = model(**inputs, output_hidden_states=True).hidden_states
            config.output_hidden_states = True
            configured = model_class(config).eval()(**inputs).hidden_states
            for states in (asked, configured):
                assert [tuple(state.shape) for state in states] == self.hidden_state_shapes

    def test_model_get_set_embeddings(self):
        """The embedding is that of the patches, a convolution or several, and can be replaced."""
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            assert model.get_input_embeddings() is model.patch_embed
            replacement = torch.nn.Identity()
            model.set_input_embeddings(replacement)
            assert model.get_input_embeddings() is model.patch_embed is replacement
            assert model.get_output_embeddings() is None


class ViTTTTests(VisionModelTests):
    family = "vittt"
    hidden_state_shapes = [(3, 16, 16)] * 3


class HViTTTTests(VisionModelTests):
    family = "h_vittt"
    hidden_state_shapes = [(3, 8, 8, 8), (3, 8, 8, 8), (3, 16, 4, 4), (3, 16, 2, 2), (3, 24, 1, 1)]


class TestViTTT(ViTTTTests, unittest.TestCase):
    """As published, by linear attention."""


class TestHViTTT(HViTTTTests, unittest.TestCase):
    """As published, by linear attention."""


class TestViTTTRecurrent(ViTTTTests, unittest.TestCase):
    """Two steps on the squared error, then the reading."""

    fields = {"ttt_implementation": "recurrent", "ttt_inner_steps": 2, "ttt_loss_type": "mse", "qkv_bias": False}
    test_bc_torch_dtype = None  # takes seconds, and is about loading: once is enough


class TestHViTTTRecurrent(HViTTTTests, unittest.TestCase):
    """A linear fast weight, read with the keys, whose gate is kept unused."""

    fields = {"ttt_implementation": "recurrent", "ttt_fast_weight": "linear", "ttt_read_with": "key"}
    test_bc_torch_dtype = None  # as above


class VisionBackboneTests(KnownToAutoClasses, backbone_common.BackboneTesterMixin):
    has_attentions = False

    def setUp(self):
        self.all_model_classes = (BACKBONES[self.family],)
        self.config_class = CONFIGS[self.family]
        self.model_tester = VisionModelTester(self.family, out_indices=[1, 2])


class TestViTTTBackbone(VisionBackboneTests, unittest.TestCase):
    family = "vittt"


class TestHViTTTBackbone(VisionBackboneTests, unittest.TestCase):
    family = "h_vittt"
