# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Chunk after chunk: the evaluation of a TTT layer that is exact for every rule, with a hand-written backward.

The backward keeps the inputs and one state per chunk and computes the rest of a chunk again. The state of chunk c is

    raw_c   the weights that accumulate: raw_{c+1} = base_c ± muon(M_c), base = normalised weights ("post") or raw
    work_c  the weights that read: raw_c with its rows scaled to the initial norms, or raw_c itself
    M_c     the momentum buffer after the chunk; without momentum the chunk's gradient

Everything here is [N, ·, ·] with N = rows · heads. What is done with one chunk is an `Inner`, which an evaluation by
other means exchanges; the walk over the chunks is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .ttt_inner import (
    Net,
    Tokens,
    gradient_backward,
    gradient_buffer,
    gradient_forward,
    heads_first,
    make_net,
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


def advance(base: Tensor, update: Tensor, sign: int, norm: Tensor | None) -> tuple[Tensor, Tensor]:
    """raw = base ± update [N, m, n], and work: its rows scaled to `norm` [N, m, 1], or raw itself for None."""
    raw = torch.add(base, update, alpha=sign)
    return raw, raw if norm is None else normalise(raw, norm)


class Inner(NamedTuple):
    """The arithmetic of one chunk; the defaults say by their own signatures and docstrings what each function does."""

    read_forward: Callable[..., None] = read_forward
    read_backward: Callable[..., None] = read_backward
    gradient_forward: Callable[..., dict[int, Tensor]] = gradient_forward
    gradient_backward: Callable[..., None] = gradient_backward
    muon_forward: Callable[..., Tensor] = muon_forward
    muon_backward: Callable[..., Tensor] = muon_backward
    advance: Callable[..., tuple[Tensor, Tensor]] = advance
    normalise: Callable[..., Tensor] = normalise
    normalise_backward: Callable[..., tuple[Tensor, Tensor]] = normalise_backward


TORCH = Inner()


class _State(NamedTuple):
    raw: Weights
    work: Weights
    buffer: Weights


def no_second_derivative(backward: Callable) -> Callable:
    """Decorator of a backward that cannot be differentiated itself, which says so when it is asked for a graph."""
    once = once_differentiable(backward)

    @wraps(backward)
    def checked(ctx, *grads):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("a TTT op has no second derivative: call backward or grad with create_graph=False")
        return once(ctx, *grads)

    return checked


class _Loop:
    """What forward and backward share: the inputs, cut into chunks, and how a state leads to the next."""

    def __init__(self, inner: Inner, rule: TTTRule, chunk_size: int, updates: int, inputs: Sequence[Tensor | None]):
        self.inner, self.rule, self.updates = inner, rule, updates
        self.q, k, v, lr0, lr1, lr2, momentum, *fast = inputs
        self.tokens = Tokens(k, v, lr0, lr1, lr2) if 0 in rule.updated else Tokens(k, v, None, lr1, None)
        self.read_keys = rule.read_with == "key" and self.q.shape[1] == k.shape[1]
        self.length = max(self.q.shape[1], k.shape[1])
        self.sizes = [chunk_size] * updates + [self.length - updates * chunk_size]
        self.momenta: list[Tensor | None] = [None] * updates
        if momentum is not None and updates:
            means = momentum[:, : updates * chunk_size].unflatten(1, (updates, chunk_size)).mean(2)
            self.momenta = [m.reshape(-1, 1, 1) for m in means.unbind(1)]
        flat = [None if w is None else w.flatten(0, 1) for w in fast]
        work, main, self.norm, buffer = (flat[i : i + 3] for i in range(0, 12, 3))
        raw = main if rule.weight_norm == "pre" else work
        self.first = _State([w if r is None else r for w, r in zip(work, raw, strict=True)], work, buffer)
        self.static = make_net(work, rule, self.q.dtype).w02 if 0 not in rule.updated else None

    def cut(self, x: Tensor, c: int) -> Tensor:
        """[B, T, H, D] → chunk c heads first [B, H, C, D], or what is left after the last that updates; a view. Tokens
        that are not there are left out of the last."""
        start = c * self.sizes[0]
        stop = start + self.sizes[c] if x.shape[1] == self.length else start
        return heads_first(x[:, start:stop])

    def split(self, x: Tensor) -> list[Tensor]:
        """All chunks, as `cut` gives them."""
        if x.shape[1] != self.length or not self.updates:
            return [self.cut(x, c) for c in range(len(self.sizes))]
        full = x[:, : self.updates * self.sizes[0]].unflatten(1, (self.updates, self.sizes[0]))
        return [*full.transpose(2, 3).unbind(1), self.cut(x, self.updates)]

    def split_tokens(self, tokens: Tokens) -> list[Tokens]:
        """The chunks that update."""
        chunks = [[None] * len(self.sizes) if x is None else self.split(x) for x in tokens]
        return [Tokens(*chunk) for chunk in zip(*chunks, strict=True)][: self.updates]

    def net(self, state: _State) -> Net:
        """The weights that read, in the type of the tokens."""
        if 0 in self.rule.updated:
            return make_net(state.work, self.rule, self.q.dtype)
        return Net(self.static, state.work[1].to(self.q.dtype))

    def kept_state(self, c: int, kept: tuple[Tensor | None, ...]) -> _State:
        """The state that chunk c reads, from what the forward kept: accumulated weights and momentum after chunks."""
        if c == 0:
            return self.first
        state, size = _State(*(list(kind) for kind in self.first)), 2 * len(self.rule.updated)
        for place, i in enumerate(self.rule.updated):
            state.raw[i], state.buffer[i] = kept[(c - 1) * size + 2 * place : (c - 1) * size + 2 * place + 2]
            state.work[i] = self.working(i, state.raw[i])
        return state

    def working(self, i: int, raw: Tensor) -> Tensor:
        """The weights that read, from those that accumulate."""
        return raw if self.rule.weight_norm == "none" else self.inner.normalise(raw, self.norm[i])

    def step(self, state: _State, net: Net, tokens: Tokens, m: Tensor | None) -> _State:
        """One gradient step on a chunk's tokens; `net` has the weights of `state`."""
        rule, inner = self.rule, self.inner
        raw, work, buffer = list(state.raw), list(state.work), list(state.buffer)
        for i, g in inner.gradient_forward(tokens, net, rule, state.work[1].dtype).items():
            if m is not None and buffer[i] is not None:
                g = torch.addcmul(g, m, buffer[i])
            base = state.work[i] if rule.weight_norm == "post" else state.raw[i]
            norm = None if rule.weight_norm == "none" else self.norm[i]
            raw[i], work[i] = inner.advance(base, inner.muon_forward(g, rule), rule.sign, norm)
            buffer[i] = None if m is None and rule.muon is None else g
        return _State(raw, work, buffer)


class _Gradients:
    """Gradients of the state while the chunks are walked backwards, and of everything that lives longer."""

    def __init__(self, loop: _Loop, last: _State, final: tuple[Tensor | None, ...], reads: bool):
        new = lambda x: None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format)  # noqa: E731
        self.loop = loop
        self.q = gradient_buffer(loop.q, loop.q.shape[1] if reads and not loop.read_keys else 0)
        written = sum(loop.sizes[:-1]) if loop.rule.inner_steps == 1 else 0
        self.tokens = loop.tokens.map(lambda x: gradient_buffer(x, written))
        self.momenta: Weights = [None] * loop.updates
        w0, w1, _ = last.work
        linear = loop.rule.fast_weight == "linear"
        self.net = Net(None if linear else w1.new_zeros(w0.shape[0], 2 * w0.shape[1], w0.shape[2]), new(w1))
        self.main: Weights = [None] * 3
        self.norm: Weights = [None] * 3
        self.buffer: Weights = [None] * 3
        parts = iter(final)
        for kind in (self.work, self.main, self.buffer) if final else ():
            for i in loop.rule.updated:
                g = next(parts)
                if g is None or (kind is self.main and loop.rule.weight_norm != "pre"):
                    continue
                elif kind[i] is None:
                    kind[i] = g.flatten(0, 1)
                else:
                    kind[i].copy_(g.flatten(0, 1))

    @property
    def work(self) -> Weights:
        """Gradients of w0, w1, w2: views of the accumulators."""
        w02, w1 = self.net
        return [None, w1, None] if w02 is None else [w02[:, : w1.shape[-1]], w1, w02[:, w1.shape[-1] :]]

    def step_backward(self, before: _State, after: _State, c: int, tokens: Tokens, dtokens: Tokens, net: Net) -> None:
        """Through one step of chunk c, from the gradients after it to those before it; `net` has the weights before."""
        rule, inner = self.loop.rule, self.loop.inner
        m, gradient, dm = self.loop.momenta[c], {}, self.momenta[c]
        for i in rule.updated:
            dwork = draw = self.work[i]
            if rule.weight_norm != "none":
                draw, dnorm = inner.normalise_backward(after.raw[i], self.loop.norm[i], dwork)
                self.norm[i] = dnorm if self.norm[i] is None else self.norm[i] + dnorm
                if rule.weight_norm == "pre":
                    self.main[i] = draw = draw if self.main[i] is None else draw + self.main[i]
                    dwork.zero_()
                else:
                    dwork.copy_(draw)
            g = rule.sign * draw
            if rule.muon is not None:
                g = inner.muon_backward(after.buffer[i], g, rule)
            if m is not None:
                g = g if self.buffer[i] is None else g + self.buffer[i]
                if before.buffer[i] is not None:
                    part = (g * before.buffer[i]).sum((-2, -1))
                    dm = part if dm is None else dm + part
                self.buffer[i] = m * g
            gradient[i] = g
        self.momenta[c] = dm
        inner.gradient_backward(tokens, gradient, net, rule, dtokens, self.net, rule.inner_steps > 1)

    def of_inputs(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """One gradient per input; zeros where it had no part."""
        momentum = None if inputs[6] is None else torch.zeros_like(inputs[6])
        for c, dm in enumerate(self.momenta):
            if dm is not None:
                size = self.loop.sizes[c]
                momentum[:, c * size : (c + 1) * size] = dm.view(self.q.shape[0], 1, self.q.shape[2], 1) / size
        grads = [self.q, *self.tokens, momentum, *self.work, *self.main, *self.norm, *self.buffer]
        return [
            None if x is None else torch.zeros_like(x) if g is None else g.reshape(x.shape)
            for x, g in zip(inputs, grads, strict=True)
        ]


class _Recurrent(torch.autograd.Function):
    """(q, k, v, rates, momentum, fast weights) → output and, if asked, the weights after the last update."""

    @staticmethod
    def forward(ctx, inner, rule, chunk_size, updates, keep, return_state, *inputs):
        loop = _Loop(inner, rule, chunk_size, updates, inputs)
        out = loop.tokens.v.new_empty(*loop.q.shape[:3], loop.first.work[1].shape[-2])
        reads = loop.split(loop.tokens.k if loop.read_keys else loop.q)
        chunks = loop.split_tokens(loop.tokens)
        state, kept = loop.first, []
        for c in range(updates + 1):
            net = loop.net(state)
            inner.read_forward(reads[c], net, loop.cut(out, c))  # cut now: export records writes to views
            for step in range(rule.inner_steps if c < updates else 0):
                net = loop.net(state) if step else net
                state = loop.step(state, net, chunks[c], loop.momenta[c])
            if keep and c < updates:  # without Muon, a momentum buffer is only read by the next step
                last = c + 1 == updates and rule.muon is None
                kept += [x for i in rule.updated for x in (state.raw[i], None if last else state.buffer[i])]
        if keep:
            ctx.settings = inner, rule, chunk_size, updates
            ctx.save_for_backward(*inputs, *kept)
            ctx.set_materialize_grads(False)
        kinds = (state.work, state.raw, state.buffer) if return_state else ()
        return out, *(_shaped(kind[i], loop.q) for kind in kinds for i in rule.updated)

    @staticmethod
    @no_second_derivative
    def backward(ctx, dout, *dfinal):
        inner, rule, chunk_size, updates = ctx.settings
        saved = ctx.saved_tensors  # once: checkpointing computes them again at each access
        inputs, kept = saved[:19], saved[19:]
        loop = _Loop(inner, rule, chunk_size, updates, inputs)
        state = loop.kept_state(updates, kept)
        grads = _Gradients(loop, state, dfinal, reads=dout is not None)
        reads, dreads = (loop.tokens.k, grads.tokens.k) if loop.read_keys else (loop.q, grads.q)
        read_chunks, dread_chunks = loop.split(reads), loop.split(dreads)
        dout_chunks = None if dout is None else loop.split(dout)
        chunks, dchunks = loop.split_tokens(loop.tokens), loop.split_tokens(grads.tokens)
        for c in range(updates, -1, -1):
            after, state = state, loop.kept_state(c, kept) if c < updates else state
            net = loop.net(state)
            if rule.inner_steps == 1:
                state = state._replace(work=[None] * 3)  # `net` has them now
            if c < updates:
                steps = [state]
                for _ in range(rule.inner_steps - 1):
                    steps.append(loop.step(steps[-1], loop.net(steps[-1]), chunks[c], loop.momenta[c]))
                for before in reversed(steps):
                    at = net if before is state else loop.net(before)
                    grads.step_backward(before, after, c, chunks[c], dchunks[c], at)
                    after = before
            if dout_chunks is not None:
                inner.read_backward(read_chunks[c], dout_chunks[c], net, dread_chunks[c], grads.net, loop.read_keys)
        return (None,) * 6 + tuple(grads.of_inputs(inputs))


def _shaped(w: Tensor | None, q: Tensor) -> Tensor | None:
    """[B·H, ·, ·] → [B, H, ·, ·] with B and H of q [B, T, H, Dk], a copy."""
    return None if w is None else w.unflatten(0, (q.shape[0], q.shape[2])).clone()


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
    inner: Inner = TORCH,
) -> tuple[Tensor, FastWeights]:
    """Evaluate aligned rows chunk after chunk: token t reads the weights after min(⌊t/C⌋, `updates`) steps.

    Args:
        q, k, v, lr0, lr1, lr2, momentum: as in `ttt_attention`; q may have length 0 (only update), or k and v may (only
            read, with `updates` = 0).
        fast: weights before the first token.
        updates: number of chunks that update, `updates * chunk_size` ≤ T.
        return_state: whether the second result is the weights after the last update; otherwise it is `fast`.
        inner: what computes a chunk.
    """
    tensors = (q, k, v, lr0, lr1, lr2, momentum, *fast.tensors())
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    out, *final = _Recurrent.apply(inner, rule, chunk_size, updates, keep, return_state, *tensors)
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
