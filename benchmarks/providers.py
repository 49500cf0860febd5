# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What is compared: evaluations of the same op, all called like `ttt_attention`, and two yardsticks that are not it.

The evaluations that are not ours are written from the definition, for the rules of the paper's Table 2. As in the
published code, products take the type of the tokens, fast weights stay float32. B rows, H heads, n chunks of C tokens,
width D; tokens are [B, T, H, D] outside and [B, H, T, D] inside.
"""

from __future__ import annotations

import functools
import importlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ttt import TTTRule, ttt_attention
from hf_ttt.ttt_interface import CallSize
from hf_ttt.ttt_muon import muon_coefficients
from hf_ttt.ttt_ops import TTT_FUNCTIONS
from hf_ttt.ttt_triton import INTERPRETED

from .problems import Problem

COMPILER = "inductor"  # of torch.compile
SDPA_MOST_TOKENS = {"cuda": 65536, "cpu": 2048}  # of a row: its time grows with the square
COMPILED_MOST_CHUNKS = 64
PUBLISHED_MOST_CHUNKS = 16


# --------------------------------------------------------------------------------------------- parts of the definition


def features(x: Tensor, w0: Tensor | None, w2: Tensor | None) -> Tensor:
    """φ(x) = silu(w0 x) ⊙ (w2 x), or x where there is no w0."""
    return x if w0 is None else F.silu(apply(w0, x)) * apply(w2, x)


def apply(w: Tensor, x: Tensor) -> Tensor:
    """w x for each token, in the type of x."""
    return x @ w.to(x.dtype).mT


def orthogonalise(g: Tensor, rule: TTTRule) -> Tensor:
    """Newton–Schulz iteration on square matrices, in the rule's type, which is also that of the result."""
    if rule.muon is None:
        return g
    x = g.bfloat16() if rule.muon_dtype == "bfloat16" else g
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for a, b, c in muon_coefficients(rule):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x


def heads_first(*tensors: Tensor | None) -> list[Tensor | None]:
    """[B, T, H, D] → [B, H, T, D]."""
    return [None if x is None else x.transpose(1, 2) for x in tensors]


def times(x: Tensor, rate: Tensor | None) -> Tensor:
    """x with a rate for each token, multiplied in float32, in the type of x."""
    return x if rate is None else (rate * x).to(x.dtype)


def row_norms(w: Tensor) -> Tensor:
    return torch.linalg.vector_norm(w, dim=-1, keepdim=True)


# --------------------------------------------------------------------------------------------------------- evaluations


def plain_loop(q, k, v, w0, w1, w2, lr0, lr1, lr2, momentum, *, rule: TTTRule, chunk_size: int) -> Tensor:
    """Chunk after chunk, for autograd: read with the weights as they are, then update them."""
    q, k, v, lr0, lr1, lr2, momentum = heads_first(q, k, v, lr0, lr1, lr2, momentum)
    rates, weights = (lr0, lr1, lr2), [None if w is None else w.expand(q.shape[0], *w.shape) for w in (w0, w1, w2)]
    norms = {i: row_norms(weights[i]) for i in rule.updated}
    moments: dict[int, Tensor] = {}
    out, length = [], q.shape[2]
    for start in range(0, length, chunk_size):
        w0, w1, w2 = weights
        cut = lambda x, start=start: None if x is None else x[:, :, start : start + chunk_size]  # noqa: E731
        out.append(apply(w1, features(cut(q), w0, w2)))
        if start + chunk_size >= length:
            break
        steps = gradients(cut(k), cut(v), weights, [cut(rate) for rate in rates], rule)
        for i, step in steps.items():
            if momentum is not None and moments:
                step = step + cut(momentum).mean(2, keepdim=True) * moments[i]
            steps[i] = step
            moved = weights[i] + orthogonalise(step, rule)
            weights[i] = moved if rule.weight_norm == "none" else moved / (row_norms(moved) + 1e-5) * norms[i]
        moments = steps
    return torch.cat(out, 2).transpose(1, 2)


def gradients(k: Tensor, v: Tensor, weights, rates, rule: TTTRule) -> dict[int, Tensor]:
    """−∂loss/∂w of the dot-product loss for each weight that the rule updates, in float32."""
    w0, w1, w2 = weights
    if rule.updated == (1,):
        return {1: (v.mT @ times(features(k, w0, w2), rates[1])).to(w1.dtype)}
    z, u = apply(w0, k), apply(w2, k)
    s = torch.sigmoid(z)
    a, d = z * s, v @ w1.to(v.dtype)
    steps = {
        0: (d * u * s * (1 + z * (1 - s))).mT @ times(k, rates[0]),
        1: v.mT @ times(a * u, rates[1]),
        2: (d * a).mT @ times(k, rates[2]),
    }
    return {i: step.to(w1.dtype) for i, step in steps.items()}


def published_parallel(q, k, v, w0, w1, w2, lr0, lr1, lr2, momentum, *, rule: TTTRule, chunk_size: int) -> Tensor:
    """The parallel algorithm of the published code, written again: pad to whole chunks; all gradients G at once;
    momentum as P cumsum(G / P), with the running product P of the chunks' momenta (wrong when P is small);
    orthogonalise; an exclusive sum; read."""
    q, k, v, lr1, momentum = heads_first(q, k, v, lr1, momentum)
    length = q.shape[2]
    q, k, v, lr1, momentum = (whole_chunks(x, chunk_size) for x in (q, k, v, lr1, momentum))
    weights = [None if w is None else w[:, None] for w in (w0, w1, w2)]
    w0, w1, w2 = weights
    g = (v.mT @ times(features(k, w0, w2), lr1)).to(w1.dtype)
    if momentum is not None:
        p = momentum.mean(-2, keepdim=True).cumprod(2)
        g = p * (g / (p + 1e-8)).cumsum(2)
    update = orthogonalise(g, rule)
    states = w1 + (update.cumsum(2) - update)
    return apply(states, features(q, w0, w2)).flatten(2, 3)[:, :, :length].transpose(1, 2)


def products_only(q, k, v, w0, w1, w2, lr0, lr1, lr2, momentum, *, rule: TTTRule, chunk_size: int) -> Tensor:
    """The parallel form with a library's batched products for all that can be one, also the sums over chunks: momentum
    is a product with the matrix [n, n] of the momenta's products, the exclusive sum one with ones. Nothing is fused."""
    batch, length, heads, _ = q.shape
    q, k, v, lr1, momentum = (whole_chunks(x, chunk_size) for x in heads_first(q, k, v, lr1, momentum))
    n = q.shape[2]
    static = [None if w is None else w.to(q.dtype).mT.repeat(batch, 1, 1) for w in (w0, w2)]
    g = torch.bmm(v.flatten(0, 2).mT, times(products_features(k, *static), None if lr1 is None else lr1.flatten(0, 2)))
    dv, dh = g.shape[1:]
    g = g.to(w1.dtype).view(batch * heads, n, dv * dh)
    if momentum is not None:
        g = torch.bmm(decays(momentum.mean((3, 4)).flatten(0, 1)), g)
    update = products_orthogonalise(g.view(-1, dv, dh), rule).to(w1.dtype).view(batch * heads, n, dv * dh)
    earlier = torch.ones(n, n, dtype=w1.dtype, device=q.device).tril(-1).expand(batch * heads, n, n)
    states = torch.bmm(earlier, update).view(batch, heads, n, dv, dh) + w1[:, None]
    out = torch.bmm(products_features(q, *static), states.flatten(0, 2).to(q.dtype).mT)
    return out.view(batch, heads, -1, dv)[:, :, :length].transpose(1, 2)


def products_features(x: Tensor, w0: Tensor | None, w2: Tensor | None) -> Tensor:
    """φ of x [B, H, n, C, D] as [B·H·n, C, D], with transposed weights [B·H, D, D] and silu written out."""
    if w0 is None:
        return x.flatten(0, 2)
    rows = x.flatten(2, 3).flatten(0, 1)
    z, u = torch.bmm(rows, w0), torch.bmm(rows, w2)
    return (z * torch.sigmoid(z) * u).view(-1, x.shape[3], w0.shape[-1])


def products_orthogonalise(g: Tensor, rule: TTTRule) -> Tensor:
    """`orthogonalise` of [N, D, D] by `torch.bmm`."""
    if rule.muon is None:
        return g
    x = g.bfloat16() if rule.muon_dtype == "bfloat16" else g
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for a, b, c in muon_coefficients(rule):
        s = torch.bmm(x, x.mT)
        x = a * x + torch.bmm(b * s + c * torch.bmm(s, s), x)
    return x


def decays(m: Tensor) -> Tensor:
    """D_ij = m_{j+1} ⋯ m_i for j ≤ i, else 0: momenta [N, n] → [N, n, n]. No division, so that m may be 0."""
    n = m.shape[1]
    below = torch.ones(n, n, dtype=torch.bool, device=m.device).tril(-1)
    return torch.where(below, m[:, :, None], 1.0).cumprod(1).tril()


def whole_chunks(x: Tensor | None, chunk_size: int) -> Tensor | None:
    """[B, H, T, D] → [B, H, n, C, D], with zeros after the last token."""
    if x is None:
        return None
    return F.pad(x, (0, 0, 0, -x.shape[2] % chunk_size)).unflatten(2, (-1, chunk_size))


def compiled(function: Callable[..., Tensor], **inputs) -> Tensor:
    return _compile(function, COMPILER)(**inputs)


@functools.cache
def _compile(function: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def ours(implementation: str, backend: str, **inputs) -> Tensor:
    return ttt_attention(**inputs, implementation=implementation, backend=backend)


# ---------------------------------------------------------------------------------------------------------- yardsticks


def softmax_attention(q, k, v, *unused, **settings) -> Tensor:
    """Causal softmax attention."""
    return F.scaled_dot_product_attention(*heads_first(q, k, v), is_causal=True).transpose(1, 2)


def fla_linear_attention(q, k, v, *unused, **settings) -> Tensor:
    """flash-linear-attention's chunk kernel: linear attention that is causal by the token, without an initial state."""
    from fla.ops.linear_attn import chunk_linear_attn

    return chunk_linear_attn(q, k, v, scale=1.0, normalize=False)[0]


# ------------------------------------------------------------------------------------------------------------ registry


def _always(device: str) -> str | None:
    return None


def _any(problem: Problem) -> str | None:
    return None


@dataclass(frozen=True)
class Provider:
    """A function that is measured, with the arguments of `ttt_attention`."""

    text: str
    function: Callable[..., Tensor]
    missing: Callable[[str], str | None] = _always  # why it is not available on "cuda" or "cpu" here
    limit: Callable[[Problem], str | None] = _any  # why it does not evaluate a problem
    same: bool = True  # whether it computes the op, and so must pass the gate
    compiled: bool = False  # by torch.compile: left out on a CPU where it is not asked for, because it takes minutes

    def why_not(self, problem: Problem) -> str | None:
        """Why this problem cannot be measured here; None where it can."""
        return self.missing(problem.device) or self.limit(problem)


def _no_compiler(device: str) -> str | None:
    if device == "cpu" and COMPILER == "inductor" and not (shutil.which("c++") or shutil.which("g++")):
        return "torch.compile needs a C++ compiler"
    return None


def resolve(implementation: str, device: str) -> None:
    """Raises ImportError where an evaluation by Triton's kernels is not available."""
    rule = TTTRule(update="last", weight_norm="none")  # one that all evaluations take
    TTT_FUNCTIONS.resolve(rule, implementation, "triton", CallSize(torch.device(device), 64, 1))


def _no_triton(implementation: str, device: str) -> str | None:
    try:
        resolve(implementation, device)
    except ImportError as error:
        return str(error).split(";")[0].split(": ")[0]
    return "TRITON_INTERPRET is set: an interpreted kernel has no speed" if INTERPRETED else None


def _no_fla(device: str) -> str | None:
    if device != "cuda":
        return "its kernels are for GPUs"
    try:
        importlib.import_module("fla.ops.linear_attn")
    except ImportError as error:
        return f"{error}: pip install flash-linear-attention"
    return None


def _not_parallel(problem: Problem) -> str | None:
    return problem.rule.why_not_parallel


def _many_chunks(problem: Problem) -> str | None:
    if problem.updates >= COMPILED_MOST_CHUNKS:
        return f"over {COMPILED_MOST_CHUNKS} chunks compilation of the unrolled loop takes too long"
    return None


def _small_products(problem: Problem) -> str | None:
    if problem.config.use_momentum and problem.updates >= PUBLISHED_MOST_CHUNKS:
        return f"over {PUBLISHED_MOST_CHUNKS} chunks its division by the product of all momenta is wrong"
    return _not_parallel(problem)


def _quadratic(problem: Problem) -> str | None:
    most = SDPA_MOST_TOKENS[problem.device]
    return f"over {most} tokens a call takes seconds" if problem.size.tokens > most else None


def _ours(implementation: str, backend: str) -> Provider:
    return Provider(
        text=f"ttt_attention(implementation={implementation!r}, backend={backend!r})",
        function=functools.partial(ours, implementation, backend),
        missing=functools.partial(_no_triton, implementation) if backend == "triton" else _always,
        limit=_not_parallel if implementation == "parallel" else _any,
    )


PROVIDERS = {
    "recurrent/torch": _ours("recurrent", "torch"),
    "parallel/torch": _ours("parallel", "torch"),
    "recurrent/triton": _ours("recurrent", "triton"),
    "parallel/triton": _ours("parallel", "triton"),
    "eager": Provider("a plain loop over chunks, differentiated by autograd", plain_loop),
    "compiled": Provider(
        "that loop by torch.compile",
        functools.partial(compiled, plain_loop),
        _no_compiler,
        _many_chunks,
        compiled=True,
    ),
    "published-parallel": Provider(
        "the published parallel algorithm, implemented again, by torch.compile",
        functools.partial(compiled, published_parallel),
        _no_compiler,
        _small_products,
        compiled=True,
    ),
    "cublas": Provider(
        "the parallel form in batched matrix products, nothing fused", products_only, limit=_not_parallel
    ),
    "sdpa": Provider("yardstick: causal softmax attention", softmax_attention, limit=_quadratic, same=False),
    "fla": Provider(
        "yardstick: token-causal linear attention of flash-linear-attention",
        fla_linear_attention,
        _no_fla,
        same=False,
    ),
}
