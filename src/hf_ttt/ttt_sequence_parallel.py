# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The parallel evaluation of a TTT layer over processes: each rank of a group holds a slice of the tokens.

Each step of `ttt_parallel` is a function of autograd here, with the same arithmetic, and between two of them ranks tell
each other what their chunks come to. Momentum M_c = G_c + m_c M_{c−1} is linear: a rank that knows its chunks from a
buffer of zero needs only the decay Π m from its first chunk to each one to add what the buffer that is carried in
contributes. Nothing is divided, so that this is exact for any momentum in [0, 1].

With S the bytes of a layer's states, batch · heads · Dv · Dh · 4, a rank gives the others, forward and backward alike,

    S    without momentum: the sum of the updates of its chunks, in one all-gather
    2 S  with momentum: also its last buffer; in one all-gather, or in two with Muon, whose updates need the buffer

and 8 bytes per row and head for the decays: nothing that depends on the number of tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .modeling_ttt import keep_unused
from .ttt_inner import (
    Net,
    gradient_backward,
    gradient_buffer,
    gradient_forward,
    heads_first,
    normalise,
    read_backward,
    read_forward,
)
from .ttt_muon import muon_backward, muon_forward
from .ttt_parallel import SCAN_BLOCK, Block, Blocks, each_step, per_chunk, scan, scan_backward
from .ttt_recurrent import FastWeights, no_second_derivative
from .ttt_rule import TTTRule


def _blocks(rule, chunk_size, updates, q, k, v, lr1, w0, w1, w2) -> Blocks:
    return Blocks(rule, chunk_size, updates, (q, k, v, None, lr1, None, None, w0, w1, w2, None, None, None))


class _SharedGradient:
    """Gradients of w0 and w2 [B, H, ·, ·], which all chunks share, gathered over blocks."""

    def __init__(self, layer: Blocks):
        self.layer, self.total = layer, None if layer.w02 is None else torch.zeros_like(layer.w02, dtype=layer.w1.dtype)

    def net(self, block: Block, w1: Tensor | None) -> Net:
        """Accumulators for the chunks of a block."""
        w02 = self.layer.net(block).w02
        return Net(None if w02 is None else torch.zeros_like(w02, dtype=self.layer.w1.dtype), w1)

    def add(self, block: Block, net: Net) -> None:
        if self.total is not None:
            self.total += net.w02.unflatten(0, (self.layer.batch, block.chunks, self.layer.heads)).sum(1).flatten(0, 1)

    def split(self, w0: Tensor | None, w2: Tensor | None) -> list[Tensor | None]:
        """The gradients of w0 and w2; zeros where they had no part."""
        if self.total is None:
            return [None if w is None else torch.zeros_like(w) for w in (w0, w2)]
        return [part.reshape(w.shape) for part, w in zip(self.total.chunk(2, 1), (w0, w2), strict=True)]


class _ChunkGradients(torch.autograd.Function):
    """G_c = V_cᵀ (η φ(K_c)) of the chunks that update: k, v, lr1 [B, T, H, ·] → [B, updates, H, Dv, Dh]."""

    @staticmethod
    def forward(ctx, rule, chunk_size, updates, k, v, lr1, w0, w1, w2):
        ctx.settings = rule, chunk_size, updates
        ctx.save_for_backward(k, v, lr1, w0, w1, w2)
        layer = _blocks(rule, chunk_size, updates, k[:, :0], k, v, lr1, w0, w1, w2)
        out = w1.new_empty(layer.batch, updates, layer.heads, *w1.shape[-2:])
        for block in layer.blocks:
            g = gradient_forward(layer.tokens.map(block.cut), layer.net(block), rule, w1.dtype)[1]
            out[:, block.first : block.first + block.chunks] = g.view(layer.batch, block.chunks, *out.shape[2:])
        return out

    @staticmethod
    @no_second_derivative
    def backward(ctx, grad):
        rule, chunk_size, updates = ctx.settings
        k, v, lr1, w0, w1, w2 = ctx.saved_tensors
        layer = _blocks(rule, chunk_size, updates, k[:, :0], k, v, lr1, w0, w1, w2)
        dtokens = layer.tokens.map(lambda x: gradient_buffer(x, updates * chunk_size))
        shared = _SharedGradient(layer)
        for block in layer.blocks:
            g, dnet = grad[:, block.first : block.first + block.chunks].flatten(0, 2), shared.net(block, None)
            tokens, parts = (x.map(block.cut) for x in (layer.tokens, dtokens))
            gradient_backward(tokens, {1: g}, layer.net(block), rule, parts, dnet, False)
            shared.add(block, dnet)
        dw0, dw2 = shared.split(w0, w2)
        return None, None, None, dtokens.k, dtokens.v, dtokens.lr1, dw0, torch.zeros_like(w1), dw2


class _ChunkReads(torch.autograd.Function):
    """o = S_c φ(q): q [B, T, H, Dk] and the weights of its chunks, `works` [B, updates + 1, H, Dv, Dh] → [B, T, H, Dv];
    the last weights read what follows the chunks that update."""

    @staticmethod
    def forward(ctx, rule, chunk_size, updates, q, works, w0, w2):
        ctx.settings = rule, chunk_size, updates
        ctx.save_for_backward(q, works, w0, w2)
        layer = _blocks(rule, chunk_size, updates, q, q, q, None, w0, works[:, 0], w2)
        out = q.new_empty(*q.shape[:3], works.shape[-2])
        for block in layer.blocks:
            net = layer.net(block, works[:, block.first : block.first + block.chunks])
            read_forward(block.cut(q), net, block.cut(out))
        start = updates * chunk_size
        read_forward(heads_first(q[:, start:]), layer.tail_net(works[:, updates]), heads_first(out[:, start:]))
        return out

    @staticmethod
    @no_second_derivative
    def backward(ctx, grad):
        rule, chunk_size, updates = ctx.settings
        q, works, w0, w2 = ctx.saved_tensors
        layer = _blocks(rule, chunk_size, updates, q, q, q, None, w0, works[:, 0], w2)
        dq, dworks, shared = gradient_buffer(q, q.shape[1]), torch.zeros_like(works), _SharedGradient(layer)
        for block in layer.blocks:
            chunks = slice(block.first, block.first + block.chunks)
            dw1 = torch.zeros_like(works[:, chunks], memory_format=torch.contiguous_format)
            net, dnet = layer.net(block, works[:, chunks]), shared.net(block, dw1.flatten(0, 2))
            read_backward(block.cut(q), block.cut(grad), net, block.cut(dq), dnet, False)
            shared.add(block, dnet)
            dworks[:, chunks] = dw1
        start, dw1 = updates * chunk_size, torch.zeros_like(works[:, 0], memory_format=torch.contiguous_format)
        tail, dtail, dq_tail = (heads_first(x[:, start:]) for x in (q, grad, dq))
        dnet = Net(shared.total, dw1.flatten(0, 1))
        read_backward(tail, dtail, layer.tail_net(works[:, updates]), dq_tail, dnet, False)
        dworks[:, updates] = dw1
        return None, None, None, dq, dworks, *shared.split(w0, w2)


class _Scan(torch.autograd.Function):
    """M_i = g_i + m_i M_{i−1} from M_{−1} = buffer: g [B, n, H, ·, ·], m [B, n, H], buffer [B, H, ·, ·] or None."""

    @staticmethod
    def forward(ctx, g, m, buffer):
        moments = scan(g, m, buffer)
        ctx.save_for_backward(m, buffer, moments)
        return moments

    @staticmethod
    @no_second_derivative
    def backward(ctx, grad):
        m, buffer, moments = ctx.saved_tensors
        dg, dm, dbuffer = scan_backward(m, grad, buffer, moments)
        return dg, dm, None if buffer is None else dbuffer


def _scan_blocks(g: Tensor, m: Tensor, buffer: Tensor | None) -> Tensor:
    """`_Scan` over any number of chunks, whose cost grows with their square within a block alone."""
    parts = []
    for start in range(0, g.shape[1], SCAN_BLOCK):
        part = slice(start, start + SCAN_BLOCK)
        parts.append(_Scan.apply(g[:, part], m[:, part], buffer))
        buffer = parts[-1][:, -1]
    return torch.cat(parts, 1) if parts else g


class _Muon(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rule, x):
        ctx.rule = rule
        ctx.save_for_backward(x)
        return muon_forward(x.flatten(0, 2), rule).view(x.shape)

    @staticmethod
    @no_second_derivative
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return None, muon_backward(x.flatten(0, 2), grad.flatten(0, 2), ctx.rule).view(x.shape)


def _gather(group: ProcessGroup, *tensors: Tensor | None) -> list[Tensor | None]:
    """Each tensor of all ranks [ranks, ...] by one all-gather; None where there is none."""
    ranks, given = dist.get_world_size(group), [x for x in tensors if x is not None]
    flat = torch.cat([x.reshape(-1) for x in given])
    everything = flat.new_empty(ranks, flat.numel())
    dist.all_gather(list(everything.unbind()), flat, group=group)
    parts = iter(everything.split([x.numel() for x in given], 1))
    return [None if x is None else next(parts).reshape(ranks, *x.shape) for x in tensors]


class _Carry(torch.autograd.Function):
    """What the ranks before this one leave: their last momentum buffer, and the sum of what their chunks add.

    Each rank is an affine step, buffer ← last + decay · buffer and before ← before + total + weight · buffer, from
    zeros; so is its adjoint, from the last rank to the first.

    Args:
        last: the rank's buffer after its chunks, from none before them [B, H, ·, ·]; None without momentum.
        decay: the product of its momentum [B, H, 1, 1].
        total: the sum over its chunks, from no buffer before them [B, H, ·, ·]; None to carry the buffer alone.
        weight: what a buffer before them adds to it [B, H, 1, 1]; None for nothing.
    """

    @staticmethod
    def forward(ctx, group, last, decay, total, weight):
        lasts, decays, totals, weights = _gather(group, last, decay, total, weight)
        buffer, before = (None if x is None else torch.zeros_like(x) for x in (last, total))
        for j in range(dist.get_rank(group)):
            if before is not None:
                before = before + totals[j]
                before = before if weights is None else torch.addcmul(before, weights[j], buffer)
            buffer = None if buffer is None else torch.addcmul(lasts[j], decays[j], buffer)
        ctx.group = group
        ctx.save_for_backward(decays, weights, buffer)
        return buffer, before

    @staticmethod
    @no_second_derivative
    def backward(ctx, dbuffer, dbefore):
        decays, weights, buffer = ctx.saved_tensors
        dbuffers, dbefores = _gather(ctx.group, dbuffer, dbefore)
        dlast, dtotal = (None if x is None else torch.zeros_like(x) for x in (dbuffer, dbefore))
        for j in reversed(range(dist.get_rank(ctx.group) + 1, dist.get_world_size(ctx.group))):
            if dlast is not None:
                dlast = torch.addcmul(dbuffers[j], decays[j], dlast)
                dlast = dlast if weights is None else torch.addcmul(dlast, weights[j], dtotal)
            dtotal = None if dtotal is None else dtotal + dbefores[j]
        ddecay = None if dlast is None else (dlast * buffer).sum((-2, -1), keepdim=True)
        dweight = None if weights is None else (dtotal * buffer).sum((-2, -1), keepdim=True)
        return None, dlast, ddecay, dtotal, dweight


def _updates(g: Tensor, m: Tensor | None, rule: TTTRule, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The update of each step [B, n, H, ·, ·] from its gradient and momentum [B, n, H], and the sum of those of the
    ranks before [B, H, ·, ·]."""
    decay = None
    if m is not None:
        g = _scan_blocks(g, m, None)
        zeros, ones = (x.new_full((*x.shape, 1, 1), y) for x, y in ((m, 0.0), (m[:, :1].sum(1), 1.0)))
        decay = _scan_blocks(zeros, m, ones)  # Π_{s ≤ i} m_s
    # sums of at most one chunk: a rank without chunks that update takes part in every exchange
    last, all_decay = (None, None) if m is None else (x[:, -1:].sum(1) for x in (g, decay))
    if rule.muon is None:
        buffer, before = _Carry.apply(group, last, all_decay, g.sum(1), None if m is None else decay.sum(1))
        return (g if m is None else torch.addcmul(g, decay, buffer[:, None])), before
    if m is not None:
        buffer, _ = _Carry.apply(group, last, all_decay, None, None)
        g = torch.addcmul(g, decay, buffer[:, None])
    update = _Muon.apply(rule, g)
    return update, _Carry.apply(group, None, None, update.sum(1), None)[1]


def ttt_sequence_parallel(
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
    group: ProcessGroup,
) -> tuple[Tensor, FastWeights]:
    """Evaluate this rank's slice of aligned rows with the updates of all ranks before it; a `TTTInterface` function.

    Args:
        q, k, v, lr0, lr1, lr2, momentum: the slice, as in `ttt_attention`; of C · n tokens but on the last rank.
        fast: the weights before the first token of the whole sequence, the same on all ranks.
        rule, chunk_size, updates: as in `ttt_parallel`. Ranks but the last one update with each of their chunks.
        group: the processes that share a sequence, in its order.

    Returns:
        The output of the slice [B, T, H, Dv], and `fast`. Gradients of `fast` are this rank's part of a sum over ranks.

    Raises:
        ValueError: if the rule is not parallelizable, a state is continued or asked for, or the slice does not end with
            a chunk.
    """
    if not rule.parallelizable:
        raise ValueError(f"sequence parallelism is not exact for this rule: {rule.why_not_parallel}")
    if return_state or fast.buffer[1] is not None:
        raise ValueError(
            "sequence parallelism neither continues nor returns a state: pass no cache and use_cache=False"
        )
    rank = dist.get_rank(group)
    if rank + 1 < dist.get_world_size(group):
        if q.shape[1] % chunk_size or not q.shape[1]:
            raise ValueError(
                f"the slice of rank {rank} has {q.shape[1]} tokens, which are no whole chunks of {chunk_size}: only "
                "the last rank may end within a chunk, as `shard_sequence` cuts"
            )
        updates = q.shape[1] // chunk_size
    w0, w1, w2 = fast.work
    g = each_step(_ChunkGradients.apply(rule, chunk_size, updates, k, v, lr1, w0, w1, w2), rule)
    m = None
    if momentum is not None:
        m = momentum[:, : updates * chunk_size].unflatten(1, (updates, chunk_size)).mean(2)[..., 0]
    update, before = _updates(g, each_step(m, rule), rule, group)
    base = w1 if fast.main[1] is None else fast.main[1]
    first, update = base + rule.sign * before, rule.sign * per_chunk(update, rule)
    works = torch.cat([first[:, None], update], 1).cumsum(1)
    if rule.weight_norm == "pre":
        works = normalise(works, fast.norm[1][:, None])
        works = works if rank else torch.cat([w1[:, None], works[:, 1:]], 1)  # the very first read as they are
    out = _ChunkReads.apply(rule, chunk_size, updates, k if rule.read_with == "key" else q, works, w0, w2)
    return keep_unused(out, *(x for x in (q, lr0, lr2, momentum) if x is not None)), fast  # unused ones, by some ranks
