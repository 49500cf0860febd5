# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The parallel evaluation by Triton kernels: what `ttt_parallel` computes, forward and backward.

In the notation of `ttt_parallel`, and for each inner step i of each chunk c:

    G_c = Σ_{t in chunk c} v_t (η_t φ(k_t))ᵀ    `parallel_gradient`
    M_i = G_c + m_c M_{i−1}                     `scan_momentum`
    S_c = S_0 ± Σ_{i before c} muon(M_i)        `muon_triton`, `scan_updates`
    o_t = S_c φ(q_t)                            `parallel_read`

Each is an operator with its own backward; autograd joins them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ttt_inner import normalise
from .ttt_recurrent import FastWeights
from .ttt_rule import TTTRule
from .ttt_triton import check_available, check_types
from .ttt_triton_features import parallel_gradient, parallel_read
from .ttt_triton_muon import muon_triton
from .ttt_triton_scan import scan_momentum, scan_updates


class _Anchor(torch.autograd.Function):
    """The results as they are; inputs that they do not depend on get zero gradients."""

    @staticmethod
    def forward(ctx, count, *tensors):
        ctx.save_for_backward(*tensors[count:])
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx, *grads):
        return None, *grads, *(None if x is None else torch.zeros_like(x) for x in ctx.saved_tensors)


def _states(k, v, lr1, momentum, w0, w1, w2, main, norm, buffer, rule: TTTRule, chunk_size: int, updates: int):
    """The weights that read each chunk and what follows [B·H, N + 1, Dv, Dh], those that accumulate, and the momentum
    buffer after the last update; w0, w1, w2, main, norm and buffer are [B·H, ·, ·]."""
    base = w1 if main is None else main
    if not updates:
        return w1[:, None], base, buffer
    moments = parallel_gradient(k, v, lr1, w0, w2, w1.shape[-1], chunk_size, updates)
    steps, factor = rule.inner_steps, rule.sign
    if momentum is None:  # the same step again and again, since it reads no state
        steps, factor = 1, factor * steps
    else:
        mean = momentum[:, : updates * chunk_size].unflatten(1, (updates, chunk_size)).mean(2)[..., 0]
        moments = scan_momentum(moments, mean.transpose(1, 2).flatten(0, 1), buffer, steps)
        buffer = moments[:, -1]
    update = moments if rule.muon is None else muon_triton(moments.flatten(0, 1), rule).view(moments.shape)
    raws = scan_updates(update, base, steps, factor)
    works = raws
    if rule.weight_norm == "pre":  # the very first are the initial ones as they are
        works = torch.cat([w1[:, None], normalise(raws[:, 1:], norm[:, None])], 1)
    return works, raws[:, -1], buffer


def ttt_parallel_triton(
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
    """`ttt_parallel` by kernels: the same arguments and results, for tokens in float32, bfloat16 or float16.

    Raises:
        ValueError: if the rule is not parallelizable, or a tensor is float64.
        ImportError: where kernels do not run on the tensors' device.
    """
    if not rule.parallelizable:
        raise ValueError(f"the parallel evaluation is not exact for this rule: {rule.why_not_parallel}")
    inputs = (q, k, v, lr0, lr1, lr2, momentum, *fast.work, fast.main[1], fast.norm[1], fast.buffer[1])
    check_types(*inputs)
    if not q.is_meta:
        check_available(q.device)
    w0, w1, w2, main, norm, buffer = (None if w is None else w.flatten(0, 1) for w in inputs[7:])
    if rule.fast_weight == "linear":
        w0 = w2 = None
    works, raw, last = _states(k, v, lr1, momentum, w0, w1, w2, main, norm, buffer, rule, chunk_size, updates)
    reads = k if rule.read_with == "key" and q.shape[1] == k.shape[1] else q
    empty = v.new_empty(*q.shape[:3], w1.shape[-2])
    out = parallel_read(reads, w0, w2, works, chunk_size) if reads.shape[1] else empty
    if not return_state:
        return _anchored(rule, updates, reads, inputs, out)[0], fast
    finals = [x.unflatten(0, q.shape[::2][:2]).clone() for x in (works[:, -1], raw, last) if x is not None]
    out, *finals = _anchored(rule, updates, reads, inputs, out, *finals)
    work, mains, buffers = list(fast.work), list(fast.main), list(fast.buffer)
    work[1] = finals[0]
    if rule.weight_norm == "pre":
        mains[1] = finals[1]
    if momentum is not None and last is not None:
        buffers[1] = finals[2]
    return out, FastWeights(work, mains, fast.norm, buffers)


def _anchored(rule: TTTRule, updates: int, reads: Tensor, inputs, *results: Tensor) -> tuple[Tensor, ...]:
    """The results, with zero gradients for the inputs that they do not depend on and, where only a state is
    differentiated, for those that it does not depend on."""
    _, k, v, _, lr1, _, momentum, w0, w1, w2, main, norm, buffer = inputs
    used = [reads] if reads.shape[1] else []
    used += [w1] if used or len(results) > 1 else []
    if rule.fast_weight == "swiglu" and (updates or reads.shape[1]):
        used += [w0, w2]
    if updates:
        used += [k, v, lr1, momentum, None if momentum is None else buffer]
        used += [main, norm] if rule.weight_norm == "pre" else []
    unused = [x for x in inputs if x is not None and x.requires_grad and all(x is not y for y in used)]
    if torch.is_grad_enabled() and (unused or len(results) > 1):
        return _Anchor.apply(len(results), *results, *unused)
    return results
