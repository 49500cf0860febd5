# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Triton kernels of the Newton–Schulz iteration and of its gradient; `ttt_muon` says what they compute.

A program has one state, in its wide orientation X [M, N] with M ≤ N, and keeps it on chip through all iterations: one
read, one write. The backward runs the forward kernel again, which writes its iterates, and then goes through them in
reverse. Larger states take the batched products of `ttt_muon`.

With `muon_dtype="bfloat16"` what a product reads is rounded, and all else of the iteration reads the same rounded
values: in strong directions the terms of a X + P X nearly cancel, and so do the roundings that they share. Sums, the
start and the last iterate stay in float32, which is nearer to the exact value than the published code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .ttt_muon import EPS, muon_backward, muon_coefficients, muon_forward
from .ttt_recurrent import no_second_derivative
from .ttt_rule import TTTRule
from .ttt_triton import (
    TARGETS,
    AOTCase,
    block,
    check_available,
    dot,
    jit,
    kernel_context,
    load_tile,
    namespace,
    register_vmap,
    store_tile,
    tl,
)

_NAMESPACE = namespace(__file__)


# ------------------------------------------------------------------------------------------------------------- kernels


@jit
def _load_wide(base, o_m, o_n, M: tl.constexpr, N: tl.constexpr, TALL: tl.constexpr):
    """X [M, N] of a matrix [M, N], or TALL of [N, M], padded with zeros."""
    if TALL:
        x = tl.trans(load_tile(base, o_n, o_m, o_n < N, o_m < M, M))
    else:
        x = load_tile(base, o_m, o_n, o_m < M, o_n < N, N)
    return x


@jit
def _store_wide(base, x, o_m, o_n, M: tl.constexpr, N: tl.constexpr, TALL: tl.constexpr):
    """The counterpart of `_load_wide`."""
    if TALL:
        store_tile(base, tl.trans(x), o_n, o_m, o_n < N, o_m < M, M)
    else:
        store_tile(base, x, o_m, o_n, o_m < M, o_n < N, N)


@jit
def _triple(step, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr):
    """(a, b, c) of a step; the COUNT triples repeat."""
    a = COEFFICIENTS[0][0]
    b = COEFFICIENTS[0][1]
    c = COEFFICIENTS[0][2]
    for i in tl.static_range(1, COUNT):
        here = step % COUNT == i
        a = tl.where(here, COEFFICIENTS[i][0], a)
        b = tl.where(here, COEFFICIENTS[i][1], b)
        c = tl.where(here, COEFFICIENTS[i][2], c)
    return a, b, c


@jit
def _forward_kernel(
    g,
    out,
    M: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TALL: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    COUNT: tl.constexpr,
    STEPS: tl.constexpr,
    EPS: tl.constexpr,
    DTYPE: tl.constexpr,
    KEEP: tl.constexpr,
):
    """The result into out or, KEEP, X, A = X Xᵀ and P = b A + c A² of each step, side by side in the type of products:
    out [states, STEPS, M, N + 2 M]. Grid: states."""
    WIDTH: tl.constexpr = N + 2 * M
    i = tl.program_id(0).to(tl.int64)
    o_m, o_n = tl.arange(0, BM), tl.arange(0, BN)
    x = _load_wide(g + i * M * N, o_m, o_n, M, N, TALL)
    x = x / (tl.sqrt(tl.sum(x * x)) + EPS)
    for step in range(STEPS):
        a, b, c = _triple(step, COEFFICIENTS, COUNT)
        b_x = x.to(DTYPE)
        b_gram = dot(b_x, tl.trans(b_x)).to(DTYPE)
        b_poly = (b * b_gram.to(tl.float32) + c * dot(b_gram, b_gram)).to(DTYPE)
        if KEEP:
            place = out + (i * STEPS + step) * M * WIDTH
            store_tile(place, b_x, o_m, o_n, o_m < M, o_n < N, WIDTH)
            store_tile(place + N, b_gram, o_m, o_m, o_m < M, o_m < M, WIDTH)
            store_tile(place + N + M, b_poly, o_m, o_m, o_m < M, o_m < M, WIDTH)
        x = a * b_x.to(tl.float32) + dot(b_poly, b_x)
    if not KEEP:
        _store_wide(out + i * M * N, x, o_m, o_n, M, N, TALL)


@jit
def _backward_kernel(
    g,
    grad,
    kept,
    dg,
    M: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TALL: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    COUNT: tl.constexpr,
    STEPS: tl.constexpr,
    EPS: tl.constexpr,
):
    """The gradient of g from that of the result. Grid: states."""
    WIDTH: tl.constexpr = N + 2 * M
    i = tl.program_id(0).to(tl.int64)
    o_m, o_n = tl.arange(0, BM), tl.arange(0, BN)
    dx = _load_wide(grad + i * M * N, o_m, o_n, M, N, TALL)
    for done in range(STEPS):
        step = STEPS - 1 - done
        place = kept + (i * STEPS + step) * M * WIDTH
        b_x = load_tile(place, o_m, o_n, o_m < M, o_n < N, WIDTH)
        b_gram = load_tile(place + N, o_m, o_m, o_m < M, o_m < M, WIDTH)
        b_poly = load_tile(place + N + M, o_m, o_m, o_m < M, o_m < M, WIDTH)
        a, b, c = _triple(step, COEFFICIENTS, COUNT)
        b_dx = dx.to(b_x.dtype)
        b_d = (dot(b_dx, tl.trans(b_x)) + dot(b_x, tl.trans(b_dx))).to(b_x.dtype)
        b_s = (b * b_d.to(tl.float32) + c * (dot(b_d, b_gram) + dot(b_gram, b_d))).to(b_x.dtype)
        dx = a * b_dx.to(tl.float32) + dot(b_poly, b_dx) + dot(b_s, b_x)
    x = _load_wide(g + i * M * N, o_m, o_n, M, N, TALL)
    norm = tl.sqrt(tl.sum(x * x))
    # X = G/(n + ε): the norm's gradient at a matrix of zeros is zero
    inner = tl.sum(dx * x) / ((norm + EPS) * tl.where(norm > 0, norm, 1.0))
    _store_wide(dg + i * M * N, (dx - x * inner) / (norm + EPS), o_m, o_n, M, N, TALL)


# ------------------------------------------------------------------------------------------------------------ launches


def _fits(g: Tensor, rule: TTTRule, backward: bool) -> bool:
    """Whether a program holds a state of g [N, m, n]: what compiles for all targets without spilling registers."""
    widest = 128 if rule.muon_dtype == "bfloat16" and not backward else 64
    return rule.muon_steps > 0 and max(g.shape[-2:]) <= widest


def _warps(widest: int, dtype: str, amd: bool = torch.version.hip is not None) -> int:
    """By the greater of a state's blocks. Without matrix units a thread can have only a small part of it."""
    if amd or widest <= 32:
        return 4
    if dtype == "float32":
        return 16
    return 8 if widest > 64 else 4


def _constexprs(m: int, n: int, rule: TTTRule) -> dict[str, Any]:
    """What the kernels know of states [m, n] and of the rule."""
    low, high, triples = min(m, n), max(m, n), muon_coefficients(rule)
    repeated = tuple(dict.fromkeys(triples))  # five, or one
    sizes = {"M": low, "N": high, "BM": block(low), "BN": block(high), "TALL": m > n}
    return {**sizes, "COEFFICIENTS": repeated, "COUNT": len(repeated), "STEPS": len(triples), "EPS": EPS}


def _forward(g: Tensor, rule: TTTRule, keep: bool) -> Tensor:
    """The result [N, m, n] or, keep, what the backward needs of each step."""
    check_available(g.device)
    states, m, n = g.shape
    constexprs = _constexprs(m, n, rule)
    low, high, steps = (constexprs[name] for name in ("M", "N", "STEPS"))
    if keep:
        out = g.new_empty(states, steps, low, high + 2 * low, dtype=getattr(torch, rule.muon_dtype))
    else:
        out = g.new_empty(g.shape)
    if g.numel():
        options = {"num_warps": _warps(constexprs["BN"], rule.muon_dtype), "num_stages": 1}
        constexprs |= {"DTYPE": getattr(tl, rule.muon_dtype), "KEEP": keep}
        _forward_kernel[(states,)](g.contiguous(), out, **constexprs, **options)
    return out


def _backward(g: Tensor, grad: Tensor, rule: TTTRule) -> Tensor:
    """The gradient of g [N, m, n]."""
    kept, dg = _forward(g, rule, True), g.new_empty(g.shape)
    if g.numel():
        constexprs = _constexprs(g.shape[-2], g.shape[-1], rule)
        options = {"num_warps": _warps(constexprs["BN"], rule.muon_dtype), "num_stages": 1}
        _backward_kernel[(g.shape[0],)](g.contiguous(), grad.contiguous(), kept, dg, **constexprs, **options)
    return dg


# ----------------------------------------------------------------------------------------------------------- operators


def _rule(muon: str, steps: int, dtype: str) -> TTTRule:
    return TTTRule(muon=muon, muon_steps=steps, muon_dtype=dtype)  # type: ignore[arg-type]


@torch.library.custom_op(f"{_NAMESPACE}::muon", mutates_args=())
def _muon(g: Tensor, muon: str, steps: int, dtype: str) -> Tensor:
    """`muon_forward` of g [N, m, n] by the fields of a rule."""
    rule = _rule(muon, steps, dtype)
    with kernel_context(g):
        return _forward(g, rule, False) if _fits(g, rule, False) else muon_forward(g, rule).contiguous()


@torch.library.custom_op(f"{_NAMESPACE}::muon_backward", mutates_args=())
def _muon_backward(g: Tensor, grad: Tensor, muon: str, steps: int, dtype: str) -> Tensor:
    """The gradient of g [N, m, n] from that of the result."""
    rule = _rule(muon, steps, dtype)
    with kernel_context(g):
        return _backward(g, grad, rule) if _fits(g, rule, True) else muon_backward(g, grad, rule).contiguous()


@_muon.register_fake
def _(g, muon, steps, dtype):
    return g.new_empty(g.shape)


@_muon_backward.register_fake
def _(g, grad, muon, steps, dtype):
    return g.new_empty(g.shape)


def _save_inputs(ctx, inputs, output):
    g, *ctx.fields = inputs
    ctx.save_for_backward(g)


@no_second_derivative
def _muon_vjp(ctx, grad):
    return _muon_backward(*ctx.saved_tensors, grad, *ctx.fields), None, None, None


_muon.register_autograd(_muon_vjp, setup_context=_save_inputs)
register_vmap(_muon)
register_vmap(_muon_backward)


def _check(*tensors: Tensor) -> None:
    for x in tensors:
        if x.dtype != torch.float32:
            raise ValueError(f"kernels of Muon take float32 states, not {x.dtype}: use backend='torch' for this type")


def muon_forward_triton(g: Tensor, rule: TTTRule) -> Tensor:
    """`ttt_muon.muon_forward` by kernels where a state fits into a program, by batched products elsewhere.

    Args:
        g: updates [N, m, n], float32; differentiable once.
        rule: gives coefficients, steps and type; returns `g` itself where `rule.muon` is None.

    Returns:
        [N, m, n], float32.

    Raises:
        ValueError: for another type.
        ImportError: where kernels do not run.
    """
    if rule.muon is None:
        return g
    _check(g)
    return _muon(g, rule.muon, rule.muon_steps, rule.muon_dtype)


muon_triton = muon_forward_triton  # the name where autograd takes the gradient


def muon_backward_triton(g: Tensor, grad: Tensor, rule: TTTRule) -> Tensor:
    """`ttt_muon.muon_backward`: the gradient of `muon_forward_triton` at `g` [N, m, n] for the output gradient `grad`.

    Raises:
        ValueError, ImportError: as `muon_forward_triton`.
    """
    if rule.muon is None:
        return grad
    _check(g, grad)
    return _muon_backward(g, grad, rule.muon, rule.muon_steps, rule.muon_dtype)


def aot_cases() -> Iterator[AOTCase]:
    """The widest states in both types of products, a narrow and a tall one."""
    for m, n, muon, dtype, backward in (
        (128, 128, "lact", "bfloat16", False),
        (64, 64, "lact", "bfloat16", True),
        (64, 64, "lact", "float32", False),
        (64, 64, "lact", "float32", True),
        (17, 32, "nvs", "bfloat16", True),
        (48, 16, "nvs", "float32", False),
    ):
        constexprs = _constexprs(m, n, _rule(muon, 5, dtype))
        narrow = "*bf16" if dtype == "bfloat16" else "*fp32"
        for amd in (False, True):
            targets = tuple(target for target in TARGETS if target.startswith("gfx") == amd)
            launch = _warps(constexprs["BN"], dtype, amd), 1, targets
            types = {"g": "*fp32", "out": narrow if backward else "*fp32"}
            forward = {**constexprs, "DTYPE": getattr(tl, dtype), "KEEP": backward}
            yield AOTCase(_forward_kernel, types, forward, *launch)
            if backward:
                types = {"g": "*fp32", "grad": "*fp32", "kept": narrow, "dg": "*fp32"}
                yield AOTCase(_backward_kernel, types, constexprs, *launch)
