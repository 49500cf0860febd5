# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What the op is measured on: rules and sizes, inputs, and the work that a call cannot avoid."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_ttt import LaCTConfig, TTTRule

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MUON_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # with tokens of this type; bfloat16 is the published code's
DIRECTIONS = ("forward", "forward+backward")
Inputs = dict[str, Tensor | None]


class Size(NamedTuple):
    """Of q, k and v [batch, tokens, heads, width], with weights [heads, width, width]."""

    batch: int
    tokens: int
    heads: int
    width: int
    chunk: int


@dataclass(frozen=True)
class Problem:
    """A call of the op: a row of the paper's Table 2 at a size. Fast weights, rates and momentum are float32."""

    variant: str
    size: Size
    dtype: str  # of the tokens, "bf16" or "fp32"
    muon: str  # the type of the orthogonalisation, "bfloat16" or "float32"
    device: str  # "cuda" or "cpu"

    @property
    def config(self) -> LaCTConfig:
        return _config(self.variant, self.muon)

    @property
    def rule(self) -> TTTRule:
        return self.config.rule

    @property
    def updates(self) -> int:
        """Of a row: the last chunk updates nothing."""
        return max(0, -(-self.size.tokens // self.size.chunk) - 1)


@functools.cache
def _config(variant: str, muon: str) -> LaCTConfig:
    return LaCTConfig.variant(variant, ttt_muon_dtype=muon)


class Peaks(NamedTuple):
    """What a device can do at most: floating-point operations and bytes a second."""

    flop: float
    bytes: float


# Measured on the device: bf16 products of random matrices, and a copy.
KNOWN_PEAKS = {("NVIDIA H200", "bf16"): Peaks(790e12, 4.3e12)}


def make_inputs(problem: Problem, grad: bool = False, seed: int = 0) -> Inputs:
    """Random arguments of `ttt_attention`, None for those that the rule does not read.

    Queries and keys have unit length, rates are some 0.005 and the momentum of a chunk some 0.5.
    """
    batch, tokens, heads, width, _ = problem.size
    device, dtype, config, rule = problem.device, DTYPES[problem.dtype], problem.config, problem.rule
    generator = torch.Generator(device).manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device=device)  # noqa: E731
    uniform = lambda: torch.rand(batch, tokens, heads, 1, generator=generator, device=device)  # noqa: E731
    q, k, v = (normal(batch, tokens, heads, width) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    inputs: Inputs = dict(zip("qkv", (q.to(dtype), k.to(dtype), v.to(dtype)), strict=True))
    for i in range(3):
        read = i == 1 or rule.fast_weight == "swiglu"
        inputs[f"w{i}"] = normal(heads, width, width) / width**0.5 if read else None
    for i in range(3):
        inputs[f"lr{i}"] = uniform() * 0.01 if i in rule.updated and config.ttt_learnable_lr else None
    inputs["momentum"] = uniform() if config.use_momentum else None
    return {name: x if x is None else x.requires_grad_(grad) for name, x in inputs.items()}


def flop(problem: Problem, direction: str, recompute: bool = False) -> int:
    """Floating-point operations of the matrix products of a call.

    A product of a token costs 2 D². A token that is read takes two products for φ, none where φ is the identity, and
    one with the state. A token that updates takes those for φ and one outer product, or four where all weights are
    updated. Backward takes twice as many. The orthogonalisation of an update takes five steps of three products of
    D × D, and backward four a step.

    Args:
        recompute: whether backward also computes φ and the iterates of the orthogonalisation again, as kernels do that
            keep neither.
    """
    batch, tokens, heads, width, chunk = problem.size
    rule, backward = problem.rule, direction != "forward"
    again = backward and recompute
    updating = problem.updates * chunk
    features = 2 if rule.fast_weight == "swiglu" else 0
    update = features + (4 if len(rule.updated) == 3 else 1)
    products = (3 if backward else 1) * (update * updating + (features + 1) * tokens)
    products += features * (updating + tokens) if again else 0
    steps = problem.updates * len(rule.updated) * (rule.muon_steps if rule.muon else 0)
    squares = steps * (3 + 4 * backward + 3 * again)
    return 2 * batch * heads * (products * width**2 + squares * width**3)


def floor_seconds(problem: Problem, direction: str, peaks: Peaks) -> float | None:
    """The least time of a fused parallel evaluation; None for a rule that has no parallel evaluation.

    The greater one of the time of its products and the time to read q, k, v and write the output (backward: to read
    those and the output's gradient, and to write three gradients); plus that of the states between the kernels: the
    gradient in float32 and the state in the tokens' type, each written and read; backward, the state is read again, its
    gradient is written and read in float32 and that of the update in the tokens' type. Exponentials are not counted.
    """
    if not problem.rule.parallelizable:
        return None
    batch, tokens, heads, width, _ = problem.size
    item = DTYPES[problem.dtype].itemsize
    row, state = batch * heads * tokens * width * item, batch * heads * (problem.updates + 1) * width**2

    def seconds(operations: int, tensors: int, state_bytes: int) -> float:
        return max(operations / peaks.flop, tensors * row / peaks.bytes) + state * state_bytes / peaks.bytes

    forward = seconds(flop(problem, "forward"), 4, 8 + 2 * item)
    if direction == "forward":
        return forward
    both = flop(problem, "forward+backward", recompute=True)
    return forward + seconds(both - flop(problem, "forward"), 7, 8 + 3 * item)
