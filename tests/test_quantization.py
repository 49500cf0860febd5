# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Weights of 8 and 4 bits by torchao, on a CPU: which layers, exactness, saving, generation, LoRA on top."""

import re

import lact_cases
import nvs_cases
import pytest
import torch
import vittt_cases
from test_remote_code import run_child
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageClassification, TorchAoConfig
from transformers.quantizers.quantizers_utils import should_convert_module

from hf_ttt import LaCTForCausalLM, LaCTForSequenceClassification
from hf_ttt.modeling_lact import CACHE_KEY
from hf_ttt.quantization import KEPT_LAYERS

torchao = pytest.importorskip("torchao", reason="torchao is an extra of its own, with wheels for Linux and macOS")
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig  # noqa: E402
from torchao.quantization import Int8WeightOnlyConfig  # noqa: E402

BITS = {8: Int8WeightOnlyConfig, 4: lambda: PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False)}
WIDE = {"hidden_size": 64, "intermediate_size": 96}  # 4 bits: in groups of 32
NVS_BLOCK = [
    {"type": "attention", "head_dim": 16, "use_qk_norm": True},
    {"type": "ttt", "head_dim": 32, "inter_multi": 1},
    {"type": "mlp", "inter_multi": 2},
]


def lact(variant="variant2", model_class=LaCTForCausalLM):
    return lact_cases.busy_model(lact_cases.tiny_config(variant, num_lact_heads=4, **WIDE), model_class)


def nvs():
    return nvs_cases.busy_model(nvs_cases.tiny_config("variant2", hidden_size=64, block_config=NVS_BLOCK))


def vittt():
    return vittt_cases.busy_model(
        vittt_cases.CLASSIFIERS["vittt"], vittt_cases.tiny_config("vittt", hidden_size=64, num_attention_heads=2)
    )


def h_vittt():
    widths = {"hidden_sizes": [64] * 4, "num_attention_heads": [2] * 4}  # attn.proj reads 64 + 32 channels
    return vittt_cases.busy_model(vittt_cases.CLASSIFIERS["h_vittt"], vittt_cases.tiny_config("h_vittt", **widths))


FAMILIES = {
    "lact": (lact, AutoModelForCausalLM, lambda: {"input_ids": lact_cases.token_ids(2, 21)}),
    "lact_nvs": (nvs, AutoModel, nvs_cases.all_views),
    "vittt": (vittt, AutoModelForImageClassification, lambda: {"pixel_values": vittt_cases.images(2)}),
    "h_vittt": (h_vittt, AutoModelForImageClassification, lambda: {"pixel_values": vittt_cases.images(2)}),
}


def quantized(auto_class, folder, bits: int, **options):
    config = TorchAoConfig(BITS[bits](), modules_to_not_convert=KEPT_LAYERS)
    return auto_class.from_pretrained(folder, quantization_config=config, **options)


def is_quantized(layer: nn.Linear) -> bool:
    return type(layer.weight) is not nn.Parameter


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


def output(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits, or rendered views."""
    with torch.no_grad():
        result = model(**inputs)
    return result.rendered if "rendered" in result else result.logits


def test_every_kept_layer_exists():
    """A name that no model has any more would keep nothing, in silence; the blocks' projections are not kept."""
    models = [make() for make, *_ in FAMILIES.values()]
    models += [lact("baseline"), lact(model_class=LaCTForSequenceClassification)]
    names = {name for model in models for name in linears(model)}
    for pattern in KEPT_LAYERS:
        assert any(not should_convert_module(f"{name}.weight", [pattern]) for name in names), pattern
    converted = {re.sub(r".*\d\.", "", name) for name in names if should_convert_module(f"{name}.weight", KEPT_LAYERS)}
    lact_layers = {"attn.qkv", "attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    nvs_layers = {"f.to_qkv", "f.c_proj", "f.c_fc"}
    assert converted == lact_layers | nvs_layers | {"attn.proj", "mlp.fc1", "mlp.fc2"}


@pytest.mark.parametrize("implementation", ["recurrent", "parallel"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_computes_with_the_quantised_weights(family, bits, implementation, tmp_path):
    """The output is that of a float32 model with the rounded weights: an op that read packed bytes gave nonsense. Fast
    weights and kept layers are as they were, bit for bit."""
    make, auto_class, inputs = FAMILIES[family]
    original, inputs = make(), inputs()
    original.save_pretrained(tmp_path)
    model = quantized(auto_class, tmp_path, bits, ttt_implementation=implementation)
    quantised = {name: layer for name, layer in linears(model).items() if is_quantized(layer)}
    kept = {name for name in linears(model) if not should_convert_module(f"{name}.weight", KEPT_LAYERS)}
    assert quantised and kept and quantised.keys() == linears(model).keys() - kept
    rest = {name for name in original.state_dict() if name.removesuffix(".weight") not in quantised}
    assert all(torch.equal(model.state_dict()[name], original.state_dict()[name]) for name in rest)
    before = output(original, inputs)
    with torch.no_grad():
        for name, layer in linears(original).items():
            if name in quantised:
                layer.weight.copy_(quantised[name](torch.eye(layer.in_features)).mT - _bias(layer))
    want = output(original, inputs)
    assert (want - before).abs().max() > 1e-5 * before.abs().max()
    torch.testing.assert_close(output(model, inputs), want, atol=2e-3 * want.abs().max().item(), rtol=0)


def _bias(layer: nn.Linear) -> torch.Tensor | float:
    return 0.0 if layer.bias is None else layer.bias[:, None]


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bits_are_saved_and_loaded(family, tmp_path):
    """The folder is smaller, loads by itself, and computes the same (but for rounding of convolutions)."""
    make, auto_class, inputs = FAMILIES[family]
    make().save_pretrained(tmp_path / "float")
    model = quantized(auto_class, tmp_path / "float", 8)
    model.save_pretrained(tmp_path / "int8")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("int8", "float")]
    assert sizes[0] < 0.7 * sizes[1]
    loaded = auto_class.from_pretrained(tmp_path / "int8")
    assert any(is_quantized(layer) for layer in linears(loaded).values())
    torch.testing.assert_close(output(loaded, inputs()), output(model, inputs()), atol=1e-6, rtol=1e-5)


def test_four_bits_are_made_while_loading_and_not_saved(tmp_path):
    """torchao packs them for this machine: saving is an error, which leaves no weights behind."""
    lact().save_pretrained(tmp_path / "float")
    model = quantized(AutoModelForCausalLM, tmp_path / "float", 4)
    with pytest.raises(ValueError, match="Unsupported tensor type"):
        model.save_pretrained(tmp_path / "int4")
    assert not list((tmp_path / "int4").glob("*.safetensors"))


def child_loads_eight_bits(folder, expected):
    import torch
    from transformers import AutoModelForCausalLM

    expected = torch.load(expected)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        torch.testing.assert_close(model(expected["ids"]).logits, expected["logits"])
    return type(model.model.layers[0].attn.qkv.weight).__module__.split(".")[0]


def test_saved_folder_loads_where_hf_ttt_is_not_installed(tmp_path):
    """The code that is saved beside the weights makes the quantised model, too."""
    lact().save_pretrained(tmp_path / "float")
    model, ids = quantized(AutoModelForCausalLM, tmp_path / "float", 8), lact_cases.token_ids(2, 21)
    model.save_pretrained(tmp_path / "int8")
    torch.save({"ids": ids, "logits": output(model, {"input_ids": ids})}, tmp_path / "expected.pt")
    arguments = (child_loads_eight_bits, tmp_path / "int8", tmp_path / "expected.pt")
    assert run_child(*arguments, home=tmp_path / "home") == "torchao"


@pytest.mark.parametrize("bits", BITS)
def test_generation(bits, tmp_path):
    """With and without the cache the tokens are the same; the cache holds float32 fast weights."""
    lact().save_pretrained(tmp_path)
    model, ids = quantized(AutoModelForCausalLM, tmp_path, bits), lact_cases.token_ids(2, 13)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))
    cache = model(ids, use_cache=True)[CACHE_KEY]
    assert cache.layers[0].ttt.w1.dtype == torch.float32


def test_lora_on_quantised_layers(tmp_path):
    """The adapter learns on a base of 8 bits, fast weights included, and the base keeps its bits."""
    from peft import LoraConfig, get_peft_model

    from hf_ttt.adapters import lora_targets

    lact().save_pretrained(tmp_path)
    model = quantized(AutoModelForCausalLM, tmp_path, 8)
    tuned = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **lora_targets(model, fast_weights=True)))
    ids = lact_cases.token_ids(2, 21)
    before = output(tuned, {"input_ids": ids})
    optimizer = torch.optim.Adam([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(tuned(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert not [key for key, p in tuned.named_parameters() if p.requires_grad and not p.grad.any()]
    with tuned.disable_adapter():
        assert torch.equal(output(tuned, {"input_ids": ids}), before)
