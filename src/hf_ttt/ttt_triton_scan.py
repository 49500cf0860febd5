# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The scans over chunks, elementwise over a state, as Triton kernels; Muon comes between them.

    scan_momentum    M_i = g_c + m_c M_{i−1}                for each inner step i of chunk c
    scan_updates     S_c = S_0 + factor · Σ_{i before c} U_i

They go from chunk to chunk, one block of elements to a program, so that nothing is divided and any momentum in [0, 1]
is exact. Everything is float32 and contiguous: states [B·H, n, Dv, Dh], `steps` inner steps of each of N chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from .ttt_recurrent import no_second_derivative
from .ttt_triton import AOTCase, contiguous, jit, kernel_context, namespace, register_vmap, tl, triton

_NAMESPACE = namespace(__file__)
BLOCK = 1024  # elements of a state per program


# ------------------------------------------------------------------------------------------------------------- kernels


@jit
def _place(SIZE, BLOCK: tl.constexpr):
    """A program's head, block of its states, and the elements of that, with their mask."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(SIZE, BLOCK)
    elements = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    return pid // blocks, pid % blocks, elements, elements < SIZE


@jit
def _momentum_kernel(g, m, buffer, moments, N, STEPS, SIZE, HAS_BUFFER: tl.constexpr, BLOCK: tl.constexpr):
    """moments [B·H, N·STEPS, SIZE] from g [B·H, N, SIZE], m [B·H, N] and the momentum before, buffer [B·H, SIZE]."""
    bh, _, o, mask = _place(SIZE, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_BUFFER:
        total = tl.load(buffer + bh * SIZE + o, mask=mask, other=0.0)
    for c in range(N):
        row = bh * N + c
        step = tl.load(g + row * SIZE + o, mask=mask, other=0.0)
        b_m = tl.load(m + row)
        for i in range(STEPS):
            total = total * b_m + step
            tl.store(moments + (row * STEPS + i) * SIZE + o, total, mask=mask)


@jit
def _momentum_backward_kernel(
    dmoments, moments, m, buffer, dg, dm, dbuffer, N, STEPS, SIZE, HAS_BUFFER: tl.constexpr, BLOCK: tl.constexpr
):
    """Backward of `_momentum_kernel`; dm [B·H, N, blocks] has this block's part."""
    bh, part, o, mask = _place(SIZE, BLOCK)
    first = bh * N * STEPS
    carry = tl.zeros([BLOCK], dtype=tl.float32)
    for back in range(N):
        row = bh * N + (N - 1 - back)
        b_m = tl.load(m + row)
        step = tl.zeros([BLOCK], dtype=tl.float32)
        products = tl.zeros([BLOCK], dtype=tl.float32)
        for again in range(STEPS):
            i = row * STEPS + (STEPS - 1 - again)
            carry += tl.load(dmoments + i * SIZE + o, mask=mask, other=0.0)
            before = tl.load(moments + (i - 1) * SIZE + o, mask=mask & (i > first), other=0.0)
            if HAS_BUFFER:
                before += tl.load(buffer + bh * SIZE + o, mask=mask & (i == first), other=0.0)
            step += carry
            products += carry * before
            carry = carry * b_m
        tl.store(dg + row * SIZE + o, step, mask=mask)
        tl.store(dm + row * tl.cdiv(SIZE, BLOCK) + part, tl.sum(products, 0))
    if HAS_BUFFER:
        tl.store(dbuffer + bh * SIZE + o, carry, mask=mask)


@jit
def _updates_kernel(update, base, states, N, STEPS, SIZE, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    """states [B·H, N + 1, SIZE]: `base` [B·H, SIZE], and after each chunk the sum with its STEPS updates."""
    bh, _, o, mask = _place(SIZE, BLOCK)
    total = tl.load(base + bh * SIZE + o, mask=mask, other=0.0)
    tl.store(states + bh * (N + 1) * SIZE + o, total, mask=mask)
    for c in range(N):
        for i in range(STEPS):
            total += FACTOR * tl.load(update + ((bh * N + c) * STEPS + i) * SIZE + o, mask=mask, other=0.0)
        tl.store(states + (bh * (N + 1) + c + 1) * SIZE + o, total, mask=mask)


@jit
def _updates_backward_kernel(dstates, dupdate, dbase, N, STEPS, SIZE, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Backward of `_updates_kernel`."""
    bh, _, o, mask = _place(SIZE, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for back in range(N):
        c = N - 1 - back
        total += tl.load(dstates + (bh * (N + 1) + c + 1) * SIZE + o, mask=mask, other=0.0)
        for i in range(STEPS):
            tl.store(dupdate + ((bh * N + c) * STEPS + i) * SIZE + o, FACTOR * total, mask=mask)
    total += tl.load(dstates + bh * (N + 1) * SIZE + o, mask=mask, other=0.0)
    tl.store(dbase + bh * SIZE + o, total, mask=mask)


def _launch(kernel, tensors: tuple[Tensor | None, ...], rows: int, updates: int, steps: int, size: int, **constexprs):
    """A kernel for the states of all heads, each of `size` elements."""
    programs = rows * triton.cdiv(size, BLOCK)
    if programs:
        kernel[(programs,)](*tensors, updates, steps, size, **constexprs, BLOCK=BLOCK)


# ----------------------------------------------------------------------------------------------------------- operators


@torch.library.custom_op(f"{_NAMESPACE}::scan_momentum", mutates_args=())
def scan_momentum(g: Tensor, m: Tensor, buffer: Tensor | None, steps: int) -> Tensor:
    """M after each step [B·H, N·steps, Dv, Dh]: g [B·H, N, Dv, Dh], m [B·H, N], buffer [B·H, Dv, Dh] or None for 0."""
    with kernel_context(g):
        g, m, buffer = contiguous(g, m, buffer)
        rows, updates, *state = g.shape
        moments = g.new_empty(rows, updates * steps, *state)
        tensors = (g, m, buffer, moments)
        _launch(_momentum_kernel, tensors, rows, updates, steps, prod(state), HAS_BUFFER=buffer is not None)
        return moments


@scan_momentum.register_fake
def _(g, m, buffer, steps):
    return g.new_empty(g.shape[0], g.shape[1] * steps, *g.shape[2:])


@torch.library.custom_op(f"{_NAMESPACE}::scan_momentum_backward", mutates_args=())
def _momentum_backward(
    dmoments: Tensor, moments: Tensor, m: Tensor, buffer: Tensor | None, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of g, m and buffer, which is empty for None."""
    with kernel_context(moments):
        dmoments, moments, m, buffer = contiguous(dmoments, moments, m, buffer)
        (rows, updates), state = m.shape, moments.shape[2:]
        dg = moments.new_empty(rows, updates, *state)
        dm = m.new_empty(rows, updates, triton.cdiv(prod(state), BLOCK))
        dbuffer = moments.new_empty(0) if buffer is None else torch.empty_like(buffer)
        tensors = (dmoments, moments, m, buffer, dg, dm, dbuffer)
        _launch(_momentum_backward_kernel, tensors, rows, updates, steps, prod(state), HAS_BUFFER=buffer is not None)
        return dg, dm.sum(-1), dbuffer


@_momentum_backward.register_fake
def _(dmoments, moments, m, buffer, steps):
    dbuffer = moments.new_empty(0) if buffer is None else buffer.new_empty(buffer.shape)
    return moments.new_empty(*m.shape, *moments.shape[2:]), m.new_empty(m.shape), dbuffer


def _momentum_setup(ctx, inputs, output):
    _, m, buffer, ctx.steps = inputs
    ctx.save_for_backward(output, m, buffer)


@no_second_derivative
def _momentum_autograd(ctx, dmoments):
    moments, m, buffer = ctx.saved_tensors
    dg, dm, dbuffer = _momentum_backward(dmoments, moments, m, buffer, ctx.steps)
    return dg, dm, None if buffer is None else dbuffer, None


@torch.library.custom_op(f"{_NAMESPACE}::scan_updates", mutates_args=())
def scan_updates(update: Tensor, base: Tensor, steps: int, factor: int) -> Tensor:
    """S before each chunk and after the last [B·H, N + 1, Dv, Dh]: U [B·H, N·steps, Dv, Dh], base [B·H, Dv, Dh]."""
    with kernel_context(base):
        update, base = contiguous(update, base)
        (rows, *state), updates = base.shape, update.shape[1] // steps
        states = base.new_empty(rows, updates + 1, *state)
        _launch(_updates_kernel, (update, base, states), rows, updates, steps, prod(state), FACTOR=factor)
        return states


@scan_updates.register_fake
def _(update, base, steps, factor):
    return base.new_empty(base.shape[0], update.shape[1] // steps + 1, *base.shape[1:])


@torch.library.custom_op(f"{_NAMESPACE}::scan_updates_backward", mutates_args=())
def _updates_backward(dstates: Tensor, steps: int, factor: int) -> tuple[Tensor, Tensor]:
    """Gradients of update and base."""
    with kernel_context(dstates):
        rows, states, *state = dstates.shape
        dupdate, dbase = dstates.new_empty(rows, (states - 1) * steps, *state), dstates.new_empty(rows, *state)
        tensors = (dstates.contiguous(), dupdate, dbase)
        _launch(_updates_backward_kernel, tensors, rows, states - 1, steps, prod(state), FACTOR=factor)
        return dupdate, dbase


@_updates_backward.register_fake
def _(dstates, steps, factor):
    rows, states, *state = dstates.shape
    return dstates.new_empty(rows, (states - 1) * steps, *state), dstates.new_empty(rows, *state)


def _updates_setup(ctx, inputs, output):
    _, _, ctx.steps, ctx.factor = inputs


@no_second_derivative
def _updates_autograd(ctx, dstates):
    return *_updates_backward(dstates, ctx.steps, ctx.factor), None, None


scan_momentum.register_autograd(_momentum_autograd, setup_context=_momentum_setup)
scan_updates.register_autograd(_updates_autograd, setup_context=_updates_setup)
for _operator in (scan_momentum, _momentum_backward, scan_updates, _updates_backward):
    register_vmap(_operator)


def aot_cases() -> Iterator[AOTCase]:
    """Every kernel, those of the momentum with a buffer."""
    sizes = {"N": "i32", "STEPS": "i32", "SIZE": "i32"}
    tensors = {
        _momentum_kernel: ("g", "m", "buffer", "moments"),
        _momentum_backward_kernel: ("dmoments", "moments", "m", "buffer", "dg", "dm", "dbuffer"),
        _updates_kernel: ("update", "base", "states"),
        _updates_backward_kernel: ("dstates", "dupdate", "dbase"),
    }
    for kernel, names in tensors.items():
        option = {"HAS_BUFFER": True} if "m" in names else {"FACTOR": 1}
        yield AOTCase(kernel, dict.fromkeys(names, "*fp32") | sizes, option | {"BLOCK": BLOCK}, 4, 3)
