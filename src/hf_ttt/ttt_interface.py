# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The registry that chooses between evaluations of a TTT layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


class Rule(Protocol):
    """What the registry asks of a rule."""

    @property
    def parallelizable(self) -> bool:
        """Whether the parallel evaluation is exact."""

    @property
    def why_not_parallel(self) -> str | None:
        """Why it is not, with the field to change."""


class CallSize(NamedTuple):
    """What a call computes on, as far as it decides which backend is the right one."""

    device: torch.device
    width: int  # greatest of the head's widths
    tokens: int  # over all rows and heads
    dtype: torch.dtype = torch.float32  # the widest of its tensors


class TTTInterface:
    """Registry of evaluations, `(implementation, backend) → function`, like transformers' attention interface.

    All functions of a registry take the same arguments and give the same numbers.
    """

    def __init__(self):
        self._functions: dict[tuple[str, str], Callable] = {}
        self._faster: dict[tuple[str, str], dict[int, int]] = {}

    @property
    def backends(self) -> tuple[str, ...]:
        """What `backend` may be: the known ones, and those that were registered."""
        return tuple(dict.fromkeys(("auto", "torch", "triton", *(backend for _, backend in self._functions))))

    def register(self, implementation: str, backend: str, function: Callable) -> None:
        """Add an evaluation, or replace one. A backend of another name is only taken where it is asked for."""
        self._functions[implementation, backend] = function

    def register_lazy(
        self,
        implementation: str,
        backend: str,
        load: Callable[[], Callable],
        faster: dict[int, int] | None = None,
    ) -> None:
        """Add an evaluation whose file is imported by the first call that takes it.

        Args:
            load: imports and returns the function; its import statement is in its body, where `save_pretrained` finds
                the file that it names.
            faster: where it was measured, on a GPU, to be faster than "torch": {greatest head width: least tokens}.
                With None "auto" never takes it.
        """

        def function(*args, **kwargs):
            return load()(*args, **kwargs)

        self.register(implementation, backend, function)
        self._faster[implementation, backend] = faster or {}

    def resolve(
        self, rule: Rule, implementation: str = "auto", backend: str = "auto", size: CallSize | None = None
    ) -> tuple[str, str]:
        """The names of the evaluation that a call takes.

        backend="auto" is "triton" on a GPU at sizes where that was measured to be faster (so far nowhere: no
        registration has measurements), and "torch" everywhere else.

        Args:
            size: of the call; None where it is not known yet, then "auto" is "torch".

        Raises:
            ValueError: for a name that is not known, or "parallel" where it is not exact.
            ImportError: for a backend that is not available, on the device of `size` or on any.
        """
        return self.explain(rule, implementation, backend, size)[:2]

    def get(
        self, rule: Rule, implementation: str = "auto", backend: str = "auto", size: CallSize | None = None
    ) -> Callable:
        """The function for these names and this size; what was taken and why is logged once, at info level."""
        implementation, backend, why = self.explain(rule, implementation, backend, size)
        if not torch.compiler.is_compiling():
            logger.info_once(f"TTT layers are evaluated by {implementation!r} on backend {backend!r}: {why}")
        return self._functions[implementation, backend]

    def explain(
        self, rule: Rule, implementation: str = "auto", backend: str = "auto", size: CallSize | None = None
    ) -> tuple[str, str, str]:
        """As `resolve`, and why in a sentence."""
        _check_choice("implementation", implementation, ("auto", "recurrent", "parallel"))
        _check_choice("backend", backend, self.backends)
        if implementation == "parallel" and not rule.parallelizable:
            raise ValueError(f"implementation='parallel' is not exact for this rule: {rule.why_not_parallel}")
        why = f"implementation={implementation!r} and backend={backend!r} were asked for"
        if implementation == "auto":
            implementation = "parallel" if rule.parallelizable else "recurrent"
            why += ", and 'parallel' is " + (
                "exact for this rule" if rule.parallelizable else f"not: {rule.why_not_parallel}"
            )
        if backend == "auto":
            backend, reason = self._fastest_backend(implementation, size)
            return implementation, backend, f"{why}; {reason}"
        if (implementation, backend) not in self._functions:
            raise ImportError(
                f"backend={backend!r} has no {implementation!r} evaluation in this installation; "
                "use backend='torch' (ttt_backend='torch' in a model)"
            )
        if backend == "triton":
            from .ttt_triton import check_available

            check_available(None if size is None else size.device)
        return implementation, backend, why

    def _fastest_backend(self, implementation: str, size: CallSize | None) -> tuple[str, str]:
        """What backend="auto" takes, and why."""
        if size is None or size.device.type != "cuda":
            return "torch", "kernels are for GPUs"
        if size.dtype == torch.float64:
            return "torch", "kernels accumulate in float32"
        faster = self._faster.get((implementation, "triton"), {})
        if not any(size.width <= width and size.tokens >= tokens for width, tokens in faster.items()):
            return "torch", "no measurement says that a kernel is faster at this size"
        from .ttt_triton import is_available

        if is_available(size.device):
            return "triton", "measured to be faster at this size"
        if not torch.compiler.is_compiling():
            logger.warning_once(
                "Triton is not installed, so TTT layers take a slower evaluation on this GPU: `pip install triton`, or "
                "choose backend='torch' (ttt_backend='torch' in a model)"
            )
        return "torch", "Triton is not installed"
