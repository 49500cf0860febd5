# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""ViTTT against numbers computed with the published code: inner steps, blocks, whole models and the dense backbone.

`golden/vittt/index.json` says where each file comes from and what it holds; tolerances are the index's, relative to a
tensor's greatest value. Values that are analytically zero are compared absolutely.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from hf_ttt import (
    HViTTTBackbone,
    HViTTTConfig,
    HViTTTForImageClassification,
    ViTTTConfig,
    ViTTTForImageClassification,
)
from hf_ttt.configuration_vittt import ViTTTConfig as Config
from hf_ttt.modeling_vittt import ViTTTAttention, rotary_tables, rotate
from hf_ttt.ttt_vision import conv_step, glu_step

GOLDEN = Path(__file__).with_name("golden") / "vittt"
INDEX = json.loads((GOLDEN / "index.json").read_text())["files"]
IMPLEMENTATIONS = ("recurrent", "parallel")


def files(kind):
    return [name for name, entry in INDEX.items() if entry["kind"] == kind]


def loss_name(entry):
    return {"official": "dot_product", None: "dot_product"}.get(entry.get("variant"), entry.get("variant"))


def case_tensors(name, case):
    """The tensors of a case as {"in": …, "cot": …, "out": …, "grad": …}."""
    parts = {"in": {}, "cot": {}, "out": {}, "grad": {}}
    for key, value in load_file(GOLDEN / name).items():
        if key.startswith(case + "."):
            _, kind, rest = key.split(".", 2)
            parts[kind][rest] = value
    return parts


def check(name, key, got, want, tolerance):
    facts = INDEX[name]["fp32_vs_fp64"].get(key, {})
    scale = 1.0 if facts.get("analytically_zero") else want.abs().max().item()
    limit = 1e-5 if facts.get("analytically_zero") else tolerance * scale
    assert got.numel() == want.numel(), key
    error = (got.double().reshape(want.shape) - want.double()).abs().max().item()
    assert error <= limit, f"{name} {key}: {error:.2e} > {limit:.2e}"


def cases(kind):
    return [(name, case) for name in files(kind) for case in INDEX[name]["cases"]]


def case_id(value):
    return value["case"] if isinstance(value, dict) else value.removesuffix(".safetensors")


@pytest.mark.parametrize(("name", "case"), cases("op_inner_train_glu"), ids=case_id)
def test_gated_step(name, case):
    parts = case_tensors(name, case["case"])
    x = {key: value.clone().requires_grad_() for key, value in parts["in"].items()}
    rule = Config(ttt_loss_type=loss_name(INDEX[name])).rule
    w1, w2 = glu_step(x["k"], x["v"], x["w1"], x["w2"], rule, lr=case["lr"])
    out = {key: w[: len(parts["out"][key])] for key, w in (("w1", w1), ("w2", w2))}  # one row where it stays as it is
    for key, want in parts["out"].items():
        check(name, f"{case['case']}.out.{key}", out[key], want, 1e-5)
    sum((out[key].mul(cotangent).sum() for key, cotangent in parts["cot"].items())).backward()
    for key, want in parts["grad"].items():
        got = torch.zeros_like(x[key]) if x[key].grad is None else x[key].grad
        check(name, f"{case['case']}.grad.{key}", got, want, 1e-5)


@pytest.mark.parametrize(("name", "case"), cases("op_inner_train_dwconv"), ids=case_id)
def test_depthwise_step(name, case):
    parts = case_tensors(name, case["case"])
    x = {key: value.clone().requires_grad_() for key, value in parts["in"].items()}
    k, v = (x[key].permute(0, 2, 3, 1) for key in ("k", "v"))
    rule = Config(ttt_loss_type=loss_name(INDEX[name])).rule
    w = conv_step(k, v, x["w"], rule, lr=case["lr"]).mT.reshape(parts["out"]["w"].shape)
    check(name, f"{case['case']}.out.w", w, parts["out"]["w"], 1e-5)
    w.mul(parts["cot"]["w"]).sum().backward()
    for key, want in parts["grad"].items():
        got = torch.zeros_like(x[key]) if x[key].grad is None else x[key].grad
        check(name, f"{case['case']}.grad.{key}", got, want, 1e-5)


@pytest.mark.parametrize(("name", "case"), cases("rope"), ids=case_id)
def test_rotary_embedding(name, case):
    parts = case_tensors(name, case["case"])
    height, width, channels = case["h"], case["w"], case["dim"]
    x = parts["in"]["x"].clone().requires_grad_()
    cos, sin = rotary_tables(height, width, channels, 10000.0, x)
    torch.testing.assert_close(torch.stack([cos, sin], -1), parts["in"]["rotations"], atol=1e-6, rtol=0)
    out = rotate(x, cos, sin)
    check(name, f"{case['case']}.out.y", out, parts["out"]["y"], 1e-5)
    out.mul(parts["cot"]["y"]).sum().backward()
    check(name, f"{case['case']}.grad.x", x.grad, parts["grad"]["x"], 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("name", "case"), cases("ttt_block"), ids=case_id)
def test_block(name, case, implementation):
    parts, width = case_tensors(name, case["case"]), case["dim"]
    config = Config(ttt_loss_type=loss_name(INDEX[name]), ttt_implementation=implementation, qkv_bias=case["qkv_bias"])
    block = ViTTTAttention(config, width, case["heads"])
    block.load_state_dict({k: v for k, v in parts["in"].items() if k not in ("x", "rotations")}, strict=True)
    x = parts["in"]["x"].clone().requires_grad_()
    rotary = rotary_tables(case["h"], case["w"], width, 10000.0, x) if case["rope"] else None
    grid = x.unflatten(1, (case["h"], case["w"]))
    tokens = block.tokens(grid, rotary)
    w1, w2 = glu_step(tokens.k, tokens.v, block.w1, block.w2, config.rule)
    w3 = conv_step(tokens.k_map, tokens.v_map, block.w3, config.rule).mT
    updated = {"aux_w1": w1, "aux_w2": w2, "aux_w3": w3.reshape(-1, 1, 3, 3)}
    for key, value in updated.items():
        if key in parts["out"]:
            want = parts["out"][key]
            check(name, f"{case['case']}.out.{key}", value, want.expand_as(value), 2e-5)
    out = block(grid, rotary).flatten(1, 2)
    check(name, f"{case['case']}.out.y", out, parts["out"]["y"], 2e-5)
    out.mul(parts["cot"]["y"]).sum().backward()
    grads = {"x": x.grad, **{key: p.grad for key, p in block.named_parameters()}}
    for key, want in parts["grad"].items():
        got = torch.zeros_like(want) if grads[key] is None else grads[key]
        check(name, f"{case['case']}.grad.{key}", got, want, 5e-5)


def make_config(arguments, implementation):
    """The configuration of a golden model, from the published constructor's arguments."""
    names = {
        "img_size": "image_size",
        "embed_dim": "hidden_size",
        "depth": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_classes": "num_labels",
        "dim": "hidden_sizes",
    }
    fields = {names.get(key, key): value for key, value in arguments.items() if key != "img_size"}
    config_class = HViTTTConfig if "dim" in arguments else ViTTTConfig
    return config_class(**fields, ttt_implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", files("model"), ids=case_id)
def test_model(name, implementation):
    entry, tensors = INDEX[name], load_file(GOLDEN / name)
    config = make_config(entry["ctor_args"], implementation)
    model_class = HViTTTForImageClassification if config.model_type == "h_vittt" else ViTTTForImageClassification
    model = model_class(config)
    state = {key[3:]: value for key, value in tensors.items() if key.startswith("sd.") and "rotations" not in key}
    model.load_state_dict(state, strict=True)
    assert sum(p.numel() for p in model.parameters()) == entry["num_parameters"]
    for mode in entry["modes"]:
        model.load_state_dict(state, strict=True)
        model.train(mode == "train").zero_grad()
        pixels = tensors["pixel_values"].clone().requires_grad_()
        output = model(pixels, labels=tensors["labels"])
        check(name, f"{mode}.logits", output.logits, tensors[f"{mode}.logits"], 5e-5)
        check(name, f"{mode}.loss", output.loss, tensors[f"{mode}.loss"], 5e-5)
        tolerance = 5e-4 if mode == "train" else 3e-4
        output.loss.backward()
        if f"{mode}.grad.pixel_values" in tensors:
            check(name, f"{mode}.grad.pixel_values", pixels.grad, tensors[f"{mode}.grad.pixel_values"], tolerance)
        for key, parameter in model.named_parameters():
            want = tensors[f"{mode}.gradnorm.{key}"]
            norm = torch.zeros(()) if parameter.grad is None else parameter.grad.norm()
            check(name, f"{mode}.gradnorm.{key}", norm, want, tolerance)
        for key, want in tensors.items():
            if mode == "train" and key.startswith("train.post."):
                got = model.state_dict()[key.removeprefix("train.post.")]
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", files("model"), ids=case_id)
def test_pooled_features(name):
    entry, tensors = INDEX[name], load_file(GOLDEN / name)
    config = make_config(entry["ctor_args"], "auto")
    model_class = HViTTTForImageClassification if config.model_type == "h_vittt" else ViTTTForImageClassification
    model = model_class(config).eval()
    model.load_state_dict({k[3:]: v for k, v in tensors.items() if k.startswith("sd.") and "rotations" not in k})
    with torch.no_grad():
        pooled = model._encode(tensors["pixel_values"], None).pooler_output
        check(name, "eval.pooled", pooled, tensors["eval.pooled"], 5e-5)
        torch.testing.assert_close(F.linear(pooled, model.head.weight, model.head.bias), tensors["eval.logits"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", files("dense_backbone"))
def test_dense_backbone(name, implementation):
    """At odd sizes. The published first call differs from all later ones (its scale is set too late): the latter."""
    entry, tensors = INDEX[name], load_file(GOLDEN / name)
    arguments = entry["ctor_args"]
    config = HViTTTConfig(
        hidden_sizes=arguments["dim"],
        depths=arguments["depths"],
        mlp_ratio=arguments["mlp_ratio"],
        out_indices=[i + 1 for i in arguments["out_indices"]],
        ttt_implementation=implementation,
    )
    model = HViTTTBackbone(config).eval()
    state = {key[3:]: value for key, value in tensors.items() if key.startswith("sd.") and "rotations" not in key}
    model.load_state_dict(state, strict=True)
    for case in entry["cases"]:
        with torch.no_grad():
            maps = model(tensors[f"{case['case']}.pixel_values"]).feature_maps
        for index, got in enumerate(maps):
            key = f"{case['case']}.steady.stage{index}"
            check(name, key, got, tensors[key], 2e-5)
