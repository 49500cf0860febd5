# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The state of a TTT layer between two calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .ttt_rule import TTTRule

try:  # comes with transformers; guarded, since remote code is refused for naming a package other than these two
    from safetensors import safe_open
    from safetensors.torch import save_file
except ImportError:  # pragma: no cover
    safe_open = save_file = None  # type: ignore[misc]

EPS = 1e-5  # of the weight normalisation, as published


def row_norm(w: Tensor) -> Tensor:
    """Euclidean norm of the rows (the last dimension) [..., 1]; its gradient at a row of zeros is zero."""
    return torch.linalg.vector_norm(w, dim=-1, keepdim=True)


def state_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Type of everything that accumulates: float64 if any tensor is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


@dataclass
class TTTState:
    """Fast weights and the unfinished chunk of a batch of rows (a row is a sequence, or a packed document).

    Every tensor has the row first, so rows can be selected, repeated and reordered. A field is None where the rule has
    no such part. With C the chunk size and D the widths of the layer:

    Attributes:
        w0, w1, w2: the weights that read now [B, H, Dh, Dk], [B, H, Dv, Dh], [B, H, Dh, Dk].
        main0, main1, main2: with weight_norm="pre", the unnormalised weights that accumulate.
        norm0, norm1, norm2: with weight_norm "post" or "pre", row norms of the initial weights [B, H, D, 1].
        momentum0, momentum1, momentum2: the momentum buffers, None before the first update with momentum.
        k, v, lr0, lr1, lr2, momentum: the tokens of the unfinished chunk [B, C, H, D]; None when there are none.
        count: how many of those C slots are in use, per row [B].
    """

    w0: Tensor | None
    w1: Tensor
    w2: Tensor | None
    main0: Tensor | None = None
    main1: Tensor | None = None
    main2: Tensor | None = None
    norm0: Tensor | None = None
    norm1: Tensor | None = None
    norm2: Tensor | None = None
    momentum0: Tensor | None = None
    momentum1: Tensor | None = None
    momentum2: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    lr0: Tensor | None = None
    lr1: Tensor | None = None
    lr2: Tensor | None = None
    momentum: Tensor | None = None
    count: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.w1.shape[0]

    @property
    def weights(self) -> tuple[Tensor | None, Tensor, Tensor | None]:
        return self.w0, self.w1, self.w2

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        return {f.name: t for f in fields(self) if (t := getattr(self, f.name)) is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> TTTState:
        """A new state with `function` applied to each tensor."""
        return replace(self, **{name: function(tensor) for name, tensor in self.tensors().items()})

    def detach(self) -> TTTState:
        """The same numbers, cut from the graph."""
        return self.map(Tensor.detach)

    def clone(self) -> TTTState:
        """A copy that shares no memory with this state."""
        return self.map(Tensor.clone)

    def to(self, device: torch.device | str) -> TTTState:
        """The state on another device. Types stay: fast weights are float32 (float64 for a float64 layer)."""
        return self.map(lambda t: t.to(device))

    def index_select(self, rows: Tensor) -> TTTState:
        """The given rows, in the given order; a row may be taken more than once."""
        return self.map(lambda t: t.index_select(0, rows.to(t.device)))

    def repeat_interleave(self, repeats: int) -> TTTState:
        """Each row `repeats` times."""
        return self.map(lambda t: t.repeat_interleave(repeats, 0))

    def save(self, path: str | os.PathLike) -> None:
        """Write the state to a safetensors file."""
        contiguous = torch.contiguous_format
        tensors = {name: t.detach().clone(memory_format=contiguous) for name, t in self.tensors().items()}
        save_file(tensors, os.fspath(path))

    @classmethod
    def load(cls, path: str | os.PathLike, device: str = "cpu") -> TTTState:
        """Read a state that `save` wrote."""
        with safe_open(os.fspath(path), framework="pt", device=device) as file:
            return cls(**{"w0": None, "w2": None, **{name: file.get_tensor(name) for name in file.keys()}})  # noqa: SIM118


def ttt_init(w0: Tensor | None, w1: Tensor, w2: Tensor | None, rule: TTTRule, batch_size: int) -> TTTState:
    """The state before the first token.

    Args:
        w0, w2: initial fast weights [H, Dh, Dk] or, one per row, [B, H, Dh, Dk]; unused by a "linear" rule.
        w1: initial fast weights [H, Dv, Dh] or [B, H, Dv, Dh].
        rule: the inner loop.
        batch_size: number of rows B.

    Returns:
        A `TTTState` in float32 (float64 if a weight is), differentiable with respect to the weights.

    Raises:
        ValueError: if a weight has neither 3 nor 4 dimensions, or 4 with another number of rows.
    """
    dtype = state_dtype(w0, w1, w2)
    weights: list[Tensor | None] = []
    for name, w in (("w0", w0), ("w1", w1), ("w2", w2)):
        if w is None:
            if name == "w1" or rule.fast_weight == "swiglu":
                raise ValueError(f"{name} is None, but a {rule.fast_weight!r} fast network needs it")
        elif w.dim() not in (3, 4) or (w.dim() == 4 and w.shape[0] != batch_size):
            raise ValueError(
                f"{name} has shape {tuple(w.shape)}; expected [heads, out, in] or [{batch_size}, heads, out, in]"
            )
        else:
            w = w.to(dtype)
            w = w.expand(batch_size, *w.shape) if w.dim() == 3 else w
        weights.append(w)
    state = TTTState(*weights)
    for i in rule.updated if rule.weight_norm != "none" else ():
        norm = row_norm(weights[i])
        setattr(state, f"norm{i}", norm.detach() if rule.detach_norms else norm)
        if rule.weight_norm == "pre":
            setattr(state, f"main{i}", weights[i].view_as(weights[i]))  # another tensor, or compile refuses it
    return state
