# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The example that draws attention maps, end to end on a photograph."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

EXAMPLE = Path(__file__).parents[1] / "examples" / "explain_vittt_image.py"


def run(folder, *arguments):
    return subprocess.run(
        [sys.executable, EXAMPLE, *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=600
    )


def test_draws_over_the_sample_photograph(tmp_path):
    """Without a model it trains one; the picture has colour beside the photograph's own."""
    done = run(tmp_path, "--steps", 2, "--side", 64, "--points", 0.5, 0.5)
    assert done.returncode == 0, done.stderr
    assert "8 × 12 patches, heads [0, 1, 2]" in done.stdout
    picture = np.array(Image.open(tmp_path / "attention_map.png").convert("RGB")).astype(int)
    overlay = picture[:, picture.shape[1] // 4 :]
    assert (np.abs(overlay[..., 0] - overlay[..., 2]) > 40).mean() > 0.05  # red or blue over grey


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--points", "0.5"], "--points must be pairs of numbers"),
        (["--points", "0.5", "1.5"], "--points must be pairs of numbers"),
    ],
    ids=["odd", "outside"],
)
def test_points_that_are_none(tmp_path, arguments, message):
    """An error before anything is trained."""
    done = run(tmp_path, *arguments)
    assert done.returncode == 2 and message in done.stderr
    assert not list(tmp_path.iterdir())
