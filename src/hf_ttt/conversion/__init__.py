# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of the published code as models of this package."""

from .checkpoint import WEIGHTS, read_state_dict
from .official import ARCHITECTURES, from_official

__all__ = ["ARCHITECTURES", "WEIGHTS", "from_official", "read_state_dict"]
