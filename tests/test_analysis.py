# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Attention maps: the output of a block is rebuilt from its map."""

import pytest
import torch

from hf_ttt import HViTTTConfig, HViTTTForImageClassification, ViTTTConfig, ViTTTForImageClassification, ViTTTModel
from hf_ttt.analysis import attention_map
from hf_ttt.ttt_vision import SCALE, glu_read, glu_step, glu_values

PLAIN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8}
HIERARCHICAL = {"hidden_sizes": [16, 32], "depths": [1, 2], "num_attention_heads": [2, 4]}


def make_model(name):
    torch.manual_seed(0)
    config = ViTTTConfig(**PLAIN) if name == "vittt" else HViTTTConfig(**HIERARCHICAL)
    model = (ViTTTForImageClassification if name == "vittt" else HViTTTForImageClassification)(config)
    return model.double().eval()


@pytest.mark.parametrize(("name", "layer"), [("vittt", 0), ("vittt", -1), ("h_vittt", 0), ("h_vittt", 2)])
def test_the_map_rebuilds_the_output(name, layer):
    """q S0 + c (s/N) ⟨q, k⟩ U through the gate is what the gated branch returns, on a grid that is not square."""
    model = make_model(name)
    image = torch.randn(3, 40, 24, dtype=torch.float64)
    block = [m for m in model.modules() if type(m).__name__ == "ViTTTAttention"][layer]
    inputs = []
    block.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments))
    for head in range(block.heads):
        weights = attention_map(model, image, layer, head)
        q, k, v = (x[:, head : head + 1] for x in block.tokens(*inputs[-1])[:3])
        w1, w2 = (w[:, head : head + 1].double() for w in (block.w1, block.w2))
        height, width = inputs[-1][0].shape[1:3]
        assert weights.shape == (height, width, height, width) and weights.dtype == torch.float64
        rule = model.config.rule
        after = torch.cat(glu_step(k, v, w1, w2, rule), -1)
        u = torch.cat(glu_values(k, v, w1, w2, rule), -1)
        delta = k.mT @ u * SCALE / (height * width)
        factor = 1 / (1 + delta.norm(dim=-2, keepdim=True))
        values = u * factor * SCALE / (height * width)
        rebuilt = q @ torch.cat([w1, w2], -1) + weights.flatten(2).flatten(0, 1) @ values
        torch.testing.assert_close(rebuilt, q @ after)
        out, gate = rebuilt.chunk(2, -1)
        torch.testing.assert_close(out * torch.nn.functional.silu(gate), glu_read(q, *after.chunk(2, -1), rule))


def test_leaves_the_model_as_it_was():
    """No hook stays, no gradient, no change of mode, and a batch of one is the same image."""
    model = ViTTTModel(ViTTTConfig(**PLAIN)).train()
    image = torch.randn(3, 16, 24)
    weights = attention_map(model, image, 0, 0)
    assert model.training and not weights.requires_grad
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert torch.equal(weights, attention_map(model, image[None], -2, -4))


def test_errors():
    """The argument is named, with what came and what would do."""
    model, image = make_model("vittt"), torch.randn(3, 16, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"layer=2 is not there: the model has 2, so -2 to 1 would do"):
        attention_map(model, image, 2, 0)
    with pytest.raises(ValueError, match=r"head=-5 is not there: the model has 4"):
        attention_map(model, image, 0, -5)
    with pytest.raises(ValueError, match=r"image of shape \[2, 3, 16, 16\] must be"):
        attention_map(model, torch.stack([image, image]), 0, 0)
    with pytest.raises(ValueError, match="model=Linear has no ViTTT block"):
        attention_map(torch.nn.Linear(1, 1), image, 0, 0)
