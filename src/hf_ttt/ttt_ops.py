# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The TTT layer as functions of tensors: `ttt_attention` over sequences; its primitives `ttt_update` and `ttt_read`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .ttt_checks import (
    check_chunk_size,
    check_rows,
    check_state,
    check_tokens,
    check_values,
    check_weights,
    has_values,
)
from .ttt_interface import CallSize, TTTInterface
from .ttt_layout import TTTLayout, make_layout
from .ttt_parallel import ttt_parallel
from .ttt_recurrent import FastWeights, ttt_recurrent
from .ttt_rule import TTTRule
from .ttt_state import TTTState, ttt_init

PENDING = ("k", "v", "lr0", "lr1", "lr2", "momentum")


def _recurrent_triton() -> Callable:
    from .ttt_triton_recurrent import ttt_recurrent_triton

    return ttt_recurrent_triton


def _parallel_triton() -> Callable:
    from .ttt_triton_parallel import ttt_parallel_triton

    return ttt_parallel_triton


TTT_FUNCTIONS = TTTInterface()
TTT_FUNCTIONS.register("recurrent", "torch", ttt_recurrent)
TTT_FUNCTIONS.register("parallel", "torch", ttt_parallel)
TTT_FUNCTIONS.register_lazy("recurrent", "triton", _recurrent_triton)
TTT_FUNCTIONS.register_lazy("parallel", "triton", _parallel_triton)


def ttt_attention(
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
    implementation: str = "auto",
    backend: str = "auto",
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: TTTState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, TTTState]:
    r"""Chunk-causal TTT: token t reads the fast weights after the updates of the ⌊t/C⌋ full chunks before it.

    For a parallelizable rule this is linear attention (paper, theorem 5.2 with chunk-exclusive sums):
    `o_t = (w1 + Σ_{chunks i < ⌊t/C⌋} muon(M_i)) φ(q_t)`.

    Args:
        q, k: queries and keys [B, T, H, Dk].
        v: values [B, T, H, Dv].
        w0, w2: initial fast weights [H, Dh, Dk] or [B, H, Dh, Dk]; may be None for a "linear" rule.
        w1: initial fast weights [H, Dv, Dh] or [B, H, Dv, Dh] (with `cu_seqlens`, B is the number of documents).
        lr0, lr2: rates of each token [B, T, H, 1 or Dk]; None for 1.0.
        lr1: [B, T, H, 1 or Dh]; None for 1.0.
        momentum: of each token [B, T, H, 1] in [0, 1], averaged over a chunk; None for no momentum.
        rule: the inner loop.
        chunk_size: C, tokens per update.
        implementation: "recurrent", "parallel" (exact where `rule.parallelizable`), or "auto".
        backend: "torch", "triton" (kernels, for a GPU and tensors up to float32), or "auto".
        attention_mask: [B, T], 1 at real tokens and 0 at padding on the left or right. Chunks count from a row's first
            real token; output and gradients at padding are zero.
        cu_seqlens: boundaries of packed documents [n + 1], for B = 1; each document is evaluated as if alone.
        state: continues from the state of an earlier call, then w0, w1, w2 are not read.
        return_state: whether to return the state after the last token, one row per batch row or document.

    Returns:
        The output [B, T, H, Dv] in the type of v (of the autocast type under autocast); with `return_state` also the
        `TTTState`. Unused inputs, such as lr0 when only w1 is updated, get zero gradients. There is no second
        derivative.

    Raises:
        ValueError: for shapes that do not fit, "parallel" where it is not exact, "triton" with float64 and, for tensors
            on the CPU outside of tracing, rates that are negative or NaN, momentum outside [0, 1], a mask that is not a
            padding mask.
        ImportError: for a backend that is not available.
    """
    check_tokens(q, k, v, lr0, lr1, lr2, momentum)
    check_chunk_size(chunk_size)
    check_rows(k, attention_mask, cu_seqlens)
    check_values(lr0, lr1, lr2, momentum, attention_mask)
    batch, length = k.shape[:2]
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if cu_seqlens is not None or (attention_mask is not None and has_values(attention_mask) and attention_mask.all()):
        attention_mask = None  # an all-ones mask says nothing
    per_row = state is None and any(w is not None and w.dim() == 4 for w in (w0, w1, w2))
    if state is not None:
        check_state(state, rows, chunk_size, dict(zip(PENDING, (k, v, lr0, lr1, lr2, momentum), strict=True)), rule)
    check_weights(q, v, lr1, *((w0, w1, w2) if state is None else state.weights), rule, rows)
    layout = make_layout(
        batch,
        length,
        chunk_size,
        attention_mask=attention_mask,
        cu_seqlens=cu_seqlens,
        counts=None if state is None or state.count is None else state.count.tolist(),
        has_state=state is not None or per_row,
        return_state=return_state,
        device=k.device,
    )
    if state is None:
        state = ttt_init(w0, w1, w2, rule, rows)
    out, state = evaluate(
        q, k, v, lr0, lr1, lr2, momentum, state, layout, rule=rule, implementation=implementation, backend=backend
    )
    return (out, state) if return_state else out


def evaluate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr0: Tensor | None,
    lr1: Tensor | None,
    lr2: Tensor | None,
    momentum: Tensor | None,
    state: TTTState,
    layout: TTTLayout,
    *,
    rule: TTTRule,
    implementation: str = "auto",
    backend: str = "auto",
    in_place: bool = False,
) -> tuple[Tensor, TTTState | None]:
    """`ttt_attention` without its checks, for a layout that several layers share.

    Tokens that reach no further than their chunk, as in decoding, are read and kept by torch whatever the backend: of
    a few tokens and one state there is nothing that a kernel could compute together.

    Args:
        state: the state before the first token, one row per row of the layout.
        layout: of this call; says whether a state is returned.
        in_place: whether `state` may be changed and returned, as a cache that owns it wants; without gradients only.
    """
    function = TTT_FUNCTIONS.get(rule, implementation, backend, _call_size(k, state.w1))
    device = _autocast_device(k)
    if torch.is_autocast_enabled(device) and k.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    dtype = state.w1.dtype
    rates = [None if x is None else x.to(dtype) for x in (lr0, lr1, lr2, momentum)]
    tokens = dict(zip(PENDING, (k, v, *rates), strict=True))
    with torch.autocast(device, enabled=False):
        if layout.return_state and layout.within_chunk and not torch.is_grad_enabled():
            return _evaluate_within_chunk(q, tokens, state, layout, rule, in_place)
        if layout.aligned:
            return _evaluate_aligned(q, tokens, state, layout, rule, function)
        return _evaluate_arranged(q, tokens, state, layout, rule, function)


def _call_size(k: Tensor, w1: Tensor) -> CallSize:
    """The size of a call with keys [B, T, H, Dk] and fast weights [B, H, Dv, Dh]."""
    batch, length, heads, width = k.shape
    width, dtype = max(width, *w1.shape[-2:]), torch.promote_types(k.dtype, w1.dtype)
    return CallSize(k.device, width, batch * length * heads, dtype)


def _autocast_device(x: Tensor) -> str:
    """The device type whose autocast counts; meta tensors have none of their own."""
    return "cpu" if x.is_meta else x.device.type


def _evaluate_aligned(q, tokens, state: TTTState, layout: TTTLayout, rule, function):
    before = layout.before
    if before:
        q = torch.cat([q.new_zeros(q.shape[0], before, *q.shape[2:]), q], 1)
        tokens = {
            name: None if x is None else torch.cat([getattr(state, name)[:, :before].to(x.dtype), x], 1)
            for name, x in tokens.items()
        }
    group = layout.groups[0]
    settings = {"chunk_size": layout.chunk_size, "updates": group.updates, "return_state": layout.return_state}
    out, fast = function(q, *tokens.values(), _fast_weights(state), rule=rule, **settings)
    out = out[:, before:] if before else out
    if not layout.return_state:
        return out, None
    done = group.updates * layout.chunk_size
    pending = {name: None if x is None else _padded(x[:, done:], layout.chunk_size) for name, x in tokens.items()}
    return out, _with_fast_weights(state, fast, **pending, count=layout.new_counts(q.device))


def _evaluate_arranged(q, tokens, state: TTTState, layout: TTTLayout, rule, function):
    has_pending = state.k is not None
    pending = {name: getattr(state, name) if has_pending else None for name in PENDING}
    arranged_q = layout.arrange(q)
    arranged = {name: layout.arrange(x, pending[name]) for name, x in tokens.items()}
    fast = _fast_weights(state)
    outputs, parts = [], []
    for group in layout.groups:
        rows = group.state_rows
        part = fast
        if rows is not None:
            part = FastWeights(*([None if w is None else w.index_select(0, rows) for w in kind] for kind in fast))
        settings = {"chunk_size": layout.chunk_size, "updates": group.updates, "return_state": layout.return_state}
        out, part = function(group.cut(arranged_q), *map(group.cut, arranged.values()), part, rule=rule, **settings)
        outputs.append(out.flatten(0, 1))
        parts.append(part)
    width = (q.shape[2], tokens["v"].shape[-1])
    flat = torch.cat(outputs) if outputs else q.new_zeros(0, *width)
    out = layout.restore(flat)
    if not layout.return_state:
        return out, None
    order = [r for group in layout.groups for r in group.state_rows.tolist()]
    back = torch.tensor(order, device=q.device, dtype=torch.long).argsort()
    sizes = [group.rows for group in layout.groups]
    joined = [[_join_rows(some, sizes, back) for some in zip(*kind, strict=True)] for kind in zip(*parts, strict=True)]
    fast = FastWeights(*joined) if parts else fast
    tail = {name: layout.arrange_tail(x, pending[name]) for name, x in tokens.items()}
    return out, _with_fast_weights(state, fast, **tail, count=layout.new_counts(q.device))


def _evaluate_within_chunk(q, tokens, state: TTTState, layout: TTTLayout, rule, in_place: bool):
    """All new tokens read the present weights; then each row's chunk takes them, and a chunk that is full updates."""
    out = _read(state, tokens["k"] if rule.read_with == "key" else q, rule, ttt_recurrent)
    if not layout.aligned:
        out = out.masked_fill(~layout.real.view(*out.shape[:2], 1, 1), 0)
    pending = {}
    for name, x in tokens.items():
        slots = getattr(state, name)
        if x is None:
            continue
        if slots is None:
            slots = x.new_zeros(layout.rows, layout.chunk_size, *x.shape[2:])
        elif not in_place or slots.requires_grad or _only_for_inference_mode(slots):
            slots = slots.clone()
        pending[name] = layout.append(x, slots)
    state = replace(state, **pending, count=layout.new_counts(q.device))
    full = layout.full_rows()
    if len(full) == layout.rows:
        state = _update_pending(state, rule)
    elif full:
        rows = torch.tensor(full, device=q.device)
        part = _fast_weights(_update_pending(state.index_select(rows), rule))
        whole = _fast_weights(state)
        fast = FastWeights(*map(lambda w, p: _put_rows(w, p, rows, layout.rows), whole, part))
        state = _with_fast_weights(state, fast)
    return out, state


def _only_for_inference_mode(x: Tensor) -> bool:
    """Whether x was made in inference mode and may not be written here; a graph that is compiled cannot ask that."""
    return not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled()


def _join_rows(parts: Sequence[Tensor | None], sizes: list[int], order: Tensor) -> Tensor | None:
    """The rows of all groups in the given order; a momentum buffer that is not there yet is zero."""
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    whole = [like.new_zeros(n, *like.shape[1:]) if p is None else p for n, p in zip(sizes, parts, strict=True)]
    return torch.cat(whole).index_select(0, order)


def _put_rows(whole: list[Tensor | None], part: list[Tensor | None], rows: Tensor, count: int) -> list[Tensor | None]:
    """The weights of all rows with those of some replaced; a momentum buffer that is not there yet is zero."""
    return [
        None if p is None else (p.new_zeros(count, *p.shape[1:]) if w is None else w).index_copy(0, rows, p)
        for w, p in zip(whole, part, strict=True)
    ]


def _update_pending(state: TTTState, rule: TTTRule) -> TTTState:
    return _update(state, [getattr(state, name) for name in PENDING], rule, ttt_recurrent)


def _update(state: TTTState, tokens: Sequence[Tensor | None], rule: TTTRule, function: Callable) -> TTTState:
    """The state after an update by all tokens (those of `PENDING`) as one chunk."""
    k, dtype = tokens[0], state.w1.dtype
    tokens = [k[:, :0], *tokens[:2], *(None if x is None else x.to(dtype) for x in tokens[2:])]
    settings = {"rule": rule, "chunk_size": k.shape[1], "updates": 1, "return_state": True}
    with torch.autocast(_autocast_device(k), enabled=False):
        _, fast = function(*tokens, _fast_weights(state), **settings)
    return _with_fast_weights(state, fast)


def _read(state: TTTState, q: Tensor, rule: TTTRule, function: Callable) -> Tensor:
    """The output for q [B, T, H, Dk] with the present weights."""
    tokens = q, q[:, :0], q.new_empty(q.shape[0], 0, q.shape[2], state.w1.shape[-2]), None, None, None, None
    with torch.autocast(_autocast_device(q), enabled=False):
        return function(*tokens, _fast_weights(state), rule=rule, chunk_size=1, updates=0)[0]


def _fast_weights(state: TTTState) -> FastWeights:
    return FastWeights(
        *([getattr(state, f"{kind}{i}") for i in range(3)] for kind in ("w", "main", "norm", "momentum"))
    )


def _with_fast_weights(state: TTTState, fast: FastWeights, **others) -> TTTState:
    kinds = zip(("w", "main", "norm", "momentum"), fast, strict=True)
    return replace(state, **{f"{kind}{i}": w for kind, three in kinds for i, w in enumerate(three)}, **others)


def _padded(x: Tensor, size: int) -> Tensor:
    """x [B, t, H, D] with zeros up to `size` tokens."""
    return torch.cat([x, x.new_zeros(x.shape[0], size - x.shape[1], *x.shape[2:])], 1)


def ttt_update(
    state: TTTState,
    k: Tensor,
    v: Tensor,
    lr0: Tensor | None = None,
    lr1: Tensor | None = None,
    lr2: Tensor | None = None,
    momentum: Tensor | None = None,
    *,
    rule: TTTRule,
    implementation: str = "auto",
    backend: str = "auto",
) -> TTTState:
    """One whole update with all given tokens as the chunk: the step of `TTTRule`, `rule.inner_steps` times.

    Args:
        state: the state before; its unfinished chunk, if any, stays as it is.
        k: keys [B, T, H, Dk]; v: values [B, T, H, Dv]; with T = 0 nothing changes.
        lr0, lr1, lr2, momentum, implementation, backend: as in `ttt_attention`.

    Returns:
        The state after the update.

    Raises:
        ValueError: for shapes that do not fit, "parallel" where it is not exact, "triton" with float64.
        ImportError: for a backend that is not available.
    """
    check_tokens(k, k, v, lr0, lr1, lr2, momentum)
    check_weights(k, v, lr1, *state.weights, rule, k.shape[0])
    function = TTT_FUNCTIONS.get(rule, implementation, backend, _call_size(k, state.w1))
    return _update(state, (k, v, lr0, lr1, lr2, momentum), rule, function) if k.shape[1] else state


def ttt_read(state: TTTState, q: Tensor, *, rule: TTTRule, backend: str = "auto") -> Tensor:
    """f(q) = w1 φ(q) with the state's weights: q [B, T, H, Dk] → [B, T, H, Dv]. A rule that reads with the key is read
    with what the caller passes.

    Raises:
        ValueError: for shapes that do not fit, "triton" with float64.
        ImportError: for a backend that is not available.
    """
    width = (state.w1 if rule.fast_weight == "linear" else state.w0).shape[-1]
    rows, heads = state.w1.shape[:2]
    if q.dim() != 4 or (q.shape[0], *q.shape[2:]) != (rows, heads, width):
        raise ValueError(f"q has shape {tuple(q.shape)}; expected [{rows}, tokens, {heads}, {width}] to fit the state")
    return _read(state, q, rule, TTT_FUNCTIONS.get(rule, "recurrent", backend, _call_size(q, state.w1)))
