# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Official state dicts become models with the published numbers, out of any kind of file, or an error says why not."""

import argparse
import json
import pickle
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from lact_cases import golden_index, golden_tensors
from nvs_cases import INDEX as NVS_INDEX
from nvs_cases import all_views, golden_inputs, golden_state, published_config, variant_config
from nvs_cases import busy_model as busy_nvs_model
from nvs_cases import tiny_config as tiny_nvs_config
from safetensors.torch import load_file, save_file
from vittt_cases import CLASSIFIERS, FAMILIES, busy_model, images, tiny_config

from hf_ttt import HViTTTBackbone, LaCTForCausalLM, LaCTNVSModel
from hf_ttt.conversion import checkpoint, from_official, read_state_dict
from hf_ttt.conversion.folder import new_folder

GOLDEN = Path(__file__).with_name("golden") / "vittt"
INDEX = json.loads((GOLDEN / "index.json").read_text())["files"]
MODELS = [name for name, entry in INDEX.items() if entry["kind"] == "model"]
DENSE = "backbone_det_official.safetensors"
EXAMPLES = {"vittt": "model_vittt_official_b.safetensors", "h_vittt": "model_hvittt_official_nonsquare.safetensors"}
TOLERANCE = 5e-5  # of the index for logits, relative to the greatest; 1.3e-5 is float32's own error


def official(name):
    """The architecture, state dict, constructor arguments and tensors of a golden file."""
    tensors, arguments = load_file(GOLDEN / name), INDEX[name]["ctor_args"]
    state = {key[3:]: value for key, value in tensors.items() if key.startswith("sd.")}
    return "h_vittt" if "dim" in arguments else "vittt", state, arguments, tensors


def official_lact(name):
    """The fields of the JSON file and the state dict of a golden language model."""
    tensors, prefix = golden_tensors(name), "state_dict/"
    state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    return golden_index()["models"][name]["config"], state


@torch.no_grad()
def check_logits(model, tensors):
    want = tensors["eval.logits"]
    torch.testing.assert_close(
        model(tensors["pixel_values"]).logits, want, atol=TOLERANCE * want.abs().max().item(), rtol=0
    )


def assert_equal(state, expected):
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], value) for key, value in expected.items())


# ---- models ----


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_read_from_the_weights(name):
    """Only the inner loop, which no weight shows, is said."""
    architecture, state, arguments, tensors = official(name)
    inner = {key: value for key, value in arguments.items() if key == "ttt_loss_type"}
    model = from_official(architecture, state, **inner)
    assert type(model) is CLASSIFIERS[architecture] and not model.training
    assert model.num_parameters() == INDEX[name]["num_parameters"]
    check_logits(model, tensors)


@pytest.mark.parametrize("name", MODELS)
def test_published_arguments(name):
    architecture, state, arguments, tensors = official(name)
    model = from_official(architecture, state, **arguments)
    check_logits(model, tensors)
    inferred = from_official(
        architecture, state, img_size=arguments["img_size"], ttt_loss_type=model.config.ttt_loss_type
    )
    for field in ("num_labels", "mlp_ratio", "qkv_bias", "num_attention_heads", "image_size"):
        assert getattr(model.config, field) == getattr(inferred.config, field), field


def test_names_of_the_classes():
    architecture, state, _, tensors = official(EXAMPLES["vittt"])
    names = dict(enumerate(("ant", "bee", "cat", "dog", "eel")))
    model = from_official(architecture, state, id2label=names, label2id={name: i for i, name in names.items()})
    assert (model.config.num_labels, model.config.id2label) == (5, names)
    assert from_official(architecture, state).config.id2label == {i: f"LABEL_{i}" for i in range(5)}
    check_logits(model, tensors)


def test_this_package_s_names():
    architecture, state, _, tensors = official(EXAMPLES["vittt"])
    fields = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_labels": 5, "patch_size": 16}
    model = from_official(architecture, state, **fields, drop_path_rate=0.1, ttt_implementation="recurrent")
    assert (model.config.drop_path_rate, model.get_ttt_implementation()) == (0.1, "recurrent")
    check_logits(model, tensors)


@torch.no_grad()
def test_dense_backbone():
    architecture, state, arguments, tensors = official(DENSE)
    for given in ({}, arguments, {"out_features": ["stage1", "stage2", "stage3"]}):
        model = from_official(architecture, state, **given)
        assert type(model) is HViTTTBackbone
        for case in INDEX[DENSE]["cases"]:
            for index, got in enumerate(model(tensors[f"{case['case']}.pixel_values"]).feature_maps):
                want = tensors[f"{case['case']}.steady.stage{index}"]
                torch.testing.assert_close(got, want, atol=2e-5 * want.abs().max().item(), rtol=0)


def test_backbone_of_a_detector():
    _, state, _, _ = official(DENSE)
    detector = {f"module.backbone.{key}": value for key, value in state.items()}
    detector["module.rpn_head.rpn_cls.weight"] = torch.zeros(3)
    with pytest.warns(UserWarning, match="left out rpn_head: only the backbone is converted"):
        model = from_official("h_vittt", detector)
    assert_equal(model.state_dict(), {key: value for key, value in state.items() if "rotations" not in key})


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrappers(prefix):
    architecture, state, _, tensors = official(EXAMPLES["h_vittt"])
    check_logits(from_official(architecture, {prefix + key: value for key, value in state.items()}), tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_model_of_this_package_saves_is_read_as_well(family):
    model = busy_model(CLASSIFIERS[family], tiny_config(family, qkv_bias=False, mlp_ratio=2.7, num_channels=1))
    converted = from_official(family, model.state_dict())
    assert_equal(converted.state_dict(), model.state_dict())
    assert converted.config.qkv_bias is False and converted.config.num_channels == 1


@pytest.mark.parametrize("widths", [[8, 16, 16, 24], [12, 20, 28, 44]])
@pytest.mark.parametrize("ratio", [0.3, 1.0, 2.7, 3.5, 4.0])
def test_ratio_of_the_mlp_gives_the_same_widths(widths, ratio):
    """A ratio of hidden / width, multiplied by width and rounded down, may be one short."""
    config = tiny_config("h_vittt", hidden_sizes=widths, num_attention_heads=[2, 2, 2, 2], mlp_ratio=ratio)
    model = CLASSIFIERS["h_vittt"](config)
    for given in ({}, {"mlp_ratio": ratio}):
        assert from_official("h_vittt", model.state_dict(), **given).num_parameters() == model.num_parameters()


def test_image_size_comes_from_the_rotary_tables_unless_it_is_given():
    architecture, state, _, _ = official("model_hvittt_official.safetensors")
    assert from_official(architecture, state).config.image_size == 64
    assert from_official(architecture, state, img_size=(96, 96)).config.image_size == 96
    without = {key: value for key, value in state.items() if "rotations" not in key}
    assert from_official(architecture, without).config.image_size == 224
    architecture, state, _, _ = official("model_hvittt_official_nonsquare.safetensors")
    assert from_official(architecture, state).config.image_size == [32, 64]


def test_half_precision_weights_become_float32():
    architecture, state, _, _ = official(EXAMPLES["vittt"])
    model = from_official(architecture, {key: value.half() for key, value in state.items()})
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_equal(model.state_dict(), {key: value.half().float() for key, value in state.items()})


@pytest.mark.parametrize("name", golden_index()["models"])
def test_lact(name):
    config, state = official_lact(name)
    model = from_official(
        "lact", state, **{"model_type": "lact_swiglu", "architectures": ["LaCTForCausalLM"], **config}
    )
    assert type(model) is LaCTForCausalLM
    assert_equal(model.state_dict(), state)
    reference = LaCTForCausalLM(model.config).eval()
    reference.load_state_dict(state, strict=True)
    with torch.no_grad():
        ids = torch.arange(1, 25)[None]
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, atol=0, rtol=0)


def test_lact_with_tied_embeddings_saved_once():
    (name,) = (n for n, entry in golden_index()["models"].items() if entry["config"].get("tie_word_embeddings"))
    config, state = official_lact(name)
    embeddings = state["model.embeddings.weight"]
    model = from_official("lact", {k: v for k, v in state.items() if k != "lm_head.weight"}, **config)
    assert torch.equal(model.lm_head.weight, embeddings) and model.lm_head.weight is model.model.embeddings.weight


def official_nvs(name):
    """Constructor arguments, state dict and tensors of a golden novel-view model: a file, or a variant."""
    if name in NVS_INDEX["models"]:
        tensors = golden_tensors(name)
        return published_config(name), golden_state(tensors), tensors, ""
    tensors, arguments = golden_tensors(NVS_INDEX["variants"]["file"]), variant_config(name)
    no_query = NVS_INDEX["variants"]["variants"][name]["no_query"]
    return arguments, golden_state(tensors, no_query), tensors, f"variant/{name}/"


NVS_MODELS = [*NVS_INDEX["models"], *NVS_INDEX["variants"]["variants"]]
NVS_EXAMPLE, NVS_NO_NORM = "model_nvsA_2heads_im2.safetensors", "model_nvsB_1head_im1_noqknorm.safetensors"


@torch.no_grad()
def check_views(model, tensors, prefix=""):
    inputs = golden_inputs(tensors)
    rendered, want = model(**inputs).rendered, tensors[f"{prefix}rendered_exact_muon"]
    torch.testing.assert_close(rendered, want, atol=NVS_INDEX["tolerance"]["rendered"], rtol=0)


@pytest.mark.parametrize("name", NVS_MODELS)
def test_nvs(name):
    """Published constructor arguments, with those that choose kernels, give the published views."""
    arguments, state, tensors, prefix = official_nvs(name)
    model = from_official("lact_nvs", state, **arguments, grad_calc_method="mannual", use_fused=True)
    assert type(model) is LaCTNVSModel and not model.training
    assert_equal(model.state_dict(), state)
    check_views(model, tensors, prefix)


@pytest.mark.parametrize("name", NVS_MODELS)
def test_nvs_sizes_are_read_from_the_weights(name):
    """Only what no weight shows is said: the inner loop, and the heads of an attention without norms."""
    arguments, state, tensors, prefix = official_nvs(name)
    attention, ttt, mlp = (entry["params"] for entry in arguments["block_config"])
    said = {key: ttt[key] for key in ("base_lr", "muon_update_steps", "ttt_loss_type") if key in ttt}
    if not attention["use_qk_norm"]:
        heads = {"type": "attention", "head_dim": attention["head_dim"]}
        said["block_config"] = [heads, {"type": "ttt"}, {"type": "mlp"}]
    model = from_official("lact_nvs", state, **said)
    check_views(model, tensors, prefix)
    whole = from_official("lact_nvs", state, **arguments)
    assert model.config.to_dict() == whole.config.to_dict()
    assert model.config.ttt_read_with == ("key" if ttt.get("no_query") else "query")


def test_nvs_arguments_override_those_of_the_layers():
    """Of the published TTT entry; `no_query` is what the weights say, whatever an overridden entry says."""
    arguments, state, _, _ = official_nvs("no_query")
    model = from_official("lact_nvs", state, **arguments, ttt_loss_type="mse", base_lr=0.5, muon_update_steps=3)
    assert (model.config.ttt_loss_type, model.config.base_lr, model.config.muon_update_steps) == ("mse", 0.5, 3)
    arguments["block_config"][1]["params"]["no_query"] = False
    assert from_official("lact_nvs", state, **arguments, no_query=True).config.ttt_read_with == "key"


@pytest.mark.parametrize("rule", ["baseline", "no_query", "variant6"])
@pytest.mark.parametrize("multi", [1, 2, 0.7])
def test_nvs_model_of_this_package(rule, multi):
    """What a model saves is read as well, and its config.json's fields are arguments."""
    multi = 1 if rule == "variant6" else multi
    block = [{"type": "ttt", "inter_multi": multi}, {"type": "attention", "head_dim": 12}, {"type": "mlp"}]
    model = busy_nvs_model(tiny_nvs_config(rule, block_config=block))
    converted = from_official("lact_nvs", model.state_dict(), **model.config.to_diff_dict())
    assert_equal(converted.state_dict(), model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(converted(**all_views()).rendered, model(**all_views()).rendered, atol=1e-5, rtol=0)


def test_any_missing_tensor_of_nvs_is_named():
    """Also one that the sizes are read from."""
    arguments, state, _, _ = official_nvs(NVS_EXAMPLE)
    for key in state:
        with pytest.raises(ValueError) as error:
            from_official("lact_nvs", {k: v for k, v in state.items() if k != key})
        assert str(error.value).endswith(f"does not fit LaCTNVSModel: {key} is missing"), key


NVS_REFUSED = {  # arguments → what is said
    "dim": ({"dim": 64}, r"dim=64 contradicts .*.weight of shape \[32\], which means hidden_size=32"),
    "layers": ({"layers": 24}, "layers=24 contradicts blocks.1.*, which means num_hidden_layers=2"),
    "patch": ({"patch_size": 8}, r"patch_size=8 contradicts image_token_decoder.1.weight of shape \[48, 32\], .*=4"),
    "query": ({"no_query": True}, r"no_query=True contradicts .*to_qkv.weight of shape \[96, 32\], .*='query'"),
    "read": ({"ttt_read_with": "key"}, "ttt_read_with='key' contradicts .*to_qkv.weight"),
    "both": ({"no_query": False, "ttt_read_with": "query"}, "no_query and ttt_read_with both set ttt_read_with"),
    "two": ({"dim": 32, "hidden_size": 32}, "dim and hidden_size both set hidden_size: give one of them"),
    "name": ({"depth": 2}, "depth=2 is not known; expected arguments of the published code, such as patch_size, dim"),
    "loss": ({"ttt_loss_type": "only_w2"}, "ttt_loss_type='only_w2' is not known"),
    "misspelt": ({"base_rl": 0.1}, "base_rl=0.1 is not known"),
    "momentum": ({"use_momentum": True}, "use_momentum=True is not there: no published model has it"),
    "modules": (
        {"block_config": [{"type": "ttt"}, {"type": "mlp"}]},
        r"block_config has modules \['ttt', 'mlp'\] where the weights have \['attention', 'ttt', 'mlp'\]",
    ),
}
NVS_REFUSED_ENTRIES = {
    "heads": (0, {"head_dim": 8}, r"block_config\[0\]: head_dim=8 contradicts .*_norm.weight of shape \[16\], .*=16"),
    "norms": (0, {"use_qk_norm": False}, r"block_config\[0\]: use_qk_norm=False contradicts .*use_qk_norm=True"),
    "one head": (1, {"head_dim": None}, r"block_config\[1\]: head_dim=None contradicts .*w0 of shape \[2, 16, 32\]"),
    "hidden": (1, {"inter_multi": 1}, r"block_config\[1\]: inter_multi=1 contradicts .*inter_multi=2"),
    "no query": (1, {"no_query": True}, r"block_config\[1\]: no_query=True contradicts .*no_query=False"),
    "mlp": (2, {"inter_multi": 4}, r"block_config\[2\]: inter_multi=4 contradicts .*c_fc.weight .*inter_multi=2"),
    "unknown": (1, {"momentum": True}, r"block_config\[1\] has 'momentum', which 'ttt' does not take"),
}


@pytest.mark.parametrize("case", NVS_REFUSED)
def test_nvs_arguments_that_are_refused(case):
    """Those that contradict the weights or each other, and misspelt ones."""
    _, state, _, _ = official_nvs(NVS_EXAMPLE)
    arguments, message = NVS_REFUSED[case]
    with pytest.raises(ValueError, match=message):
        from_official("lact_nvs", state, **arguments)


@pytest.mark.parametrize("case", NVS_REFUSED_ENTRIES)
def test_nvs_entries_that_are_refused(case):
    """Those of a block that contradict the weights."""
    arguments, state, _, _ = official_nvs(NVS_EXAMPLE)
    index, params, message = NVS_REFUSED_ENTRIES[case]
    arguments["block_config"][index]["params"].update(params)
    with pytest.raises(ValueError, match=message):
        from_official("lact_nvs", state, **arguments)


def test_nvs_heads_that_no_weight_shows():
    """Attention without norms may have heads of any width."""
    _, state, _, _ = official_nvs(NVS_NO_NORM)
    with pytest.raises(ValueError, match=r"block_config\[0\] must say head_dim: the weights have no q_norm"):
        from_official("lact_nvs", state)


# ---- what does not fit ----


@pytest.mark.parametrize("family", FAMILIES)
def test_any_missing_tensor_is_named(family):
    """Also one that the sizes are read from."""
    _, state, _, _ = official(EXAMPLES[family])
    for key in state:
        if "rotations" not in key:
            rest = {k: v for k, v in state.items() if k != key}
            with pytest.raises(ValueError) as error:
                from_official(family, rest)
            assert str(error.value).endswith(f": {key} is missing"), key


@pytest.mark.parametrize("family", FAMILIES)
def test_all_problems_are_in_one_error(family):
    _, state, _, _ = official(EXAMPLES[family])
    first, second, *_ = (key for key in state if key.endswith("norm1.bias"))
    state[first] = torch.zeros(7)
    del state[second], state["norm.weight"]
    state["extra.weight"] = torch.zeros(1)
    state["head.bias"] = state["head.bias"].long()
    with pytest.raises(ValueError) as error:
        from_official(family, state)
    width, labels = state["head.weight"].shape[1], state["head.weight"].shape[0]
    own = state[first.replace("bias", "weight")].shape[0]
    assert f"does not fit {CLASSIFIERS[family].__name__}: " in str(error.value)
    assert f"{second}, norm.weight are missing; extra.weight is unexpected; " in str(error.value)
    assert f"{first} ([7] instead of [{own}])" in str(error.value)
    assert f"head.bias ([{labels}] of integers instead of [{labels}]) are of a wrong shape" in str(error.value)
    assert width == state["norm.bias"].shape[0]


def test_a_long_list_is_cut():
    _, state, _, _ = official(EXAMPLES["vittt"])
    blocks = {f"extra.{i}": torch.zeros(1) for i in range(25)}
    with pytest.raises(ValueError, match=r"extra\.19 and 5 more are unexpected"):
        from_official("vittt", {**state, **blocks})


@pytest.mark.parametrize(
    ("family", "argument", "value", "weights"),
    [
        ("vittt", "embed_dim", 48, r"blocks.0.norm1.bias of shape \[32\], which means hidden_size=32"),
        ("vittt", "hidden_size", 48, "hidden_size=32"),
        ("vittt", "depth", 12, "num_hidden_layers=3"),
        ("vittt", "num_heads", 4, r"attn.w1 of shape \[1, 2, 16, 16\], which means num_attention_heads=2"),
        ("vittt", "patch_size", 8, "patch_size=16"),
        ("vittt", "patch_size", (16, 8), "patch_size=16"),
        ("vittt", "in_chans", 1, "num_channels=3"),
        ("vittt", "num_classes", 1000, r"head.bias of shape \[5\], which means num_labels=5"),
        ("vittt", "id2label", {0: "cat", 1: "dog"}, "num_labels=5"),
        ("vittt", "mlp_ratio", 4.0, "mlp_ratio=2"),
        ("vittt", "qkv_bias", False, "qkv_bias=True"),
        ("h_vittt", "dim", (64, 128, 320, 512), r"hidden_sizes=\[8, 16, 24, 32\]"),
        ("h_vittt", "depths", [1, 3, 9, 4], r"depths=\[1, 1, 1, 1\]"),
        ("h_vittt", "num_heads", [1, 2, 3, 4], r"num_attention_heads=\[2, 2, 3, 2\]"),
        ("h_vittt", "mlp_ratio", 4.0, "mlp_ratio=2"),
        ("h_vittt", "num_classes", 0, "num_labels=6"),
    ],
)
def test_arguments_that_contradict_the_weights(family, argument, value, weights):
    _, state, _, _ = official(EXAMPLES[family])
    with pytest.raises(ValueError, match=rf"{argument}=.* contradicts .*{weights}"):
        from_official(family, state, **{argument: value})


def test_contradictions_are_in_one_error():
    _, state, _, _ = official(EXAMPLES["vittt"])
    with pytest.raises(ValueError, match="embed_dim=48 contradicts .*; depth=1 contradicts "):
        from_official("vittt", state, depth=1, embed_dim=48)


def test_maps_of_a_dense_backbone_that_contradict():
    _, state, _, _ = official(DENSE)
    with pytest.raises(ValueError, match=r"out_indices=\(1, 2\) contradicts norm0.weight .*out_features=\['stage1'"):
        from_official("h_vittt", state, out_indices=(1, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 32, "hidden_size": 32}, "embed_dim and hidden_size both set hidden_size: give one of them"),
        ({"width": 32}, "width=32 is not known; expected arguments of the published code, such as img_size, in_chans"),
        ({"dim": [32]}, r"dim=\[32\] is not known"),
        ({"distilled": True}, "distilled=True is not there"),
        ({"representation_size": 64}, "representation_size=64 is not there"),
        ({"drop_rate": 0.1}, "drop_rate=0.1 is not there"),
        ({"ttt_loss_type": "only_w2"}, "ttt_loss_type='only_w2' is not known"),
        ({"drop_path_rate": 1.5}, "drop_path_rate=1.5 must be in"),
        ({"img_size": 0}, r"img_size=0 must be the side of an image in pixels, or \[height, width\]"),
        ({"image_size": [32, 32, 32]}, r"image_size=\[32, 32, 32\] must be the side"),
        ({"image_size": "224"}, "image_size='224' must be the side"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    _, state, _, _ = official(EXAMPLES["vittt"])
    with pytest.raises(ValueError, match=message):
        from_official("vittt", state, **arguments)


def test_arguments_without_effect():
    _, state, _, tensors = official(EXAMPLES["vittt"])
    arguments = {"drop_rate": 0.0, "attn_drop_rate": 0.1, "distilled": False, "representation_size": None}
    check_logits(from_official("vittt", state, **arguments, use_checkpoint=True), tensors)


@pytest.mark.parametrize("architecture", ["nvs", "vit", None])
def test_other_architectures(architecture):
    with pytest.raises(
        ValueError, match=f"architecture={architecture!r} cannot be converted; expected one of 'vittt', "
    ):
        from_official(architecture, {"a": torch.zeros(1)})


@pytest.mark.parametrize(("architecture", "name"), [("vittt", EXAMPLES["h_vittt"]), ("h_vittt", EXAMPLES["vittt"])])
def test_another_architecture_s_weights(architecture, name):
    other, state, _, _ = official(name)
    with pytest.raises(ValueError, match=f"architecture='{architecture}' contradicts state_dict, .* of '{other}'"):
        from_official(architecture, state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "it has nothing"),
        ({"model": {"a": torch.zeros(1)}, "epoch": 3}, r"it has 'model' \(dict\), 'epoch' \(int\)"),
    ],
)
def test_what_is_no_state_dict(state, message):
    with pytest.raises(ValueError, match=f"state_dict must map names to tensors; {message}"):
        from_official("vittt", state)


# ---- files ----

RAW, EMA = {"a": torch.ones(2)}, {"a": torch.full((2,), 2.0)}
LAYOUTS = {  # what a file holds → the weights that each choice takes ("auto" for vittt, then for h_vittt)
    "bare": (RAW, {"raw": RAW, "vittt": RAW, "h_vittt": RAW}),
    "model": ({"model": RAW, "epoch": 3}, {"raw": RAW, "vittt": RAW, "h_vittt": RAW}),
    "state_dict": ({"state_dict": RAW}, {"raw": RAW, "vittt": RAW, "h_vittt": RAW}),
    "ema": ({"ema": EMA, "model": RAW}, {"ema": EMA, "raw": RAW, "vittt": RAW, "h_vittt": EMA}),
    "state_dict_ema": (
        {"model": RAW, "optimizer": {}, "state_dict_ema": EMA},
        {"ema": EMA, "raw": RAW, "vittt": RAW, "h_vittt": EMA},
    ),
    "only_ema": ({"state_dict_ema": EMA}, {"ema": EMA, "vittt": EMA, "h_vittt": EMA}),
    "no_ema": ({"model": RAW, "state_dict_ema": None}, {"raw": RAW, "vittt": RAW, "h_vittt": RAW}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("new_format", [True, False])
def test_layouts(tmp_path, layout, new_format):
    content, expected = LAYOUTS[layout]
    path = tmp_path / "checkpoint.pth"
    torch.save(content, path, _use_new_zipfile_serialization=new_format)
    for architecture in FAMILIES:
        assert_equal(read_state_dict(path, architecture), expected[architecture])
        for weights in ("ema", "raw"):
            if weights in expected:
                assert_equal(read_state_dict(str(path), architecture, weights=weights), expected[weights])
            else:
                with pytest.raises(ValueError, match=f"weights='{weights}': 'checkpoint.pth' has no state dict under"):
                    read_state_dict(path, architecture, weights=weights)


def test_safetensors(tmp_path):
    save_file(RAW, tmp_path / "model.safetensors")
    assert_equal(read_state_dict(tmp_path / "model.safetensors"), RAW)


def test_file_on_the_hub(tmp_path, monkeypatch):
    torch.save({"model": RAW}, tmp_path / "x.pth")
    asked = []
    monkeypatch.setattr(checkpoint, "hf_hub_download", lambda *names: asked.append(names) or str(tmp_path / "x.pth"))
    assert_equal(read_state_dict("someone/ViTTT/sub/vittt_s.pth"), RAW)
    assert asked == [("someone/ViTTT", "sub/vittt_s.pth")]


def test_file_that_is_not_on_the_hub(monkeypatch):
    def fail(*_):
        raise OSError("404 Client Error")

    monkeypatch.setattr(checkpoint, "hf_hub_download", fail)
    with pytest.raises(OSError, match="source='a/b/c.pth' is no file here, and cannot be downloaded .*: 404 Client"):
        read_state_dict("a/b/c.pth")


@pytest.fixture
def pickled(tmp_path, monkeypatch):
    """A checkpoint with a configuration object of a package that can be made to disappear, as published ones have."""
    module = types.ModuleType("a_config_package")
    module.CfgNode = type("CfgNode", (dict,), {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    path = tmp_path / "checkpoint.pth"
    torch.save({"model": RAW, "config": module.CfgNode(MODEL="vittt_s")}, path)
    return path


def test_pickled_configuration_needs_the_opt_in(pickled):
    """torch.load told to set weights_only=False, without a word on which file or what the object is."""
    with pytest.raises(ValueError, match=r"pickled Python object \(a_config_package.CfgNode\).*--allow-pickle"):
        read_state_dict(pickled)
    with pytest.warns(UserWarning, match="allow_pickle: reading 'checkpoint.pth' runs code from the file"):
        assert_equal(read_state_dict(pickled, allow_pickle=True), RAW)


def test_opt_in_does_not_warn_where_it_is_not_needed(tmp_path):
    torch.save({"model": RAW}, tmp_path / "x.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(read_state_dict(tmp_path / "x.pth", allow_pickle=True), RAW)


def test_pickled_configuration_of_a_class_that_is_not_installed(pickled, monkeypatch):
    module = sys.modules["a_config_package"]
    message = "whose class is not installed .*a_config_package"
    monkeypatch.delattr(module, "CfgNode")
    with pytest.warns(UserWarning), pytest.raises(ImportError, match=message):
        read_state_dict(pickled, allow_pickle=True)
    monkeypatch.delitem(sys.modules, "a_config_package")
    with pytest.warns(UserWarning), pytest.raises(ImportError, match=message):
        read_state_dict(pickled, allow_pickle=True)


def test_pickled_objects_of_a_training_loop(tmp_path):
    """Accuracies are often NumPy scalars, and arguments a Namespace: not allowed by torch.load either."""
    for value in (argparse.Namespace(model="vittt_s"), torch.ones(1).numpy()[0], print):
        torch.save({"model": RAW, "extra": value}, tmp_path / "x.pth")
        try:
            torch.load(tmp_path / "x.pth", weights_only=True)
            readable = True  # newer versions of torch allow some
        except pickle.UnpicklingError:
            readable = False
        if not readable:
            with pytest.raises(ValueError, match="holds, beside tensors, a pickled Python object"):
                read_state_dict(tmp_path / "x.pth")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_equal(read_state_dict(tmp_path / "x.pth", allow_pickle=True), RAW)
    assert not readable


@pytest.mark.parametrize("content", [b"", b"hello world", b"PK\x03\x04junk", b"<!doctype html>"])
@pytest.mark.parametrize("allow_pickle", [True, False])
def test_damaged_files(tmp_path, content, allow_pickle):
    (tmp_path / "x.pth").write_bytes(content)
    with pytest.raises(ValueError, match="source='x.pth' is damaged, or not a file of torch.save"):
        read_state_dict(tmp_path / "x.pth", allow_pickle=allow_pickle)
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="source='x.safetensors' is not a safetensors file"):
        read_state_dict(tmp_path / "x.safetensors")


def test_a_file_that_holds_no_dictionary(tmp_path):
    torch.save([torch.ones(1)], tmp_path / "x.pth")
    with pytest.raises(ValueError, match="source='x.pth' holds a list, not a dictionary of tensors"):
        read_state_dict(tmp_path / "x.pth")


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(
        ValueError, match="source='.*' is a folder; expected the path of a checkpoint, or 'hub-id/file'"
    ):
        read_state_dict(tmp_path)
    with pytest.raises(ValueError, match="source='vittt.pth' is no file that exists"):
        read_state_dict("vittt.pth")
    for source in ("./data/vittt/x.pth", str(tmp_path / "x.pth")):
        with pytest.raises(ValueError, match=f"source='{source}' is no file that exists"):
            read_state_dict(source)
    with pytest.raises(ValueError, match="weights='best' is not one of 'auto', 'ema', 'raw'"):
        read_state_dict("vittt.pth", weights="best")


@pytest.mark.parametrize("family", FAMILIES)
def test_training_checkpoint(tmp_path, family):
    """Everything at once: both weights, prefixes, an optimizer; the model computes the published logits."""
    _, state, _, tensors = official(EXAMPLES[family])
    wrapped = {f"module.{key}": value for key, value in state.items()}
    other = {key: value + 1 for key, value in wrapped.items()}
    raw, ema = (wrapped, other) if family == "vittt" else (other, wrapped)
    torch.save({"model": raw, "state_dict_ema": ema, "optimizer": {"state": {}}, "epoch": 1}, tmp_path / "x.pth")
    check_logits(from_official(family, read_state_dict(tmp_path / "x.pth", family)), tensors)


def test_conversion_leaves_the_random_state_alone():
    _, state, _, _ = official(EXAMPLES["vittt"])
    before = torch.get_rng_state()
    model = from_official("vittt", state)
    assert torch.equal(torch.get_rng_state(), before)
    state["head.bias"].add_(1)
    assert not torch.equal(model.head.bias, state["head.bias"])  # the model has its own copy
    assert torch.isfinite(model(images(1)).logits).all()


# ---- folders ----


def test_folder_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "deep" / "model"
    with pytest.raises(RuntimeError), new_folder(target) as folder:
        (folder / "half").touch()
        raise RuntimeError
    assert not target.exists() and list(target.parent.iterdir()) == []
    with new_folder(target) as folder:
        (folder / "config.json").touch()
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert target.stat().st_mode == target.parent.stat().st_mode  # the temporary folder is private, the model is not


def test_folder_that_is_replaced(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("old")
    with pytest.raises(ValueError, match="is not empty; choose another folder, or set --overwrite"), new_folder(target):
        pass
    with pytest.raises(RuntimeError), new_folder(target, overwrite=True):
        raise RuntimeError
    assert (target / "config.json").read_text() == "old"
    with new_folder(target, overwrite=True) as folder:
        (folder / "config.json").write_text("new")
    assert (target / "config.json").read_text() == "new" and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_folder_that_is_no_model_is_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="has no config.json, so it is no model"), new_folder(tmp_path, overwrite=True):
        pass
    with (
        pytest.raises(ValueError, match="thesis.tex' is a file; expected a folder"),
        new_folder(tmp_path / "thesis.tex"),
    ):
        pass
    assert (tmp_path / "thesis.tex").exists()
