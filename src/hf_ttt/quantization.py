# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Which linear layers of TTT models are to stay as they are where the others' weights are quantised."""

from __future__ import annotations

KEPT_LAYERS: list[str] = [
    *(f".*{name}" for name in ("lr_proj", "lr_fc", "momentum_proj.0", "ttt_scale_proj")),
    *("lm_head", "score", "head"),
    *("input_linear", "image_token_decoder.1"),
]
"""Patterns of layers that make rates, momentum and scales, of heads, and of the layers from and to pixels, for
`TorchAoConfig(modules_to_not_convert=...)` and `BitsAndBytesConfig(llm_int8_skip_modules=...)`. They are small, so that
there is little to save; with as many outputs as heads they do not fit kernels of 4 bits, and what they make is computed
in float32. The fast weights are no layers: no quantiser touches them.
"""
