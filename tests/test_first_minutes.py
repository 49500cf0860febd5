# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The README's first ten minutes, followed to the letter: each family is trained, fine-tuned, pushed, loaded again from
the Hub and evaluated."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import USER, fake_hub

for package in ("accelerate", "datasets", "evaluate", "peft", "pybullet", "sklearn"):
    pytest.importorskip(package, reason="the section asks for the extras all and nvs")

ROOT = Path(__file__).parents[1]
TITLE = "## Your first ten minutes"
# what makes hf_ttt look as if it were not installed
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "hf_ttt" or name.startswith("hf_ttt."):
            raise ImportError(name)
sys.meta_path.insert(0, Blocker())
"""


def section() -> list[tuple[str, str]]:
    """Language and text of the section's code blocks, with a name of the tests in place of "your-name"."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.split(TITLE, 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^```(\w+)\n(.*?)^```$", text.replace("your-name", USER), re.M | re.S)


@pytest.mark.slow
def test_first_ten_minutes(tmp_path):
    """The commands run one after the other in a folder with the clone's files; the last evaluations have numbers."""
    for name in ("examples", "README.md", "CONTRIBUTING.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    blocks = section()
    assert [language for language, _ in blocks] == ["bash", "bash", "python"]
    with fake_hub() as hub:
        environment = {**os.environ, **hub.client_environment(), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        environment["HF_HOME"] = str(tmp_path / "home")
        environment = {k: v for k, v in environment.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
        for language, code in blocks:
            command = ["bash", "-euo", "pipefail", "-c", code]
            if language == "python":
                command = [sys.executable, "-c", BLOCKER + code]
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            assert done.returncode == 0, done.stdout[-6000:]
        for name in ("text", "digits", "solids"):
            files = set(hub.files(f"{USER}/{name}"))
            assert {"README.md", "config.json", "model.safetensors"} <= files
            assert not any(file.endswith((".png", ".bin")) and "/" in file for file in files)  # no scenes, no optimizer
    metrics = {
        name: json.loads((tmp_path / f"{name}-again/eval_results.json").read_text())
        for name in ("text", "digits", "solids")
    }
    tuned = json.loads((tmp_path / "text-lora/all_results.json").read_text())
    assert tuned["eval_loss"] < tuned["base_loss"]
    assert 0 < metrics["text"]["eval_bits_per_byte"] < 8
    assert 0.1 < metrics["digits"]["eval_accuracy"] <= 1
    assert metrics["solids"]["views_psnr"] > 0
