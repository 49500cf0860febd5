# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What TTT layers compute, seen as linear attention."""

from .attention import attention_map
from .linear_attention import LinearAttentionForm, TTTCall, linear_attention_form, record_calls

__all__ = ["LinearAttentionForm", "TTTCall", "attention_map", "linear_attention_form", "record_calls"]
