# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The theorems as tests: whatever the rule, the op's output is that of the linear attention that is read off it."""

import pytest
import torch
from lact_cases import busy_model, tiny_config, token_ids
from nvs_cases import busy_model as busy_views_model
from nvs_cases import cameras
from nvs_cases import tiny_config as tiny_views_config
from ttt_cases import make_inputs, name, reference, some_rules

from hf_ttt import TTTRule, ViTTTConfig, ViTTTModel
from hf_ttt.analysis import linear_attention_form, record_calls


@pytest.mark.parametrize("rule", some_rules(), ids=name)
def test_output_is_rebuilt(rule):
    """S₀ q̂ + Σ v̂ ⟨k̂, q̂⟩ is the definition's output to float64's rounding, for every rule."""
    x = make_inputs(rule, length=19, rates="channel", requires_grad=False)
    form = linear_attention_form(**x, rule=rule, chunk_size=4)
    torch.testing.assert_close(form.output(), reference(x, rule, 4), rtol=1e-9, atol=1e-9)


def test_parts_of_the_simplest_rule():
    """Variant 6 is linear attention as it stands: q̂ = q, k̂ = k, v̂ = v of full chunks before, S₀ = w1."""
    rule = TTTRule(update="last", fast_weight="linear", weight_norm="none")
    x = make_inputs(rule, length=11, rates=None, momentum=None, requires_grad=False)
    form = linear_attention_form(**x, rule=rule, chunk_size=4)
    assert torch.equal(form.q_hat, x["q"]) and torch.equal(form.k_hat, x["k"][:, :8])
    assert torch.equal(form.s0, x["w1"].expand(3, 2, -1, -1, -1))
    for chunk, before in enumerate((0, 4, 8)):
        assert torch.equal(form.v_hat[chunk, :, :before], x["v"][:, :before])
        assert not form.v_hat[chunk, :, before:].any()


def test_momentum_mixes_earlier_values():
    """Theorem 5.3: β of the chunks since, summed, is what an entry's value has been multiplied with."""
    rule = TTTRule(update="last", fast_weight="linear", weight_norm="none")
    x = make_inputs(rule, length=13, rates=None, momentum=0.5, requires_grad=False)
    form = linear_attention_form(**x, rule=rule, chunk_size=4)
    torch.testing.assert_close(form.v_hat[3, :, :4], (1 + 0.5 + 0.25) * x["v"][:, :4])
    torch.testing.assert_close(form.v_hat[3, :, 4:8], 1.5 * x["v"][:, 4:8])


def test_ascent_flips_the_values():
    """Section 4.2: the other sign of the inner loop is the other sign of v̂, and nothing else."""
    rules = [TTTRule(update="last", weight_norm="none", direction=d) for d in ("descent", "ascent")]
    x = make_inputs(rules[0], requires_grad=False)
    down, up = (linear_attention_form(**x, rule=rule, chunk_size=4) for rule in rules)
    assert torch.equal(down.v_hat, -up.v_hat) and torch.equal(down.q_hat, up.q_hat)
    assert torch.equal(down.k_hat, up.k_hat) and torch.equal(down.s0, up.s0)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_short_sequences(length):
    """Without a full chunk there are no entries: the initial weights are read."""
    rule = TTTRule()
    x = make_inputs(rule, length=length, requires_grad=False)
    form = linear_attention_form(**x, rule=rule, chunk_size=4)
    assert form.k_hat.shape[1] == 0 and form.scores().shape[-1] == 0
    torch.testing.assert_close(form.output(), reference(x, rule, 4), rtol=1e-12, atol=1e-12)


def test_bfloat16_muon_is_refused():
    """Rounding inside of the polynomial is not linear in the tokens."""
    rule = TTTRule(muon="lact", muon_dtype="bfloat16")
    with pytest.raises(ValueError, match="set muon_dtype='float32'"):
        linear_attention_form(**make_inputs(rule, requires_grad=False), rule=rule, chunk_size=4)


@pytest.mark.parametrize("variant", ["baseline", "variant2"])
def test_a_layer_of_a_model(variant):
    """Each layer's call is recorded, the form rebuilds what the layer got, and the registry is as before."""
    model = busy_model(tiny_config(variant)).double()
    functions = dict(model._ttt_functions._functions)
    with record_calls(model) as calls:
        logits = model(token_ids(2, 21)).logits
    assert model._ttt_functions._functions == functions
    assert len(calls) == model.config.num_hidden_layers
    for call in calls:
        torch.testing.assert_close(call.linear_attention_form().output(), call.out, rtol=1e-9, atol=1e-9)
    assert torch.equal(model(token_ids(2, 21)).logits, logits)


def test_views_are_recorded():
    """LaCT-NVS updates and reads in two calls a layer: the first has the keys, the second the queries."""
    model = busy_views_model(tiny_views_config())
    with record_calls(model) as calls, torch.no_grad():
        scene = model.reconstruct(torch.rand(1, 2, 3, 8, 8), **cameras(1, 2, 8, 8))
        written = len(calls)
        model.render(scene, **cameras(1, 1, 8, 8), size=(8, 8))
    assert written >= 2 and len(calls) == written + 2
    assert calls[0].k.shape[1] == 2 * 2 * 2 and calls[-1].q.shape[1] == 2 * 2 and not calls[-1].k.numel()


def test_other_families_are_refused():
    """ViTTT's block has another op."""
    with (
        pytest.raises(ValueError, match="model=ViTTTModel has no layers that can be recorded"),
        record_calls(ViTTTModel(ViTTTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))),
    ):
        pass
