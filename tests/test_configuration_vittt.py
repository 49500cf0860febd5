# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""ViTTTConfig and HViTTTConfig: published sizes and loss names, what contradicts or is absent, and what is written."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from vittt_cases import BACKBONES, CLASSIFIERS, CONFIGS, FAMILIES, tiny_config

from hf_ttt import HViTTTConfig, ViTTTConfig
from hf_ttt.configuration_ttt import VARIANTS
from hf_ttt.ttt_vision import VisionRule

GOLDEN = Path(__file__).with_name("golden") / "vittt"
SIZES = ("tiny", "small", "base")
DEFAULTS = {
    "ttt_loss_type": "dot_product",
    "ttt_update": "all",
    "ttt_fast_weight": "swiglu",
    "ttt_direction": "descent",
    "ttt_read_with": "query",
    "use_muon": True,
    "ttt_inner_steps": 1,
    "ttt_implementation": "auto",
}
LAST = {"ttt_update": "last"}
LINEAR = {**LAST, "ttt_fast_weight": "linear"}
LOSS_NAMES = {  # what each name of the published code and its ablations stands for, where it differs from the default
    "dot_product": {},
    "ga_dot_product": {"ttt_direction": "ascent"},
    "mse": {"ttt_loss_type": "mse"},
    "no_query_dot_product": {"ttt_read_with": "key"},
    "only_w1": LAST,
    "only_w1_no_muon": {**LAST, "use_muon": False},
    "only_w1_straight_qk": LINEAR,
    "only_w1_straight_qk_no_muon": {**LINEAR, "use_muon": False},
    "only_w1_parallel": {**LAST, "ttt_implementation": "parallel"},
}
ALL = pytest.mark.parametrize("family", FAMILIES)


def inner_loop(config):
    return {name: getattr(config, name) for name in DEFAULTS}


def golden_shapes(name):
    """Name → shape of all parameters and buffers of a published model, rotary tables left out; and its parameters."""
    facts = json.loads((GOLDEN / f"params_{name}.json").read_text())
    entries = {entry["name"]: entry["shape"] for entry in facts["state_dict"]}
    return {key: shape for key, shape in entries.items() if "rotations" not in key}, facts["num_parameters"]


def shapes(model):
    return {key: list(tensor.shape) for key, tensor in model.state_dict().items()}


# ---- sizes ----


@pytest.mark.parametrize("size", SIZES)
@ALL
def test_published_sizes(family, size):
    """Names, shapes and counts of all parameters and BatchNorm buffers, and the stochastic depth."""
    config = CONFIGS[family].size(size, num_labels=1000)
    with torch.device("meta"):
        model = CLASSIFIERS[family](config)
    expected, parameters = golden_shapes(f"{family}_{size}")
    assert shapes(model) == expected
    assert model.num_parameters() == parameters
    facts = json.loads((GOLDEN / f"params_{family}_{size}.json").read_text())
    assert config.drop_path_rate == facts["config_drop_path_rate"]


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes_of_dense_backbones(size):
    config = HViTTTConfig.size(size, out_indices=[1, 2, 3, 4])
    with torch.device("meta"):
        model = BACKBONES["h_vittt"](config)
    expected, parameters = golden_shapes(f"det_vittt_{size}")
    assert shapes(model) == expected
    assert model.num_parameters() == parameters


@ALL
def test_size_takes_other_fields_and_names_the_sizes_it_knows(family):
    config = CONFIGS[family].size("small", drop_path_rate=0.0, image_size=384, num_labels=7)
    assert (config.drop_path_rate, config.image_size, config.num_labels) == (0.0, 384, 7)
    with pytest.raises(ValueError, match="size 'large' is not known; expected one of 'tiny', 'small', 'base'"):
        CONFIGS[family].size("large")


def test_defaults_are_published_sizes():
    small, tiny = ViTTTConfig.size("small", drop_path_rate=0.0), HViTTTConfig.size("tiny", drop_path_rate=0.0)
    assert ViTTTConfig().to_dict() == small.to_dict()
    assert HViTTTConfig().to_dict() == tiny.to_dict()


def test_heads_of_stages_are_32_wide_unless_given():
    assert HViTTTConfig.size("base").num_attention_heads == [3, 6, 14, 20]
    assert HViTTTConfig(hidden_sizes=[16, 64], depths=[1, 1]).num_attention_heads == [1, 2]


def test_stages_give_the_standard_names():
    config = HViTTTConfig.size("tiny")
    assert (config.hidden_size, config.num_hidden_layers) == (512, 4)


# ---- inner loop ----


@ALL
def test_defaults(family):
    assert inner_loop(CONFIGS[family]()) == DEFAULTS
    assert CONFIGS[family]().rule == VisionRule()


@pytest.mark.parametrize("name", LOSS_NAMES)
@ALL
def test_loss_names(family, name):
    assert inner_loop(CONFIGS[family](ttt_loss_type=name)) == {**DEFAULTS, **LOSS_NAMES[name]}


@pytest.mark.parametrize(
    "name", ["", "cosine", "only_w2", "design1", "ga_mse", "dot_product_no_muon", "only_w1_no_lr1", None, 3]
)
@ALL
def test_unknown_loss_names(family, name):
    with pytest.raises(ValueError, match=rf"ttt_loss_type={name!r} is not known; expected 'dot_product', 'mse', or"):
        CONFIGS[family](ttt_loss_type=name)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("only_w1_no_wn", "ttt_weight_norm='none'"),
        ("only_w1_straight_qk_no_lr1", "ttt_learnable_lr=False"),
        ("only_w1_straight_qk_no_wn_parallel", "ttt_weight_norm='none'"),
    ],
)
@ALL
def test_loss_names_of_parts_that_are_absent(family, name, part):
    with pytest.raises(ValueError, match=f"ttt_loss_type='{name}' means {part}, which '{family}' does not have"):
        CONFIGS[family](ttt_loss_type=name)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("only_w1", {"ttt_update": "all"}, "ttt_update='all' contradicts ttt_loss_type='only_w1'.*ttt_update='last'"),
        ("only_w1_straight_qk", {"ttt_fast_weight": "swiglu"}, "ttt_fast_weight='swiglu' contradicts .*'linear'"),
        ("only_w1_no_muon", {"use_muon": True}, "use_muon=True contradicts .*use_muon=False"),
        ("ga_dot_product", {"ttt_direction": "descent"}, "ttt_direction='descent' contradicts .*'ascent'"),
        ("no_query_dot_product", {"ttt_read_with": "query"}, "ttt_read_with='query' contradicts .*'key'"),
        ("only_w1_parallel", {"ttt_implementation": "auto"}, "ttt_implementation='auto' contradicts"),
    ],
)
@ALL
def test_fields_that_contradict_the_loss_name(family, name, fields, message):
    with pytest.raises(ValueError, match=message):
        CONFIGS[family](ttt_loss_type=name, **fields)


@ALL
def test_fields_that_repeat_or_add_to_the_loss_name(family):
    config = CONFIGS[family](ttt_loss_type="only_w1", ttt_update="last", use_muon=False, ttt_read_with="key")
    assert inner_loop(config) == {**DEFAULTS, **LAST, "use_muon": False, "ttt_read_with": "key"}


@ALL
def test_variants_are_the_rows_of_table_2(family):
    """Without what the architecture lacks: variant 2 equals variant 1, and variants 4 and 5 equal variant 3."""
    rows = [inner_loop(CONFIGS[family].variant(name)) for name in VARIANTS]
    linear, last = {**DEFAULTS, **LINEAR}, {**DEFAULTS, **LAST}
    assert rows == [DEFAULTS, last, last, linear, linear, linear, {**linear, "use_muon": False}]
    with pytest.raises(ValueError, match="variant 'variant7' is not known; expected one of 'baseline', 'variant1'"):
        CONFIGS[family].variant("variant7")


@ALL
def test_fields_given_to_a_variant_win(family):
    config = CONFIGS[family].variant("variant6", use_muon=True, ttt_fast_weight="linear_plain", num_labels=3)
    assert (config.use_muon, config.ttt_fast_weight, config.num_labels) == (True, "linear_plain", 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttt_weight_norm", "post"),
        ("ttt_weight_norm", "pre"),
        ("ttt_prenorm", True),
        ("ttt_learnable_lr", True),
        ("use_momentum", True),
        ("ttt_muon_dtype", "float32"),
    ],
)
@ALL
def test_parts_that_are_absent(family, field, value):
    with pytest.raises(ValueError, match=f"{field}={value!r} does not apply: '{family}' has no such part"):
        CONFIGS[family](**{field: value})


@ALL
def test_saying_that_an_absent_part_is_absent_is_no_error(family):
    absent = {"ttt_weight_norm": "none", "ttt_prenorm": False, "ttt_learnable_lr": False, "use_momentum": False}
    config = CONFIGS[family](**absent)
    assert config.to_dict() == CONFIGS[family]().to_dict()
    assert not absent.keys() & config.to_dict().keys()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ttt_update": "first"}, "update='first' is not one of 'all', 'last'"),
        ({"ttt_fast_weight": "mlp"}, "fast_weight='mlp' is not one of 'swiglu', 'linear', 'linear_plain'"),
        ({"ttt_direction": "up"}, "direction='up' is not one of 'descent', 'ascent'"),
        ({"ttt_read_with": "value"}, "ttt_read_with='value' is not one of 'query', 'key'"),
        ({"use_muon": "yes"}, "normalise='yes' is not one of True, False"),
        ({"ttt_inner_steps": 0}, "inner_steps=0 must be an integer of at least 1"),
        ({"ttt_inner_steps": 1.5}, "inner_steps=1.5 must be an integer of at least 1"),
        ({"ttt_implementation": "scan"}, "ttt_implementation='scan' is not one of 'auto', 'recurrent', 'parallel'"),
        ({"ttt_backend": "cuda"}, "ttt_backend='cuda' is not one of 'auto', 'torch', 'triton'"),
        ({"ttt_loss_type": "mse", "ttt_fast_weight": "linear"}, "loss='mse' is defined for fast_weight='swiglu' only"),
        ({"drop_path_rate": 1}, r"drop_path_rate=1 must be in \[0, 1\)"),
        ({"drop_path_rate": -0.1}, r"drop_path_rate=-0.1 must be in \[0, 1\)"),
    ],
)
@ALL
def test_unknown_values(family, fields, message):
    with pytest.raises(ValueError, match=message):
        CONFIGS[family](**fields)


@ALL
def test_rule(family):
    rule = CONFIGS[family](ttt_loss_type="only_w1_no_muon", ttt_direction="ascent", ttt_inner_steps=2).rule
    assert rule == VisionRule(update="last", normalise=False, direction="ascent", inner_steps=2)
    assert "ttt_inner_steps" in rule.why_not_parallel and CONFIGS[family]().rule.parallelizable


# ---- what cannot be built ----


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("vittt", {"num_attention_heads": 5}, "num_attention_heads=5 does not divide hidden_size=16"),
        ("vittt", {"num_attention_heads": 0}, "num_attention_heads=0 does not divide"),
        ("vittt", {"patch_size": 0}, "patch_size=0 must be at least 1"),
        ("vittt", {"num_channels": 0}, "num_channels=0 must be at least 1"),
        ("h_vittt", {"num_attention_heads": [2, 2, 3, 3]}, "num_attention_heads=3 does not divide hidden_sizes=16"),
        ("h_vittt", {"hidden_sizes": [8, 16, 16, 18]}, "hidden_sizes has 18, .* to be a multiple of 4"),
        ("h_vittt", {"num_channels": 0}, "num_channels=0 must be at least 1"),
    ],
)
def test_configurations_that_load_but_cannot_be_built(family, fields, message):
    config = tiny_config(family, **fields)
    with pytest.raises(ValueError, match=message):
        CLASSIFIERS[family](config)


@pytest.mark.parametrize(
    "fields", [{"depths": [1, 1]}, {"num_attention_heads": [1]}, {"hidden_sizes": [], "depths": []}]
)
def test_stages_of_different_number(fields):
    with pytest.raises(
        ValueError, match=r"hidden_sizes=\[.*\], depths=\[.*\] and num_attention_heads=\[.*\] must have"
    ):
        HViTTTConfig(**fields)


@ALL
def test_parallel_with_several_steps_is_refused_when_the_model_is_built(family):
    config = tiny_config(family, ttt_inner_steps=2, ttt_implementation="parallel")
    with pytest.raises(
        ValueError, match="'parallel' is not exact for this rule: .*ttt_inner_steps in a model's config"
    ):
        CLASSIFIERS[family](config)


# ---- what a backbone returns ----


@pytest.mark.parametrize(("family", "stages"), [("vittt", 2), ("h_vittt", 4)])
def test_feature_maps(family, stages):
    names = ["stem", *(f"stage{i + 1}" for i in range(stages))]
    config = tiny_config(family)
    assert config.stage_names == names
    assert (list(config.out_features), list(config.out_indices)) == ([names[-1]], [stages])
    for fields in ({"out_features": ["stem", "stage2"]}, {"out_indices": [0, 2]}, {"out_indices": (0, 2)}):
        config = tiny_config(family, **fields)
        assert (list(config.out_features), list(config.out_indices)) == (["stem", "stage2"], [0, 2])
    assert list(tiny_config(family, out_indices=[-1]).out_features) == [names[-1]]


@pytest.mark.parametrize(
    "fields", [{"out_features": ["stage9"]}, {"out_indices": [9]}, {"out_features": ["stem"], "out_indices": [1]}]
)
@ALL
def test_feature_maps_that_are_not_there(family, fields):
    with pytest.raises(ValueError, match="out_features|out_indices"):
        tiny_config(family, **fields)


# ---- what is written ----


@pytest.mark.parametrize("name", LOSS_NAMES)
@ALL
def test_round_trip(tmp_path, family, name):
    """A name such as only_w1 becomes fields, which must not contradict the name that is written."""
    config = tiny_config(family, ttt_loss_type=name, out_features=["stem", "stage1"], drop_path_rate=0.1)
    assert CONFIGS[family].from_dict(config.to_dict()).to_dict() == config.to_dict()
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["ttt_loss_type"] in ("dot_product", "mse")
    for loaded in (CONFIGS[family].from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is CONFIGS[family]
        assert {**loaded.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}
        assert loaded.rule == config.rule and inner_loop(loaded) == inner_loop(config)
        assert list(loaded.out_features) == ["stem", "stage1"]


@ALL
def test_what_config_json_holds(tmp_path, family):
    config = tiny_config(family, ttt_implementation="recurrent", ttt_backend="torch")
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["model_type"], saved["ttt_implementation"]) == (family, "recurrent")
    assert "ttt_backend" not in saved and "ttt_backend" not in config.to_json_string()
    assert CONFIGS[family].from_pretrained(tmp_path).ttt_backend == "auto"


@ALL
def test_arguments_of_from_pretrained_override_the_file(tmp_path, family):
    tiny_config(family).save_pretrained(tmp_path)
    config = CONFIGS[family].from_pretrained(
        tmp_path, ttt_implementation="recurrent", ttt_backend="torch", num_labels=9, out_indices=[1]
    )
    assert (config.ttt_implementation, config.ttt_backend, config.num_labels) == ("recurrent", "torch", 9)
    assert list(config.out_features) == ["stage1"]
