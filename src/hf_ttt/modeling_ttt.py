# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What all models of this package share: the choice of the TTT evaluation, and saving."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from .ttt_interface import TTTInterface


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


class _KeepUnused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, *unused: Tensor) -> Tensor:
        ctx.save_for_backward(*unused)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def keep_unused(x: Tensor, *unused: Tensor) -> Tensor:
    """x as it is, with zero gradients for parameters that a variant keeps without using them."""
    return _KeepUnused.apply(x, *unused)


class TTTPreTrainedModel(PreTrainedModel):
    """Base of the models: its configuration has a `rule`, `ttt_implementation` and `ttt_backend`.

    Args:
        config: the configuration. The model is built for its `ttt_implementation` and `ttt_backend`.
        ttt_implementation, ttt_backend: override those of the configuration.
    """

    _ttt_functions: TTTInterface
    _ttt_auto_map: dict[str, str]

    def __init__(self, config, ttt_implementation: str | None = None, ttt_backend: str | None = None):
        config.check_buildable()
        super().__init__(config)
        self.set_ttt_implementation(ttt_implementation or config.ttt_implementation, ttt_backend or config.ttt_backend)

    def set_ttt_implementation(self, implementation: str, backend: str | None = None) -> None:
        """Choose how the TTT layers are evaluated, from the next call on.

        Args:
            implementation: "recurrent", "parallel" (the same numbers, where exact) or "auto".
            backend: "torch", "triton" or "auto"; None leaves it as it is.

        Raises:
            ValueError: for other names, and "parallel" where it is not exact.
            ImportError: for a backend that is not available.
        """
        backend = self.config.ttt_backend if backend is None else backend
        self._ttt_functions.resolve(self.config.rule, implementation, backend)
        self.config.ttt_implementation, self.config.ttt_backend = implementation, backend

    def get_ttt_implementation(self) -> str:
        """The evaluation that the next call takes: "recurrent" or "parallel"."""
        choice = self.config.ttt_implementation, self.config.ttt_backend
        return self._ttt_functions.resolve(self.config.rule, *choice)[0]

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers; the saved folder loads with any of the Auto classes and `trust_remote_code=True`."""
        if self.is_remote_code():
            self.config.auto_map = dict(self._ttt_auto_map)
        super().save_pretrained(save_directory, *args, **kwargs)
