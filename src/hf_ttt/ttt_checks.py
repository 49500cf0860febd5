# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Checks of what a caller passes to the TTT functions. Each error names the argument, what came, and what would do.

Shapes are always checked. Values are looked at only for eager tensors on the CPU, so that tracing, meta tensors and
accelerators are left alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ttt_rule import TTTRule
from .ttt_state import TTTState


def has_values(x: Tensor) -> bool:
    """Whether the values of x may be looked at: a plain tensor on the CPU, outside of tracing."""
    return x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()


def check_chunk_size(chunk_size: int) -> None:
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size!r} must be an integer of at least 1")


def _check_shape(name: str, x: Tensor, expected: tuple[int | tuple[int, ...] | None, ...], axes: str) -> None:
    """`expected` has a size, the allowed sizes, or None for any, per axis."""
    fits = x.dim() == len(expected) and all(
        want is None or size == want or (isinstance(want, tuple) and size in want)
        for size, want in zip(x.shape, expected, strict=True)
    )
    if not fits:
        want = ", ".join(
            "any" if e is None else " or ".join(map(str, e)) if isinstance(e, tuple) else str(e) for e in expected
        )
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {axes} = [{want}]")


def check_tokens(q: Tensor, k: Tensor, v: Tensor, lr0, lr1, lr2, momentum) -> None:
    """Shapes and types of everything that comes per token."""
    _check_shape("k", k, (None,) * 4, "[batch, tokens, heads, key width]")
    _check_shape("q", q, tuple(k.shape), "[batch, tokens, heads, key width] of k")
    _check_shape("v", v, (*k.shape[:3], None), "[batch, tokens, heads, value width] with k's first three")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_floating_point() or x.dtype != k.dtype:
            raise ValueError(
                f"{name} has dtype {x.dtype}; expected one floating-point type for q, k and v ({k.dtype} in k)"
            )
    for name, x, widths in (("lr0", lr0, (1, k.shape[3])), ("lr1", lr1, None), ("lr2", lr2, (1, k.shape[3]))):
        if x is not None:
            _check_shape(name, x, (*k.shape[:3], widths), "[batch, tokens, heads, 1 or width]")
    if momentum is not None:
        _check_shape("momentum", momentum, (*k.shape[:3], 1), "[batch, tokens, heads, 1]")


def check_weights(q: Tensor, v: Tensor, lr1: Tensor | None, w0, w1: Tensor, w2, rule: TTTRule, rows: int) -> None:
    """Shapes of the initial fast weights [H, out, in] or [rows, H, out, in] for these tokens and this rule."""
    heads, dk, dv = q.shape[2], q.shape[3], v.shape[3]
    if w1.dim() not in (3, 4):
        raise ValueError(
            f"w1 has shape {tuple(w1.shape)}; expected [heads, value width, hidden width], or the same per row"
        )
    dh = w1.shape[-1]
    lead = lambda w: (heads,) if w.dim() == 3 else (rows, heads)  # noqa: E731
    _check_shape("w1", w1, (*lead(w1), dv, dh), "[(rows,) heads, value width of v, hidden width]")
    if rule.fast_weight == "linear":
        if dh != dk:
            raise ValueError(
                f"w1 has shape {tuple(w1.shape)}, so its input width is {dh}, but a linear fast network is applied to "
                f"keys of width {dk}: the two must be equal"
            )
    else:
        for name, w in (("w0", w0), ("w2", w2)):
            if w is None:
                raise ValueError(
                    f"{name} is None, but a 'swiglu' fast network needs it: [heads, hidden width, key width]"
                )
            _check_shape(name, w, (*lead(w), dh, dk), "[(rows,) heads, hidden width of w1, key width of k]")
    if lr1 is not None and lr1.shape[-1] not in (1, dh):
        raise ValueError(
            f"lr1 has shape {tuple(lr1.shape)}; expected a last width of 1 or {dh}, the hidden width of w1"
        )


def check_rows(k: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Form of the mask and of the document boundaries."""
    batch, length = k.shape[:2]
    if attention_mask is not None:
        if attention_mask.dim() != 2 or tuple(attention_mask.shape) != (batch, length):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; expected a padding mask [{batch}, {length}]"
            )
        if has_values(attention_mask):
            _check_padding_mask(attention_mask)
    if cu_seqlens is None:
        return
    if batch != 1:
        raise ValueError(
            f"cu_seqlens needs documents packed into one row, but k has a batch of {batch}: flatten it to 1"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; "
            "expected integers [documents + 1]"
        )
    if has_values(cu_seqlens):
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != length or any(a > b for a, b in zip(ends, ends[1:], strict=False)):
            raise ValueError(f"cu_seqlens is {ends}; expected boundaries that rise from 0 to {length}")
    if attention_mask is not None and has_values(attention_mask) and not bool(attention_mask.all()):
        raise ValueError(
            "attention_mask has zeros and cu_seqlens is given: pass packed documents without padding, or rows"
        )


def _check_padding_mask(mask: Tensor) -> None:
    if mask.is_floating_point() and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask has values other than 0 and 1; expected 1 at real tokens and 0 at padding")
    on = (mask != 0).to(torch.int8)
    if on.shape[1] and bool((on.diff(dim=1).abs().sum(1) + on[:, 0] + on[:, -1] > 2).any()):
        raise ValueError(
            "attention_mask is not a padding mask: the real tokens of a row are interrupted by zeros; "
            "expected zeros on the left and right of one run of ones"
        )


def check_values(lr0, lr1, lr2, momentum, attention_mask: Tensor | None) -> None:
    """Rates at least 0 and momentum in [0, 1], none of them NaN; what stands at padding does not count."""
    given = {"lr0": lr0, "lr1": lr1, "lr2": lr2, "momentum": momentum}
    values = {name: x for name, x in given.items() if x is not None and has_values(x)}
    if attention_mask is not None and has_values(attention_mask):
        values = {name: x[attention_mask != 0] for name, x in values.items()}
    for name, x in values.items():
        if name != "momentum" and not bool((x >= 0).all()):
            raise ValueError(
                f"{name} has a value that is negative or NaN (least: {x.min().item()}); rates must be at least 0"
            )
        if name == "momentum" and not bool(((x >= 0) & (x <= 1)).all()):
            raise ValueError(
                f"momentum has a value outside [0, 1] or NaN (least {x.min().item()}, greatest {x.max().item()})"
            )


def check_state(state: TTTState, rows: int, chunk_size: int, tokens: dict[str, Tensor | None], rule: TTTRule) -> None:
    """Whether a state fits the rows, the chunk size and the tokens of a call."""
    if state.batch_size != rows:
        raise ValueError(f"state has {state.batch_size} rows; expected {rows}, one per batch row or document")
    if rule.weight_norm != "none" and any(getattr(state, f"norm{i}") is None for i in rule.updated):
        raise ValueError(
            f"state was made for another rule: it has no norms, which weight_norm={rule.weight_norm!r} needs"
        )
    if rule.weight_norm == "pre" and any(getattr(state, f"main{i}") is None for i in rule.updated):
        raise ValueError("state was made for another rule: it has no main weights, which weight_norm='pre' needs")
    if state.k is None:
        return
    for name, x in tokens.items():
        slots = getattr(state, name)
        if (x is None) != (slots is None):
            came, had = ("is None", "has") if x is None else ("is given", "has no")
            raise ValueError(
                f"{name} {came}, but the state's unfinished chunk {had} it: pass the same arguments in each call"
            )
        if x is not None and tuple(slots.shape[1:]) != (chunk_size, *x.shape[2:]):
            raise ValueError(
                f"state's unfinished chunk holds {name} of [{', '.join(map(str, slots.shape[1:]))}] per row; expected "
                f"[{chunk_size}, {', '.join(map(str, x.shape[2:]))}] for chunk_size={chunk_size}"
            )
