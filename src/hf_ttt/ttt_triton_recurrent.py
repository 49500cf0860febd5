# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The recurrent evaluation by Triton kernels: the walk of `ttt_recurrent` with another `Inner`.

A chunk is computed by the operators of `ttt_triton_step`, with products between them in the backward; a linear fast
network has nothing between its products and stays with `ttt_inner`. Here are the kernels for the weights between two
chunks: an update is added and the rows are scaled in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .ttt_inner import Net, Tokens, accumulate, scaled, scaled_backward
from .ttt_inner import gradient_backward as torch_gradient_backward
from .ttt_inner import gradient_forward as torch_gradient_forward
from .ttt_inner import read_backward as torch_read_backward
from .ttt_inner import read_forward as torch_read_forward
from .ttt_recurrent import FastWeights, Inner, ttt_recurrent
from .ttt_rule import TTTRule
from .ttt_state import EPS
from .ttt_triton import (
    AOTCase,
    block,
    check_available,
    check_types,
    contiguous,
    jit,
    kernel_context,
    load_tile,
    namespace,
    register_vmap,
    store_tile,
    tl,
    triton,
)
from .ttt_triton_muon import muon_backward_triton, muon_forward_triton
from .ttt_triton_step import flat, gate_backward, read, step, step_backward

_NAMESPACE = namespace(__file__)
TILE = 4096  # elements of a program


# ------------------------------------------------------------------------------------------------------------- kernels


@jit
def _normalise_kernel(
    x, update, norm, raw, work, R,
    WIDTH: tl.constexpr, SIGN: tl.constexpr, EPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """work = rows of x scaled to `norm`; with a SIGN other than 0, those of raw = x ± update, which is written too."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.arange(0, BN)
    inside, m_n = rows < R, columns < WIDTH
    b_x = load_tile(x, rows, columns, inside, m_n, WIDTH)
    if SIGN != 0:
        b_x += SIGN * load_tile(update, rows, columns, inside, m_n, WIDTH)
        store_tile(raw, b_x, rows, columns, inside, m_n, WIDTH)
    factor = tl.load(norm + rows, mask=inside, other=0.0) / (tl.sqrt(tl.sum(b_x * b_x, 1)) + EPS)
    store_tile(work, b_x * factor[:, None], rows, columns, inside, m_n, WIDTH)


@jit
def _normalise_backward_kernel(
    raw, norm, grad, draw, dnorm, R,
    WIDTH: tl.constexpr, EPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of `_normalise_kernel` with respect to raw and norm."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.arange(0, BN)
    inside, m_n = rows < R, columns < WIDTH
    b_raw = load_tile(raw, rows, columns, inside, m_n, WIDTH)
    b_grad = load_tile(grad, rows, columns, inside, m_n, WIDTH)
    length = tl.sqrt(tl.sum(b_raw * b_raw, 1))
    inner = tl.sum(b_grad * b_raw, 1) / (length + EPS)
    factor = tl.load(norm + rows, mask=inside, other=0.0) / (length + EPS)
    along = inner * factor / tl.where(length > 0, length, 1.0)
    store_tile(draw, b_grad * factor[:, None] - b_raw * along[:, None], rows, columns, inside, m_n, WIDTH)
    tl.store(dnorm + rows, inner, mask=inside)


# ----------------------------------------------------------------------------------------------------------- operators


def _blocks(width: int) -> dict[str, int]:
    return {"BM": max(1, TILE // block(width)), "BN": block(width)}


def _launch(kernel, like: Tensor, *args, **constexprs) -> None:
    """A program for some rows of a weight [N, m, n]; the last argument is their number."""
    rows, width = like.shape[0] * like.shape[1], like.shape[2]
    blocks = _blocks(width)
    if rows and width:
        programs = (triton.cdiv(rows, blocks["BM"]),)
        kernel[programs](*args, rows, WIDTH=width, EPS=EPS, **constexprs, **blocks, num_warps=4, num_stages=1)


@torch.library.custom_op(f"{_NAMESPACE}::normalise", mutates_args=())
def normalise(raw: Tensor, norm: Tensor) -> Tensor:
    """Rows of raw [N, m, n] scaled to norm [N, m, 1], float32."""
    with kernel_context(raw):
        raw, norm = contiguous(raw, norm)
        work = torch.empty_like(raw)
        _launch(_normalise_kernel, raw, raw, None, norm, None, work, SIGN=0)
        return work


@normalise.register_fake
def _(raw, norm):
    return raw.new_empty(raw.shape)


@torch.library.custom_op(f"{_NAMESPACE}::normalise_backward", mutates_args=())
def normalise_backward(raw: Tensor, norm: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `normalise` with respect to raw and norm."""
    with kernel_context(raw):
        raw, norm, grad = contiguous(raw, norm, grad)
        draw, dnorm = torch.empty_like(raw), torch.empty_like(norm)
        _launch(_normalise_backward_kernel, raw, raw, norm, grad, draw, dnorm)
        return draw, dnorm


@normalise_backward.register_fake
def _(raw, norm, grad):
    return raw.new_empty(raw.shape), norm.new_empty(norm.shape)


@torch.library.custom_op(f"{_NAMESPACE}::advance", mutates_args=())
def advance_normalised(base: Tensor, update: Tensor, sign: int, norm: Tensor) -> tuple[Tensor, Tensor]:
    """raw = base ± update [N, m, n], and its rows scaled to norm [N, m, 1], float32."""
    with kernel_context(base):
        base, update, norm = contiguous(base, update, norm)
        raw, work = torch.empty_like(base), torch.empty_like(base)
        _launch(_normalise_kernel, base, base, update, norm, raw, work, SIGN=sign)
        return raw, work


@advance_normalised.register_fake
def _(base, update, sign, norm):
    return base.new_empty(base.shape), base.new_empty(base.shape)


for operator in (normalise, normalise_backward, advance_normalised):
    register_vmap(operator)


# --------------------------------------------------------------------------- a chunk, with the contracts of `ttt_inner`


def advance(base: Tensor, update: Tensor, sign: int, norm: Tensor | None) -> tuple[Tensor, Tensor]:
    if norm is not None:
        return advance_normalised(base, update, sign, norm)
    raw = torch.add(base, update, alpha=sign)
    return raw, raw


def read_forward(q: Tensor, net: Net, out: Tensor) -> None:
    if net.w02 is None:
        torch_read_forward(q, net, out)
    else:
        out.copy_(read(q, *net))


def read_backward(q: Tensor, grad: Tensor, net: Net, dq: Tensor, dnet: Net, add: bool) -> None:
    if net.w02 is None:
        return torch_read_backward(q, grad, net, dq, dnet, add)
    x, y = flat(q), flat(grad)
    h, dzu, _ = gate_backward(torch.bmm(x, net.w02.mT), torch.bmm(y, net.w1), None)
    accumulate(dnet.w1, y.mT, h)
    accumulate(dnet.w02, dzu.mT, x)
    _put(dq, torch.bmm(dzu, net.w02), add)


def gradient_forward(tokens: Tokens, net: Net, rule: TTTRule, dtype: torch.dtype) -> dict[int, Tensor]:
    if net.w02 is None:
        return torch_gradient_forward(tokens, net, rule, dtype)
    g = step(tokens.k, _error(tokens, net, rule), *tokens[2:], *net, 0 in rule.updated)
    return {i: g[i] for i in rule.updated}


def gradient_backward(
    tokens: Tokens, grad: dict[int, Tensor], net: Net, rule: TTTRule, dtokens: Tokens, dnet: Net, add: bool
) -> None:
    if net.w02 is None:
        return torch_gradient_backward(tokens, grad, net, rule, dtokens, dnet, add)
    grad = {i: g.to(tokens.k.dtype) for i, g in grad.items()}
    e = _error(tokens, net, rule)
    backward = _backward_of_all if 0 in rule.updated else _backward_of_last
    parts = backward(flat(tokens.k), flat(e), tokens, grad, net, dnet)
    for total, x in zip(dtokens, parts, strict=True):
        _put(total, x, add)
    if rule.loss == "mse":  # e = v − f(k)
        read_backward(tokens.k, -parts.v.view(e.shape), net, dtokens.k, dnet, True)


def _error(tokens: Tokens, net: Net, rule: TTTRule) -> Tensor:
    """E = −∂loss/∂f [B, H, C, Dv]."""
    return tokens.v if rule.loss == "dot_product" else tokens.v - read(tokens.k, *net)


def _put(total: Tensor | None, x: Tensor | None, add: bool) -> None:
    """Add x [N, C, D] to a gradient [B, H, C, D] or write it there."""
    if total is not None and x is not None:
        x = x.view(total.shape)
        total.add_(x) if add else total.copy_(x)


def _backward_of_last(x: Tensor, e: Tensor, tokens: Tokens, grad: dict[int, Tensor], net: Net, dnet: Net) -> Tokens:
    """Gradients of k, e and the rate through g1; x, e [N, C, ·]."""
    h, dzu, dlr1 = gate_backward(torch.bmm(x, net.w02.mT), torch.bmm(e, grad[1]), tokens.lr1)
    accumulate(dnet.w02, dzu.mT, x)
    return Tokens(torch.bmm(dzu, net.w02), torch.bmm(h, grad[1].mT), None, dlr1, None)


def _backward_of_all(x: Tensor, e: Tensor, tokens: Tokens, grad: dict[int, Tensor], net: Net, dnet: Net) -> Tokens:
    """Gradients of k, e and the rates through g0, g1, g2. A rate of each token is the kernel's, one of each channel
    goes with k."""
    width = net.w02.shape[1]
    wide = [None if lr is None or lr.shape[-1] == 1 else flat(lr) for lr in (tokens.lr0, tokens.lr2)]
    lr0, lr2 = (lr if w is None else None for lr, w in zip((tokens.lr0, tokens.lr2), wide, strict=True))
    w, side = torch.cat([net.w02, grad[0], grad[2]], 1), torch.cat([net.w1, grad[1]], 2)
    if all(lr is None for lr in wide):
        products = torch.bmm(x, w.mT)
    else:
        parts = [torch.bmm(scaled(x, lr), g.mT) for lr, g in zip(wide, (grad[0], grad[2]), strict=True)]
        products = torch.cat([torch.bmm(x, net.w02.mT), *parts], 2)
    dx, de, dlr0, dlr1, dlr2 = step_backward(products, torch.bmm(e, side), lr0, tokens.lr1, lr2)
    accumulate(dnet.w02, dx[..., :width].mT, x)
    accumulate(dnet.w1, e.mT, de[..., : width // 2])
    de = torch.bmm(de, side.mT)
    if all(lr is None for lr in wide):
        return Tokens(torch.bmm(dx, w), de, dlr0, dlr1, dlr2)
    dk = torch.bmm(dx[..., :width], net.w02)
    drates = [dlr0, dlr2]
    for i, (part, g) in enumerate(zip(dx[..., width:].chunk(2, -1), (grad[0], grad[2]), strict=True)):
        through, drate = scaled_backward(torch.bmm(part, g), x, wide[i], -1)
        drates[i] = drates[i] if drate is None else drate
        dk += through
    return Tokens(dk, de, drates[0], dlr1, drates[1])


# ---------------------------------------------------------------------------------------------------------- evaluation

TRITON = Inner(
    read_forward,
    read_backward,
    gradient_forward,
    gradient_backward,
    muon_forward_triton,
    muon_backward_triton,
    advance,
    normalise,
    normalise_backward,
)


def ttt_recurrent_triton(
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
    """`ttt_recurrent` by kernels: the same arguments and results, for tokens in float32, bfloat16 or float16.

    Raises:
        ValueError: if a tensor is float64.
        ImportError: where kernels do not run on the tensors' device.
    """
    tokens = q, k, v, lr0, lr1, lr2, momentum
    check_types(*tokens, *fast.tensors())
    if not q.is_meta:
        check_available(q.device)
    return ttt_recurrent(
        *tokens, fast, rule=rule, chunk_size=chunk_size, updates=updates, return_state=return_state, inner=TRITON
    )


def aot_cases() -> Iterator[AOTCase]:
    """Rows of 48 and 512 channels: with an update, alone, and the backward."""
    for width in (48, 512):
        sizes = {"WIDTH": width, "EPS": EPS, **_blocks(width)}
        floats = lambda *names: dict.fromkeys(names, "*fp32") | {"R": "i32"}  # noqa: E731
        types = floats("x", "update", "norm", "raw", "work")
        yield AOTCase(_normalise_kernel, types, sizes | {"SIGN": 1}, 4, 1)
        types = floats("raw", "norm", "grad", "draw", "dnorm")
        yield AOTCase(_normalise_backward_kernel, types, sizes, 4, 1)
    alone = sizes | {"SIGN": 0, "update": None, "raw": None}
    yield AOTCase(_normalise_kernel, floats("x", "norm", "work"), alone, 4, 1)
