# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""A scene as LaCT-NVS holds it: the fast weights of its TTT layers after the input views."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .configuration_lact_nvs import LaCTNVSConfig
from .ttt_state import TTTState

try:  # comes with transformers; guarded, since remote code is refused for naming other packages than torch
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
except ImportError:  # pragma: no cover
    SafetensorError, safe_open, save_file = OSError, None, None  # type: ignore[misc, assignment]


def to_states(weights: Sequence[Tensor]) -> list[TTTState]:
    """States of TTT layers out of their w0, w1, w2, one after another."""
    return [TTTState(*weights[i : i + 3]) for i in range(0, len(weights), 3)]


@dataclass
class LaCTNVSScene:
    """A scene, as the model holds it: fast weights, whose size does not depend on the number of input views.

    Attributes:
        states: of each TTT layer, in order, with w0, w1, w2 for each scene of the batch.
        world_to_scene: [B, 4, 4] and scene_scale: [B], which take cameras of the world into the scene's coordinates;
            None where the input views' cameras were given in them.
    """

    states: list[TTTState]
    world_to_scene: Tensor | None = None
    scene_scale: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Number of scenes."""
        return self.states[0].batch_size

    def map(self, function: Callable[[Tensor], Tensor]) -> LaCTNVSScene:
        """A new scene with `function` applied to each tensor."""
        others = (None if t is None else function(t) for t in (self.world_to_scene, self.scene_scale))
        return LaCTNVSScene([state.map(function) for state in self.states], *others)

    def detach(self) -> LaCTNVSScene:
        """The same numbers, cut from the graph."""
        return self.map(Tensor.detach)

    def to(self, device: torch.device | str) -> LaCTNVSScene:
        """The scene on another device."""
        return self.map(lambda t: t.to(device))

    def index_select(self, rows: Tensor) -> LaCTNVSScene:
        """Some scenes of a batch, in the given order."""
        return self.map(lambda t: t.index_select(0, rows.to(t.device)))

    def check_fits(self, config: LaCTNVSConfig) -> None:
        """Raise a `ValueError` that says why a model of this configuration cannot render the scene, if so."""
        entries = [entry for entry in config.block_config if entry["type"] == "ttt"] * config.num_hidden_layers
        if len(self.states) != len(entries):
            raise ValueError(
                f"scene has {len(self.states)} states where this model has {len(entries)} TTT layers: render it with "
                "the model that reconstructed it"
            )
        for i, (state, entry) in enumerate(zip(self.states, entries, strict=True)):
            head = entry["head_dim"] or config.hidden_size
            want = [config.hidden_size // head, head, int(head * entry["inter_multi"])]
            if list(state.w1.shape[1:]) != want:
                raise ValueError(
                    f"scene has w1 of shape {list(state.w1.shape[1:])} in state {i} where this model has {want}: "
                    "render it with the model that reconstructed it"
                )

    def _named(self) -> dict[str, Tensor]:
        named = {f"{i}.{name}": t for i, state in enumerate(self.states) for name, t in state.tensors().items()}
        others = {"world_to_scene": self.world_to_scene, "scene_scale": self.scene_scale}
        return named | {name: t for name, t in others.items() if t is not None}

    def save(self, path: str | os.PathLike) -> None:
        """Write the scene to a safetensors file."""
        contiguous = torch.contiguous_format
        tensors = {name: t.detach().clone(memory_format=contiguous) for name, t in self._named().items()}
        save_file(tensors, os.fspath(path))

    @classmethod
    def load(cls, path: str | os.PathLike, device: str = "cpu") -> LaCTNVSScene:
        """Read a scene that `save` wrote.

        Raises:
            FileNotFoundError: for a file that is not there.
            ValueError: for one that holds something else.
        """
        try:
            with safe_open(os.fspath(path), framework="pt", device=device) as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"path={os.fspath(path)!r} is no saved scene: {error}") from error
        others = [tensors.pop(name, None) for name in ("world_to_scene", "scene_scale")]
        names = [f"{i}.w{j}" for i in range(len(tensors) // 3) for j in range(3)]
        if not names or tensors.keys() != set(names):
            raise ValueError(
                f"path={os.fspath(path)!r} has tensors {', '.join(tensors) or 'none'}: it is no saved scene"
            )
        return cls(to_states([tensors[name] for name in names]), *others)
