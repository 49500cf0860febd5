# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The generation caches: window keys and values as in transformers, and a `TTTState` per layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from .ttt_layout import TTTLayout
from .ttt_ops import PENDING, ttt_update
from .ttt_rule import TTTRule
from .ttt_state import TTTState

# transformers 5.24 renamed the argument and output field `past_key_values` to `cache`
CACHE_KEY = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


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


class TTTStaticLayer(TTTLayer):
    """A layer of a `TTTStaticCache`: the last keys and values before the next token, in buffers that stay in place.

    Args:
        slots: how many are kept; the last token is in the last slot.
    """

    is_compileable = True
    is_sliding = True
    keys: Tensor
    values: Tensor

    def __init__(self, slots: int):
        super().__init__()
        self.slots, self.cumulative_length = slots, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.keys, self.values = (x.new_zeros(*x.shape[:2], self.slots, x.shape[3]) for x in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Kept and new keys and values [B, heads, slots + T, width]; the last of them are kept."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = key_states.shape[-2]
        keys, values = torch.cat([self.keys, key_states], 2), torch.cat([self.values, value_states], 2)
        self.keys.copy_(keys[:, :, length:])
        self.values.copy_(values[:, :, length:])
        self.cumulative_length += length
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots + query_length, 0

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return self.slots + 1


@dataclass
class _StepLayout(TTTLayout):
    """One new token in each row, where every unfinished chunk has room: tensors say in which slot, and no chunk
    updates. A token that is padding is written where the next token of its row will be.

    Attributes:
        slot: tokens in the unfinished chunk of each row [B].
        taken: whether the new token is real [B].
    """

    slot: Tensor | None = None
    taken: Tensor | None = None

    @property
    def within_chunk(self) -> bool:
        return True

    def full_rows(self) -> list[int]:
        return []

    def new_counts(self, device: torch.device) -> Tensor:
        return self.slot + self.taken

    def append(self, x: Tensor, slots: Tensor) -> Tensor:
        rows = torch.arange(self.rows, device=x.device)
        return slots.index_put_((rows, self.slot), x[:, 0].to(slots.dtype))


class _KeptTokens:
    """What transformers' mask functions ask a cache: as if the tokens that are kept were all there have been."""

    is_compileable = True
    is_sliding = (True,)

    def __init__(self, slots: int):
        self.slots = slots

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.slots

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.slots + query_length, 0


class TTTStaticCache(Cache):
    """Cache in which a decoding step is one graph of fixed shapes, for `torch.compile`. For inference only.

    A chunk of the TTT branch that is full updates before the next token, by `update_full_chunks`, outside of that
    graph. Calls that are not compiled do so by themselves, as do `generate` and what `model.get_compiled_call` returns.

    Args:
        config: of the model; `window_size`, `num_hidden_layers`, `lact_chunk_size` and `rule` are read.
        max_cache_len: the greatest number of tokens, where the attention sees all of them; with a window there is no
            limit, and this is not read.

    Raises:
        ValueError: without `max_cache_len`, for a model without window.
    """

    def __init__(self, config, max_cache_len: int | None = None):
        if config.window_size is None and (max_cache_len is None or max_cache_len < 1):
            raise ValueError(
                f"max_cache_len is {max_cache_len!r}, but the attention of this model (window_size=None) keeps every "
                "token: give the greatest number of tokens, at least 1"
            )
        self.limit = max_cache_len if config.window_size is None else None
        self.slots = (config.window_size or max_cache_len) - 1
        self.rule, self.chunk_size = config.rule, config.lact_chunk_size
        super().__init__(layers=[TTTStaticLayer(self.slots) for _ in range(config.num_hidden_layers)])
        self.geometry = _KeptTokens(self.slots)
        self._forget()

    def _forget(self) -> None:
        self.real: Tensor | None = None  # whether a kept token is one and no padding [B, slots]
        self.seen: Tensor | None = None  # real tokens so far [B]
        self.room = 0  # tokens that fit into every row's chunk; 0 also for what is not known

    def update_full_chunks(self) -> None:
        """Update the fast weights of the rows whose chunk is full, in place. Waits for the device where one may be."""
        if self.room or self.layers[0].ttt is None:
            return
        rows = (self.layers[0].ttt.count == self.chunk_size).nonzero()[:, 0]
        for layer in self.layers:
            state = layer.ttt.map(Tensor.contiguous)  # always the same strides, or a graph would be compiled again
            layer.ttt = _update_rows(state, rows, self.rule) if len(rows) else state
        self.room = self.chunk_size - int(self.layers[0].ttt.count.max())

    def begin_call(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, TTTLayout | None]:
        """Take in what a call's tokens are, before the layers take them.

        Args:
            x: [B, T, D], the new tokens' embeddings.
            mask: [B, T], zero at padding; None without.

        Returns:
            Which of the kept and the new tokens are real [B, slots + T]; the new ones' positions [B, T]; the layout of
            a decoding step, None for calls of any other kind.

        Raises:
            ValueError: where gradients are asked for, for more tokens than the limit, and in a compiled step before
                which a chunk was full.
        """
        batch, length = x.shape[:2]
        past = self.get_seq_length()
        if torch.is_grad_enabled():
            raise ValueError("a TTTStaticCache is overwritten in place: call the model under torch.no_grad()")
        if self.limit is not None and past + length > self.limit:
            raise ValueError(
                f"max_cache_len is {self.limit}, but the call ends with token {past + length}: make a longer cache"
            )
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self.update_full_chunks()
        new = torch.ones(batch, length, dtype=torch.bool, device=x.device) if mask is None else mask != 0
        if self.real is None:
            self.real = new.new_zeros(batch, self.slots)
            self.seen = torch.zeros(batch, dtype=torch.long, device=x.device)
        real = torch.cat([self.real, new], 1)
        positions = (self.seen[:, None] + new.cumsum(1) - 1).clamp(min=0)
        self.real.copy_(real[:, length:])
        self.seen.add_(new.sum(1))
        state = self.layers[0].ttt
        if length != 1 or state is None or state.count is None:
            self.room = 0
            return real, positions, None
        if compiling and self.room < 1:
            raise ValueError("a chunk is full: call update_full_chunks() of the cache before each compiled step")
        self.room -= 1
        layout = _StepLayout(batch, 1, self.chunk_size, batch, True, [], slot=state.count, taken=new[:, 0])
        return real, positions, layout

    def reset(self) -> None:
        super().reset()
        for layer in self.layers:
            layer.is_initialized = False
        self._forget()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_rows(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_rows(lambda x: x[indices])

    def _map_rows(self, function) -> None:
        if self.real is not None:
            self.real, self.seen = function(self.real), function(self.seen)


def static_cache(cache: Any) -> TTTStaticCache | None:
    """The cache if it is a static one, also of another copy of this code."""
    return cache if hasattr(cache, "update_full_chunks") else None


def _update_rows(state: TTTState, rows: Tensor, rule: TTTRule) -> TTTState:
    """The state in which the given rows, whose chunk is full, are updated by it. Nothing is written in place: weights
    that have no update yet may be views of parameters."""
    part = state.index_select(rows)
    tokens = (getattr(part, name) for name in PENDING)
    part = ttt_update(part, *tokens, rule=rule, implementation="recurrent", backend="torch")
    part.count = torch.zeros_like(part.count)
    whole = state.tensors()
    for name, new in part.tensors().items():
        if name not in PENDING:  # a momentum buffer that is not there yet is zero
            old = whole[name] if name in whole else new.new_zeros(state.batch_size, *new.shape[1:])
            whole[name] = old.index_copy(0, rows, new)
    return replace(state, **whole)


__all__ = ["TTTCache", "TTTStaticCache"]
