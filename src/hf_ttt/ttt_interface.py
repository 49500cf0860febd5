# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The registry that chooses between evaluations of a TTT layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


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


class TTTInterface:
    """Registry of evaluations, `(implementation, backend) → function`, like transformers' attention interface.

    All functions of a registry take the same arguments and give the same numbers.
    """

    def __init__(self):
        self._functions: dict[tuple[str, str], Callable] = {}

    def register(self, implementation: str, backend: str, function: Callable) -> None:
        """Add an evaluation, or replace one."""
        self._functions[implementation, backend] = function

    def resolve(self, rule: Rule, implementation: str = "auto", backend: str = "auto") -> tuple[str, str]:
        """The names of the evaluation that a call takes.

        Raises:
            ValueError: for a name that is not known, or "parallel" where it is not exact.
            ImportError: for a backend that is not available.
        """
        _check_choice("implementation", implementation, ("auto", "recurrent", "parallel"))
        _check_choice("backend", backend, ("auto", "torch", "triton"))
        if implementation == "parallel" and not rule.parallelizable:
            raise ValueError(f"implementation='parallel' is not exact for this rule: {rule.why_not_parallel}")
        if implementation == "auto":
            implementation = "parallel" if rule.parallelizable else "recurrent"
        backend = "torch" if backend == "auto" else backend
        if (implementation, backend) not in self._functions:
            raise ImportError(
                f"backend={backend!r} has no {implementation!r} evaluation in this installation; "
                "use backend='torch' (ttt_backend='torch' in a model)"
            )
        return implementation, backend

    def get(self, rule: Rule, implementation: str = "auto", backend: str = "auto") -> Callable:
        """The function for these names."""
        return self._functions[self.resolve(rule, implementation, backend)]
