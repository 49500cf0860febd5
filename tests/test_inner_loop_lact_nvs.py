# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The inner loop of LaCT-NVS: variants, both evaluations, and what experiments take hold of."""

import pytest
import torch
from nvs_cases import (
    RULES,
    all_views,
    busy_model,
    gradients,
    input_views,
    tiny_config,
    to_double,
)
from torch import nn
from torch.testing import assert_close

from hf_ttt.modeling_lact_nvs import LaCTNVSModel
from hf_ttt.ttt_ops import ttt_read, ttt_update

EXACT = {"atol": 1e-10, "rtol": 1e-10}  # float64: 500 times the largest difference measured between two ways, 2e-13
CLOSE = {"atol": 1e-5, "rtol": 0}  # float32 with Muon: twice its own error in the golden models, 5.6e-6
PARALLELIZABLE = [name for name in RULES if tiny_config(name).rule.parallelizable]


@pytest.mark.parametrize("rule", PARALLELIZABLE)
def test_both_implementations_agree(rule):
    """Views and gradients in float64 by both evaluations."""
    model, inputs, results = busy_model(tiny_config(rule)).double(), to_double(all_views()), []
    for implementation in ("recurrent", "parallel"):
        model.set_ttt_implementation(implementation)
        assert model.get_ttt_implementation() == implementation
        model.zero_grad()
        output = model(**inputs)
        output.loss.backward()
        results.append((output.rendered.detach(), {name: grad.clone() for name, grad in gradients(model).items()}))
    assert_close(results[1], results[0], **EXACT)


def test_every_parallelizable_variant_is_tried():
    assert set(PARALLELIZABLE) == {"variant2", "variant3", "variant4", "variant5", "variant6", "prenorm_last"}


def test_every_rule_is_another_function():
    """No field of the inner loop is without effect, but that there is no momentum, and that after a single step the
    norm of the weights before and after it is the same."""
    with torch.no_grad():
        views = {}
        for rule in RULES:
            model = busy_model(tiny_config("baseline"))
            config = tiny_config(rule)
            other = LaCTNVSModel(config).eval()
            state = model.state_dict()
            if config.ttt_read_with == "key":
                state |= {k: v[24:] for k, v in state.items() if k.endswith("module_list.1.f.to_qkv.weight")}
            other.load_state_dict(state)
            views[rule] = other(**all_views()).rendered
    for name, same in (("variant5", "variant4"), ("prenorm", "baseline"), ("prenorm_last", "variant1")):
        assert_close(views.pop(name), views[same], **CLOSE)
    names = list(views)
    for i, name in enumerate(names):
        for other in names[:i]:
            assert (views[name] - views[other]).abs().max() > 1e-4, (name, other)


@pytest.mark.parametrize("rule", RULES)
def test_every_parameter_gets_a_gradient(rule):
    """Data-parallel training stops at a parameter without a gradient; what a rule leaves unused gets zeros."""
    model = busy_model(tiny_config(rule))
    model(**all_views()).loss.backward()
    grads, fields = gradients(model), tiny_config(rule)
    assert not [name for name, grad in grads.items() if grad is None]
    unused = {"w0", "w2"} if fields.ttt_fast_weight == "linear" else set()
    unused |= set() if fields.ttt_learnable_lr else {"weight", "bias"}
    zero = {name for name, grad in grads.items() if not grad.any()}
    assert zero == {
        name
        for name in grads
        if ".1.f." in name and name.rsplit(".")[-1] in unused and ("lr_fc" in name or ".w" in name[-3:])
    }


def test_unused_fast_weights_do_not_spread():
    """0 · sum(w0) kept unused weights in the published graph: one NaN among them made everything NaN."""
    model = busy_model(tiny_config("variant6"))
    want = model(**all_views()).rendered
    with torch.no_grad():
        for block in model.blocks:
            block.module_list[1].f.w0.fill_(float("nan"))
    output = model(**all_views())
    assert torch.equal(output.rendered, want)
    output.loss.backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())


def test_reading_with_the_key():
    """Built so, a model has no query projection; one built with it can be set to read with the key."""
    model, inputs = busy_model(tiny_config()), all_views()
    with_query = model(**inputs).rendered
    model.config.ttt_read_with = "key"
    switched = model(**inputs).rendered
    built = LaCTNVSModel(tiny_config("no_query")).eval()
    state = model.state_dict()
    for name in [name for name in state if name.endswith("module_list.1.f.to_qkv.weight")]:
        state[name] = state[name][24:]
        assert state[name].shape == (48, 24)
    built.load_state_dict(state, strict=True)
    assert torch.equal(built(**inputs).rendered, switched)
    assert (with_query - switched).abs().max() > 1e-3
    built.config.ttt_read_with = "query"
    with pytest.raises(ValueError, match="ttt_read_with='query' .* has no query projection.*'key'"):
        built(**inputs)


@pytest.mark.parametrize("loss", ["dot_product", "mse"])
def test_an_update_is_a_gradient_step(loss):
    """Without Muon and norms, descent and ascent on the inner loss are what autograd computes of it."""
    fields = {"ttt_loss_type": loss, "use_muon": False, "ttt_weight_norm": "none"}
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    for direction, sign in (("descent", -1), ("ascent", 1)):
        layer = busy_model(tiny_config(ttt_direction=direction, **fields)).double().blocks[0].module_list[1].f
        k, v, *rates = (t.detach() for t in layer.tokens(x))
        w0, w1, w2 = (w.detach().clone().requires_grad_() for w in layer.initial_state(2).weights)
        hidden = nn.functional.silu(torch.einsum("bhik,bthk->bthi", w0, k)) * torch.einsum("bhik,bthk->bthi", w2, k)
        out = torch.einsum("bhvi,bthi->bthv", w1, hidden)
        losses = -(out * v).sum(-1) if loss == "dot_product" else (out - v).square().sum(-1) / 2
        for w, rate, got in zip((w0, w1, w2), rates, layer.update(x).weights, strict=True):
            (grad,) = torch.autograd.grad((losses * rate[..., 0]).sum(), w, retain_graph=True)
            assert_close(got, w + sign * grad, **EXACT)


def test_more_steps_at_inference():
    """Set on a trained model, a number of inner steps is that many updates with the same tokens."""
    config = tiny_config(num_hidden_layers=1)
    model, inputs = busy_model(config).double(), to_double(all_views())
    layer, seen = model.blocks[0].module_list[1], []
    layer.ln.register_forward_hook(lambda module, args, output: seen.append(output.flatten(1, 2)))
    given = {name: value for name, value in inputs.items() if not name.startswith("target_")}
    once = model.reconstruct(**given)
    model.config.ttt_inner_steps = 3
    thrice = model.reconstruct(**given)
    state, rule = layer.f.initial_state(2), tiny_config().rule
    for _ in range(3):
        state = ttt_update(state, *layer.f.tokens(seen[0]), rule=rule)
    assert_close(thrice.states[0].weights, state.weights, **EXACT)
    assert (once.states[0].w1 - thrice.states[0].w1).abs().max() > 1e-2
    built = LaCTNVSModel(tiny_config("baseline", num_hidden_layers=1, ttt_inner_steps=3)).double()
    built.load_state_dict(model.state_dict())
    assert torch.equal(built(**inputs).rendered, model(**inputs).rendered)


@pytest.mark.parametrize("rule", RULES)
def test_tokens_and_states_of_a_call(rule):
    """Keys, values and rates of the input views give the scene's states; what reads them gives a layer's output."""
    model, seen, given = busy_model(tiny_config(rule)).double(), {}, to_double(input_views())
    module = model.blocks[0].module_list[1]
    module.ln.register_forward_hook(lambda _, args, output: seen.update(x=output.flatten(1, 2)))
    module.f.register_forward_hook(lambda _, args, output: seen.update(out=output))
    scene = model.reconstruct(**given)
    layer, config = module.f, model.config
    tokens = layer.tokens(seen["x"])
    assert tokens.k.shape == tokens.v.shape == layer.reads(seen["x"]).shape == (2, 36, 2, 12)
    assert (tokens.lr1 is None) is (not config.ttt_learnable_lr)
    assert config.ttt_learnable_lr is False or tokens.lr1.shape == (2, 36, 2, 1)
    state = ttt_update(layer.initial_state(2), *tokens, rule=config.rule)
    assert_close(state.weights, scene.states[0].weights, **EXACT)
    read = ttt_read(scene.states[0], layer.reads(seen["x"]), rule=config.rule)
    assert_close(layer.c_proj(layer.o_norm(read).flatten(2)), seen["out"], **EXACT)
    assert torch.equal(layer.reads(seen["x"]), tokens.k) is (config.ttt_read_with == "key")


def test_hooks_on_the_projections():
    """A hook on `to_qkv` sees queries, keys and values, as one on `qkv` of the language model; layers used rows of its
    weight past the call, so that no hook ever ran. The views stay the same."""
    model, inputs, seen = busy_model(tiny_config("variant2")), all_views(), []
    want = model(**inputs).rendered
    layer = model.blocks[0].module_list[1].f
    hook = layer.to_qkv.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    assert_close(model(**inputs).rendered, want, **CLOSE)
    tokens, views = [x.shape[1] for x, _ in seen], 12
    assert set(tokens) == {3 * views, 2 * views}  # of the input views and of the target views
    x, qkv = seen[0]
    assert qkv.shape == (2, 3 * views, 3 * 24)
    assert_close(nn.functional.silu(qkv[..., 48:]).unflatten(-1, (2, 12)), layer.tokens(x).v)
    hook.remove()
    count = len(seen)
    model(**inputs)
    assert len(seen) == count
    layer.to_qkv.register_forward_hook(lambda _, args, output: output * 0)  # and it may change them
    assert (model(**inputs).rendered - want).abs().max() > 1e-3


def test_ascent_and_key_on_a_trained_model():
    """Fields of the inner loop that are set on a model count from the next call on, alone and together, and can be set
    back; a model that is built with them gives the same."""
    model, inputs = busy_model(tiny_config("variant2")).double(), to_double(all_views())
    plain, state = model(**inputs).rendered, model.state_dict()
    for fields in (
        {"ttt_direction": "ascent"},
        {"ttt_read_with": "key"},
        {"ttt_direction": "ascent", "ttt_read_with": "key", "ttt_inner_steps": 2},
    ):
        for name, value in fields.items():
            setattr(model.config, name, value)
        got = model(**inputs).rendered
        assert (got - plain).abs().max() > 1e-3
        built = LaCTNVSModel(tiny_config("variant2", **fields)).double()
        rows = 24 if "ttt_read_with" in fields else 0  # such a model has no query projection
        built.load_state_dict({k: w[rows:] if k.endswith("1.f.to_qkv.weight") else w for k, w in state.items()})
        assert_close(built(**inputs).rendered, got, **EXACT)
        model.config.ttt_direction, model.config.ttt_read_with, model.config.ttt_inner_steps = "descent", "query", 1
        assert torch.equal(model(**inputs).rendered, plain)
