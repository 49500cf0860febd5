# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""TTT layers written as the linear attention that they are, for any rule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ..ttt_checks import check_chunk_size, check_tokens, check_weights
from ..ttt_muon import EPS as MUON_EPS
from ..ttt_muon import muon_coefficients
from ..ttt_ops import ttt_update
from ..ttt_rule import TTTRule
from ..ttt_state import EPS, TTTState, row_norm, ttt_init


@dataclass(frozen=True)
class LinearAttentionForm:
    r"""`o_t = (S₀ + Σ_i v̂_i k̂_iᵀ) q̂_t`, with S₀ and v̂ as the chunk of token t sees them.

    An entry i is a token of a full chunk in one inner step, in the order in which they are taken. Momentum, Muon and
    weight norms change what earlier entries are worth, so values depend on the chunk that reads; features do not.

    Attributes:
        q_hat: features of the queries at the weights that they read [B, T, H, Dh].
        k_hat: features of the keys at the weights that they update, times the rate [B, N, H, Dh].
        v_hat: for each chunk that reads, the values of the entries [chunks, B, N, H, Dv]; 0 for those after it.
        s0: for each chunk that reads, what is left of the initial weights [chunks, B, H, Dv, Dh].
        chunk_size: C; token t is read by chunk ⌊t/C⌋.
    """

    q_hat: Tensor
    k_hat: Tensor
    v_hat: Tensor
    s0: Tensor
    chunk_size: int

    def scores(self) -> Tensor:
        """⟨q̂_t, k̂_i⟩ [B, H, T, N], without a mask: what t does not see has the value 0."""
        return torch.einsum("bthd,bnhd->bhtn", self.q_hat, self.k_hat)

    def output(self) -> Tensor:
        """The output of the layer's op [B, T, H, Dv], rebuilt."""
        outputs = []
        for c, (s0, v) in enumerate(zip(self.s0, self.v_hat, strict=True)):
            q = self.q_hat[:, c * self.chunk_size : (c + 1) * self.chunk_size]
            scores = torch.einsum("bthd,bnhd->bhtn", q, self.k_hat)
            outputs.append(torch.einsum("bhvd,bthd->bthv", s0, q) + torch.einsum("bhtn,bnhv->bthv", scores, v))
        return torch.cat(outputs, 1) if outputs else self.q_hat.new_zeros(*self.q_hat.shape[:3], self.s0.shape[-2])


class _Matrix(NamedTuple):
    """S₀ + Σ_i v_i k̂_iᵀ, by its parts: s0 [B, H, Dv, Dh] and values [B, n, H, Dv]."""

    s0: Tensor
    values: Tensor

    def dense(self, k_hat: Tensor) -> Tensor:
        return self.s0 + torch.einsum("bnhv,bnhd->bhvd", self.values, k_hat)

    def times(self, factor: Tensor) -> _Matrix:
        """factor @ matrix, factor [B, H, Dv, Dv]."""
        return _Matrix(factor @ self.s0, torch.einsum("bhvw,bnhw->bnhv", factor, self.values))

    def plus(self, other: _Matrix, sign: int = 1) -> _Matrix:
        """The sum, where `other` may have further entries."""
        new = other.values.shape[1] - self.values.shape[1]
        return _Matrix(self.s0 + sign * other.s0, _longer(self.values, new) + sign * other.values)


def _longer(values: Tensor, new: int) -> Tensor:
    return torch.cat([values, values.new_zeros(values.shape[0], new, *values.shape[2:])], 1)


def _features(state: TTTState, x: Tensor, rule: TTTRule) -> Tensor:
    """φ(x) [B, T, H, Dh]."""
    if rule.fast_weight == "linear":
        return x
    gate, up = (torch.einsum("bhij,bthj->bthi", w, x) for w in (state.w0, state.w2))
    return silu(gate) * up


def _muon_factor(g: Tensor, rule: TTTRule) -> Tensor:
    """P [B, H, Dv, Dv] with muon(G) = P G: an odd polynomial of G is a polynomial of G Gᵀ times G."""
    eye = torch.eye(g.shape[-2], dtype=g.dtype).expand(*g.shape[:2], -1, -1)
    if rule.muon is None:
        return eye
    factor = eye / (torch.linalg.matrix_norm(g, keepdim=True) + MUON_EPS)
    for a, b, c in muon_coefficients(rule):
        x = factor @ g
        gram = x @ x.mT
        factor = (a * eye + b * gram + c * gram @ gram) @ factor
    return factor


@torch.no_grad()
def linear_attention_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w0: Tensor | None,
    w1: Tensor,
    w2: Tensor | None,
    lr0: Tensor | None = None,
    lr1: Tensor | None = None,
    lr2: Tensor | None = None,
    momentum: Tensor | None = None,
    *,
    rule: TTTRule,
    chunk_size: int,
) -> LinearAttentionForm:
    r"""q̂, k̂, v̂ and S₀ of a call of `ttt_attention`, in float64: paper, theorems 5.1 to 5.3, for any rule.

    Each step of the inner loop is linear in the rank-one terms v̂ k̂ᵀ of all tokens so far, with factors on the left:
    the momentum scales earlier terms, Muon multiplies them by a polynomial of G Gᵀ, and a weight norm scales their
    rows. Where all weights are updated, only the features φ change from chunk to chunk. Meant for inspection: memory is
    tokens × chunks × Dv.

    Args:
        q, k, v, w0, w1, w2, lr0, lr1, lr2, momentum, rule, chunk_size: as in `ttt_attention`, without padding.

    Returns:
        The form; its `output()` is what `ttt_attention` returns.

    Raises:
        ValueError: for shapes that do not fit each other, and for Muon in bfloat16, which rounds in between.
    """
    check_tokens(q, k, v, lr0, lr1, lr2, momentum)
    check_chunk_size(chunk_size)
    check_weights(q, v, lr1, w0, w1, w2, rule, q.shape[0])
    if rule.muon is not None and rule.muon_dtype == "bfloat16":
        raise ValueError("muon_dtype='bfloat16' rounds inside of the polynomial: set muon_dtype='float32'")
    q, k, v, w0, w1, w2, lr0, lr1, lr2, momentum = (
        None if x is None else x.detach().double().cpu() for x in (q, k, v, w0, w1, w2, lr0, lr1, lr2, momentum)
    )
    state, one_step = ttt_init(w0, w1, w2, rule, q.shape[0]), replace(rule, inner_steps=1)
    empty = v[:, :0]
    weights = main = _Matrix(state.w1, empty)
    buffer = _Matrix(torch.zeros_like(state.w1), empty)
    k_hat = q.new_zeros(q.shape[0], 0, q.shape[2], state.w1.shape[-1])
    q_hat, seen = [], []
    for start in range(0, q.shape[1], chunk_size):
        chunk = slice(start, start + chunk_size)
        kc, vc = k[:, chunk], v[:, chunk]
        q_hat.append(_features(state, (q if rule.read_with == "query" else k)[:, chunk], rule))
        seen.append(weights)
        rates = [None if x is None else x[:, chunk] for x in (lr0, lr1, lr2, momentum)]
        for _ in range(rule.inner_steps if kc.shape[1] == chunk_size else 0):
            features = _features(state, kc, rule)
            error = vc
            if rule.loss == "mse":
                error = vc - torch.einsum("bhvd,bthd->bthv", state.w1, features)
            k_hat = torch.cat([k_hat, features if rates[1] is None else rates[1] * features], 1)
            kept = 0.0 if momentum is None else rates[3].mean(1, keepdim=True)  # [B, 1, H, 1]
            buffer = _Matrix(buffer.s0, torch.cat([kept * buffer.values, error], 1))
            step = buffer.times(_muon_factor(buffer.dense(k_hat), rule))
            main = (main if rule.weight_norm == "pre" else weights).plus(step, rule.sign)
            weights = main
            if rule.weight_norm != "none":
                scale = state.norm1 / (row_norm(main.dense(k_hat)) + EPS)
                weights = main.times(torch.diag_embed(scale[..., 0]))
            state = ttt_update(state, kc, vc, *rates, rule=one_step, implementation="recurrent", backend="torch")
    values = [_longer(matrix.values, k_hat.shape[1] - matrix.values.shape[1]) for matrix in seen]
    return LinearAttentionForm(
        q_hat=torch.cat(q_hat, 1) if q_hat else k_hat[:, :0],
        k_hat=k_hat,
        v_hat=torch.stack(values) if values else empty.new_zeros(0, *empty.shape),
        s0=torch.stack([matrix.s0 for matrix in seen]) if seen else state.w1.new_zeros(0, *state.w1.shape),
        chunk_size=chunk_size,
    )


@dataclass(frozen=True)
class TTTCall:
    """A call of a TTT layer's evaluation, as `record_calls` keeps it.

    Attributes:
        q, k, v: what reads and what is bound, as after the layer's norms [B, T, H, D].
        lr0, lr1, lr2, momentum: of each token [B, T, H, ·], or None.
        weights: w0, w1, w2 before the call [B, H, ·, ·], or None.
        rule: the inner loop.
        chunk_size, updates: tokens per update, and the number of updates.
        out: [B, T, H, Dv].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lr0: Tensor | None
    lr1: Tensor | None
    lr2: Tensor | None
    momentum: Tensor | None
    weights: tuple[Tensor | None, Tensor, Tensor | None]
    rule: TTTRule
    chunk_size: int
    updates: int
    out: Tensor

    def linear_attention_form(self) -> LinearAttentionForm:
        """The call as linear attention, for one that starts at a sequence's first token."""
        tokens = self.q, self.k, self.v, *self.weights, self.lr0, self.lr1, self.lr2, self.momentum
        return linear_attention_form(*tokens, rule=self.rule, chunk_size=self.chunk_size)


@contextlib.contextmanager
def record_calls(model: nn.Module) -> Iterator[list[TTTCall]]:
    """While it lasts, keep what the TTT layers of a LaCT model get and give, layer after layer.

        with record_calls(model) as calls:
            model(input_ids)
        form = calls[3].linear_attention_form()

    Tensors are detached. Padding and packed documents come as the rows that they are evaluated in; the tokens of a
    decoding step within a chunk are evaluated elsewhere, and are not recorded.

    Args:
        model: a LaCT or LaCT-NVS model, also of remote code. All models of its code are recorded while it lasts.

    Raises:
        ValueError: for a model of another family.
    """
    inner: Any = next((m for m in model.modules() if hasattr(m, "_ttt_functions")), None)
    if inner is None or "vittt" in inner.config.model_type:
        raise ValueError(f"model={type(model).__name__} has no layers that can be recorded; expected LaCT or LaCT-NVS")
    functions: dict[tuple[str, str], Callable] = inner._ttt_functions._functions
    calls: list[TTTCall] = []
    before = dict(functions)

    def recording(function: Callable) -> Callable:
        def call(q, k, v, lr0, lr1, lr2, momentum, fast, *, rule, chunk_size, updates, **settings: Any):
            out, after = function(
                q, k, v, lr0, lr1, lr2, momentum, fast, rule=rule, chunk_size=chunk_size, updates=updates, **settings
            )
            q, k, v, lr0, lr1, lr2, momentum, *weights, kept = (
                None if x is None else x.detach() for x in (q, k, v, lr0, lr1, lr2, momentum, *fast.work, out)
            )
            tokens = q, k, v, lr0, lr1, lr2, momentum
            calls.append(TTTCall(*tokens, tuple(weights), rule, chunk_size, updates, kept))
            return out, after

        return call

    functions.update({name: recording(function) for name, function in before.items()})
    try:
        yield calls
    finally:
        functions.clear()
        functions.update(before)
