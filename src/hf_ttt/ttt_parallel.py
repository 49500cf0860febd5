# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""All chunks at once: the evaluation of a parallelizable rule as linear attention, with its own backward.

With φ fixed and a dot-product loss the update of a chunk, G_c = Vᵀ (η φ(K)), reads no state, so the states follow from
a scan (paper, theorem 5.3 and appendix H, with chunk-exclusive sums as in the published code):

    M_c = Σ_{j ≤ c} D_cj G_j       D_cj = Π_{s = j+1..c} m_s
    S_c = w1 ± Σ_{j < c} muon(M_j)       o = S_c φ(q)

D is built by products along its columns, never by a division, so that it is exact for any momentum in [0, 1]. Chunks
are taken in blocks: on a CPU as many as stay in cache, since all of them at once are slower there than one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

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
    tile_length,
)
from .ttt_muon import muon_backward, muon_forward
from .ttt_recurrent import FastWeights, no_second_derivative
from .ttt_rule import TTTRule

SCAN_BLOCK = 16  # chunks per block: the scan costs 2·16 products of an element, against 6·C for the chunk itself


class Block(NamedTuple):
    """Chunks [first, first + chunks) of a sequence."""

    first: int
    chunks: int
    chunk_size: int

    def cut(self, x: Tensor | None) -> Tensor | None:
        """[B, T, H, D] → the block's chunks heads first [B, chunks, H, C, D], a view."""
        if x is None:
            return None
        start, size = self.first * self.chunk_size, self.chunks * self.chunk_size
        return heads_first(x[:, start : start + size].unflatten(1, (self.chunks, self.chunk_size)))


def _decay(m: Tensor) -> Tensor:
    """D[..., i, j] = Π_{s = j+1..i} m_s for j ≤ i, else 0: m [..., n] → [..., n, n]."""
    n = m.shape[-1]
    below = torch.ones(n, n, dtype=torch.bool, device=m.device).tril(-1)
    return torch.where(below, m[..., :, None], 1.0).cumprod(-2).tril()


def _mix(weights: Tensor, x: Tensor) -> Tensor:
    """Σ_j weights_ij x_j over chunks: weights [i, j] or [B, H, i, j], x [B, j, H, ·, ·] → [B, i, H, ·, ·]."""
    return torch.einsum("ij,bjhkl->bihkl" if weights.dim() == 2 else "bhij,bjhkl->bihkl", weights, x)


def _before(n: int, like: Tensor) -> Tensor:
    """[n, n] of 1 for j < i, else 0: sums over the chunks before each."""
    return like.new_ones(n, n).tril(-1)


def scan(g: Tensor, m: Tensor | None, buffer: Tensor | None) -> Tensor:
    """M_i = g_i + m_i M_{i−1} from M_{−1} = buffer: g [B, n, H, ·, ·], m [B, n, H], buffer [B, H, ·, ·]."""
    if m is None:
        return g
    decay = _decay(m.transpose(1, 2))
    out = _mix(decay, g)
    if buffer is not None:
        first = (m[:, :1] * decay[..., 0].transpose(1, 2))[..., None, None]  # Π_{s ≤ i} m_s
        out = torch.addcmul(out, first, buffer[:, None])
    return out


def scan_backward(m: Tensor, grad: Tensor, buffer: Tensor | None, moments: Tensor):
    """Gradients of `scan` with respect to g, m and buffer, given its result `moments`."""
    decay = _decay(m.transpose(1, 2))
    dg = _mix(decay.mT, grad)
    dm = torch.zeros_like(m)
    dm[:, 1:] = (dg[:, 1:] * moments[:, :-1]).sum((-2, -1))
    if buffer is not None:
        dm[:, 0] = (dg[:, 0] * buffer).sum((-2, -1))
    return dg, dm, m[:, 0, :, None, None] * dg[:, 0]


def each_step(x: Tensor | None, rule: TTTRule) -> Tensor | None:
    """A chunk's entry once for each of its inner steps: the gradient is the same in all, since it reads no state."""
    return x if x is None or rule.inner_steps == 1 else x.repeat_interleave(rule.inner_steps, 1)


def per_chunk(x: Tensor, rule: TTTRule) -> Tensor:
    """The sum over the inner steps of each chunk."""
    return x if rule.inner_steps == 1 else x.unflatten(1, (-1, rule.inner_steps)).sum(2)


class Blocks:
    """What forward and backward share: the inputs, cut into blocks, and the static features' weights for each."""

    def __init__(self, rule: TTTRule, chunk_size: int, updates: int, inputs: Sequence[Tensor | None]):
        self.rule, self.chunk_size, self.updates = rule, chunk_size, updates
        self.q, k, v, _, lr1, _, self.momentum, w0, self.w1, w2, self.main, self.norm, self.buffer = inputs
        self.tokens = Tokens(k, v, None, lr1, None)
        self.has_reads = self.q.shape[1] > 0
        self.read_keys = rule.read_with == "key" and self.has_reads
        self.batch, self.heads = self.q.shape[0], self.q.shape[2]
        flat = [None if w is None else w.flatten(0, 1) for w in (w0, self.w1, w2)]
        self.w02 = make_net(flat, rule, self.q.dtype).w02
        size = max(1, min(SCAN_BLOCK, tile_length(self.batch * self.heads, self.w1.shape[-1], k) // chunk_size))
        self.blocks = [Block(c, min(size, updates - c), chunk_size) for c in range(0, updates, size)]
        self._repeated: dict[int, Tensor | None] = {}

    def net(self, block: Block, works: Tensor | None = None) -> Net:
        """The weights that read a block's chunks [B, chunks, H, ·, ·] as one batch; without them w1 is only a shape."""
        if block.chunks not in self._repeated:
            self._repeated[block.chunks] = self._repeat(self.w02, block.chunks)
        if works is None:
            w1 = self.w1.new_empty(1, 1, 1).expand(self.batch * block.chunks * self.heads, *self.w1.shape[-2:])
        else:
            w1 = works.flatten(0, 2).to(self.q.dtype)
        return Net(self._repeated[block.chunks], w1)

    def tail_net(self, work: Tensor) -> Net:
        """The weights that read what is left after the last block."""
        return Net(self.w02, work.flatten(0, 1).to(self.q.dtype))

    def _repeat(self, w: Tensor | None, count: int) -> Tensor | None:
        if w is None:
            return None
        return w.unflatten(0, (self.batch, self.heads))[:, None].expand(-1, count, -1, -1, -1).flatten(0, 2)

    def block_momentum(self, block: Block) -> Tensor | None:
        """Mean momentum of each step of a block [B, chunks · inner_steps, H]."""
        if self.momentum is None:
            return None
        return each_step(block.cut(self.momentum).mean(-2)[..., 0], self.rule)

    def working(self, raws: Tensor, first: bool) -> Tensor:
        """The weights that read, from the accumulated ones [B, n, H, ·, ·]; the very first are the initial ones as they
        are."""
        if self.rule.weight_norm == "none":
            return raws
        out = normalise(raws, self.norm[:, None])
        if first:
            out[:, 0] = self.w1
        return out

    def last_work(self, raw: Tensor) -> Tensor:
        """The weights that read after the last update, from the accumulated ones [B, H, ·, ·]."""
        return self.working(raw[:, None], False)[:, 0] if self.updates else self.w1


class _Parallel(torch.autograd.Function):
    """As `_Recurrent`, for w1 alone; the inputs end with w0, w1, w2 and main, norm and buffer of w1 [B, H, ·, ·]."""

    @staticmethod
    def forward(ctx, rule, chunk_size, updates, keep, return_state, *inputs):
        layer = Blocks(rule, chunk_size, updates, inputs)
        w1, buffer = layer.w1, layer.buffer
        raw = w1 if layer.main is None else layer.main
        reads = layer.tokens.k if layer.read_keys else layer.q
        out = layer.tokens.v.new_empty(*layer.q.shape[:3], w1.shape[-2])
        kept = []
        for block in layer.blocks:
            g = gradient_forward(layer.tokens.map(block.cut), layer.net(block), rule, w1.dtype)[1]
            g = g.unflatten(0, (layer.batch, block.chunks, layer.heads))
            m = layer.block_momentum(block)
            moments = scan(each_step(g, rule), m, buffer)
            update = per_chunk(muon_forward(moments.flatten(0, 2), rule).view(moments.shape), rule)
            update = rule.sign * update
            raws, raw = raw[:, None] + _mix(_before(block.chunks, w1), update), raw + update.sum(1)
            buffer = None if m is None else moments[:, -1]
            if layer.has_reads:
                works = layer.working(raws, block.first == 0)
                read_forward(block.cut(reads), layer.net(block, works), block.cut(out))
            if keep:
                kept += [raws, None if m is None and rule.muon is None else moments]
        start, work = updates * chunk_size, layer.last_work(raw)
        read_forward(heads_first(reads[:, start:]), layer.tail_net(work), heads_first(out[:, start:]))
        if keep:
            ctx.settings = rule, chunk_size, updates
            ctx.save_for_backward(*inputs, raw, *kept)
            ctx.set_materialize_grads(False)
        final = (work, raw, buffer) if return_state else ()
        return out, *(None if w is None else w.clone() for w in final)

    @staticmethod
    @no_second_derivative
    def backward(ctx, dout, *dfinal):
        rule, chunk_size, updates = ctx.settings
        saved = ctx.saved_tensors  # once: checkpointing computes them again at each access
        inputs, raw, kept = saved[:13], saved[13], list(saved[14:])
        layer = Blocks(rule, chunk_size, updates, inputs)
        grads = _Gradients(layer, dout, raw, *(dfinal or (None, None, None)))
        for block in reversed(layer.blocks):
            raws, moments = kept[-2:]
            del kept[-2:]
            before = kept[-1][:, -1] if kept and kept[-1] is not None else layer.buffer
            grads.block_backward(block, dout, raws, moments, before)
        return (None,) * 5 + tuple(grads.of_inputs(inputs))


class _Gradients:
    """Gradients while the blocks are walked backwards.

    Attributes:
        carry: of the weights that accumulate, after the block that is next [B, H, ·, ·].
        first: of the initial weights where they read as they are, apart from `carry` (weight_norm="pre").
        buffer: of the momentum buffer after the block that is next.
    """

    def __init__(self, layer: Blocks, dout: Tensor | None, raw: Tensor, dwork, draw, dbuffer):
        new = lambda x: None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format)  # noqa: E731
        self.layer, self.buffer = layer, dbuffer
        self.q = gradient_buffer(layer.q, 0 if dout is None or layer.read_keys else layer.q.shape[1])
        self.momentum, self.norm, self.first = map(new, (layer.momentum, layer.norm, layer.w1))
        written = 0 if layer.read_keys else layer.updates * layer.chunk_size
        self.tokens = layer.tokens.map(lambda x: gradient_buffer(x, written))
        self.reads = self.tokens.k if layer.read_keys else self.q
        w02 = None if layer.w02 is None else torch.zeros_like(layer.w02, dtype=layer.w1.dtype)
        self.net = Net(w02, None)
        self._repeated: dict[int, Tensor | None] = {}

        dwork = new(layer.w1) if dwork is None else dwork.clone(memory_format=torch.contiguous_format)
        if dout is not None and layer.has_reads:
            start = layer.updates * layer.chunk_size
            reads = layer.tokens.k if layer.read_keys else layer.q
            dnet = Net(w02, dwork.flatten(0, 1))
            net, tail = (
                layer.tail_net(layer.last_work(raw)),
                [heads_first(x[:, start:]) for x in (reads, dout, self.reads)],
            )
            read_backward(tail[0], tail[1], net, tail[2], dnet, layer.read_keys)
        if layer.rule.weight_norm == "none":
            self.carry = dwork
        elif layer.updates:
            part, self.norm = normalise_backward(raw, layer.norm, dwork)
            self.carry = part if draw is None else part + draw
        else:
            self.first, self.carry = dwork, new(layer.w1) if draw is None else draw

    def block_net(self, block: Block, dworks: Tensor | None) -> Net:
        """Accumulators for a block's chunks as one batch."""
        if block.chunks not in self._repeated:
            w02 = self.layer.net(block).w02
            self._repeated[block.chunks] = None if w02 is None else torch.zeros_like(w02, dtype=self.layer.w1.dtype)
        return Net(self._repeated[block.chunks], None if dworks is None else dworks.flatten(0, 2))

    def block_backward(self, block: Block, dout: Tensor | None, raws: Tensor, moments, before: Tensor | None) -> None:
        """Through the reads, the scan and the gradients of a block; `before` is the momentum buffer before it."""
        layer, rule = self.layer, self.layer.rule
        works = layer.working(raws, block.first == 0)
        draws = torch.zeros_like(works, memory_format=torch.contiguous_format)
        if dout is not None and layer.has_reads:
            reads = layer.tokens.k if layer.read_keys else layer.q
            net, dnet = layer.net(block, works), self.block_net(block, draws)
            read_backward(block.cut(reads), block.cut(dout), net, block.cut(self.reads), dnet, layer.read_keys)
        if rule.weight_norm == "pre":
            if block.first == 0:
                self.first += draws[:, 0]
                draws[:, 0] = 0
            draws, dnorms = normalise_backward(raws, layer.norm[:, None], draws)
            self.norm = self.norm + dnorms.sum(1)
        dupdate = self.carry[:, None] + _mix(_before(block.chunks, raws).mT, draws)
        self.carry = self.carry + draws.sum(1)
        dmoments = each_step(rule.sign * dupdate, rule)
        if rule.muon is not None:
            dmoments = muon_backward(moments.flatten(0, 2), dmoments.flatten(0, 2), rule).view(moments.shape)
        if self.buffer is not None:
            dmoments = torch.cat([dmoments[:, :-1], dmoments[:, -1:] + self.buffer[:, None]], 1)
        m = layer.block_momentum(block)
        if m is not None:
            dmoments, dm, self.buffer = scan_backward(m, dmoments, before, moments)
            block.cut(self.momentum).add_(per_chunk(dm, rule)[..., None, None] / block.chunk_size)
        gradient = {1: per_chunk(dmoments, rule).flatten(0, 2)}
        dtokens, dnet = self.tokens.map(block.cut), self.block_net(block, None)
        gradient_backward(layer.tokens.map(block.cut), gradient, layer.net(block), rule, dtokens, dnet, layer.read_keys)

    def of_inputs(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """One gradient per input; zeros where it had no part."""
        layer, w02, width = self.layer, self.net.w02, self.layer.w1.shape[-1]
        w0 = w2 = None
        if w02 is not None:
            for count, part in self._repeated.items():
                w02 += part.unflatten(0, (layer.batch, count, layer.heads)).sum(1).flatten(0, 1)
            w0, w2 = w02[:, :width], w02[:, width:]
        w1, main = (self.carry, None) if layer.rule.weight_norm == "none" else (self.first, self.carry)
        grads = [self.q, *self.tokens, self.momentum, w0, w1, w2, main, self.norm, self.buffer]
        return [
            None if x is None else torch.zeros_like(x) if g is None else g.reshape(x.shape)
            for x, g in zip(inputs, grads, strict=True)
        ]


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
