# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What weights say of a configuration, and what arguments of the published code say, brought together."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Fact:
    """What the weights say of a field of the configuration.

    Attributes:
        field: the field.
        value: its value.
        key: a tensor that shows it.
        same: whether another value means the same.
    """

    field: str
    value: Any
    key: str
    same: Callable[[Any, Any], bool] = operator.eq

    def contradiction(self, name: str, value: Any, state: Mapping[str, Tensor]) -> str | None:
        """What is wrong with an argument of another value; None if nothing is."""
        if self.same(value, self.value):
            return None
        return (
            f"{name}={value!r} contradicts {self.key} of shape {list(state[self.key].shape)}, which means "
            f"{self.field}={self.value!r}"
        )


def check_facts(
    facts: Iterable[Fact],
    given: Mapping[str, tuple[str, Any]],
    arguments: Mapping[str, Any],
    state: Mapping[str, Tensor],
) -> None:
    """Raise one `ValueError` that lists all arguments that contradict the weights, if there are any.

    Args:
        facts: what the weights say.
        given: field → name and value of the argument that sets it, as `own_names` gives it.
        arguments: the arguments as they came.
        state: the weights.
    """
    contradictions = []
    for fact in facts:
        name, value = given.get(fact.field, (None, None))
        if name is not None and not fact.same(value, fact.value):
            contradictions.append(fact.contradiction(name, arguments[name], state))
    if contradictions:
        raise ValueError("; ".join(contradictions))


def own_names(
    config_class: type,
    arguments: Mapping[str, Any],
    names: Mapping[str, str],
    *,
    also: Iterable[str] = (),
    ignored: Iterable[str] = (),
    absent: Iterable[str] = (),
    own_value: Callable[[str, str, Any], Any] = lambda name, field, value: value,
) -> dict[str, tuple[str, Any]]:
    """Field of the configuration → name and value of the argument that sets it.

    Args:
        config_class: the configuration.
        arguments: of the published constructor, or fields of the configuration.
        names: published name → field.
        also: what the configuration takes beside its fields.
        ignored: arguments without effect on what is computed.
        absent: arguments of parts that no published model has.
        own_value: name of an argument, field and value → the value as the configuration has it.

    Raises:
        ValueError: for names that are not known, absent parts, and two arguments that set one field.
    """
    known = {field.name for field in dataclasses.fields(config_class)} | set(also)
    given: dict[str, tuple[str, Any]] = {}
    for name, value in arguments.items():
        if name in ignored:
            continue
        if name in absent:
            if value:
                raise ValueError(f"{name}={value!r} is not there: no published model has it; leave it out")
            continue
        field = names.get(name, name)
        if field not in known:
            published = [alias for alias, own in names.items() if own in known]
            raise ValueError(
                f"{name}={value!r} is not known; expected arguments of the published code, such as "
                f"{', '.join(published)}, or fields of {config_class.__name__}"
            )
        if field in given:
            raise ValueError(f"{given[field][0]} and {name} both set {field}: give one of them")
        given[field] = name, own_value(name, field, value)
    return given


# ---- what the weights say ----


def size_in(state: Mapping[str, Tensor], pattern: str, axis: int, rank: int | None = None) -> tuple[int, str] | None:
    """The most common size of an axis among the tensors whose name matches, and a tensor that has it; None for none."""
    sizes = {
        key: tensor.shape[axis]
        for key, tensor in state.items()
        if re.fullmatch(pattern, key) and (tensor.dim() > axis if rank is None else tensor.dim() == rank)
    }
    if not sizes:
        return None
    size = Counter(sizes.values()).most_common(1)[0][0]
    return size, next(key for key, value in sizes.items() if value == size)


def count_in(state: Mapping[str, Tensor], pattern: str) -> tuple[int, str] | None:
    """One more than the greatest number that a pattern finds in the names, and the name; None if it finds none."""
    numbers = {int(match[1]): key for key in state if (match := re.match(pattern, key))}
    return (max(numbers) + 1, numbers[max(numbers)]) if numbers else None


def facts_in(state: Mapping[str, Tensor], sizes: Mapping[str, tuple[str, int, int | None]]) -> Iterator[Fact]:
    """A fact for each field → (pattern, axis, rank) that is found."""
    for field, (pattern, axis, rank) in sizes.items():
        if found := size_in(state, pattern, axis, rank):
            yield Fact(field, *found)


def ratio_of(widths: Sequence[int], hidden: Sequence[int]) -> int | float:
    """The ratio that gives each width its hidden width, rounded down."""
    ratio = max(h / w for h, w in zip(hidden, widths, strict=True))
    while any(int(w * ratio) < h for h, w in zip(hidden, widths, strict=True)):  # h / w was rounded down
        ratio = math.nextafter(ratio, math.inf)
    return int(ratio) if ratio == int(ratio) else ratio
