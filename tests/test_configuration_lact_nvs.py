# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""LaCTNVSConfig: blocks, published forms and names, what contradicts or is absent, and what is written."""

import copy
import json

import pytest
from nvs_cases import BLOCK, INDEX, RULES, config_of, published_config, tiny_config, variant_config
from transformers import AutoConfig

from hf_ttt.configuration_lact_nvs import SIZES, LaCTNVSConfig
from hf_ttt.modeling_lact_nvs import LaCTNVSModel
from hf_ttt.ttt_rule import TTTRule

DEFAULTS = {
    "ttt_loss_type": "dot_product",
    "ttt_update": "all",
    "ttt_weight_norm": "post",
    "ttt_fast_weight": "swiglu",
    "ttt_learnable_lr": True,
    "use_muon": True,
    "ttt_direction": "descent",
    "ttt_read_with": "query",
    "ttt_inner_steps": 1,
    "ttt_implementation": "auto",
    "ttt_muon_dtype": "float32",
    "base_lr": 0.01,
    "muon_update_steps": 5,
}
LAST = {"ttt_update": "last"}
LINEAR = {**LAST, "ttt_fast_weight": "linear"}
NO_RATE = {**LINEAR, "ttt_learnable_lr": False}
NO_NORM = {"ttt_weight_norm": "none"}
NO_MUON = {"use_muon": False}
LOSS_NAMES = {  # what each published name stands for, where it differs from the default
    "dot_product": {},
    "ga_dot_product": {"ttt_direction": "ascent"},
    "mse": {"ttt_loss_type": "mse"},
    "no_query_dot_product": {"ttt_read_with": "key"},
    "only_w1": LAST,
    "only_w1_no_wn": {**LAST, **NO_NORM},
    "only_w1_no_wn_parallel": {**LAST, **NO_NORM, "ttt_implementation": "parallel"},
    "only_w1_straight_qk": LINEAR,
    "only_w1_straight_qk_no_wn": {**LINEAR, **NO_NORM},
    "only_w1_straight_qk_no_lr1": NO_RATE,
    "only_w1_straight_qk_no_lr1_no_muon": {**NO_RATE, **NO_MUON},
    "only_w1_straight_qk_no_lr1_no_wn": {**NO_RATE, **NO_NORM},
    "only_w1_straight_qk_no_lr1_no_wn_muon": {**NO_RATE, **NO_NORM, **NO_MUON},
}
PUBLISHED = [  # the published block of 24 layers with twice the width
    {"type": "model.SelfAttention", "length_dim": "l", "params": {"head_dim": 64, "use_qk_norm": True}},
    {
        "type": "lact_ttt.FastWeightGluMLPMultihead",
        "length_dim": "vl",
        "params": {"head_dim": 768, "inter_multi": 2, "base_lr": 0.01, "muon_update_steps": 5},
    },
    {"type": "model.MLP", "length_dim": "vl", "params": {"inter_multi": 4}},
]


def inner_loop(config):
    return {name: getattr(config, name) for name in DEFAULTS}


def published(**params):
    """The published block with other parameters of its TTT layer."""
    block = copy.deepcopy(PUBLISHED)
    block[1]["params"].update(params)
    return block


# ---- blocks and sizes ----


def test_defaults():
    """The published model of 24 layers, with the rule of its code."""
    config = LaCTNVSConfig()
    assert inner_loop(config) == DEFAULTS
    assert (config.patch_size, config.hidden_size, config.num_hidden_layers) == (8, 768, 24)
    assert config.rule == TTTRule(muon="nvs", detach_norms=True)
    assert config.to_dict() == LaCTNVSConfig.size("l24_ttt2x").to_dict()


def test_published_form_of_a_block():
    """`type`, `length_dim` and `params` as published, with what each leaves out, and this package's own form."""
    config = LaCTNVSConfig(block_config=PUBLISHED)
    assert config.block_config == [
        {"type": "attention", "head_dim": 64, "use_qk_norm": True},
        {"type": "ttt", "head_dim": 768, "inter_multi": 2},
        {"type": "mlp", "inter_multi": 4},
    ]
    bare = [{"type": "model.SelfAttention"}, {"type": "ttt"}, {"type": "model.MLP", "length_dim": "l"}]
    assert LaCTNVSConfig(block_config=bare).block_config == [
        {"type": "attention", "head_dim": 64, "use_qk_norm": True},
        {"type": "ttt", "head_dim": None, "inter_multi": 1},
        {"type": "mlp", "inter_multi": 4},
    ]


def test_a_given_block_is_not_changed():
    """The list that was passed belongs to the caller."""
    block = copy.deepcopy(PUBLISHED)
    LaCTNVSConfig(block_config=block)
    assert block == PUBLISHED


def test_fields_in_a_published_block():
    """What a published TTT layer says of the inner loop becomes fields; those that choose kernels are ignored."""
    params = {"base_lr": 0.1, "muon_update_steps": 3, "ttt_loss_type": "mse", "no_query": True}
    config = LaCTNVSConfig(block_config=published(**params, grad_calc_method="mannual", use_fused=True))
    own = {"base_lr": 0.1, "muon_update_steps": 3, "ttt_loss_type": "mse", "ttt_read_with": "key"}
    assert inner_loop(config) == {**DEFAULTS, **own}
    assert config.rule.muon_steps == 3 and "base_lr" not in config.block_config[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("base_lr", 0.5), ("muon_update_steps", 1), ("ttt_loss_type", "only_w1"), ("ttt_read_with", "query")],
)
def test_fields_of_the_model_override_those_of_a_block(field, value):
    """Each alone, the others staying as the block says."""
    params = {"base_lr": 0.1, "muon_update_steps": 3, "ttt_loss_type": "mse", "no_query": True}
    config = LaCTNVSConfig(block_config=published(**params), **{field: value})
    own = {"base_lr": 0.1, "muon_update_steps": 3, "ttt_loss_type": "mse", "ttt_read_with": "key", field: value}
    own |= {"ttt_loss_type": "dot_product", "ttt_update": "last"} if value == "only_w1" else {}
    assert inner_loop(config) == {**DEFAULTS, **own}


def test_layers_of_a_block_share_the_inner_loop():
    """Two TTT layers with different rates cannot be one configuration; with equal ones they can."""
    block = [*published(base_lr=0.1), published(base_lr=0.2)[1]]
    with pytest.raises(ValueError, match="block_config has base_lr=0.1 and 0.2: all layers share it"):
        LaCTNVSConfig(block_config=block)
    block[-1] = block[1]
    assert LaCTNVSConfig(block_config=block).base_lr == 0.1


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("ttt", r"block_config\[1\] is 'ttt'; expected a dictionary with a 'type'"),
        ({"head_dim": 8}, r"block_config\[1\] is {'head_dim': 8}; expected a dictionary with a 'type'"),
        (
            {"type": "conv"},
            r"block_config\[1\] has type 'conv', which is not one of 'attention', 'ttt', 'mlp', 'model.",
        ),
        ({"type": "ttt", "width": 3}, r"block_config\[1\] has 'width', which 'ttt' does not take"),
        ({"type": "mlp", "base_lr": 0.1, "a": 1}, r"block_config\[1\] has 'base_lr', 'a', which 'mlp' does not take"),
        ({"type": "mlp", "use_fused": True}, r"block_config\[1\] has 'use_fused', which 'mlp' does not take"),
        (
            {"type": "model.SelfAttention", "length_dim": "vl"},
            r"block_config\[1\] has length_dim='vl', which this model does not have for 'attention': expected 'l'",
        ),
        ({"type": "ttt", "length_dim": "l"}, "length_dim='l', which this model does not have for 'ttt': expected 'vl'"),
        ({"type": "mlp", "length_dim": "v"}, "does not have for 'mlp': expected 'l' or 'vl'"),
    ],
)
def test_entries_that_are_refused(entry, message):
    """The error says which entry of the block, and what would do."""
    with pytest.raises(ValueError, match=message):
        LaCTNVSConfig(block_config=[BLOCK[0], entry])


def test_sizes():
    """Fields given to a size win, and an unknown one is told which there are."""
    config = LaCTNVSConfig.size("l12_ttt1x", patch_size=16, ttt_loss_type="only_w1")
    assert (config.num_hidden_layers, config.patch_size, config.ttt_update) == (12, 16, "last")
    assert [LaCTNVSConfig.size(name).block_config[1]["inter_multi"] for name in SIZES] == [1, 2, 2, 4]
    with pytest.raises(ValueError, match="size 'small' is not known; expected one of 'l12_ttt1x', 'l14_ttt2x'"):
        LaCTNVSConfig.size("small")


# ---- the inner loop ----


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_loss_names(name):
    """As a field, and in a published block."""
    expected = {**DEFAULTS, **LOSS_NAMES[name]}
    assert inner_loop(LaCTNVSConfig(ttt_loss_type=name)) == expected
    assert inner_loop(LaCTNVSConfig(block_config=published(ttt_loss_type=name))) == expected


def test_published_variants_are_known():
    """Every name of the golden files stands for the rule that the tests say."""
    for name, case in INDEX["variants"]["variants"].items():
        own = {"ttt_read_with": "key"} if case["no_query"] else {}
        assert inner_loop(config_of(variant_config(name))) == {**DEFAULTS, **LOSS_NAMES[case["ttt_loss_type"]], **own}
    assert config_of(published_config("model_nvsC_muon0steps.safetensors")).rule.muon_steps == 0


def test_variants_are_the_rows_of_table_2():
    """Without momentum, so that variant 5 is variant 4."""
    rows = [inner_loop(LaCTNVSConfig.variant(name)) for name in RULES[:7]]
    steps = [{}, LAST, {**LAST, **NO_NORM}, {**LINEAR, **NO_NORM}, {**NO_RATE, **NO_NORM}, {**NO_RATE, **NO_NORM}]
    assert rows == [{**DEFAULTS, **step} for step in (*steps, {**NO_RATE, **NO_NORM, **NO_MUON})]
    assert LaCTNVSConfig.variant("variant6", use_muon=True, patch_size=4).use_muon is True
    with pytest.raises(ValueError, match="variant 'variant7' is not known; expected one of 'baseline', 'variant1'"):
        LaCTNVSConfig.variant("variant7")


@pytest.mark.parametrize("name", ["", "cosine", "dot_product_no_wn", "only_w1_no_lr1", "only_w2", "ga_mse", 3])
def test_unknown_loss_names(name):
    """Also those that the published code does not have."""
    with pytest.raises(ValueError, match=f"ttt_loss_type={name!r} is not known; expected 'dot_product', 'mse', or"):
        LaCTNVSConfig(ttt_loss_type=name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ttt_loss_type": "only_w1", "ttt_update": "all"}, "ttt_update='all' contradicts ttt_loss_type='only_w1'"),
        ({"ttt_loss_type": "only_w1_no_wn", "ttt_weight_norm": "post"}, "ttt_weight_norm='post' contradicts"),
        (
            {"ttt_loss_type": "only_w1_no_wn", "ttt_prenorm": True},
            "ttt_prenorm=True contradicts ttt_weight_norm='none'",
        ),
        ({"ttt_loss_type": "no_query_dot_product", "ttt_read_with": "query"}, "ttt_read_with='query' contradicts"),
        ({"use_momentum": True}, "use_momentum=True does not apply: 'lact_nvs' has no such part; leave it out"),
        ({"base_lr": 0.0}, "base_lr=0.0 must be greater than 0"),
        ({"base_lr": float("nan")}, "base_lr=nan must be greater than 0"),
        ({"muon_update_steps": -1}, "muon_steps=-1 must be an integer of at least 0"),
        ({"ttt_inner_steps": 0}, "inner_steps=0 must be an integer of at least 1"),
        ({"ttt_update": "first"}, "update='first' is not one of 'all', 'last'"),
        ({"ttt_weight_norm": "both"}, "weight_norm='both' is not one of 'post', 'pre', 'none'"),
        ({"ttt_fast_weight": "mlp"}, "fast_weight='mlp' is not one of 'swiglu', 'linear'"),
        ({"ttt_direction": "up"}, "direction='up' is not one of 'descent', 'ascent'"),
        ({"ttt_read_with": "value"}, "read_with='value' is not one of 'query', 'key'"),
        ({"ttt_muon_dtype": "float16"}, "muon_dtype='float16' is not one of 'float32', 'bfloat16'"),
        ({"ttt_implementation": "scan"}, "ttt_implementation='scan' is not one of 'auto', 'recurrent', 'parallel'"),
        ({"ttt_backend": "cuda"}, "ttt_backend='cuda' is not one of 'auto', 'torch', 'triton'"),
    ],
)
def test_fields_that_are_refused(fields, message):
    """Unknown values, contradictions, and parts that are absent."""
    with pytest.raises(ValueError, match=message):
        LaCTNVSConfig(**fields)


def test_prenorm_as_published():
    """The flag means a field, and that it is false says nothing."""
    assert LaCTNVSConfig(ttt_prenorm=True).ttt_weight_norm == "pre"
    assert LaCTNVSConfig(ttt_prenorm=False, use_momentum=False).to_dict() == LaCTNVSConfig().to_dict()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patch_size": 0}, "patch_size=0 must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"hidden_size": -4}, "hidden_size=-4 must be at least 1"),
        ({"block_config": []}, "block_config has no entry of type 'ttt', through which new views see the input views"),
        ({"block_config": [BLOCK[0], BLOCK[2]]}, "block_config has no entry of type 'ttt'"),
        (
            {"block_config": [{"type": "attention", "head_dim": 7}, BLOCK[1]]},
            r"block_config\[0\] has head_dim=7, which does not divide hidden_size=24",
        ),
        (
            {"block_config": [{"type": "ttt", "head_dim": 48}]},
            r"block_config\[0\] has head_dim=48, which does not divide",
        ),
        ({"block_config": [{"type": "ttt", "head_dim": -8}]}, r"block_config\[0\] has head_dim=-8, which does not"),
        (
            {"block_config": [{"type": "ttt", "inter_multi": 2}], "ttt_fast_weight": "linear", "ttt_update": "last"},
            r"block_config\[0\] has inter_multi=2, but ttt_fast_weight='linear' needs hidden and key widths to be "
            "equal: set inter_multi to 1",
        ),
        (
            {"block_config": [BLOCK[1], {"type": "mlp", "inter_multi": 0.01}]},
            r"block_config\[1\] has inter_multi=0.01, which leaves no hidden channel",
        ),
    ],
)
def test_configurations_that_load_but_cannot_be_built(fields, message):
    """Building the model says why."""
    config = tiny_config(**fields)
    with pytest.raises(ValueError, match=message):
        LaCTNVSModel(config)


# ---- what is written ----


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_round_trip(tmp_path, name):
    """A name such as only_w1 becomes fields, which must not contradict the name that is written."""
    config = LaCTNVSConfig(block_config=published(ttt_loss_type=name, base_lr=0.1), layer_norm_eps=1e-6)
    assert LaCTNVSConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["ttt_loss_type"] in ("dot_product", "mse")
    for loaded in (LaCTNVSConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is LaCTNVSConfig
        assert {**loaded.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}
        assert loaded.rule == config.rule and inner_loop(loaded) == inner_loop(config)


def test_what_config_json_holds(tmp_path):
    """The backend belongs to a machine; arguments of loading override the file."""
    tiny_config(ttt_implementation="recurrent", ttt_backend="torch").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["model_type"], saved["ttt_implementation"]) == ("lact_nvs", "recurrent")
    assert "ttt_backend" not in saved and saved["block_config"][1] == BLOCK[1]
    config = LaCTNVSConfig.from_pretrained(tmp_path, ttt_implementation="auto", ttt_read_with="key")
    assert (config.ttt_backend, config.ttt_implementation, config.ttt_read_with) == ("auto", "auto", "key")
