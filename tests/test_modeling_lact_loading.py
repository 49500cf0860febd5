# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Initialisation, saving and loading of the LaCT models. Several tests name a fault of other packages that they pin."""

import ast
import inspect
import json
import sys

import pytest
import torch
import transformers.dynamic_module_utils
from lact_cases import OTHER_RULES, busy_model, golden_index, golden_tensors, tiny_config, token_ids
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_ttt import LaCTConfig, LaCTForCausalLM, LaCTForSequenceClassification, LaCTModel, cache_ttt, modeling_lact

MODELS = [LaCTModel, LaCTForCausalLM, LaCTForSequenceClassification]
SWITCHES = {  # what changes the set of parameters
    "full_rank": {},
    "low_rank": {"w0_w2_low_rank": 4},
    "tied": {"tie_word_embeddings": True},
    "no_momentum": {"use_momentum": False},
    "no_scale": {"learnable_ttt_scale": False},
    "bias_and_norms": {"qkv_bias": True, "attn_qk_norm": True},
    "wide": {"inter_multi": 2},
    "rate_per_channel": {"lr_dim": 4},
}
FAST_WEIGHTS = ("w0", "w1", "w2", "w_left", "w_right")


def is_fast_weight(name: str) -> bool:
    return name.split(".")[-1] in FAST_WEIGHTS


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("model_class", MODELS)
def test_loading_does_not_initialise_again(tmp_path, model_class, switch):
    """Weights that `_init_weights` writes through `.data` were initialised again after loading, without a warning."""
    model = model_class(tiny_config(**SWITCHES[switch]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.save_pretrained(tmp_path)
    loaded, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    for name, parameter in loaded.named_parameters():
        assert (parameter == 0.5).all(), name


@pytest.mark.parametrize("module", [modeling_lact, cache_ttt])
def test_no_parameter_is_written_through_data(module):
    """The same fault, in the source: `.data` hides a write from the flags that protect loaded weights."""
    tree = ast.parse(inspect.getsource(module))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "data"]


@pytest.mark.parametrize(
    "rope_parameters",
    [None, {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}],
    ids=["default", "yarn"],
)
@pytest.mark.parametrize("model_class", MODELS)
def test_buffers_after_loading(tmp_path, model_class, rope_parameters):
    """Buffers that are not saved, such as rotary tables, held uninitialised memory after loading."""
    config = tiny_config(rope_parameters=rope_parameters)
    model = busy_model(config, model_class)
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    buffers = dict(model_class(config).named_buffers())
    assert buffers.keys() == dict(loaded.named_buffers()).keys() != set()
    for name, buffer in loaded.named_buffers():
        assert_close(buffer, buffers[name], atol=0, rtol=0, msg=name)
    ids = token_ids(2, 21)
    assert_close(loaded(ids)[0], model(ids)[0], atol=0, rtol=0)


@pytest.fixture
def remote_code_folder(tmp_path, monkeypatch):
    """Remote code is copied to a folder of this test, and no module of it stays behind."""
    remote = lambda: [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]  # noqa: E731
    for name in remote():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    yield
    for name in remote():
        del sys.modules[name]


def test_buffers_and_logits_of_remote_code(tmp_path, remote_code_folder):
    """A package got the fix for its buffers, and the copy of its code on the Hub did not: NaN from that one."""
    model = busy_model(tiny_config("variant2"))
    model.save_pretrained(tmp_path / "saved")
    remote_class = get_class_from_dynamic_module("modeling_lact.LaCTForCausalLM", tmp_path / "saved")
    assert remote_class is not LaCTForCausalLM and "transformers_modules" in remote_class.__module__
    loaded = remote_class.from_pretrained(tmp_path / "saved").eval()
    for name, buffer in model.named_buffers():
        assert_close(loaded.get_buffer(name), buffer, atol=0, rtol=0, msg=name)
    ids = token_ids(2, 21)
    assert_close(loaded(ids).logits, model(ids).logits, atol=0, rtol=0)


def std(width: int) -> float:
    return width**-0.5


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"w0": std(64), "w1": std(64), "w2": std(64)}),
        ({"inter_multi": 2}, {"w0": std(64), "w1": std(128), "w2": std(64)}),
        (
            {"w0_w2_low_rank": 16, "fw_init_gain": 0.7},
            {"w_left": 0.7 * std(16), "w_right": 0.7 * std(64), "w1": std(64)},
        ),
    ],
    ids=["full", "wide", "low_rank"],
)
def test_missing_fast_weights_are_initialised(tmp_path, fields, expected):
    """Parameters owned by a layer class without a branch in `_init_weights` came out as uninitialised memory."""
    torch.manual_seed(0)
    model = LaCTForCausalLM(tiny_config(hidden_size=128, num_lact_heads=2, num_hidden_layers=1, **fields))
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    dropped = {name for name in state if is_fast_weight(name)}
    save_file({k: v for k, v in state.items() if k not in dropped}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, info = LaCTForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == dropped
    seen = set()
    for made in (model, loaded):
        for name, parameter in made.named_parameters():
            if name in dropped:
                kind = name.split(".")[-1]
                seen.add(kind)
                # the standard deviation of n normal numbers is off by std/√(2n): 5 of those
                bound = 5 * expected[kind] / (2 * parameter.numel()) ** 0.5
                assert abs(parameter.std().item() - expected[kind]) < bound, name
    assert seen == expected.keys()


def test_initial_values():
    torch.manual_seed(0)
    model = LaCTForCausalLM(tiny_config(initializer_range=0.05, qkv_bias=True, attn_qk_norm=True))
    attention = model.model.layers[1].attn
    assert (attention.qk_scale == 1).all() and (attention.qk_offset == 0).all()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
    for weight in (model.lm_head.weight, model.model.embeddings.weight[1:], attention.qkv.weight):
        assert abs(weight.std().item() - 0.05) < 5 * 0.05 / (2 * weight.numel()) ** 0.5
    assert (model.model.embeddings.weight[0] == 0).all()  # the padding id


@pytest.mark.parametrize("how", ["from_pretrained", "from_config", "AutoModel.from_config"])
@pytest.mark.parametrize("switch", ["full_rank", "low_rank"])
def test_fast_weights_stay_float32(tmp_path, switch, how):
    """Small parameters that need float32 were cast to bfloat16 on loading, or everything was kept in float32."""
    config = tiny_config("variant6", **SWITCHES[switch])
    model = busy_model(config)
    model.save_pretrained(tmp_path)
    if how == "from_pretrained":
        loaded = LaCTForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    elif how == "from_config":
        loaded = LaCTForCausalLM._from_config(config, dtype=torch.bfloat16)
    else:
        loaded = AutoModelForCausalLM.from_config(config, dtype="bfloat16")
    types = {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    expected = {name: torch.float32 if is_fast_weight(name) else torch.bfloat16 for name in types}
    assert types == expected and set(types.values()) == {torch.float32, torch.bfloat16}
    ids = token_ids(2, 29)
    output = loaded(ids, labels=ids)
    assert output.logits.dtype == torch.bfloat16
    output.loss.backward()
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in loaded.parameters())
    if how == "from_pretrained":
        # rounding may be 2^16 times that of float32, for the computation and as much for the weights
        exact = model.double()(ids).logits
        rounding = (model.float()(ids).logits - exact).abs().max()
        assert (output.logits - exact).abs().max() <= 4 * 2**16 * rounding < 6 * exact.std()


def test_saving_and_loading_in_bfloat16(tmp_path):
    model = busy_model(tiny_config())
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = LaCTForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16 and loaded.model.layers[0].attn.w1.dtype == torch.float32
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).to(parameter.dtype)), name


def test_loading_in_float64(tmp_path):
    """Fast weights are stored in float32, and everything is computed in float64."""
    model = busy_model(tiny_config())
    model.save_pretrained(tmp_path)
    loaded = LaCTForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.dtype == torch.float64
    ids = token_ids(2, 29)
    assert_close(loaded(ids).logits, model.double()(ids).logits, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings(tmp_path, tied):
    """A list of tied keys, as the published code has, is an AttributeError when a model is built or saved."""
    model = busy_model(tiny_config(tie_word_embeddings=tied))
    assert (model.lm_head.weight is model.model.embeddings.weight) == tied
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in saved) != tied and "model.embeddings.weight" in saved
    loaded, info = LaCTForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (loaded.lm_head.weight is loaded.model.embeddings.weight) == tied
    ids = token_ids(2, 21)
    assert_close(loaded(ids).logits, model(ids).logits, atol=0, rtol=0)


def test_every_model_calls_post_init(monkeypatch):
    """Loading fails for a model class that does not call post_init."""
    base = modeling_lact.LaCTPreTrainedModel
    classes = [x for x in vars(modeling_lact).values() if inspect.isclass(x) and issubclass(x, base)]
    assert set(classes) == {base, *MODELS}
    called = []
    monkeypatch.setattr(base, "post_init", lambda self: called.append(type(self)))
    for model_class in MODELS:
        model_class(tiny_config())
        assert called[-1] is model_class
        called.clear()


@pytest.mark.parametrize("name", ["full_rank", "low_rank"])
def test_a_base_model_loads_into_a_head_and_back(tmp_path, name):
    model = busy_model(tiny_config(**SWITCHES[name]))
    ids = token_ids(2, 21)
    model.save_pretrained(tmp_path / "lm")
    base, info = AutoModel.from_pretrained(tmp_path / "lm", output_loading_info=True)
    assert type(base) is LaCTModel and set(info["unexpected_keys"]) == {"lm_head.weight"}
    assert_close(base(ids).last_hidden_state, model.model(ids).last_hidden_state, atol=0, rtol=0)
    base.save_pretrained(tmp_path / "base")
    classifier, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=3, output_loading_info=True
    )
    assert type(classifier) is LaCTForSequenceClassification and set(info["missing_keys"]) == {"score.weight"}
    assert classifier(ids).logits.shape == (2, 3)
    assert_close(classifier.model(ids).last_hidden_state, base(ids).last_hidden_state, atol=0, rtol=0)


@pytest.mark.parametrize("file", ["model_m1_full_mom.safetensors", "model_m6_tied_novsilu_qkvbias_nomom.safetensors"])
def test_a_folder_with_published_files(tmp_path, file):
    """config.json and weights as the published code writes them, through the Auto classes."""
    config, tensors = golden_index()["models"][file]["config"], golden_tensors(file)
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LaCTForCausalLM"]}))
    state = {k.removeprefix("state_dict/"): v for k, v in tensors.items() if k.startswith("state_dict/")}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_close(model(tensors["input_ids/1"]).logits, tensors["logits/1"], atol=5e-5, rtol=0)


def test_choice_of_the_implementation_when_loading(tmp_path):
    """`ttt_implementation` and `ttt_backend` are arguments like `attn_implementation`; the first is saved."""
    LaCTForCausalLM(tiny_config("variant2")).save_pretrained(tmp_path)
    config = lambda: LaCTConfig.from_pretrained(tmp_path)  # noqa: E731  a model owns and changes its configuration
    makers = [
        lambda **choice: LaCTForCausalLM.from_pretrained(tmp_path, **choice),
        lambda **choice: AutoModelForCausalLM.from_pretrained(tmp_path, **choice),
        lambda **choice: AutoModelForCausalLM.from_config(config(), **choice),
        lambda **choice: LaCTForCausalLM(config(), **choice),
        lambda **choice: AutoModelForSequenceClassification.from_config(config(), **choice),
    ]
    for make in makers:
        assert make().get_ttt_implementation() == "parallel"
        model = make(ttt_implementation="recurrent", ttt_backend="torch")
        assert model.get_ttt_implementation() == "recurrent"
        assert (model.config.ttt_implementation, model.config.ttt_backend) == ("recurrent", "torch")
        with pytest.raises(ValueError, match="implementation='scan' is not one of"):
            make(ttt_implementation="scan")
    model.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert saved["ttt_implementation"] == "recurrent" and "ttt_backend" not in saved
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again")
    assert again.get_ttt_implementation() == "recurrent" and again.config.ttt_backend == "auto"


@pytest.mark.parametrize("variant", ["baseline", "variant3", *OTHER_RULES])
def test_inference_changes_no_weight(variant):
    """Fast weights are state of a sequence: what is updated while reading one is never written to the parameters."""
    model = busy_model(tiny_config(variant))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        logits = model(token_ids(2, 29), use_cache=True).logits
        model.generate(token_ids(2, 13), max_new_tokens=12, do_sample=False)
    assert model.state_dict().keys() == before.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(model(token_ids(2, 29)).logits, logits)
