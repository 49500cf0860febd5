# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The ViTTT and H-ViTTT models: which images they take, heads and losses, stochastic depth, initialisation."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import Trainer, TrainingArguments
from vittt_cases import (
    BACKBONES,
    CLASSIFIERS,
    FAMILIES,
    IMPLEMENTATIONS,
    MODELS,
    busy_model,
    images,
    relative_error,
    tiny_config,
)

from hf_ttt.modeling_vittt import drop_path

by_family = pytest.mark.parametrize("family", FAMILIES)
STRIDE = {"vittt": 8, "h_vittt": 4}  # of the patch embedding or the stem
EVEN_HEADS = {"vittt": {}, "h_vittt": {"num_attention_heads": [2, 2, 4, 4]}}


def make_model(family, classes=CLASSIFIERS, **fields):
    return busy_model(classes[family], tiny_config(family, **fields))


def swap_halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.roll(x.shape[dim] // 2, dim)


def transposed_state(model) -> dict[str, torch.Tensor]:
    """The weights that do on a transposed image what the model's do on an image: kernels are transposed, and where a
    rotary embedding turns one half of the channels by rows and the other by columns, the halves (and so the heads)
    change places."""
    state = {}
    for name, value in model.state_dict().items():
        if name.endswith(("attn.w1", "attn.w2")):
            value = swap_halves(value, 1) if model.config.model_type == "h_vittt" else value
        elif value.dim() == 4:
            value = value.mT
        elif model.config.model_type == "h_vittt" and ".attn.qkv." in name:
            width = model.state_dict()[name.split("qkv")[0] + "proj.weight"].shape[0]
            q, k, v, rest = value.split([width] * 3 + [value.shape[0] - 3 * width])
            value = torch.cat([*(swap_halves(x, 0) for x in (q, k, v)), rest])
        elif model.config.model_type == "h_vittt" and name.endswith(".attn.proj.weight"):
            width = value.shape[0]
            value = torch.cat([swap_halves(value[:, :width], 1), value[:, width:]], 1)
        state[name] = value
    return state


@by_family
@pytest.mark.parametrize("size", [(32, 48), (48, 32), (33, 47), (8, 64)], ids=str)
def test_transposed_image(family, size):
    """With its direction-dependent weights transposed, a model gives the transposed map: rows are not columns."""
    model = make_model(family, BACKBONES, out_indices=[0, 1, 2], **EVEN_HEADS[family]).double()
    other = copy.deepcopy(model)
    other.load_state_dict(transposed_state(model))
    pixels = images(2, *size, dtype=torch.float64)
    want, got = model(pixels).feature_maps, other(pixels.mT).feature_maps
    for a, b in zip(got, want, strict=True):
        assert_close(a.mT, b, atol=1e-11, rtol=1e-11)
    untransposed = model(pixels.mT).feature_maps[-1].mT
    assert relative_error(untransposed, want[-1]) > 1e-2  # the weights do depend on the direction


@by_family
@pytest.mark.parametrize("size", [(33, 47), (38, 51)], ids=str)
def test_padding(family, size):
    """An image that patches do not fill is padded with zeros on the right and at the bottom."""
    model, pixels = make_model(family), images(2, *size)
    bottom, right = (-side % STRIDE[family] for side in size)
    assert bottom and right
    padded = F.pad(pixels, (0, right, 0, bottom))
    assert_close(model(pixels).logits, model(padded).logits)
    elsewhere = F.pad(pixels, (right, 0, bottom, 0))
    assert relative_error(model(elsewhere).logits, model(padded).logits) > 1e-3


@by_family
@pytest.mark.parametrize("classes", [MODELS, CLASSIFIERS, BACKBONES], ids=["model", "classifier", "backbone"])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 1, 32, 32), r"pixel_values of shape \[2, 1, 32, 32\] has 1 channels .* num_channels=3"),
        ((3, 32, 32), r"pixel_values of shape \[3, 32, 32\] must have four dimensions"),
        ((2, 3, 32, 3), r"pixel_values of shape \[2, 3, 32, 3\] is smaller than one patch of (8 × 8|4 × 4)"),
        ((2, 3, 0, 32), r"pixel_values of shape \[2, 3, 0, 32\] is smaller than one patch"),
        (None, r"pixel_values of shape None must have four dimensions"),
    ],
    ids=["channels", "rank", "narrow", "empty", "none"],
)
def test_refused_images(family, classes, shape, message):
    model = make_model(family, classes)
    with pytest.raises(ValueError, match=message):
        model(None if shape is None else torch.zeros(shape))


@by_family
def test_smallest_image_and_one_channel(family):
    """One patch, grey."""
    side = STRIDE[family]
    assert make_model(family, num_channels=1)(torch.ones(2, 1, side, side)).logits.isfinite().all()


@by_family
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_batch(family, implementation):
    model = make_model(family, ttt_implementation=implementation)
    assert model(images(0)).logits.shape == (0, 5)
    assert make_model(family, MODELS)(images(0)).pooler_output.shape == (0, model.config.hidden_size)


@by_family
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_a_batch(family, implementation):
    """Every image has fast weights of its own."""
    model = make_model(family, ttt_implementation=implementation).double()
    pixels = images(3, 40, 24, dtype=torch.float64)
    rows = torch.cat([model(row[None]).logits for row in pixels])
    assert_close(model(pixels).logits, rows, atol=1e-11, rtol=1e-11)


@by_family
def test_inference_changes_nothing(family):
    """The updated weights are not kept: the state dict and the next call's output stay as they are."""
    model, pixels = make_model(family), images(2)
    state = copy.deepcopy(model.state_dict())
    first = model(pixels).logits
    model(images(2, seed=1))
    assert torch.equal(model(pixels).logits, first)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@by_family
@pytest.mark.parametrize("fields", [{}, {"ttt_loss_type": "mse", "qkv_bias": False}, {"ttt_fast_weight": "linear"}])
def test_implementations_agree(family, fields):
    """Both evaluations, chosen by `set_ttt_implementation`: the same loss and gradients in float64."""
    model = make_model(family, **fields).double()
    results = []
    for implementation in IMPLEMENTATIONS:
        model.set_ttt_implementation(implementation)
        assert model.get_ttt_implementation() == implementation
        model.zero_grad()
        loss = model(images(2, 40, 24, dtype=torch.float64), labels=torch.tensor([0, 4])).loss
        loss.backward()
        results.append({"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}})
    assert_close(results[0], results[1], atol=1e-10, rtol=1e-10)


@by_family
def test_no_head(family, tmp_path):
    """With num_labels=0 the logits are the pooled features; saved and loaded."""
    model = make_model(family, num_labels=0)
    base = MODELS[family](model.config).eval()
    base.load_state_dict(model.state_dict())
    logits = model(images(2)).logits
    assert_close(logits, base(images(2)).pooler_output)
    model.save_pretrained(tmp_path)
    assert_close(CLASSIFIERS[family].from_pretrained(tmp_path)(images(2)).logits, logits)


@by_family
def test_pooled_features_and_tokens(family):
    """The pooled features are the mean of the tokens, in the order of rows, after the final norm."""
    model = make_model(family, MODELS)
    output = model(images(2, 40, 24), output_hidden_states=True)
    assert_close(output.pooler_output, output.last_hidden_state.mean(1))
    tokens = output.hidden_states[-1] if family == "vittt" else output.hidden_states[-1].flatten(2).mT
    normed = model.norm(tokens) if family == "vittt" else model.norm(tokens.mT).mT
    assert_close(output.last_hidden_state, normed)


@by_family
def test_outputs_as_tuple(family):
    model = make_model(family)
    inputs = {"pixel_values": images(2), "labels": torch.tensor([0, 4])}
    output = model(**inputs, output_hidden_states=True)
    loss, logits, hidden_states = model(**inputs, output_hidden_states=True, return_dict=False)
    assert torch.equal(loss, output.loss) and torch.equal(logits, output.logits)
    assert len(hidden_states) == len(output.hidden_states) == model.config.num_hidden_layers + 1


LOSSES = {
    "classes": ({}, torch.tensor([0, 4, 1]), F.cross_entropy),
    "several classes": ({}, torch.tensor([[1.0, 0, 1, 0, 0]] * 3), F.binary_cross_entropy_with_logits),
    "one number": ({"num_labels": 1}, torch.tensor([0.5, -1, 2]), lambda x, y: F.mse_loss(x[:, 0], y)),
    "several numbers": ({"problem_type": "regression"}, torch.linspace(-1, 1, 15).view(3, 5), F.mse_loss),
}


@by_family
@pytest.mark.parametrize("kind", LOSSES)
def test_losses(family, kind):
    """The loss that the labels call for."""
    fields, labels, loss = LOSSES[kind]
    output = make_model(family, **fields)(images(3), labels=labels)
    assert_close(output.loss, loss(output.logits, labels))


@by_family
def test_loss_over_accumulated_batches(family):
    """With `num_items_in_batch` a loss is the sum over it, so that those of parts add up to that of the whole."""
    model, pixels, labels = make_model(family), images(4), torch.tensor([0, 4, 1, 1])
    whole = model(pixels, labels=labels).loss
    parts = [model(pixels[i], labels=labels[i], num_items_in_batch=4).loss for i in (slice(1), slice(1, 4))]
    assert_close(sum(parts), whole)


@pytest.mark.parametrize("labels", [torch.tensor([0, 4, 1, 1]), torch.eye(5)[:4]], ids=["classes", "several classes"])
def test_trainer_accumulates_gradients(labels, tmp_path):
    """Two batches of two make the step of one batch of four, whichever loss the labels call for."""
    rows = [{"pixel_values": x, "labels": y} for x, y in zip(images(4), labels, strict=True)]
    states = []
    for batch, steps in ((4, 1), (2, 2)):
        model = make_model("vittt")
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            max_steps=1,
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=rows).train()
        states.append(model.state_dict())
    assert_close(states[1], states[0], atol=1e-6, rtol=1e-4)
    assert not torch.allclose(states[0]["head.bias"], make_model("vittt").head.bias)


def test_drop_path():
    """Half of the images are dropped whole, the others doubled, and none in evaluation."""
    torch.manual_seed(0)
    x = torch.ones(1000, 2, 3)
    dropped = drop_path(x, 0.5, training=True)
    kept = (dropped != 0).flatten(1)
    assert torch.equal(kept.all(1), kept.any(1))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert 0.45 < kept.float().mean() < 0.55
    assert drop_path(x, 0.5, training=False) is drop_path(x, 0.0, training=True) is x


@by_family
def test_stochastic_depth(family):
    """Rates grow linearly over all blocks; a block leaves some images at x + cpe(x) in training, none in evaluation."""
    model = make_model(family, drop_path_rate=0.5)
    stages = [model] if family == "vittt" else model.layers
    blocks = [block for stage in stages for block in stage.blocks]
    assert [block.rate for block in blocks] == pytest.approx(torch.linspace(0, 0.5, len(blocks)).tolist())
    block = blocks[-1]
    x = torch.randn(256, 2, 3, model.config.hidden_size)
    skipped = x + block.cpe(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    share = lambda: (block(x) == skipped).flatten(1).all(1).float().mean().item()  # noqa: E731
    block.train()
    assert share() == pytest.approx(0.25, abs=0.1)  # neither attention nor MLP
    block.eval()
    assert share() == 0
    undropped = make_model(family)
    undropped.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(images(2)).logits, undropped(images(2)).logits)


@by_family
def test_initialisation(family):
    """Linear and fast weights normal with deviation 0.02, zero biases, torch's defaults for convolutions and norms."""
    torch.manual_seed(0)
    fields = (
        {"hidden_size": 64}
        if family == "vittt"
        else {"hidden_sizes": [16, 32, 32, 64], "num_attention_heads": [1, 2, 2, 4]}
    )
    model = CLASSIFIERS[family](tiny_config(family, **fields))
    normal, checked = [], set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            normal.append(module.weight.flatten())
            assert not module.bias.any()
        elif isinstance(module, nn.Conv2d):
            bound = module.weight[0].numel() ** -0.5
            assert 0.8 * bound < module.weight.abs().max() <= bound
            assert module.weight.mean().abs() < 0.3 * bound
            if module.bias is not None:
                assert 0 < module.bias.abs().max() <= bound
        elif isinstance(module, (nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d)):
            assert (module.weight == 1).all() and not module.bias.any()
            if not isinstance(module, nn.LayerNorm):
                assert not module.running_mean.any() and (module.running_var == 1).all()
        elif name.endswith("attn"):
            fast = torch.cat([w.flatten() for w in (module.w1, module.w2, module.w3)])
            normal.append(fast)
            assert fast.std().item() == pytest.approx(0.02, rel=0.15)
        checked.add(type(module))
    assert {nn.Linear, nn.Conv2d, nn.LayerNorm} <= checked
    values = torch.cat(normal)
    assert values.std().item() == pytest.approx(0.02, rel=0.02)
    assert values.mean().abs() < 5 * 0.02 / len(values) ** 0.5
    assert (values / 0.02).pow(4).mean().item() == pytest.approx(3, abs=0.2)  # 1.8 of a uniform distribution


@by_family
def test_inner_loop_options_of_loading(family, tmp_path):
    """`ttt_implementation` given to from_pretrained wins over the saved one."""
    make_model(family, ttt_implementation="parallel").save_pretrained(tmp_path)
    assert CLASSIFIERS[family].from_pretrained(tmp_path).get_ttt_implementation() == "parallel"
    model = CLASSIFIERS[family].from_pretrained(tmp_path, ttt_implementation="recurrent")
    assert model.get_ttt_implementation() == "recurrent"


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("vittt", {"num_attention_heads": 3}, "num_attention_heads=3 does not divide hidden_size=16"),
        ("h_vittt", {"num_attention_heads": [2, 3, 4, 3]}, "num_attention_heads=3 does not divide hidden_sizes=16"),
        ("h_vittt", {"hidden_sizes": [8, 16, 16, 18]}, "18.*multiple of 4"),
        ("vittt", {"num_channels": 0}, "num_channels=0"),
        ("vittt", {"patch_size": 0}, "patch_size=0"),
        ("vittt", {"ttt_implementation": "parallel", "ttt_inner_steps": 2}, "set .*inner_steps=1"),
    ],
)
def test_models_that_cannot_be_built(family, fields, message):
    """The configuration can be made; building the model says what is wrong."""
    config = tiny_config(family, **fields)
    with pytest.raises(ValueError, match=message):
        CLASSIFIERS[family](config)
