# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""ViTTT and H-ViTTT as backbones: feature maps, checkpoints of classifiers, and training under a segmentation head."""

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoBackbone, UperNetConfig, UperNetForSemanticSegmentation
from transformers.models.auto import auto_factory
from vittt_cases import BACKBONES, CLASSIFIERS, FAMILIES, busy_model, images, relative_error, tiny_config

SIZES = [(32, 32), (38, 51), (33, 47)]
by_family = pytest.mark.parametrize("family", FAMILIES)
by_size = pytest.mark.parametrize(("height", "width"), SIZES)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@by_size
def test_four_stages_at_their_strides(height, width):
    """H-ViTTT: strides 4, 8, 16, 32, every odd size rounded up."""
    config = tiny_config("h_vittt", out_features=["stage1", "stage2", "stage3", "stage4"])
    model = AutoBackbone.from_config(config)
    assert isinstance(model, BACKBONES["h_vittt"])
    assert model.channels == config.hidden_sizes
    maps = model(images(2, height, width)).feature_maps
    expected, size = [], (ceil_div(height, 4), ceil_div(width, 4))
    for channels in config.hidden_sizes:
        expected.append((2, channels, *size))
        size = ceil_div(size[0], 2), ceil_div(size[1], 2)
    assert [tuple(x.shape) for x in maps] == expected


@by_size
def test_chosen_layers_of_one_resolution(height, width):
    """ViTTT: one map for each of the chosen layers, at the stride of its patches."""
    config = tiny_config("vittt", out_indices=[0, 2])
    assert config.out_features == ["stem", "stage2"]
    model = AutoBackbone.from_config(config)
    assert isinstance(model, BACKBONES["vittt"])
    assert model.channels == [16, 16]
    maps = model(images(2, height, width)).feature_maps
    assert [tuple(x.shape) for x in maps] == [(2, 16, ceil_div(height, 8), ceil_div(width, 8))] * 2


@by_family
def test_maps_are_the_hidden_states_after_a_norm(family):
    """Of the chosen layers, in their order; "stem" of H-ViTTT has no norm."""
    config = tiny_config(family, out_features=["stem", "stage1", "stage2"])
    model = busy_model(BACKBONES[family], config)
    output = model(images(2, 38, 51), output_hidden_states=True)
    norms = [model.norm] * 3 if family == "vittt" else [torch.nn.Identity(), model.norm0, model.norm1]
    for features, state, norm in zip(output.feature_maps, output.hidden_states, norms, strict=False):
        if family == "vittt":
            state = state.unflatten(1, (5, 7)).permute(0, 3, 1, 2)
        assert_close(features, norm(state.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), rtol=0, atol=0)


def test_maps_without_norm():
    config = tiny_config("vittt", apply_layernorm=False, out_features=["stage1"])
    output = busy_model(BACKBONES["vittt"], config)(images(2), output_hidden_states=True)
    assert_close(output.feature_maps[0].flatten(2).mT, output.hidden_states[1], rtol=0, atol=0)


@by_family
def test_checkpoint_of_a_classifier(family, tmp_path):
    """Loads into the backbone: the same hidden states, and nothing is missing but H-ViTTT's norms of the maps."""
    classifier = busy_model(CLASSIFIERS[family], tiny_config(family))
    classifier.save_pretrained(tmp_path)
    model, info = BACKBONES[family].from_pretrained(tmp_path, out_indices=[1, 2], output_loading_info=True)
    new = {f"norm{i}.{part}" for i in range(2) for part in ("weight", "bias")} if family == "h_vittt" else set()
    assert set(info["missing_keys"]) == new
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    pixels = images(2, 38, 51)
    got, want = (m.eval()(pixels, output_hidden_states=True) for m in (model, classifier))
    assert_close(got.hidden_states, want.hidden_states, rtol=0, atol=0)
    if family == "vittt":
        last = classifier.norm(want.hidden_states[2])
        assert_close(got.feature_maps[1].flatten(2).mT, last, rtol=0, atol=0)
    else:
        for features, state in zip(got.feature_maps, want.hidden_states[1:], strict=False):
            normed = torch.nn.functional.layer_norm(state.permute(0, 2, 3, 1), state.shape[1:2])
            assert_close(features, normed.permute(0, 3, 1, 2))


@by_family
def test_auto_backbone_from_pretrained(family, tmp_path, monkeypatch):
    """A saved backbone keeps its choice of stages, which can be changed on loading.

    The folder stands in for a repository: AutoBackbone takes what the Hub does not have for a model of timm.
    """
    monkeypatch.setattr(auto_factory, "hf_api", lambda: SimpleNamespace(repo_exists=lambda name: True))
    model = busy_model(BACKBONES[family], tiny_config(family, out_indices=[1, 2]))
    model.save_pretrained(tmp_path)
    loaded = AutoBackbone.from_pretrained(tmp_path)
    assert type(loaded) is BACKBONES[family]
    assert loaded.out_features == ["stage1", "stage2"]
    maps = model(images(2)).feature_maps
    assert_close(loaded(images(2)).feature_maps, maps)
    last = AutoBackbone.from_pretrained(tmp_path, out_features=["stage2"])
    assert_close(last(images(2)).feature_maps, maps[1:])


@by_family
def test_unknown_stage(family):
    with pytest.raises(ValueError, match="stage9"):
        tiny_config(family, out_features=["stage9"])


def segmentation_model(family: str) -> UperNetForSemanticSegmentation:
    """UperNet with 4 classes over four maps."""
    torch.manual_seed(0)
    fields = {"num_hidden_layers": 4} if family == "vittt" else {}
    backbone = tiny_config(family, out_indices=[1, 2, 3, 4], **fields)
    config = UperNetConfig(
        backbone_config=backbone,
        hidden_size=16,
        pool_scales=[1, 2],
        use_auxiliary_head=False,
        num_labels=4,
    )
    return UperNetForSemanticSegmentation(config)


@by_family
def test_segmentation_model_trains(family, tmp_path):
    """Two steps on one batch of odd size: every parameter gets a gradient, the loss falls, and the result reloads."""
    model = segmentation_model(family).train()
    pixels = images(2, 38, 51)
    labels = torch.randint(0, 4, (2, 38, 51), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(pixels, labels=labels).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()}
        assert not without
        optimizer.step()
    assert losses[0] > losses[1] > losses[2]
    model.eval().save_pretrained(tmp_path)
    loaded = UperNetForSemanticSegmentation.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        logits = model(pixels).logits
        assert logits.shape == (2, 4, 38, 51)
        assert relative_error(loaded(pixels).logits, logits) < 1e-5


@by_family
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(family, reentrant):
    """The first iteration has the gradients that it has without, in float64 (the published code's differ)."""
    config = tiny_config(family, out_indices=[1, 2], drop_path_rate=0.3)
    weights = busy_model(BACKBONES[family], config).state_dict()
    results = []
    for checkpointing in (False, True):
        model = BACKBONES[family](config)
        model.load_state_dict(weights)
        model.double().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert model.is_gradient_checkpointing
        torch.manual_seed(0)  # of the stochastic depth
        pixels = images(4, 38, 51, dtype=torch.float64).requires_grad_()
        sum(x.square().mean() for x in model(pixels).feature_maps).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append({"pixels": pixels.grad, **gradients, **dict(model.named_buffers())})
    want, got = results
    assert got.keys() == want.keys()
    assert {"pixels", "patch_embed.proj.weight" if family == "vittt" else "layers.1.blocks.0.attn.w1"} <= got.keys()
    worst = max(relative_error(got[name], value) for name, value in want.items() if value.is_floating_point())
    assert worst < 1e-11  # measured: 5e-16
