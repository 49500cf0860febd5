# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The generation cache: window keys and values as in transformers, and a `TTTState` per layer."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .ttt_state import TTTState


class TTTLayer(DynamicLayer):
    """Cache of a layer whose attention sees all tokens before: keys, values, and the state of its TTT branch.

    Attributes:
        ttt: the `TTTState` after all tokens so far, one row per batch row; None before the first.
    """

    ttt: TTTState | None = None
    is_croppable = False

    def reset(self) -> None:
        super().reset()
        self.ttt = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_state(lambda state: state.index_select(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_state(lambda state: state.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self._map_state(lambda state: state.index_select(rows))

    def offload(self) -> None:
        super().offload()
        self._map_state(lambda state: state.to("cpu"))

    def prefetch(self) -> None:
        super().prefetch()
        if self.is_initialized:
            self._map_state(lambda state: state.to(self.device))

    def crop(self, tokens_to_remove: int = 0, **kwargs: Any) -> None:
        if tokens_to_remove or kwargs:
            raise ValueError(
                "a TTT cache cannot be cropped: the tokens to remove have already changed the fast weights. "
                "Keep a copy (copy.deepcopy) of the cache from before them"
            )

    def _map_state(self, function) -> None:
        if self.ttt is not None:
            self.ttt = function(self.ttt)


class TTTSlidingWindowLayer(TTTLayer, DynamicSlidingWindowLayer):
    """The same for a layer whose attention sees a window."""

    keys: torch.Tensor
    values: torch.Tensor

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        states = super().update(key_states, value_states, *args, **kwargs)
        if self.sliding_window == 1:  # the base class keeps the last 1 - 1 = 0 tokens by a slice that keeps all
            self.keys, self.values = self.keys[:, :, :0], self.values[:, :, :0]
        if key_states.shape[-2] > 1:  # a slice would keep the whole prompt in memory
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return states


class TTTCache(DynamicCache):
    """Cache of a language model with TTT layers. Its size and the cost of a step do not grow once the window is full.

    Args:
        config: of the model; `window_size` and `num_hidden_layers` are read.
    """

    def __init__(self, config):
        Cache.__init__(self, layers=_layers(config))

    @classmethod
    def adopt(cls, cache: Any, config) -> Cache:
        """A cache that a model can write: the given one if it is a TTT cache, or an empty `DynamicCache`, which gets
        the layers of a TTT cache in place.

        Raises:
            ValueError: for any other cache.
        """
        layers = getattr(cache, "layers", [])
        if isinstance(cache, Cache) and layers and all(hasattr(layer, "ttt") for layer in layers):
            return cache
        if isinstance(cache, DynamicCache) and cache.get_seq_length() == 0 and not cache.offloading:
            cache.layers, cache.layer_class_to_replicate = _layers(config), None
            return cache
        raise ValueError(
            f"the cache is a {type(cache).__name__}, which cannot hold fast weights; pass "
            "hf_ttt.TTTCache(model.config), an empty DynamicCache, or none and use_cache=True"
        )


def _layers(config) -> list[TTTLayer | TTTSlidingWindowLayer]:
    if config.window_size is None:
        return [TTTLayer() for _ in range(config.num_hidden_layers)]
    return [TTTSlidingWindowLayer(sliding_window=config.window_size) for _ in range(config.num_hidden_layers)]


__all__ = ["TTTCache"]
