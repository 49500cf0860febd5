# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""A `Trainer` that was killed and goes on from its last checkpoint. Run as a script, this file is the runs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_worker_training import make_batch, make_model
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments

FAMILIES = ("lact", "lact_nvs", "h_vittt")
STEPS, SAVED, KILLED = 7, 4, 6  # the sixth step is done when the process ends, the last checkpoint is of the fourth

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the process that is killed is forked")


class Kill(TrainerCallback):
    """Ends the process after a step, as a scheduler does."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(family: str, folder: Path, *callbacks: TrainerCallback) -> Trainer:
    """AdamW with warm-up over shuffled rows; H-ViTTT also has statistics of batch norms, and drops paths at random."""
    fields = {"drop_path_rate": 0.3} if family == "h_vittt" else {}
    model, batch = make_model(family, "variant2", **fields), make_batch(family, rows=6)
    rows = [{name: value[i] for name, value in batch.items()} for i in range(6)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        warmup_steps=3,
        learning_rate=1e-2,
        save_steps=SAVED // 2,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    return Trainer(model=model, args=arguments, train_dataset=rows, callbacks=list(callbacks))


def run(family: str, folder: Path) -> dict:
    """Kill one run, resume it, and do an unbroken one."""
    broken, whole = folder / f"{family}-broken", folder / f"{family}-whole"
    child = os.fork()
    if child == 0:
        trainer(family, broken, Kill()).train()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    left = sorted(path.name for path in broken.glob("checkpoint-*"))
    losses = []
    for path, resume in ((broken, True), (whole, None)):
        runner = trainer(family, path)
        runner.train(resume_from_checkpoint=resume)
        losses.append([entry["loss"] for entry in runner.state.log_history if "loss" in entry])
    return {"killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, "left": left, "losses": losses}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder, env = tmp_path_factory.mktemp("runs"), dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run([sys.executable, __file__, folder], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_resume_after_kill(folder, family):
    """Weights, buffers, optimizer and losses are those of an unbroken run, to the bit: data order, random numbers,
    schedule and moments all come back from the checkpoint."""
    found = json.loads((folder / "figures.json").read_text())[family]
    assert found["killed"] and found["left"] == [f"checkpoint-{SAVED // 2}", f"checkpoint-{SAVED}"]
    broken, whole = (folder / f"{family}-{kind}" / f"checkpoint-{STEPS}" for kind in ("broken", "whole"))
    assert found["losses"][0] == found["losses"][1] and len(found["losses"][0]) == STEPS
    weights, others = (load_file(path / "model.safetensors") for path in (whole, broken))
    assert weights.keys() == others.keys() and all(torch.equal(others[name], w) for name, w in weights.items())
    earlier = load_file(folder / f"{family}-whole" / f"checkpoint-{SAVED}" / "model.safetensors")
    assert any(not torch.equal(earlier[name], w) for name, w in weights.items())
    optimizer, other = (torch.load(path / "optimizer.pt")["state"] for path in (whole, broken))
    assert optimizer.keys() == other.keys()
    assert all(torch.equal(other[i][name], x) for i, state in optimizer.items() for name, x in state.items())


if __name__ == "__main__":
    torch.set_num_threads(1)
    figures = {family: run(family, Path(sys.argv[1])) for family in FAMILIES}
    Path(sys.argv[1], "figures.json").write_text(json.dumps(figures))
