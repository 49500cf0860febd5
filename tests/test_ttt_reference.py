# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The definition against closed forms that can be read off the papers."""

import pytest
import torch
from ttt_cases import make_inputs, reference

from hf_ttt import TTTRule
from hf_ttt.ttt_reference import reference_attention, reference_loss, reference_network

C = 4


def heads_first(x):
    return {key: t if t is None or key[0] == "w" else t.transpose(1, 2) for key, t in x.items()}


def test_variant_6_is_blockwise_linear_attention():
    """o_t = (w1 + Σ over earlier chunks of v kᵀ) q_t: the mask of linear attention with whole chunks left out."""
    rule = TTTRule(fast_weight="linear", weight_norm="none")
    x = make_inputs(rule, length=11, rates=None, momentum=None)
    y = heads_first(x)
    chunk = torch.arange(11) // C
    scores = (y["q"] @ y["k"].mT) * (chunk[:, None] > chunk)
    want = (y["q"] @ x["w1"].mT + scores @ y["v"]).transpose(1, 2)
    torch.testing.assert_close(reference(x, rule, C), want, rtol=1e-12, atol=1e-12)


def test_variant_2_is_linear_attention_of_features_with_momentum():
    """o = (w1 + Σ_{j < c} M_j) φ(q), M_j = G_j + m_j M_{j−1}, G_j = Σ_t η_t v_t φ(k_t)ᵀ (paper, theorem 5.3)."""
    rule = TTTRule(update="last", weight_norm="none")
    x = make_inputs(rule, length=11)
    y = heads_first(x)
    phi = lambda t: torch.nn.functional.silu(t @ x["w0"].mT) * (t @ x["w2"].mT)  # noqa: E731
    state, moment, outs = x["w1"].expand(2, -1, -1, -1), 0.0, []
    for start in range(0, 11, C):
        part = {key: t if t is None or key[0] == "w" else t[:, :, start : start + C] for key, t in y.items()}
        outs.append(phi(part["q"]) @ state.mT)
        moment = part["v"].mT @ (part["lr1"] * phi(part["k"])) + part["momentum"].mean(2, keepdim=True) * moment
        state = state + moment
    torch.testing.assert_close(reference(x, rule, C), torch.cat(outs, 2).transpose(1, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", ["dot_product", "mse"])
def test_loss(loss):
    """−⟨f(k), v⟩ and ½ ‖f(k) − v‖²."""
    rule = TTTRule(loss=loss)
    x = make_inputs(rule, per_row=True)
    k, v, weights = x["k"][:, 0], x["v"][:, 0], [x[key] for key in ("w0", "w1", "w2")]
    f = reference_network(k, *weights, rule)
    want = -(f * v).sum() if loss == "dot_product" else (f - v).square().sum() / 2
    torch.testing.assert_close(reference_loss(k, v, *weights, rule), want)


def test_one_step_is_a_gradient_step_on_the_loss_of_the_chunk():
    """All rates 1: w − ∂/∂w of the summed loss, and rows with the norms of the initial weights."""
    for norm in ("none", "post", "pre"):
        rule = TTTRule(weight_norm=norm, loss="mse")
        x = make_inputs(rule, length=C, rates=None, momentum=None, per_row=True)
        weights = [x[key] for key in ("w0", "w1", "w2")]
        loss = sum(reference_loss(x["k"][:, t], x["v"][:, t], *weights, rule) for t in range(C))
        _, after = reference_attention(**x, rule=rule, chunk_size=C)
        for w, g, got in zip(weights, torch.autograd.grad(loss, weights), after, strict=True):
            want = w - g
            if norm != "none":
                want = want / (want.norm(dim=-1, keepdim=True) + 1e-5) * w.norm(dim=-1, keepdim=True)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_ascent_steps_the_other_way_and_keys_replace_queries():
    x = make_inputs(TTTRule(), length=11)
    none = {"weight_norm": "none", "update": "last"}
    down, up = (reference(x, TTTRule(direction=d, **none), C) for d in ("descent", "ascent"))
    still = reference({**x, "lr1": torch.zeros_like(x["lr1"])}, TTTRule(**none), C)
    torch.testing.assert_close(down - still, still - up)
    key = reference(x, TTTRule(read_with="key"), C)
    torch.testing.assert_close(key, reference({**x, "q": x["k"]}, TTTRule(), C))


def test_weights_after_whole_chunks():
    """Returned are the weights after each full chunk; the ragged rest changes nothing."""
    rule = TTTRule(update="last")
    x = make_inputs(rule, length=11)
    _, after = reference_attention(**x, rule=rule, chunk_size=C)
    short = {key: t if key[0] == "w" else t[:, :8] for key, t in x.items()}
    _, want = reference_attention(**short, rule=rule, chunk_size=C)
    assert torch.equal(after[1], want[1])
    assert torch.equal(after[0][0], x["w0"])
