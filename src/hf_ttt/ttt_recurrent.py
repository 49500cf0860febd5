# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Chunk after chunk: the evaluation of a TTT layer that is exact for every rule, with a hand-written backward.

The backward keeps the inputs and one state per chunk and computes the rest of a chunk again. The state of chunk c is

    raw_c   the weights that accumulate: raw_{c+1} = base_c ± muon(M_c), base = normalised weights ("post") or raw
    work_c  the weights that read: raw_c with its rows scaled to the initial norms, or raw_c itself
    M_c     the momentum buffer after the chunk; without momentum the chunk's gradient

Everything here is [N, ·, ·] with N = rows · heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .ttt_inner import (
    Tokens,
    gradient_backward,
    gradient_forward,
    normalise,
    normalise_backward,
    read_backward,
    read_forward,
)
from .ttt_muon import muon_backward, muon_forward
from .ttt_rule import TTTRule

Weights = list[Tensor | None]


class FastWeights(NamedTuple):
    """The part of a `TTTState` that a step changes, one list of three per kind; tensors [B, H, ·, ·]."""

    work: Weights
    main: Weights
    norm: Weights
    buffer: Weights

    def tensors(self) -> list[Tensor | None]:
        return [tensor for kind in self for tensor in kind]


class _State(NamedTuple):
    raw: Weights
    work: Weights
    buffer: Weights


def chunk_momentum(momentum: Tensor | None, start: int, stop: int) -> Tensor | None:
    """Mean momentum of tokens [start, stop) of [B, T, H, 1] → [N, 1, 1]."""
    return None if momentum is None else momentum[:, start:stop].mean(1).reshape(-1, 1, 1)


def _working(raw: Tensor, norm: Tensor | None, rule: TTTRule) -> Tensor:
    return raw if rule.weight_norm == "none" else normalise(raw, norm)


def _step(state: _State, norm: Weights, tokens: Tokens, m: Tensor | None, rule: TTTRule) -> _State:
    work = [None if w is None else w.to(tokens.k.dtype) for w in state.work]
    gradient = gradient_forward(tokens, work, rule, state.work[1].dtype)
    raw, work, buffer = list(state.raw), list(state.work), list(state.buffer)
    for i, g in gradient.items():
        if m is not None and buffer[i] is not None:
            g = torch.addcmul(g, m, buffer[i])
        base = state.work[i] if rule.weight_norm == "post" else state.raw[i]
        raw[i] = torch.add(base, muon_forward(g, rule), alpha=rule.sign)
        buffer[i] = None if m is None and rule.muon is None else g
        work[i] = _working(raw[i], norm[i], rule)
    return _State(raw, work, buffer)


def _reads_keys(q: Tensor, k: Tensor, rule: TTTRule) -> bool:
    return rule.read_with == "key" and q.shape[1] == k.shape[1]


class _Gradients:
    """Gradients of a state while the chunks are walked backwards."""

    def __init__(self, work: Weights, main: Weights, buffer: Weights, like: _State):
        self.work = [
            None if w is None else (torch.zeros_like(w) if g is None else g.clone())
            for w, g in zip(like.work, work, strict=True)
        ]
        self.main, self.buffer = list(main), list(buffer)
        self.norm: Weights = [None] * 3

    def step_backward(
        self, before: _State, after: _State, norm: Weights, tokens: Tokens, m: Tensor | None, rule: TTTRule, dtokens
    ) -> Tensor | None:
        """Through one step, from the gradients after it to those before it; returns the gradient of m [N]."""
        gradient, dm = {}, None
        for i in rule.updated:
            draw = self.work[i]
            if rule.weight_norm != "none":
                draw, dnorm = normalise_backward(after.raw[i], norm[i], draw)
                self.norm[i] = dnorm if self.norm[i] is None else self.norm[i] + dnorm
                if rule.weight_norm == "pre" and self.main[i] is not None:
                    draw = draw + self.main[i]
            dbuffer = rule.sign * draw
            if rule.muon is not None:
                dbuffer = muon_backward(after.buffer[i], dbuffer, rule)
            if m is not None:
                if self.buffer[i] is not None:
                    dbuffer = dbuffer + self.buffer[i]
                if before.buffer[i] is not None:
                    part = (dbuffer * before.buffer[i]).sum((-2, -1))
                    dm = part if dm is None else dm + part
                self.buffer[i] = m * dbuffer
            gradient[i] = dbuffer
            if rule.weight_norm == "pre":
                self.main[i], self.work[i] = draw, torch.zeros_like(draw)
            else:
                self.work[i] = draw.clone()
        work = [None if w is None else w.to(tokens.k.dtype) for w in before.work]
        gradient_backward(tokens, gradient, work, rule, dtokens, self.work)
        return dm


class _Recurrent(torch.autograd.Function):
    """(q, k, v, rates, momentum, fast weights) → output and, if asked, the weights after the last update."""

    @staticmethod
    def forward(ctx, rule, chunk_size, updates, keep, return_state, q, k, v, lr0, lr1, lr2, momentum, *fast):
        work, main, norm, buffer = (
            [None if w is None else w.flatten(0, 1) for w in fast[i : i + 3]] for i in range(0, 12, 3)
        )
        raw = list(main) if rule.weight_norm == "pre" else list(work)
        state = _State([work[i] if raw[i] is None else raw[i] for i in range(3)], work, buffer)
        tokens, reads = Tokens(k, v, lr0, lr1, lr2), k if _reads_keys(q, k, rule) else q
        out = v.new_empty(*q.shape[:3], fast[1].shape[-2])
        states = [state]
        for c in range(updates + 1):
            start, stop = c * chunk_size, (c + 1) * chunk_size if c < updates else max(q.shape[1], k.shape[1])
            weights = [None if w is None else w.to(q.dtype) for w in state.work]
            read_forward(reads[:, start:stop], weights, rule, out[:, start:stop])
            if c < updates:
                m = chunk_momentum(momentum, start, stop)
                for _ in range(rule.inner_steps):
                    state = _step(state, norm, tokens.map(lambda x: x[:, start:stop]), m, rule)
                if keep:
                    states.append(state)
        if keep:
            ctx.settings = rule, chunk_size, updates
            flat = [t for s in states[1:] for i in rule.updated for t in (s.raw[i], s.buffer[i])]
            ctx.save_for_backward(q, k, v, lr0, lr1, lr2, momentum, *fast, *flat)
            ctx.set_materialize_grads(False)
        batch = q.shape[0]
        shaped = lambda w: None if w is None else w.unflatten(0, (batch, -1)).clone()  # noqa: E731
        kinds = (state.work, state.raw, state.buffer) if return_state else ()
        final = [shaped(kind[i]) for kind in kinds for i in rule.updated]
        return out, *final

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, *dfinal):
        rule, chunk_size, updates = ctx.settings
        q, k, v, lr0, lr1, lr2, momentum, *rest = ctx.saved_tensors
        flat = [None if w is None else w.flatten(0, 1) for w in rest[:12]]
        work, main, norm, buffer = (flat[i : i + 3] for i in range(0, 12, 3))
        raw = list(main) if rule.weight_norm == "pre" else list(work)
        states = [_State([work[i] if raw[i] is None else raw[i] for i in range(3)], work, buffer)]
        kept = iter(rest[12:])
        for _ in range(updates):
            state = _State(list(work), list(work), list(buffer))
            for i in rule.updated:
                state.raw[i], state.buffer[i] = next(kept), next(kept)
                state.work[i] = _working(state.raw[i], norm[i], rule)
            states.append(state)
        dwork, dmain, dbuffer = [None] * 3, [None] * 3, [None] * 3
        if dfinal:
            parts = iter(dfinal)
            for kind in (dwork, dmain, dbuffer):
                for i in rule.updated:
                    g = next(parts)
                    kind[i] = None if g is None else g.flatten(0, 1)
            if rule.weight_norm != "pre":
                dmain = [None] * 3
        grads = _Gradients(dwork, dmain, dbuffer, states[-1])

        dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
        dtokens = Tokens(
            *(
                None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format)
                for x in (k, v, lr0, lr1, lr2)
            )
        )
        dmomentum = None if momentum is None else torch.zeros_like(momentum)
        tokens, reads, dreads = Tokens(k, v, lr0, lr1, lr2), q, dq
        if _reads_keys(q, k, rule):
            reads, dreads = k, dtokens.k
        for c in range(updates, -1, -1):
            start, stop = c * chunk_size, (c + 1) * chunk_size if c < updates else max(q.shape[1], k.shape[1])
            if c < updates:
                m = chunk_momentum(momentum, start, stop)
                chunk, dchunk = tokens.map(lambda x: x[:, start:stop]), dtokens.map(lambda x: x[:, start:stop])
                steps = [states[c]]
                for _ in range(rule.inner_steps - 1):
                    steps.append(_step(steps[-1], norm, chunk, m, rule))
                steps.append(states.pop())
                for before, after in zip(steps[-2::-1], steps[:0:-1], strict=True):
                    dm = grads.step_backward(before, after, norm, chunk, m, rule, dchunk)
                    if dm is not None:
                        dmomentum[:, start:stop] += dm.view(k.shape[0], 1, -1, 1) / (stop - start)
            if dout is not None:
                weights = [None if w is None else w.to(q.dtype) for w in states[c].work]
                read_backward(
                    reads[:, start:stop], dout[:, start:stop], weights, rule, dreads[:, start:stop], grads.work
                )
        dfast = [*grads.work, *grads.main, *grads.norm, *grads.buffer]
        dfast = [
            None if w is None else torch.zeros_like(w) if g is None else g.view(w.shape)
            for w, g in zip(rest[:12], dfast, strict=True)
        ]
        return (None,) * 5 + (dq, *dtokens, dmomentum, *dfast)


def ttt_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr0: Tensor | None,
    lr1: Tensor | None,
    lr2: Tensor | None,
    momentum: Tensor | None,
    fast: FastWeights,
    *,
    rule: TTTRule,
    chunk_size: int,
    updates: int,
    return_state: bool = False,
) -> tuple[Tensor, FastWeights]:
    """Evaluate aligned rows chunk after chunk: token t reads the weights after min(⌊t/C⌋, `updates`) steps.

    Args:
        q, k, v, lr0, lr1, lr2, momentum: as in `ttt_attention`; q may have length 0 (only update), or k and v may (only
            read, with `updates` = 0).
        fast: weights before the first token.
        updates: number of chunks that update, `updates * chunk_size` ≤ T.
        return_state: whether the second result is the weights after the last update; otherwise it is `fast`.
    """
    tensors = (q, k, v, lr0, lr1, lr2, momentum, *fast.tensors())
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    out, *final = _Recurrent.apply(rule, chunk_size, updates, keep, return_state, *tensors)
    return out, _merge(fast, final, rule, momentum is not None) if return_state else fast


def _merge(fast: FastWeights, final: list[Tensor], rule: TTTRule, has_momentum: bool) -> FastWeights:
    work, main, buffer = list(fast.work), list(fast.main), list(fast.buffer)
    size = len(rule.updated)
    for i, w, raw, m in zip(rule.updated, final[:size], final[size : 2 * size], final[2 * size :], strict=True):
        work[i] = w
        if rule.weight_norm == "pre":
            main[i] = raw
        if has_momentum:
            buffer[i] = m
    return FastWeights(work, main, fast.norm, buffer)
