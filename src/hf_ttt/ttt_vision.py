# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The two inner models of a ViTTT block, each trained for one full-batch step on an image and then read.

Gated branch, per image and head, on N tokens of width D, with s = 1/3:

    f(k) = (k w1) ⊙ silu(k w2)      loss = −(s/N) Σ_n ⟨f(k_n), v_n⟩
    Δ = (s/N) Kᵀ [U1 | U2]          U1 = V ⊙ silu(K w2)    U2 = V ⊙ (K w1) ⊙ silu'(K w2)
    w' = w + c ⊙ Δ                  c = 1 / (1 + ‖Δ‖) per column
    o = (q w1') ⊙ silu(q w2')

Depthwise branch, per image and channel, on an h × w map: f is a 3 × 3 convolution w3, Δ its gradient's negative, and
c = 1 / (1 + ‖Δ‖) over the nine taps.

Since all queries read the same weights, the layer is linear attention without a mask (ViTTT; paper of the linear view,
theorem 5.1 with one step): o = q (S0 + Σ_n k_nᵀ v̂_n) with S0 = w and v̂ = c (s/N) u. The "recurrent" evaluation takes
the step and reads the new weights; the "parallel" one evaluates the linear attention, with whichever of (q Kᵀ) V̂ and
q (Kᵀ V̂) costs less.

Sources: ViTTT (LeapLabTHU/ViTTT, MIT) and its ablations (JunchenLiu77/ViTTT). The factor s/N is applied after a sum in
float32, without which float16 loses small updates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .ttt_interface import TTTInterface

SCALE = 1 / 3  # s of both branches: the head width of the depthwise one is 9
TAPS = 9


@dataclass(frozen=True, kw_only=True)
class VisionRule:
    """What the inner step of a ViTTT block does.

    Attributes:
        update: "all" (w1 and w2) or "last" (w1) of the gated branch.
        fast_weight: "swiglu"; "linear", the published ablation f(k) = k w1 whose values carry a factor k w1; or
            "linear_plain", linear attention without that factor.
        loss: "dot_product", or "mse" as published, whose prediction is the gate silu(k w2).
        direction: "descent" or "ascent" (gated branch only, as published).
        normalise: whether the gated branch divides each column of its step by 1 + its norm.
        inner_steps: steps on the same image.

    Raises:
        ValueError: for a value that is not known, or a loss that the fast weight does not have.
    """

    update: str = "all"
    fast_weight: str = "swiglu"
    loss: str = "dot_product"
    direction: str = "descent"
    normalise: bool = True
    inner_steps: int = 1

    def __post_init__(self):
        choices = {
            "update": ("all", "last"),
            "fast_weight": ("swiglu", "linear", "linear_plain"),
            "loss": ("dot_product", "mse"),
            "direction": ("descent", "ascent"),
            "normalise": (True, False),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(repr, allowed))}")
        if not isinstance(self.inner_steps, int) or isinstance(self.inner_steps, bool) or self.inner_steps < 1:
            raise ValueError(f"inner_steps={self.inner_steps!r} must be an integer of at least 1")
        if self.loss == "mse" and self.fast_weight != "swiglu":
            raise ValueError(
                f"loss='mse' is defined for fast_weight='swiglu' only, whose gate is the prediction, not for "
                f"{self.fast_weight!r}: set loss='dot_product' (ttt_loss_type in a model's config)"
            )

    @property
    def updates_gate(self) -> bool:
        """Whether the step changes w2."""
        return self.update == "all" and self.fast_weight == "swiglu"

    @property
    def sign(self) -> int:
        """+1 for descent, −1 for ascent."""
        return 1 if self.direction == "descent" else -1

    @property
    def parallelizable(self) -> bool:
        """Whether the layer is one linear attention."""
        return self.inner_steps == 1

    @property
    def why_not_parallel(self) -> str | None:
        """Why it is not, with the field to change; None where it is."""
        if self.parallelizable:
            return None
        return (
            f"inner_steps={self.inner_steps} makes later steps read the earlier ones' weights: "
            "set inner_steps=1 (ttt_inner_steps in a model's config)"
        )


class VisionTokens(NamedTuple):
    """Queries, keys and values of both branches: heads first [B, H, N, D], and as maps [B, h, w, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_map: Tensor
    k_map: Tensor
    v_map: Tensor


def _wide(x: Tensor) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def _full_precision(x: Tensor):
    """Context in which autocast does not narrow the products of float32 tensors."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def glu_values(k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, rule: VisionRule) -> tuple[Tensor, ...]:
    """U1 and U2, the values of the gated branch's linear attentions before they are scaled.

    Args:
        k, v: [B, H, N, D].
        w1, w2: [1 or B, H, D, D].
        rule: the inner step.

    Returns:
        [B, H, N, D] for w1 and, where it is updated, for w2.
    """
    if rule.fast_weight == "linear_plain":
        return (v,)
    w1, w2 = w1.to(k.dtype), w2.to(k.dtype)
    if rule.fast_weight == "linear":
        return (v * (k @ w1),)
    z2 = k @ w2
    if not rule.updates_gate:
        gate = F.silu(z2)
        return ((v if rule.loss == "dot_product" else v - gate) * gate,)
    s = torch.sigmoid(z2)
    gate = z2 * s
    error = v if rule.loss == "dot_product" else v - gate
    return error * gate, error * (k @ w1) * torch.addcmul(gate, s, 1 - gate)  # silu' = a + s (1 − a)


def _step(k: Tensor, u: Tensor, rule: VisionRule, lr: float = 1.0) -> Tensor:
    """± c ⊙ (s/N) Kᵀ U [B, H, D, D], in float32 (float64 for float64)."""
    wide = _wide(k)
    with _full_precision(k):  # transposed, so that the norm of a column is that of a contiguous row
        delta = (u.mT.to(wide) @ k.to(wide)) * (rule.sign * SCALE / k.shape[-2])
    norm = torch.linalg.vector_norm(delta, dim=-1, keepdim=True) if rule.normalise else 0
    return (delta * (lr / (1 + norm))).mT


def glu_step(k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, rule: VisionRule, lr: float = 1.0) -> tuple[Tensor, Tensor]:
    """w1' and w2' [B, H, D, D] of the gated branch after its inner steps, in float32 (float64 for float64).

    Args:
        k, v: [B, H, N, D].
        w1, w2: [1 or B, H, D, D].
        rule: the inner step.
        lr: inner learning rate, 1.0 in all published models.
    """
    shape = (k.shape[0], *w1.shape[1:])
    w1, w2 = (w.to(_wide(k)).expand(shape) for w in (w1, w2))
    for _ in range(rule.inner_steps):
        steps = [_step(k, u, rule, lr) for u in glu_values(k, v, w1, w2, rule)]
        w1 = w1 + steps[0]
        w2 = w2 + steps[1] if rule.updates_gate else w2
    return w1, w2


def glu_read(q: Tensor, w1: Tensor, w2: Tensor, rule: VisionRule) -> Tensor:
    """The gated branch at q [B, H, N, D] → [B, H, N, D]; w1, w2 [B, H, D, D]."""
    if rule.fast_weight != "swiglu":
        return q @ w1.to(q.dtype)
    return (q @ w1.to(q.dtype)) * F.silu(q @ w2.to(q.dtype))


def _taps(x: Tensor) -> list[Tensor]:
    """The nine shifts of a zero-padded map [B, h, w, D], row by row; views of [B, h, w, D]."""
    height, width = x.shape[1:3]
    padded = F.pad(x, (0, 0, 1, 1, 1, 1))
    return [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]


def conv_step(k: Tensor, v: Tensor, w: Tensor, rule: VisionRule, lr: float = 1.0) -> Tensor:
    """The kernels [B, 9, D] of the depthwise branch after its inner steps, in float32 (float64 for float64).

    The gradient reads no weight, so all steps are the same.

    Args:
        k, v: maps [B, h, w, D].
        w: kernels [D, 1, 3, 3].
        rule: the inner step, of which only `inner_steps` applies.
        lr: inner learning rate.
    """
    wide = _wide(k)
    delta = torch.stack([(tap * v).sum((1, 2), dtype=wide) for tap in _taps(k)], 1)
    delta = delta * (SCALE / (k.shape[1] * k.shape[2]))
    factor = lr * rule.inner_steps / (1 + torch.linalg.vector_norm(delta, dim=1, keepdim=True))
    return w.to(wide).flatten(1).mT + delta * factor


def conv_read(q: Tensor, w: Tensor) -> Tensor:
    """The depthwise branch at q [B, h, w, D] with kernels [B, 9, D] of its own for each image."""
    kernels = w.to(q.dtype)[:, :, None, None]
    taps = _taps(q)
    out = taps[0] * kernels[:, 0]
    for i in range(1, TAPS):
        out = torch.addcmul(out, taps[i], kernels[:, i])
    return out


def vision_recurrent(tokens: VisionTokens, w1: Tensor, w2: Tensor, w3: Tensor, *, rule: VisionRule):
    """Take the inner steps of both branches, then read the new weights.

    Args:
        tokens: of both branches.
        w1, w2: [1, H, D, D].
        w3: [D, 1, 3, 3].
        rule: the inner step.

    Returns:
        The gated branch's output [B, H, N, D] and the depthwise one's [B, h, w, D].
    """
    q, k, v, q_map, k_map, v_map = tokens
    return glu_read(q, *glu_step(k, v, w1, w2, rule), rule), conv_read(q_map, conv_step(k_map, v_map, w3, rule))


def _linear_attention(
    q: Tensor, k: Tensor, values: Sequence[Tensor], states: Sequence[Tensor], rule: VisionRule
) -> list[Tensor]:
    """q (S0 + Σ_n k_nᵀ v̂_n) with v̂ = ± c (s/N) u for several u, in whichever order costs less.

    Args:
        q, k: [..., N, D].
        values: u, each [..., N, M].
        states: S0, each [..., D, M].
        rule: whether there is a c, and the sign.
    """
    wide, (tokens, width) = _wide(k), k.shape[-2:]
    if tokens >= width:
        return [q @ (state.to(wide) + _step(k, u, rule)).to(q.dtype) for u, state in zip(values, states, strict=True)]
    scale, out = SCALE / tokens, []
    with _full_precision(k):
        q_wide, k = q.to(wide), k.to(wide)
        weights = torch.cat([q_wide, k], -2) @ k.mT  # ⟨q, k⟩ above ⟨k, k⟩
        for u, state in zip(values, states, strict=True):
            u = u.to(wide)
            sums = weights @ u * scale
            squares = (sums[..., tokens:, :] * u).sum(-2, keepdim=True) * scale  # ‖Δ‖² = Σ_nm ⟨k_n, k_m⟩ u_n u_m
            factor = rule.sign / (1 + _safe_sqrt(squares)) if rule.normalise else rule.sign
            out.append((q_wide @ state.to(wide) + sums[..., :tokens, :] * factor).to(q.dtype))
    return out


def _safe_sqrt(x: Tensor) -> Tensor:
    """√x with gradient 0 at x ≤ 0, where rounding may put it."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1).sqrt(), 0)


def vision_parallel(tokens: VisionTokens, w1: Tensor, w2: Tensor, w3: Tensor, *, rule: VisionRule):
    """Both branches as linear attention; arguments and results of `vision_recurrent`.

    Raises:
        ValueError: if the rule takes more than one step.
    """
    if not rule.parallelizable:
        raise ValueError(f"the parallel evaluation is not exact for this rule: {rule.why_not_parallel}")
    q, k, v, q_map, k_map, v_map = tokens
    out, *gates = _linear_attention(q, k, glu_values(k, v, w1, w2, rule), (w1, w2)[: 1 + rule.updates_gate], rule)
    if rule.fast_weight == "swiglu":
        out = out * F.silu(gates[0] if gates else q @ w2.to(q.dtype))
    return out, _conv_attention(q_map, k_map, v_map, w3, rule)


def _conv_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor, rule: VisionRule) -> Tensor:
    """The depthwise branch as linear attention between 3 × 3 patches [B, D, N, 9], one value each."""
    if q.shape[1] * q.shape[2] >= TAPS:  # Kᵀ V̂ by shifts: patches would take nine times the memory
        return conv_read(q, conv_step(k, v, w, rule))
    q_hat, k_hat = (torch.stack(_taps(x), -1).flatten(1, 2).transpose(1, 2) for x in (q, k))
    values = v.flatten(1, 2).mT[..., None]
    (out,) = _linear_attention(q_hat, k_hat, (values,), (w.flatten(1)[..., None],), VisionRule())
    return out[..., 0].mT.unflatten(1, q.shape[1:3])


def _vision_triton() -> Callable:
    """The kernels, whose file is imported where they are asked for."""
    from .ttt_triton_vision import vision_triton

    return vision_triton


VISION_FUNCTIONS = TTTInterface()
VISION_FUNCTIONS.register("recurrent", "torch", vision_recurrent)
VISION_FUNCTIONS.register("parallel", "torch", vision_parallel)
VISION_FUNCTIONS.register_lazy("recurrent", "triton", _vision_triton)
VISION_FUNCTIONS.register_lazy("parallel", "triton", _vision_triton)
