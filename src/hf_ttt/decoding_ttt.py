# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What `generate` asks a language model with TTT layers: its caches, and a compiled step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cache_ttt import CACHE_KEY, TTTCache, TTTStaticCache, static_cache


class TTTDecodingMixin:
    """Goes before `PreTrainedModel` and `GenerationMixin`, some of whose methods it replaces."""

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict[str, Any], generation_mode, batch_size: int, max_cache_length: int
    ):
        asked = generation_config.cache_implementation
        if asked not in (None, "dynamic", "static"):
            raise ValueError(
                f"cache_implementation={asked!r} cannot hold fast weights; leave it None or set it to 'dynamic' or "
                "'static'"
            )
        if model_kwargs.get(CACHE_KEY) is None and generation_config.use_cache is not False:
            config = self.config  # type: ignore[attr-defined]
            model_kwargs[CACHE_KEY] = (
                TTTStaticCache(config, max_cache_length) if asked == "static" else TTTCache(config)
            )
            return None
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any):
        """Not possible: raises a ValueError that says why."""
        raise ValueError(
            "continuous batching keeps keys and values in pages, which cannot hold fast weights: call generate with a "
            "padded batch instead"
        )

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """The padding mask as it is, for `generate`: the model makes the attention's mask by itself."""
        return attention_mask

    def get_compiled_call(self, compile_config) -> Callable:
        """The forward call, in which steps of one token with a `TTTStaticCache` are one compiled graph, as `generate`
        uses it. Full chunks update before the step and outside of the graph; other calls are not compiled.

        Args:
            compile_config: `transformers.CompileConfig`, or None for the default one.
        """
        compiled = super().get_compiled_call(compile_config)  # type: ignore[misc]

        def call(input_ids: Tensor | None = None, **inputs: Any):
            static, mask = static_cache(inputs.get(CACHE_KEY)), inputs.get("attention_mask")
            if static is None or static.get_seq_length() == 0 or input_ids is None or input_ids.shape[1] != 1:
                return self(input_ids=input_ids, **inputs)  # type: ignore[operator]
            static.update_full_chunks()
            inputs["attention_mask"] = torch.ones_like(input_ids) if mask is None else mask[:, -1:].contiguous()
            return compiled(input_ids=input_ids, **inputs)

        return call
