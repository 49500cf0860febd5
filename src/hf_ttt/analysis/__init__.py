# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What TTT layers compute, seen as linear attention."""

from .attention import attention_map

__all__ = ["attention_map"]
