# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""All chunks at once: the evaluation of a parallelizable rule as linear attention, with its own backward.

With φ fixed and a dot-product loss the update of a chunk, G_c = Vᵀ (η φ(K)), reads no state, so the states follow from a
scan (paper, theorem 5.3 and appendix H, with chunk-exclusive sums as in the published code):

    M_c = Σ_{j ≤ c} D_cj G_j       D_cj = Π_{s = j+1..c} m_s
    S_c = w1 ± Σ_{j < c} muon(M_j)       o = S_c φ(q)

D is built by products along its columns, never by a division, so that it is exact for any momentum in [0, 1]. Chunks are
taken in blocks: on a CPU as many as stay in cache, since all of them at once are slower there than one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .ttt_inner import (
    Tokens,
    features,
    fold,
    gradient_backward,
    gradient_forward,
    normalise,
    normalise_backward,
    read_backward,
    read_forward,
    tile_length,
)
from .ttt_muon import muon_backward, muon_forward
from .ttt_recurrent import FastWeights
from .ttt_rule import TTTRule

SCAN_BLOCK = 16  # chunks per block: the scan costs 2·16 products of an element, against 6·C for the chunk itself


class _Block(NamedTuple):
    """Chunks [first, first + count) of a sequence."""

    first: int
    count: int
    chunk_size: int

    def cut(self, x: Tensor | None) -> Tensor | None:
        """[B, T, H, D] → the block's chunks [B, count, C, H, D], a view."""
        if x is None:
            return None
        start, size = self.first * self.chunk_size, self.count * self.chunk_size
        return x[:, start : start + size].unflatten(1, (self.count, self.chunk_size))


def _blocks(k: Tensor, width: int, chunk_size: int, updates: int) -> list[_Block]:
    size = max(1, min(SCAN_BLOCK, tile_length(k, width) // chunk_size))
    return [_Block(c, min(size, updates - c), chunk_size) for c in range(0, updates, size)]


def _repeat(w: Tensor | None, count: int) -> Tensor | None:
    """[B, H, m, n] → [B · count · H, m, n]."""
    return None if w is None else w[:, None].expand(-1, count, -1, -1, -1).flatten(0, 2)


def _decay(m: Tensor) -> Tensor:
    """D[..., i, j] = Π_{s = j+1..i} m_s for j ≤ i, else 0: m [..., n] → [..., n, n]."""
    n = m.shape[-1]
    below = torch.ones(n, n, dtype=torch.bool, device=m.device).tril(-1)
    return torch.where(below, m[..., :, None], 1.0).cumprod(-2).tril()


def _scan(g: Tensor, m: Tensor | None, buffer: Tensor | None) -> Tensor:
    """M_i = g_i + m_i M_{i−1} from M_{−1} = buffer: g [B, n, H, ·, ·], m [B, n, H], buffer [B, H, ·, ·]."""
    if m is None:
        return g
    decay = _decay(m.transpose(1, 2))
    out = torch.einsum("bhij,bjhkl->bihkl", decay, g)
    if buffer is not None:
        first = (m[:, :1] * decay[..., 0].transpose(1, 2))[..., None, None]  # Π_{s ≤ i} m_s
        out = torch.addcmul(out, first, buffer[:, None])
    return out


def _scan_backward(m: Tensor, grad: Tensor, buffer: Tensor | None, moments: Tensor):
    """Gradients of `_scan` with respect to g, m and buffer, given its result `moments`."""
    decay = _decay(m.transpose(1, 2))
    dg = torch.einsum("bhij,bihkl->bjhkl", decay, grad)
    dm = torch.zeros_like(m)
    dm[:, 1:] = (dg[:, 1:] * moments[:, :-1]).sum((-2, -1))
    if buffer is not None:
        dm[:, 0] = (dg[:, 0] * buffer).sum((-2, -1))
    return dg, dm, m[:, 0, :, None, None] * dg[:, 0]


def _each_step(x: Tensor | None, rule: TTTRule) -> Tensor | None:
    """A chunk's entry once for each of its inner steps: the gradient is the same in all, since it reads no state."""
    return x if x is None or rule.inner_steps == 1 else x.repeat_interleave(rule.inner_steps, 1)


def _per_chunk(x: Tensor, rule: TTTRule) -> Tensor:
    """The sum over the inner steps of each chunk."""
    return x if rule.inner_steps == 1 else x.unflatten(1, (-1, rule.inner_steps)).sum(2)


def _block_momentum(momentum: Tensor | None, block: _Block, rule: TTTRule) -> Tensor | None:
    """[B, count · inner_steps, H]."""
    return None if momentum is None else _each_step(block.cut(momentum).mean(2)[..., 0], rule)


def _working(raw: Tensor, work: Tensor, norm: Tensor | None, first: bool, rule: TTTRule) -> Tensor:
    """The weights that read, from the accumulated ones [B, n, H, ·, ·]; the very first are the initial ones as they are."""
    if rule.weight_norm == "none":
        return raw
    out = normalise(raw, norm[:, None])
    if first:
        out[:, 0] = work
    return out


def _shape_of(w1: Tensor, block: _Block) -> Tensor:
    """A stand-in for the block's last-layer weights [N, Dv, Dh], of which a static gradient needs only the shape."""
    return w1.new_empty(1, 1, 1).expand(w1.shape[0] * block.count * w1.shape[1], *w1.shape[-2:])


class _Parallel(torch.autograd.Function):
    """As `_Recurrent`, for w1 alone; fast weights are w0, w1, w2, main1, norm1, buffer1 of [B, H, ·, ·]."""

    @staticmethod
    def forward(ctx, rule, chunk_size, updates, keep, return_state, q, k, v, lr0, lr1, lr2, momentum, *fast):
        w0, w1, w2, main, norm, buffer = fast
        c0, c2 = (None if w is None else w.to(q.dtype) for w in (w0, w2))
        raw, work = w1 if main is None else main, w1
        tokens, reads = Tokens(k, v, lr0, lr1, lr2), k if rule.read_with == "key" else q
        out = v.new_empty(*q.shape[:3], w1.shape[-2])
        kept, repeated = [], {}
        for block in _blocks(k, w1.shape[-1], chunk_size, updates):
            if block.count not in repeated:
                repeated[block.count] = _repeat(c0, block.count), _repeat(c2, block.count)
            r0, r2 = repeated[block.count]
            shape = (q.shape[0], block.count, q.shape[2])
            g = gradient_forward(tokens.map(block.cut), [r0, _shape_of(w1, block), r2], rule, w1.dtype)[1].unflatten(
                0, shape
            )
            m = _block_momentum(momentum, block, rule)
            moments = _scan(_each_step(g, rule), m, buffer)
            update = _per_chunk(muon_forward(moments.flatten(0, 2), rule).view(moments.shape), rule)
            raws = torch.cat([raw[:, None], rule.sign * update], 1).cumsum(1)
            raws, raw = raws[:, :-1], raws[:, -1]
            works = _working(raws, w1, norm, block.first == 0, rule)
            read_forward(block.cut(reads), [r0, works.flatten(0, 2).to(q.dtype), r2], rule, block.cut(out))
            buffer = None if m is None else moments[:, -1]
            if keep:
                kept += [raws, None if m is None and rule.muon is None else moments]
        start = updates * chunk_size
        if updates:
            work = _working(raw[:, None], w1, norm, False, rule)[:, 0]
        weights = [None if w is None else w.flatten(0, 1).to(q.dtype) for w in (w0, work, w2)]
        read_forward(reads[:, start:], weights, rule, out[:, start:])
        if keep:
            ctx.settings = rule, chunk_size, updates
            ctx.save_for_backward(q, k, v, lr0, lr1, lr2, momentum, *fast, raw, *kept)
            ctx.set_materialize_grads(False)
        final = (work, raw, buffer) if return_state else ()
        return out, *(None if w is None else w.clone() for w in final)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, *dfinal):
        rule, chunk_size, updates = ctx.settings
        q, k, v, lr0, lr1, lr2, momentum, w0, w1, w2, main, norm, buffer, raw, *kept = ctx.saved_tensors
        new = lambda x: None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format)  # noqa: E731
        dq, dmomentum, dw0, dw2 = map(new, (q, momentum, w0, w2))
        tokens = Tokens(k, v, lr0, lr1, lr2)
        dtokens = tokens.map(new)
        reads, dreads = (k, dtokens.k) if rule.read_with == "key" else (q, dq)
        dwork, draw, dbuffer = dfinal or (None, None, None)
        dwork = new(w1) if dwork is None else dwork.clone()
        dnorm, normed = new(norm), rule.weight_norm == "pre"

        start = updates * chunk_size
        work = _working(raw[:, None], w1, norm, False, rule)[:, 0] if updates else w1
        if dout is not None:
            weights = [None if w is None else w.flatten(0, 1).to(q.dtype) for w in (w0, work, w2)]
            flat = [None if w is None else w.flatten(0, 1) for w in (dw0, dwork, dw2)]
            read_backward(reads[:, start:], dout[:, start:], weights, rule, dreads[:, start:], flat)
        if normed and updates:
            part, dnorm = normalise_backward(raw, norm, dwork)
            draw, dwork = part if draw is None else part + draw, new(w1)
        carry = draw if normed else dwork
        carry = new(w1) if carry is None else carry

        repeated = {}
        for block in reversed(_blocks(k, w1.shape[-1], chunk_size, updates)):
            raws, moments = kept[-2:]
            del kept[-2:]
            if block.count not in repeated:
                static = [_repeat(w, block.count) for w in (w0, w2)]
                repeated[block.count] = [None if w is None else w.to(q.dtype) for w in static] + [
                    new(w) for w in static
                ]
            r0, r2, dr0, dr2 = repeated[block.count]
            works = _working(raws, w1, norm, block.first == 0, rule)
            draws = torch.zeros_like(works)
            if dout is not None:
                weights, dweights = [r0, works.flatten(0, 2).to(q.dtype), r2], [dr0, draws.flatten(0, 2), dr2]
                read_backward(block.cut(reads), block.cut(dout), weights, rule, block.cut(dreads), dweights)
            if normed:
                if block.first == 0:
                    dwork += draws[:, 0]
                    draws[:, 0] = 0
                draws, dnorms = normalise_backward(raws, norm[:, None], draws)
                dnorm = dnorm + dnorms.sum(1)
            sums = torch.cat([draws, carry[:, None]], 1).flip(1).cumsum(1).flip(1)
            carry = sums[:, 0]
            dmoments = _each_step(rule.sign * sums[:, 1:], rule)
            if rule.muon is not None:
                dmoments = muon_backward(moments.flatten(0, 2), dmoments.flatten(0, 2), rule).view(moments.shape)
            if dbuffer is not None:
                dmoments = torch.cat([dmoments[:, :-1], dmoments[:, -1:] + dbuffer[:, None]], 1)
            m = _block_momentum(momentum, block, rule)
            if m is not None:
                before = kept[-1][:, -1] if kept else buffer
                dmoments, dm, dbuffer = _scan_backward(m, dmoments, before, moments)
                block.cut(dmomentum).add_(_per_chunk(dm, rule)[:, :, None, :, None] / chunk_size)
            gradient = {1: _per_chunk(dmoments, rule).flatten(0, 2)}
            weights, dweights = [r0, _shape_of(w1, block), r2], [dr0, None, dr2]
            gradient_backward(tokens.map(block.cut), gradient, weights, rule, dtokens.map(block.cut), dweights)
        for count, (_, _, dr0, dr2) in repeated.items():
            for total, part in ((dw0, dr0), (dw2, dr2)):
                if total is not None:
                    total += part.unflatten(0, (q.shape[0], count, q.shape[2])).sum(1)
        dw1, dmain = (dwork, carry) if normed else (carry, None)
        dbuffer = None if buffer is None else new(buffer) if dbuffer is None else dbuffer
        return (None,) * 5 + (dq, *dtokens, dmomentum, dw0, dw1, dw2, dmain, dnorm, dbuffer)


def ttt_parallel(
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
    """Evaluate aligned rows with all chunks at once; arguments and results of `ttt_recurrent`.

    Raises:
        ValueError: if the rule is not parallelizable.
    """
    if not rule.parallelizable:
        raise ValueError(f"the parallel evaluation is not exact for this rule: {rule.why_not_parallel}")
    tensors = (q, k, v, lr0, lr1, lr2, momentum, *fast.work, fast.main[1], fast.norm[1], fast.buffer[1])
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    out, *final = _Parallel.apply(rule, chunk_size, updates, keep, return_state, *tensors)
    if not return_state:
        return out, fast
    work, main, buffer = list(fast.work), list(fast.main), list(fast.buffer)
    work[1] = final[0]
    if rule.weight_norm == "pre":
        main[1] = final[1]
    if momentum is not None:
        buffer[1] = final[2]
    return out, FastWeights(work, main, fast.norm, buffer)
