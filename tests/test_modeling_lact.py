# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The LaCT models: numbers of the published code, inputs, outputs, and equal ways to the same numbers."""

import copy

import pytest
import torch
from lact_cases import (
    OTHER_RULES,
    VARIANTS,
    busy_model,
    golden_index,
    golden_tensors,
    gradients,
    tiny_config,
    token_ids,
)
from torch.testing import assert_close
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_ttt import LaCTConfig, LaCTForCausalLM, LaCTForSequenceClassification, LaCTModel
from hf_ttt.modeling_lact import CACHE_KEY
from hf_ttt.ttt_ops import TTT_FUNCTIONS

INDEX = golden_index()
EXACT = {"atol": 1e-10, "rtol": 1e-10}  # float64: 500 times the largest difference measured between two ways, 2e-13
PARALLELIZABLE = [name for name in (*VARIANTS, *OTHER_RULES) if tiny_config(name).rule.parallelizable]
ROPE = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 32},
    "longrope": {
        "factor": 2.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    },
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


def paper_config(variant: str) -> LaCTConfig:
    case = INDEX["paper"]["variants"][variant]
    fields = {name: case[name] for name in ("ttt_loss_type", "use_momentum", "use_muon")}
    return LaCTConfig(**INDEX["paper"]["state"]["config"], **fields)


PAPER_VARIANTS = [
    (variant, implementation)
    for variant in INDEX["paper"]["variants"]
    for implementation in ("recurrent", "parallel")
    if implementation == "recurrent" or paper_config(variant).rule.parallelizable
]


def check_golden(model, inputs, tensors, order, prefix=""):
    """Logits, loss, gradient norms and projections of the gradients, within the tolerances of the index."""
    suffix, kind = "", "plain"
    if model.config.use_muon:
        suffix, kind = "_exact_muon", "muon_float64" if model.dtype == torch.float64 else "muon_float32"
    tolerance = INDEX["tolerance"][kind]
    checked = 0
    for i, ids in enumerate(inputs):
        expected = tensors.get(f"{prefix}logits{suffix}/{i}")
        if expected is not None:
            assert_close(model(ids).logits.float(), expected, atol=tolerance["logits"], rtol=0)
            checked += 1
    assert checked
    loss = model(inputs[0], labels=inputs[0]).loss
    assert_close(loss.float(), tensors[f"{prefix}loss{suffix}"][0], atol=tolerance["loss"], rtol=0)
    loss.backward()
    grads = gradients(model)
    assert set(grads) == set(order)
    norms, projections = (tensors[f"{prefix}{kind}{suffix}"].double() for kind in ("grad_norms", "grad_cosproj"))
    for name, norm, projection in zip(order, norms, projections, strict=True):
        grad = grads[name].double().flatten()
        bound = tolerance["grad_norm_rel"] * norm.item() + 1e-12
        assert abs(grad.norm().item() - norm.item()) <= bound, name
        cosines = torch.cos(0.37 * torch.arange(grad.numel(), dtype=torch.float64) + 0.1)
        assert abs((grad @ cosines).item() - projection.item()) <= bound, name


def published_model(file: str, **fields) -> tuple[LaCTForCausalLM, dict[str, torch.Tensor]]:
    tensors = golden_tensors(file)
    model = LaCTForCausalLM(LaCTConfig(**INDEX["models"][file]["config"], **fields))
    state = {k.removeprefix("state_dict/"): v for k, v in tensors.items() if k.startswith("state_dict/")}
    model.load_state_dict(state, strict=True)
    return model, tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("file", INDEX["models"])
def test_published_model(file, dtype):
    (model, tensors), case = published_model(file), INDEX["models"][file]
    model = model.to(dtype).train()
    check_golden(model, [tensors[f"input_ids/{i}"] for i in range(3)], tensors, case["grad_param_order"])


@pytest.mark.parametrize("file", [f for f, case in INDEX["models"].items() if case["config"]["use_muon"]])
def test_published_muon_in_bfloat16(file):
    """As published. Only the loss can be compared: rounding differs between kernels and is amplified by hundreds."""
    model, tensors = published_model(file, ttt_muon_dtype="bfloat16")
    loss = model(tensors["input_ids/0"], labels=tensors["input_ids/0"]).loss
    assert_close(loss, tensors["loss"][0], atol=INDEX["tolerance"]["muon_bfloat16"]["loss"], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("variant", "implementation"), PAPER_VARIANTS)
def test_published_variant(variant, implementation, dtype):
    paper, case = INDEX["paper"], INDEX["paper"]["variants"][variant]
    config = paper_config(variant)
    model = LaCTForCausalLM(config).to(dtype).train()
    model.set_ttt_implementation(implementation)
    state = golden_tensors(paper["state"]["file"])
    inputs = [state.pop(f"input_ids/{i}") for i in range(3)]
    state = {k.removeprefix("state_dict/"): v for k, v in state.items()}
    if not config.use_momentum:
        state = {k: v for k, v in state.items() if "momentum_proj" not in k}
    model.load_state_dict(state, strict=True)
    check_golden(
        model, inputs, golden_tensors(paper["outputs"]["file"]), case["grad_param_order"], f"variant/{variant}/"
    )


@pytest.mark.parametrize("variant", PARALLELIZABLE)
def test_both_implementations_agree(variant):
    model = busy_model(tiny_config(variant)).double()
    ids, mask = token_ids(3, 29), torch.ones(3, 29, dtype=torch.long)
    mask[0, :11], mask[1, 20:] = 0, 0
    results = {}
    for implementation in ("recurrent", "parallel"):
        model.set_ttt_implementation(implementation)
        assert model.get_ttt_implementation() == implementation
        model.zero_grad()
        logits = model(ids, attention_mask=mask).logits
        (logits * mask[..., None]).square().sum().backward()
        results[implementation] = logits[mask.bool()], {k: g.clone() for k, g in gradients(model).items()}
    (logits, grads), (others, other_grads) = results.values()
    assert_close(logits, others, **EXACT)
    for name, grad in grads.items():
        assert_close(
            grad, other_grads[name], atol=EXACT["atol"] * grad.abs().max().item(), rtol=EXACT["rtol"], msg=name
        )


def test_choice_of_the_implementation(monkeypatch):
    torch_only = {key: f for key, f in TTT_FUNCTIONS._functions.items() if key[1] == "torch"}
    monkeypatch.setattr(TTT_FUNCTIONS, "_functions", torch_only)
    model = LaCTForCausalLM(tiny_config("variant2"))
    assert (model.config.ttt_implementation, model.get_ttt_implementation()) == ("auto", "parallel")
    model.set_ttt_implementation("recurrent", backend="torch")
    assert (model.config.ttt_backend, model.get_ttt_implementation()) == ("torch", "recurrent")
    model.set_ttt_implementation("auto")
    assert (model.config.ttt_backend, model.model.get_ttt_implementation()) == ("torch", "parallel")
    with pytest.raises(ValueError, match="implementation='scan' is not one of 'auto', 'recurrent', 'parallel'"):
        model.set_ttt_implementation("scan")
    with pytest.raises(ValueError, match="backend='cuda' is not one of 'auto', 'torch', 'triton'"):
        model.set_ttt_implementation("auto", backend="cuda")
    with pytest.raises(ImportError, match="backend='triton' has no 'parallel' evaluation .* use backend='torch'"):
        model.set_ttt_implementation("auto", backend="triton")
    assert (model.config.ttt_implementation, model.config.ttt_backend) == ("auto", "torch")  # a refusal changes nothing


@pytest.mark.parametrize(
    ("variant", "field"), [("baseline", "ttt_update"), ("variant1", "ttt_weight_norm"), ("mse", "ttt_update")]
)
def test_parallel_where_it_is_not_exact(variant, field):
    message = f"'parallel' is not exact for this rule: .*{field} in a model's config"
    with pytest.raises(ValueError, match=message):
        LaCTForCausalLM(tiny_config(variant, ttt_implementation="parallel"))
    model = LaCTForCausalLM(tiny_config(variant))
    assert model.get_ttt_implementation() == "recurrent"
    with pytest.raises(ValueError, match=message):
        model.set_ttt_implementation("parallel")


@pytest.mark.parametrize("variant", ["variant6", "fixed_rate_low_rank", "two_steps"])
def test_bfloat16_on_a_cpu(variant):
    """bfloat16 has 16 bits less than float32, so its rounding may be 2^16 times that of float32: within twice that."""
    model = busy_model(tiny_config(variant, use_muon=False)).to(torch.bfloat16)
    ids = token_ids(2, 29)
    logits = model(ids, labels=ids)
    assert logits.logits.dtype == torch.bfloat16
    logits.loss.backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())
    exact = copy.deepcopy(model).double()(ids).logits
    rounding = (copy.deepcopy(model).float()(ids).logits - exact).abs().max()
    assert (logits.logits - exact).abs().max() <= 2 * 2**16 * rounding
    assert 2 * 2**16 * rounding < 3 * exact.std()  # or the comparison would say nothing


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_with_muon(dtype):
    """Muon amplifies rounding too much for a comparison of logits; the published bfloat16 runs differ as much."""
    model = busy_model(tiny_config()).to(dtype)
    ids = token_ids(2, 29)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())
    assert abs(loss - copy.deepcopy(model).double()(ids, labels=ids).loss) < 0.5


def test_float64():
    model = busy_model(tiny_config()).double()
    output = model(token_ids(2, 29), use_cache=True, output_hidden_states=True)
    assert output.logits.dtype == torch.float64
    assert all(h.dtype == torch.float64 for h in output.hidden_states)
    assert output[CACHE_KEY].layers[0].ttt.w0.dtype == torch.float64


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window_size", [None, 8])
@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_attention_implementations_agree(implementation, window_size, padded):
    """Forward only, and not compiled: flex attention has no backward on a CPU, and compiling it takes a minute."""
    eager = busy_model(tiny_config(window_size=window_size, attn_implementation="eager")).double()
    other = busy_model(tiny_config(window_size=window_size)).double()
    other.set_attn_implementation(implementation)
    ids, mask = token_ids(2, 21), torch.ones(2, 21, dtype=torch.long)
    if padded:
        mask[0, :6] = 0
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        expected, logits = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (eager, other))
    assert_close(logits, expected, **EXACT)


@pytest.mark.parametrize("window_size", [None, 1, 5, 50])
def test_what_the_window_sees(window_size):
    model = busy_model(tiny_config(window_size=window_size, attn_implementation="eager"))
    attentions = model(token_ids(2, 21), output_attentions=True).attentions
    seen = torch.ones(21, 21).tril().bool()
    if window_size is not None:
        seen &= torch.ones(21, 21).triu(1 - window_size).bool()
    assert len(attentions) == 2
    for weights in attentions:
        assert weights.shape == (2, 4, 21, 21)
        assert torch.equal(weights > 0, seen.expand_as(weights))
        assert_close(weights.sum(-1), torch.ones(2, 4, 21))


def test_a_window_larger_than_the_sequence_is_full_attention():
    logits = [busy_model(tiny_config(window_size=size))(token_ids(2, 21)).logits for size in (None, 21, 22, 1000)]
    for other in logits[1:]:
        assert_close(other, logits[0], atol=0, rtol=0)


def test_every_rope_type_is_tried():
    assert set(ROPE) >= {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("rope_type", [*ROPE_INIT_FUNCTIONS, "default"])
def test_rope_types(rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 1e4, **ROPE[rope_type]}
    config = tiny_config(rope_parameters=rope, max_position_embeddings=32)
    model, plain = busy_model(config), busy_model(tiny_config(max_position_embeddings=32))
    ids = token_ids(2, 48)
    logits = model(ids).logits
    assert logits.isfinite().all()
    assert torch.equal(logits, plain(ids).logits) == (rope_type == "default")
    assert_close(model(ids).logits, logits, atol=0, rtol=0)  # types that depend on the length give the same again
    short = ids[:, :9]
    same = rope_type in ("default", "dynamic")  # dynamic scaling begins beyond max_position_embeddings
    assert torch.equal(model(short).logits, plain(short).logits) == same


def test_logits_to_keep():
    model = busy_model(tiny_config())
    ids = token_ids(2, 21)
    logits = model(ids).logits
    assert logits.shape == (2, 21, 61)
    kept = model(ids, logits_to_keep=3).logits
    assert_close(kept, logits[:, -3:])
    indices = torch.tensor([0, 7, 20])
    assert_close(model(ids, logits_to_keep=indices).logits, logits[:, indices])
    assert_close(model(ids, logits_to_keep=0).logits, logits)


def test_hidden_states():
    model = busy_model(tiny_config())
    ids = token_ids(2, 21)
    output = model(ids, output_hidden_states=True)
    assert [h.shape for h in output.hidden_states] == [(2, 21, 32)] * 3
    assert_close(output.hidden_states[0], model.model.embeddings(ids))
    assert_close(output.hidden_states[-1], model.model(ids).last_hidden_state)
    assert_close(model.lm_head(output.hidden_states[-1]), output.logits)
    assert model(ids).hidden_states is None and model(ids).attentions is None
    loss, logits, hidden_states = model(ids, labels=ids, output_hidden_states=True, use_cache=False, return_dict=False)
    assert loss.dim() == 0 and logits.shape == (2, 21, 61) and len(hidden_states) == 3


def test_loss():
    model = busy_model(tiny_config())
    ids = token_ids(2, 21)
    labels = ids.clone()
    labels[0, :9] = -100
    output = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    count = (labels[:, 1:] != -100).sum().item()
    assert count == 20 - 8 + 20
    assert_close(output.loss, expected / count)
    assert_close(model(ids, labels=labels, num_items_in_batch=100).loss, expected / 100)
    assert_close(model(ids, labels=labels, num_items_in_batch=torch.tensor(100)).loss, expected / 100)


def test_embeddings_as_input():
    model = busy_model(tiny_config())
    ids = token_ids(2, 21)
    embeds = model.get_input_embeddings()(ids)
    assert_close(model(inputs_embeds=embeds).logits, model(ids).logits, atol=0, rtol=0)
    with pytest.raises(ValueError, match="pass either input_ids or inputs_embeds, not both"):
        model(ids, inputs_embeds=embeds)
    with pytest.raises(ValueError, match="pass either input_ids or inputs_embeds"):
        model()


@pytest.mark.parametrize("shape", [(2, 20), (2, 22), (1, 21), (2, 1, 21, 21)])
def test_masks_that_are_not_of_the_tokens(shape):
    model = LaCTForCausalLM(tiny_config())
    with pytest.raises(
        ValueError, match=rf"attention_mask has shape \({shape[0]}, .*expected a padding mask \[2, 21\]"
    ):
        model(token_ids(2, 21), attention_mask=torch.ones(shape))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_a_single_row(side):
    """A mask was once looked at only for more than one row."""
    model = busy_model(tiny_config(use_muon=False))
    ids, pads = token_ids(1, 21), torch.full((1, 6), 9)
    parts = [(pads, 0), (ids, 1)] if side == "left" else [(ids, 1), (pads, 0)]
    mask = torch.cat([torch.full_like(tokens, real) for tokens, real in parts], 1)
    logits = model(torch.cat([tokens for tokens, _ in parts], 1), attention_mask=mask).logits
    assert_close(logits[mask.bool()], model(ids).logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("shape", [(2, 0), (0, 21), (0, 0)])
@pytest.mark.parametrize("variant", ["baseline", "variant2"])
def test_empty_input(variant, shape, with_mask, use_cache):
    ids = torch.zeros(shape, dtype=torch.long)
    arguments = {"attention_mask": torch.ones_like(ids)} if with_mask else {}
    for implementation in ("sdpa", "eager"):
        model = busy_model(tiny_config(variant, attn_implementation=implementation))
        output = model(ids, use_cache=use_cache, **arguments)
        assert output.logits.shape == (*shape, 61)
        assert model.model(ids, **arguments).last_hidden_state.shape == (*shape, 32)
        output.logits.sum().backward()


def test_empty_input_leaves_a_cache_as_it_is():
    model = busy_model(tiny_config())
    ids = token_ids(2, 21)
    with torch.no_grad():
        cache = model(ids[:, :11], use_cache=True)[CACHE_KEY]
        cache = model(ids[:, :0], cache=cache, use_cache=True)[CACHE_KEY]
        logits = model(ids[:, 11:], cache=cache, use_cache=True).logits
        assert_close(logits, model(ids).logits[:, 11:], atol=5e-4, rtol=0)  # the index's bound for Muon in float32


def test_one_token():
    for variant in ("baseline", "variant2"):
        model = busy_model(tiny_config(variant))
        ids = token_ids(2, 9)
        assert_close(model(ids[:, :1]).logits, model(ids).logits[:, :1])
        assert model(token_ids(1, 1)).logits.shape == (1, 1, 61)


@pytest.mark.parametrize("variant", ["baseline", "variant2"])
def test_meta_tensors(variant):
    """Shapes without values: no part of the model may look at numbers."""
    model = LaCTForCausalLM(tiny_config(variant)).to("meta")
    ids = token_ids(2, 21).to("meta")
    inputs = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(21, device="meta").expand(2, -1)}
    for arguments in ({}, {"attention_mask": inputs["attention_mask"]}, inputs):
        for use_cache in (False, True):
            output = model(ids, labels=ids, use_cache=use_cache, **arguments)
            assert output.logits.shape == (2, 21, 61) and output.loss.is_meta
    output.loss.backward()


@pytest.mark.parametrize("padded", [False, True])
def test_export(padded):
    model = busy_model(tiny_config("variant2", num_hidden_layers=1, use_muon=False))
    inputs = {"input_ids": token_ids(2, 17), "use_cache": False}
    if padded:
        inputs["attention_mask"] = (torch.arange(17) >= torch.tensor([[5], [0]])).long()
    with torch.no_grad():
        exported = torch.export.export(model, (), inputs, strict=False).module()
        assert_close(exported(**inputs).logits, model(**inputs).logits)


class TestSequenceClassification:
    lengths = (21, 9, 14)

    def model(self, **fields):
        return busy_model(tiny_config(use_muon=False, num_labels=5, **fields), LaCTForSequenceClassification)

    def rows(self):
        ids = token_ids(3, 21)
        return [ids[i : i + 1, :length] for i, length in enumerate(self.lengths)]

    def batch(self, side, pad=0):
        ids = torch.full((3, 21), pad)
        mask = torch.zeros(3, 21, dtype=torch.long)
        for i, row in enumerate(self.rows()):
            where = slice(None, row.shape[1]) if side == "right" else slice(21 - row.shape[1], None)
            ids[i, where], mask[i, where] = row[0], 1
        return ids, mask

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padded_rows_are_classified_as_if_alone(self, side):
        model = self.model()
        expected = torch.cat([model(row).logits for row in self.rows()])
        for pad in (0, 7):
            ids, mask = self.batch(side, pad)
            logits = model(ids, attention_mask=mask).logits
            assert logits.shape == (3, 5)
            assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        embeds = model.get_input_embeddings()(ids)
        assert_close(model(inputs_embeds=embeds, attention_mask=mask).logits, expected, atol=1e-5, rtol=1e-5)

    def test_the_padding_id_tells_the_last_token_where_there_is_no_mask(self):
        """On the right: what follows a token does not change it."""
        model = self.model()
        expected = torch.cat([model(row).logits for row in self.rows()])
        assert_close(model(self.batch("right")[0]).logits, expected, atol=1e-5, rtol=1e-5)

    def test_without_mask_and_padding_id(self):
        model = self.model(pad_token_id=None)
        assert model(self.rows()[0]).logits.shape == (1, 5)
        with pytest.raises(ValueError, match="batch of 3 without attention_mask needs config.pad_token_id"):
            model(token_ids(3, 21))
        embeds = model.get_input_embeddings()(token_ids(3, 21))
        ones = torch.ones(3, 21, dtype=torch.long)
        assert_close(model(inputs_embeds=embeds).logits, model(token_ids(3, 21), attention_mask=ones).logits)

    def test_empty_input(self):
        model = self.model()
        assert model(token_ids(1, 9)[:0]).logits.shape == (0, 5)
        with pytest.raises(ValueError, match=r"the input has shape \[2, 0\]; a row needs at least one token"):
            model(token_ids(2, 9)[:, :0])

    @pytest.mark.parametrize(
        ("problem", "labels"),
        [
            ("single_label_classification", torch.tensor([0, 4, 2])),
            ("multi_label_classification", torch.tensor([[1.0, 0, 0, 1, 0]] * 3)),
            ("regression", torch.tensor([[0.5, -1, 2, 0, 0]] * 3)),
        ],
    )
    def test_losses(self, problem, labels):
        ids, mask = self.batch("left")
        functions = torch.nn.functional
        for given in (problem, None):
            if given is None and problem == "regression":
                continue  # inferred for one label only
            model = self.model(problem_type=given)
            output = model(ids, attention_mask=mask, labels=labels)
            expected = {
                "single_label_classification": functions.cross_entropy,
                "multi_label_classification": functions.binary_cross_entropy_with_logits,
                "regression": functions.mse_loss,
            }[problem](output.logits, labels)
            assert_close(output.loss, expected)
            output.loss.backward()
            assert all(grad is not None for grad in gradients(model).values())

    def test_regression_of_one_number(self):
        model = busy_model(tiny_config(num_labels=1), LaCTForSequenceClassification)
        output = model(token_ids(3, 21), labels=torch.tensor([0.5, -1.0, 2.0]))
        assert_close(output.loss, (output.logits[:, 0] - torch.tensor([0.5, -1.0, 2.0])).square().mean())


def test_models_share_their_layers():
    config = tiny_config()
    base = busy_model(config, LaCTModel)
    for model_class in (LaCTForCausalLM, LaCTForSequenceClassification):
        model = model_class(config)
        model.model.load_state_dict(base.state_dict())
        assert model.base_model is model.model and model.get_input_embeddings() is model.model.embeddings
        output = model(token_ids(2, 21), output_hidden_states=True)
        assert_close(output.hidden_states[-1], base(token_ids(2, 21)).last_hidden_state)
