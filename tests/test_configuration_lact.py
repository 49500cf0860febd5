# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""LaCTConfig: published files, the paper's names, what contradicts, and what is written to config.json."""

import json

import pytest
import torch
from lact_cases import OTHER_RULES, VARIANTS, tiny_config
from transformers import AutoConfig

from hf_ttt import LaCTConfig, LaCTForCausalLM

# The JSON files of a1600012888/LaCT (lact_llm/configs), which differ in few of their fields.
_COMMON = {
    "model_type": "lact_swiglu",
    "num_hidden_layers": 24,
    "num_lact_heads": 4,
    "inter_multi": 1,
    "attention_bias": False,  # read by nothing
    "attn_qk_norm": False,
    "lact_chunk_size": 2048,
    "window_size": 2048,
    "rope_theta": 1e6,
    "w0_w2_low_rank": 32,
    "fw_init_gain": 0.5,
    "use_momentum": True,
    "learnable_ttt_scale": True,
    "vocab_size": 32000,
    "initializer_range": 0.02,
    "norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "fuse_cross_entropy": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_760M = {**_COMMON, "hidden_size": 1536, "num_attn_heads": 24, "intermediate_size": 4096}
_3B = {**_COMMON, "hidden_size": 3072, "num_attn_heads": 24, "intermediate_size": 8192}
PUBLISHED = {
    "760m_momentum_muon": {**_760M, "use_muon": True},
    "760m_momentum": {**_760M, "use_muon": False},
    "760m_fused_kernel": {
        **_760M,
        "use_muon": False,
        "use_fused_kernel": True,
        "fp32_states": True,
        "no_v_silu": True,
    },
    "3b_momentum_muon": {**_3B, "use_muon": True},
    "3b_momentum": {**_3B, "use_muon": False, "num_attn_heads": 25},
}
# The JSON files of the paper add a loss name to the first of those; variants 5 and 6 also switch off.
PAPER = {
    "baseline": {"ttt_loss_type": "dot_product"},
    "variant1": {"ttt_loss_type": "only_w1"},
    "variant2": {"ttt_loss_type": "only_w1_no_wn"},
    "variant2_parallel": {"ttt_loss_type": "only_w1_no_wn_parallel"},
    "variant3": {"ttt_loss_type": "only_w1_straight_qk_no_wn"},
    "variant4": {"ttt_loss_type": "only_w1_straight_qk_no_lr1_no_wn"},
    "variant5": {"ttt_loss_type": "only_w1_straight_qk_no_lr1_no_wn", "use_momentum": False},
    "variant6": {"ttt_loss_type": "only_w1_straight_qk_no_lr1_no_wn", "use_momentum": False, "use_muon": False},
}
_LAST = {"ttt_update": "last"}
_LINEAR = {**_LAST, "ttt_fast_weight": "linear"}
_NO_NORM = {"ttt_weight_norm": "none"}
_NO_RATE = {"ttt_learnable_lr": False}
LOSS_NAMES = {  # what each name of the published code stands for, where it differs from the default
    "dot_product": {},
    "ga_dot_product": {"ttt_direction": "ascent"},
    "no_query_dot_product": {"ttt_read_with": "key"},
    "mse": {"ttt_loss_type": "mse"},
    "only_w1": _LAST,
    "only_w1_no_wn": {**_LAST, **_NO_NORM},
    "only_w1_no_wn_parallel": {**_LAST, **_NO_NORM, "ttt_implementation": "parallel"},
    "only_w1_straight_qk": _LINEAR,
    "only_w1_straight_qk_no_wn": {**_LINEAR, **_NO_NORM},
    "only_w1_straight_qk_no_lr1": {**_LINEAR, **_NO_RATE},
    "only_w1_straight_qk_no_lr1_no_wn": {**_LINEAR, **_NO_RATE, **_NO_NORM},
    "only_w1_straight_qk_no_wn_parallel": {**_LINEAR, **_NO_NORM, "ttt_implementation": "parallel"},
    "only_w1_straight_qk_no_lr1_no_wn_parallel": {
        **_LINEAR,
        **_NO_RATE,
        **_NO_NORM,
        "ttt_implementation": "parallel",
    },
}
INNER_LOOP = {
    "ttt_loss_type": "dot_product",
    "ttt_update": "all",
    "ttt_weight_norm": "post",
    "ttt_fast_weight": "swiglu",
    "ttt_learnable_lr": True,
    "ttt_direction": "descent",
    "ttt_read_with": "query",
    "ttt_implementation": "auto",
}


def inner_loop(config: LaCTConfig) -> dict:
    return {name: getattr(config, name) for name in INNER_LOOP}


@pytest.fixture
def read(tmp_path):
    """A function that reads a published JSON file as a user would."""

    def read(fields: dict, config_class=LaCTConfig) -> LaCTConfig:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return config_class.from_pretrained(tmp_path)

    return read


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read_unchanged(read, name):
    published = PUBLISHED[name]
    config = read(published)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    for field in published.keys() - {"rope_theta"}:
        assert getattr(config, field) == published[field], field
    assert inner_loop(config) == INNER_LOOP
    assert type(read(published, AutoConfig)) is LaCTConfig


@pytest.mark.parametrize("name", PAPER)
def test_files_of_the_paper_are_read_unchanged(read, name):
    config = read({**PUBLISHED["760m_momentum_muon"], **PAPER[name]})
    variant = LaCTConfig.variant(name.removesuffix("_parallel"))
    expected = {**inner_loop(variant), "ttt_implementation": "parallel" if "parallel" in name else "auto"}
    assert inner_loop(config) == expected
    assert (config.use_momentum, config.use_muon) == (variant.use_momentum, variant.use_muon)
    assert config.rule == variant.rule


@pytest.mark.parametrize("name", ["760m_momentum_muon", "760m_momentum", "760m_fused_kernel", "3b_momentum_muon"])
def test_published_sizes(name):
    with torch.device("meta"):
        model = LaCTForCausalLM(LaCTConfig(**PUBLISHED[name]))
    assert model.num_parameters() == {"760m": 797_625_312, "3b": 2_982_516_192}[name.split("_")[0]]


@pytest.mark.parametrize(("size", "parameters"), [("760m", 797_625_312), ("3b", 2_982_516_192)])
def test_size(size, parameters):
    config = LaCTConfig.size(size)
    published = LaCTConfig(**PUBLISHED[f"{size}_momentum_muon"])
    published.attention_bias = None
    assert {**config.to_dict(), "attention_bias": None} == published.to_dict()
    with torch.device("meta"):
        assert LaCTForCausalLM(config).num_parameters() == parameters


def test_size_takes_other_fields_and_names_the_sizes_it_knows():
    config = LaCTConfig.size("760m", num_hidden_layers=2, use_muon=False, num_attention_heads=12)
    assert (config.num_hidden_layers, config.use_muon, config.num_attn_heads) == (2, False, 12)
    with pytest.raises(ValueError, match="size '1b' is not known; expected one of '760m', '3b'"):
        LaCTConfig.size("1b")


def test_published_file_with_heads_that_do_not_divide_loads_and_says_why_it_cannot_be_built(read):
    config = read(PUBLISHED["3b_momentum"])
    with pytest.raises(ValueError, match="num_attn_heads=25 does not divide hidden_size=3072"), torch.device("meta"):
        LaCTForCausalLM(config)


def test_fused_kernel_with_muon_is_another_function(read):
    config = read({**PUBLISHED["760m_fused_kernel"], "use_muon": True})
    with (
        pytest.raises(ValueError, match="use_fused_kernel=True with use_muon=True .* set use_fused_kernel=False"),
        torch.device("meta"),
    ):
        LaCTForCausalLM(config)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_loss_names(name):
    assert inner_loop(LaCTConfig(ttt_loss_type=name)) == {**INNER_LOOP, **LOSS_NAMES[name]}


@pytest.mark.parametrize(
    "name", ["", "cosine", "only_w2", "ga_", "no_query_", "only_w1_straight_qk_no_wn_no_lr2", "only_w1_wn", None, 3]
)
def test_unknown_loss_names(name):
    with pytest.raises(ValueError, match=rf"ttt_loss_type={name!r} is not known; expected 'dot_product', 'mse', or"):
        LaCTConfig(ttt_loss_type=name)


# The published dispatcher raises TypeError for these, so no weights were trained with them.
@pytest.mark.parametrize(
    "name",
    [
        "dot_product_no_wn",
        "only_w1_no_lr1",
        "only_w1_no_lr1_no_wn",
        "mse_no_wn",
        "ga_mse",
        "ga_only_w1",
        "no_query_only_w1_no_wn",
        "no_query_ga_dot_product",
        "ga_no_query_dot_product",
        "dot_product_no_lr1",
    ],
)
def test_loss_names_that_the_published_code_refuses(name):
    with pytest.raises(ValueError, match=f"ttt_loss_type='{name}' is not known"):
        LaCTConfig(ttt_loss_type=name)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("only_w1_parallel", "ttt_weight_norm"),
        ("only_w1_straight_qk_parallel", "ttt_weight_norm"),
        ("dot_product_parallel", "ttt_update"),
        ("mse_parallel", "ttt_update"),
    ],
)
def test_a_parallel_name_that_is_not_exact_is_refused_when_the_model_is_built(name, field):
    with pytest.raises(ValueError, match=f"'parallel' is not exact for this rule: .*{field} in a model's config"):
        LaCTForCausalLM(tiny_config(ttt_loss_type=name, **dict.fromkeys(INNER_LOOP.keys() - {"ttt_loss_type"})))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("only_w1", {"ttt_update": "all"}, "ttt_update='all' contradicts ttt_loss_type='only_w1'.*ttt_update='last'"),
        ("only_w1_no_wn", {"ttt_weight_norm": "post"}, "ttt_weight_norm='post' contradicts .*'none'"),
        ("only_w1_no_wn", {"ttt_weight_norm": "pre"}, "ttt_weight_norm='pre' contradicts .*'none'"),
        ("only_w1_straight_qk", {"ttt_fast_weight": "swiglu"}, "ttt_fast_weight='swiglu' contradicts .*'linear'"),
        ("only_w1_straight_qk_no_lr1", {"ttt_learnable_lr": True}, "ttt_learnable_lr=True contradicts .*False"),
        ("ga_dot_product", {"ttt_direction": "descent"}, "ttt_direction='descent' contradicts .*'ascent'"),
        ("no_query_dot_product", {"ttt_read_with": "query"}, "ttt_read_with='query' contradicts .*'key'"),
        ("only_w1_no_wn_parallel", {"ttt_implementation": "auto"}, "ttt_implementation='auto' contradicts"),
    ],
)
def test_fields_that_contradict_the_loss_name(name, fields, message):
    with pytest.raises(ValueError, match=message):
        LaCTConfig(ttt_loss_type=name, **fields)


def test_fields_that_repeat_or_add_to_the_loss_name():
    config = LaCTConfig(ttt_loss_type="only_w1", ttt_update="last", ttt_weight_norm="none", ttt_learnable_lr=False)
    assert (config.ttt_weight_norm, config.ttt_learnable_lr) == ("none", False)
    assert LaCTConfig(ttt_loss_type="mse", ttt_direction="ascent").rule.direction == "ascent"


@pytest.mark.parametrize(
    ("fields", "norm"),
    [
        ({"ttt_prenorm": True}, "pre"),
        ({"ttt_prenorm": True, "ttt_weight_norm": "pre"}, "pre"),
        ({"ttt_prenorm": True, "ttt_loss_type": "only_w1"}, "pre"),
        ({"ttt_prenorm": False}, "post"),
        ({"ttt_prenorm": False, "ttt_weight_norm": "pre"}, "pre"),
        ({"ttt_prenorm": False, "ttt_loss_type": "only_w1_no_wn"}, "none"),
    ],
)
def test_published_flag_of_the_pre_norm(fields, norm):
    config = LaCTConfig(**fields)
    assert config.ttt_weight_norm == norm
    assert "ttt_prenorm" not in config.to_dict()
    assert LaCTConfig(**config.to_dict()).ttt_weight_norm == norm


@pytest.mark.parametrize(
    "fields",
    [
        {"ttt_weight_norm": "post"},
        {"ttt_weight_norm": "none"},
        {"ttt_loss_type": "only_w1_no_wn"},
        {"ttt_loss_type": "only_w1_straight_qk_no_lr1_no_wn"},
    ],
)
def test_pre_norm_flag_that_contradicts(fields):
    with pytest.raises(
        ValueError, match="ttt_prenorm=True contradicts ttt_weight_norm='(post|none)'.*ttt_prenorm=False"
    ):
        LaCTConfig(ttt_prenorm=True, **fields)


def test_variants_are_the_rows_of_table_2():
    rows = [inner_loop(LaCTConfig.variant(name)) for name in VARIANTS]
    changed = [{k: b[k] for k in a if a[k] != b[k]} for a, b in zip(rows, rows[1:], strict=False)]
    assert rows[0] == INNER_LOOP
    assert changed == [_LAST, _NO_NORM, {"ttt_fast_weight": "linear"}, _NO_RATE, {}, {}]
    switches = [(c.use_momentum, c.use_muon) for c in map(LaCTConfig.variant, VARIANTS)]
    assert switches == [(True, True)] * 5 + [(False, True), (False, False)]
    with pytest.raises(ValueError, match="variant 'variant7' is not known; expected one of 'baseline', 'variant1'"):
        LaCTConfig.variant("variant7")


def test_fields_given_to_a_variant_win():
    config = LaCTConfig.variant("variant6", use_muon=True, ttt_weight_norm="pre", num_attention_heads=8)
    assert (config.use_muon, config.ttt_weight_norm, config.num_attn_heads) == (True, "pre", 8)
    assert LaCTConfig.variant("variant2", ttt_implementation="recurrent").ttt_implementation == "recurrent"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ttt_update": "first"}, "update='first' is not one of 'all', 'last'"),
        ({"ttt_weight_norm": "rms"}, "weight_norm='rms' is not one of 'post', 'pre', 'none'"),
        ({"ttt_fast_weight": "mlp"}, "fast_weight='mlp' is not one of 'swiglu', 'linear'"),
        ({"ttt_direction": "up"}, "direction='up' is not one of 'descent', 'ascent'"),
        ({"ttt_read_with": "value"}, "read_with='value' is not one of 'query', 'key'"),
        ({"ttt_muon_dtype": "float16", "use_muon": True}, "muon_dtype='float16' is not one of 'float32', 'bfloat16'"),
        ({"ttt_inner_steps": 0}, "inner_steps=0 must be an integer of at least 1"),
        ({"ttt_implementation": "scan"}, "ttt_implementation='scan' is not one of 'auto', 'recurrent', 'parallel'"),
        ({"ttt_backend": "cuda"}, "ttt_backend='cuda' is not one of 'auto', 'torch', 'triton'"),
        ({"lr_parameterization": "linear"}, "lr_parameterization='linear' is not known; expected 'mamba'"),
    ],
)
def test_unknown_values(fields, message):
    with pytest.raises(ValueError, match=message):
        LaCTConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attn_heads": 5}, "num_attn_heads=5 does not divide hidden_size=32"),
        ({"num_lact_heads": 3}, "num_lact_heads=3 does not divide hidden_size=32"),
        ({"num_attn_heads": 32}, "hidden_size=32 over num_attn_heads=32 gives an odd head width"),
        ({"num_attn_heads": 0}, "num_attn_heads=0 must be at least 1"),
        ({"num_lact_heads": -2}, "num_lact_heads=-2 must be at least 1"),
        ({"lact_chunk_size": 0}, "lact_chunk_size=0 must be at least 1"),
        ({"window_size": 0}, "window_size=0 must be at least 1, or None"),
        (
            {"inter_multi": 2, "ttt_fast_weight": "linear"},
            "inter_multi=2 .* hidden width of 8 for keys of 4.*inter_multi=1",
        ),
        ({"lr_dim": 3}, r"lr_dim=3 must be 1, or equal to both the key and hidden widths \(4, 4\)"),
        ({"lr_dim": 4, "inter_multi": 2}, "lr_dim=4 must be 1"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type='spiral' is not known; expected 'default', "),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 does not fit: rope_type='linear' rotates whole heads here",
        ),
    ],
)
def test_configurations_that_load_but_cannot_be_built(fields, message):
    config = tiny_config(**fields)
    with pytest.raises(ValueError, match=message):
        LaCTForCausalLM(config)


def test_standard_names_are_the_same_fields():
    config = LaCTConfig(num_attention_heads=8, sliding_window=128, rms_norm_eps=1e-5, hidden_size=512)
    assert (config.num_attn_heads, config.window_size, config.norm_eps) == (8, 128, 1e-5)
    config.sliding_window = None
    config.num_attention_heads = 4
    assert (config.window_size, config.num_attn_heads, config.num_key_value_heads) == (None, 4, 4)
    saved = config.to_dict()
    assert saved["window_size"] is None and "sliding_window" not in saved and "num_attention_heads" not in saved


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e6}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"type": "linear", "rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e5}},
            {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e5},
        ),
    ],
)
def test_rope_parameters_and_their_older_names(tmp_path, fields, expected):
    config = LaCTConfig(**fields)
    assert config.rope_parameters == expected
    config.save_pretrained(tmp_path)
    assert LaCTConfig.from_pretrained(tmp_path).rope_parameters == expected


def test_width_of_the_mlp():
    assert LaCTConfig(hidden_size=2048).intermediate_size == 5632  # 2/3 · 4 · 2048 = 5461, rounded up to 256
    assert LaCTConfig(hidden_size=32, hidden_ratio=2).intermediate_size == 256
    assert LaCTConfig(hidden_size=96, hidden_ratio=4).intermediate_size == 256  # exactly 256
    assert LaCTConfig(intermediate_size=40).intermediate_size == 40


@pytest.mark.parametrize("variant", [*VARIANTS, *OTHER_RULES])
def test_round_trip(tmp_path, variant):
    config = tiny_config(variant, ttt_inner_steps=3)
    assert LaCTConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert LaCTConfig(**config.to_dict()).rule == config.rule
    config.save_pretrained(tmp_path)
    for loaded in (LaCTConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert {**loaded.to_dict(), "_name_or_path": ""} == config.to_dict()
        assert loaded.rule == config.rule


@pytest.mark.parametrize("name", [*LOSS_NAMES])
def test_round_trip_of_the_published_names(tmp_path, name):
    """A name such as only_w1_no_wn became fields, which must not contradict the name that is written."""
    config = LaCTConfig(ttt_loss_type=name)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["ttt_loss_type"] in ("dot_product", "mse")
    assert inner_loop(LaCTConfig.from_pretrained(tmp_path)) == inner_loop(config)


def test_what_config_json_holds(tmp_path):
    config = tiny_config("variant2", ttt_implementation="recurrent", ttt_backend="torch")
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["ttt_implementation"] == "recurrent"
    assert "ttt_backend" not in saved
    assert "ttt_backend" not in config.to_dict() and "ttt_backend" not in config.to_diff_dict()
    assert "ttt_backend" not in config.to_json_string()
    assert LaCTConfig.from_pretrained(tmp_path).ttt_backend == "auto"
    assert saved["model_type"] == "lact_swiglu"


def test_arguments_of_from_pretrained_override_the_file(tmp_path):
    tiny_config("variant2").save_pretrained(tmp_path)
    config = LaCTConfig.from_pretrained(tmp_path, ttt_implementation="recurrent", ttt_backend="torch", window_size=4)
    assert (config.ttt_implementation, config.ttt_backend, config.window_size) == ("recurrent", "torch", 4)


def test_rule():
    rule = tiny_config("variant2").rule
    assert rule.parallelizable and rule.muon == "lact" and not rule.detach_norms
    assert tiny_config("variant6").rule.muon is None
    assert "ttt_update" in tiny_config("baseline").rule.why_not_parallel
    assert tiny_config(ttt_muon_dtype="bfloat16").rule.muon_dtype == "bfloat16"
