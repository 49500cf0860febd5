# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""LoRA of PEFT on all models: what is adapted, exactness of merging and loading, training on a frozen base.

Comparisons are in float64, where a tolerance of 1e-9 of the greatest value leaves out nothing but rounding, which Muon
amplifies by up to 490.
"""

import ast
import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lact_cases
import nvs_cases
import pytest
import torch
import vittt_cases
from peft import LoraConfig, PeftModel, get_peft_model
from test_remote_code import run_child
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import hf_ttt.adapters as adapters
from hf_ttt import HViTTTBackbone, LaCTForCausalLM, LaCTForSequenceClassification, LaCTModel, ViTTTModel
from hf_ttt.adapters import lora_targets, merge_and_unload, unload
from hf_ttt.modeling_lact import CACHE_KEY

TOLERANCE = 1e-9
NO_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@dataclass
class Case:
    """A tiny model, and a batch with labels for its loss."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    head: bool = False
    fast_weights: bool = True
    task: str | None = None

    def targets(self) -> dict:
        return lora_targets(self.make(), fast_weights=self.fast_weights, head=self.head)


def _lact(variant: str, model_class: type = LaCTForCausalLM) -> Case:
    labels = torch.tensor([0, 1]) if model_class is LaCTForSequenceClassification else None

    def inputs():
        ids = lact_cases.token_ids(2, 21)
        return {"input_ids": ids, "labels": ids if labels is None else labels}

    return Case(
        lambda: lact_cases.busy_model(lact_cases.tiny_config(variant), model_class),
        inputs,
        head=labels is not None,
        task="CAUSAL_LM" if labels is None else "SEQ_CLS",
    )


def _nvs(rule: str) -> Case:
    return Case(lambda: nvs_cases.busy_model(nvs_cases.tiny_config(rule)), nvs_cases.all_views)


def _vittt(family: str) -> Case:
    return Case(
        lambda: vittt_cases.busy_model(vittt_cases.CLASSIFIERS[family], vittt_cases.tiny_config(family)),
        lambda: {"pixel_values": vittt_cases.images(2), "labels": torch.tensor([1, 3])},
        head=True,
        fast_weights=False,
    )


CASES = {
    "lact": _lact("baseline"),
    "lact_variant2": _lact("variant2"),
    "lact_variant4": _lact("variant4"),
    "lact_low_rank": _lact("low_rank"),
    "lact_classifier": _lact("variant2", LaCTForSequenceClassification),
    "lact_nvs": _nvs("baseline"),
    "lact_nvs_variant2": _nvs("variant2"),
    "lact_nvs_fixed_rate": _nvs("fixed_rate"),
    "vittt": _vittt("vittt"),
    "h_vittt": _vittt("h_vittt"),
}
PARALLEL = ("lact_variant2", "lact_variant4", "lact_classifier", "lact_nvs_variant2", "vittt", "h_vittt")
BOTH = [(name, "recurrent") for name in CASES] + [(name, "parallel") for name in PARALLEL]
HAS_BOTH = pytest.mark.parametrize("name", PARALLEL)
each_evaluation = pytest.mark.parametrize(("name", "implementation"), BOTH)
each_model = pytest.mark.parametrize("name", CASES)


def base_and_inputs(name: str, implementation: str = "recurrent"):
    """The case's model in float64, and its inputs."""
    case = CASES[name]
    model = case.make().double()
    model.set_ttt_implementation(implementation)
    double = {key: x.double() if x.is_floating_point() else x for key, x in case.inputs().items()}
    return model, double


def adapted(model: nn.Module, name: str, random: bool = True) -> PeftModel:
    """The model with an adapter of rank 4; `random` for one that changes the output, as if it were trained."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, init_lora_weights=not random, task_type=CASES[name].task, **CASES[name].targets())
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def output(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits, or rendered views, without gradients."""
    with torch.no_grad():
        return model(**inputs)[1]


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


def copy_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# ---- what is adapted ----

LACT_LAYERS = {"attn.qkv", "attn.o_proj", "attn.lr_proj", "attn.momentum_proj.0", "attn.ttt_scale_proj"} | {
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
}
VISION_LAYERS = {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"}
NVS_LAYERS = {"f.to_qkv", "f.c_proj", "f.lr_fc", "f.c_fc"}


@pytest.mark.parametrize(
    ("name", "layers", "weights", "saved"),
    [
        ("lact", LACT_LAYERS, {"attn.w0", "attn.w1", "attn.w2"}, set()),
        ("lact_variant4", LACT_LAYERS - {"attn.lr_proj"}, {"attn.w1"}, set()),
        ("lact_low_rank", LACT_LAYERS, {"attn.w1"}, set()),
        ("lact_classifier", LACT_LAYERS, {"attn.w0", "attn.w1", "attn.w2"}, {"score"}),
        ("lact_nvs", NVS_LAYERS, {"f.w0", "f.w1", "f.w2"}, set()),
        ("lact_nvs_fixed_rate", NVS_LAYERS - {"f.lr_fc"}, {"f.w0", "f.w1", "f.w2"}, set()),
        ("vittt", VISION_LAYERS, set(), {"head"}),
        ("h_vittt", VISION_LAYERS, set(), {"norm", "head"}),
    ],
)
def test_targets(name, layers, weights, saved):
    """The names for each family; of H-ViTTT's batch norms, all of which are called `norm`, the last part."""
    targets = CASES[name].targets()
    assert set(targets["target_modules"]) == layers
    assert set(targets["target_parameters"] or []) == weights
    assert {module.rsplit(".", 1)[-1] for module in targets["modules_to_save"] or []} == saved


@each_model
def test_nothing_of_a_block_is_left_out(name):
    """PEFT finds all linear layers of the blocks: a list that is kept by hand forgets one that is added."""
    model = CASES[name].make()
    linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    fixed = not getattr(model.config, "ttt_learnable_lr", True)
    outside = {"lm_head", "score", "head", "input_linear", "image_token_decoder.1"}
    unused = {path for path in linear if fixed and path.endswith(("lr_proj", "lr_fc"))}
    found = set(adapted(model, name).targeted_module_names)
    assert found == linear - outside - unused and found


def test_targets_of_a_model_without_a_head():
    """Names are those within a block, so that they are the same for each class of a family; no fast weights unasked."""
    lact = CASES["lact"].make()
    assert lora_targets(LaCTModel(lact.config)) == lora_targets(lact)
    assert lora_targets(lact)["target_parameters"] is lora_targets(lact)["modules_to_save"] is None


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (CASES["vittt"].make, {"fast_weights": True}, "fast_weights=True: .* four dimensions .* modules_to_save"),
        (CASES["lact_nvs"].make, {"head": True}, "head=True: LaCTNVSModel has no head"),
        (lambda: ViTTTModel(vittt_cases.tiny_config("vittt")), {"head": True}, "head=True: ViTTTModel has no head"),
        (
            lambda: LaCTForCausalLM(lact_cases.tiny_config(tie_word_embeddings=True)),
            {"head": True},
            "head=True: lm_head shares its weights with the embeddings",
        ),
        (lambda: nn.Linear(2, 2), {}, "model=Linear is not a model of hf-ttt"),
        (lambda: adapted(CASES["vittt"].make(), "vittt"), {}, "has an adapter already"),
        (lambda: adapted(CASES["vittt"].make(), "vittt").get_base_model(), {}, "has an adapter already"),
    ],
)
def test_targets_that_cannot_be(make, options, message):
    """Each is an error that says what to do, and not an adapter that does less than it seems to."""
    with pytest.raises(ValueError, match=message):
        lora_targets(make(), **options)


def test_peft_is_not_imported_with_the_module():
    """Whoever has no PEFT can import it, and with it whatever imports it."""
    for node in ast.parse(Path(adapters.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert "peft" not in ast.unparse(node)


# ---- exactness ----


@each_evaluation
def test_adapter_reaches_the_output_and_merges(name, implementation):
    """A fused op that reads the weights of a projection skips its adapter, and merging then changes the output. PEFT's
    own merging left adapters within layers whose fast weights have some too: what was saved then did not load."""
    model, inputs = base_and_inputs(name, implementation)
    before, start = output(model, inputs), copy_of(model)
    tuned = adapted(model, name)
    after = output(tuned, inputs)
    assert (after - before).abs().max() > 1e-3 * before.abs().max()
    with tuned.disable_adapter():
        assert torch.equal(output(tuned, inputs), before)
    unloaded = unload(copy.deepcopy(tuned))
    assert unloaded.state_dict().keys() == start.keys()
    assert all(torch.equal(value, start[key]) for key, value in unloaded.state_dict().items())
    assert torch.equal(output(unloaded, inputs), before)
    merged = merge_and_unload(tuned)
    assert type(merged) is type(CASES[name].make()) and merged.state_dict().keys() == start.keys()
    assert_same(output(merged, inputs), after)


@HAS_BOTH
def test_both_evaluations_agree(name):
    """Recurrent and parallel give the same output, and the same gradients of the adapter."""
    results = []
    for implementation in ("recurrent", "parallel"):
        model, inputs = base_and_inputs(name, implementation)
        tuned = adapted(model, name)
        tuned(**inputs)[0].backward()
        gradients = {key: p.grad for key, p in tuned.named_parameters() if p.requires_grad}
        results.append((output(tuned, inputs), gradients))
    (out, gradients), (other_out, others) = results
    assert_same(other_out, out)
    for key, gradient in gradients.items():
        assert_same(others[key], gradient)


@each_evaluation
def test_every_adapter_parameter_learns(name, implementation):
    """After two steps from PEFT's own start, at which lora_B is 0, each parameter of the adapter has a gradient that is
    not 0, and no other has one."""
    model, inputs = base_and_inputs(name, implementation)
    start, tuned = copy_of(model), adapted(model, name, random=False).train()
    optimizer = torch.optim.Adam([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        tuned(**inputs)[0].backward()
        gradients = {key: p.grad for key, p in tuned.named_parameters() if p.requires_grad}
        optimizer.step()
    assert any("lora_A" in key for key in gradients)
    assert not [key for key, gradient in gradients.items() if gradient is None or not gradient.any()]
    assert not [key for key, p in tuned.named_parameters() if not p.requires_grad and p.grad is not None]
    with tuned.disable_adapter():
        assert torch.equal(output(tuned.eval(), inputs), output(base_and_inputs(name, implementation)[0], inputs))
    assert all(torch.equal(value, start[key]) for key, value in CASES[name].make().double().state_dict().items())


def test_batch_norms_belong_to_the_adapter():
    """Training moves the statistics of H-ViTTT's batch norms: with the head alone in `modules_to_save`, they were those
    of the base, which they changed, and a saved adapter lacked them."""
    model, inputs = base_and_inputs("h_vittt")
    before = output(model, inputs)
    tuned = adapted(model, "h_vittt")
    same = output(tuned, inputs)
    tuned.train()(inputs["pixel_values"] * 2 + 1)
    assert (output(tuned.eval(), inputs) - same).abs().max() > 1e-3
    with tuned.disable_adapter():
        assert torch.equal(output(tuned, inputs), before)
    backbone = lora_targets(HViTTTBackbone(vittt_cases.tiny_config("h_vittt")))["modules_to_save"]
    assert backbone and all(path.endswith(".norm") for path in backbone)


def test_merging_needs_an_adapter():
    """Of a model without one, merging would do nothing in silence."""
    with pytest.raises(ValueError, match="model=LaCTForCausalLM has no adapter"):
        merge_and_unload(CASES["lact"].make())


@pytest.mark.parametrize("targets", [["cpe"], ["cpe", "mlp.dwc"]], ids=["cpe", "cpe and dwc"])
def test_depthwise_convolutions_are_adapted_but_not_merged(targets):
    """PEFT adapts a grouped convolution where the rank is a multiple of the groups, and does not merge it: an error."""
    model, inputs = base_and_inputs("h_vittt")
    before = output(model, inputs)
    width = 2 * 3 * 16  # a multiple of all widths: 8, 16, 24 and, in the MLP, twice as many
    tuned = get_peft_model(model, LoraConfig(r=width, target_modules=targets, init_lora_weights=False))
    assert (output(tuned, inputs) - before).abs().max() > 1e-3
    with pytest.raises(NotImplementedError, match="groups > 1"):
        merge_and_unload(tuned)
    with pytest.raises(ValueError, match="rank is divisible by groups"):
        get_peft_model(base_and_inputs("h_vittt")[0], LoraConfig(r=5, target_modules=targets))


@NO_TRITON
@pytest.mark.parametrize("implementation", ["recurrent", "parallel"])
def test_kernels_do_not_bypass_the_adapter(implementation):
    """With Triton's kernels an adapter, of the fast weights too, gives the same output and gradients as with torch."""
    results = []
    for backend in ("torch", "triton"):
        model = lact_cases.busy_model(lact_cases.tiny_config("variant2", num_lact_heads=2, num_hidden_layers=1))
        model.set_ttt_implementation(implementation, backend)
        tuned = adapted(model, "lact")
        ids = lact_cases.token_ids(1, 26)
        out = tuned(input_ids=ids, labels=ids)
        out.loss.backward()
        gradients = {key: p.grad for key, p in tuned.named_parameters() if p.requires_grad}
        results.append({"logits": out.logits.detach(), **gradients})
    assert any("lora_A" in key and "attn.base_layer" in key for key in results[0])
    for key, want in results[0].items():  # float32; Muon amplifies its rounding
        assert want.any() and (results[1][key] - want).abs().max() <= 1e-3 * want.abs().max(), key


# ---- saving and loading ----


@each_model
def test_saved_adapter_loads(name, tmp_path):
    """The folder holds the adapter alone, and gives the same output in another copy of the base, bit for bit."""
    model, inputs = base_and_inputs(name)
    size = sum(p.numel() for p in model.parameters())
    tuned = adapted(model, name)
    tuned.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py")) and (tmp_path / "adapter_model.safetensors").is_file()
    assert sum(p.numel() for p in tuned.parameters() if p.requires_grad) < size
    loaded = PeftModel.from_pretrained(base_and_inputs(name)[0], tmp_path, autocast_adapter_dtype=False)
    assert torch.equal(output(loaded, inputs), output(tuned, inputs))


def test_merged_model_is_an_ordinary_one(tmp_path):
    """It saves, reloads without PEFT and computes the same; its fast weights stay float32 in a bfloat16 model."""
    model = CASES["lact"].make().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned = adapted(model, "lact")
    merged = merge_and_unload(tuned)
    assert merged.model.layers[0].attn.w1.dtype == torch.float32 and merged.lm_head.weight.dtype == torch.bfloat16
    merged.save_pretrained(tmp_path / "merged")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(reloaded) is LaCTForCausalLM
    inputs = CASES["lact"].inputs()
    assert torch.equal(output(reloaded, inputs), output(merged, inputs))


def child_loads_adapters(root, names):
    import torch
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageClassification

    classes = {
        "lact": AutoModelForCausalLM,
        "lact_nvs": AutoModel,
        "vittt": AutoModelForImageClassification,
        "h_vittt": AutoModelForImageClassification,
    }
    for name in names.split():
        folder = f"{root}/{name}"
        base = classes[name].from_pretrained(f"{folder}/base", trust_remote_code=True).eval()
        assert type(base).__module__.startswith("transformers_modules."), type(base)
        expected = torch.load(f"{folder}/expected.pt")
        with torch.no_grad():
            tuned = PeftModel.from_pretrained(base, f"{folder}/adapter")
            torch.testing.assert_close(tuned(**expected["inputs"])[1], expected["out"])
            if name == "lact":
                found = AutoPeftModelForCausalLM.from_pretrained(f"{folder}/adapter", trust_remote_code=True)
                torch.testing.assert_close(found(**expected["inputs"])[1], expected["out"])
    return "loaded"


def test_adapters_load_where_hf_ttt_is_not_installed(tmp_path):
    """In a new process the base comes from its folder with its code, and the adapter from its own."""
    names = ("lact", "lact_nvs", "vittt", "h_vittt")
    for name in names:  # AutoPeftModel looks for a class that is not there where task_type is not said
        folder, inputs = tmp_path / name, CASES[name].inputs()
        model = CASES[name].make()
        model.save_pretrained(folder / "base")
        model.name_or_path = str(folder / "base")
        tuned = adapted(model, name)
        tuned.save_pretrained(folder / "adapter")
        torch.save({"inputs": inputs, "out": output(tuned, inputs)}, folder / "expected.pt")
    assert run_child(child_loads_adapters, tmp_path, " ".join(names), home=tmp_path / "home") == "loaded"


# ---- training and generation ----


def rows_of(inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{key: value[i] for key, value in inputs.items()} for i in range(2)]


@pytest.mark.parametrize(
    ("name", "implementation"),
    [pair for pair in BOTH if pair[0] in ("lact", "lact_variant2", "lact_nvs_variant2", "vittt", "h_vittt")],
)
def test_training_on_a_frozen_base(name, implementation, tmp_path):
    """`Trainer` lowers the loss by a tenth at least; the base is as it was, to the bit."""
    model = CASES[name].make()
    model.set_ttt_implementation(implementation)
    start, inputs = copy_of(model), CASES[name].inputs()
    with torch.no_grad():
        before = model(**inputs)[0].item()
    tuned = adapted(model, name, random=False)
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=20,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(model=tuned, args=arguments, train_dataset=rows_of(inputs)).train()
    with torch.no_grad():
        after = tuned.eval()(**inputs)[0].item()
    assert after < 0.9 * before
    with tuned.disable_adapter(), torch.no_grad():
        assert tuned(**inputs)[0].item() == pytest.approx(before, rel=1e-6)  # other products of other shapes
    for key, value in tuned.state_dict().items():
        if "lora_" not in key and "modules_to_save" not in key:
            name = key.removeprefix("base_model.model.").replace("base_layer.", "").replace("original_module.", "")
            assert torch.equal(value, start[name]), key


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["lact", "lact_nvs_variant2", "vittt", "h_vittt"])
def test_gradient_checkpointing_of_a_frozen_base(name, use_reentrant):
    """Nothing that goes into the first block has a gradient, which reentrant checkpointing takes for nothing to learn:
    `enable_input_require_grads` mends it."""
    results = []
    for checkpointed in (False, True):
        model, inputs = base_and_inputs(name)
        tuned = adapted(model, name).train()
        for module in tuned.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.eval()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        tuned(**inputs)[0].backward()
        results.append({key: p.grad for key, p in tuned.named_parameters() if p.requires_grad})
    for key, want in results[0].items():
        assert results[1][key] is not None, key
        assert_same(results[1][key], want)


@pytest.mark.parametrize("implementation", ["recurrent", "parallel"])
def test_generation_with_an_adapter(implementation):
    """The cache starts from the adapted fast weights: the same tokens with and without it, and merged."""
    model = lact_cases.busy_model(lact_cases.tiny_config("variant2"))
    model.set_ttt_implementation(implementation)
    ids = lact_cases.token_ids(2, 13)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    before = model.generate(ids, **settings)
    tuned = adapted(model, "lact")
    tokens = tuned.generate(input_ids=ids, **settings)
    assert not torch.equal(tokens, before)
    assert torch.equal(tuned.generate(input_ids=ids, use_cache=False, **settings), tokens)
    with torch.no_grad():
        whole = tuned(input_ids=tokens).logits
        first = tuned(input_ids=tokens[:, :13], use_cache=True)
        rest = tuned(input_ids=tokens[:, 13:], past_key_values=first[CACHE_KEY], use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, atol=1e-3, rtol=1e-3)
    with tuned.disable_adapter():
        assert torch.equal(tuned.generate(input_ids=ids, **settings), before)
    assert torch.equal(merge_and_unload(tuned).generate(ids, **settings), tokens)
