# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Data sets for training; the models do not need them."""

from .scenes import SceneDataset, collate_scenes, load_scenes, sample_views

__all__ = ["SceneDataset", "collate_scenes", "load_scenes", "sample_views"]
