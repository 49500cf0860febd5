# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Models on the Hub: their cards, and pushing a folder in one commit."""

from .cards import is_generated, model_card, save_card
from .push import check_folder, push
from .trainer import TrainerCardMixin
from .training import Run, Setting, run_in, run_of

__all__ = [
    "Run",
    "Setting",
    "TrainerCardMixin",
    "check_folder",
    "is_generated",
    "model_card",
    "push",
    "run_in",
    "run_of",
    "save_card",
]
