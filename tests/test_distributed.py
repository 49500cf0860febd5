# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Data-parallel training on two gloo processes, which run `distributed_worker_training.py`: DDP, FSDP2, `Trainer`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from distributed_worker_training import FAMILIES, HEADS, STEPS, head_model, make_model, train
from safetensors.torch import load_file
from torch.testing import assert_close

WORKER = Path(__file__).with_name("distributed_worker_training.py")
EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIGS = sorted(path.stem for path in (EXAMPLES / "accelerate").glob("*.yaml"))


def run(module: str, *arguments) -> None:
    """`python -m module arguments`, or without a module, with one thread for each process."""
    env = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0", **os.environ, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, *(("-m", module) if module else ()), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the two processes left. One launch for all tests of this file."""
    folder = tmp_path_factory.mktemp("processes")
    run("torch.distributed.run", "--standalone", "--nproc_per_node", "2", WORKER, folder)
    return folder


@pytest.fixture(scope="module")
def figures(folder) -> list[dict]:
    """What each of the two processes found."""
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.parametrize("head", HEADS)
def test_two_processes_are_accumulated_batches(folder, figures, head, tmp_path):
    """Losses and parameters of `Trainer` with two processes and two accumulated batches, and with four in one process.

    The loss was scaled by the number of processes or batches, or by tokens where it is a mean over rows."""
    losses, parameters = train(head, tmp_path, 1, 4)
    start, others = dict(head_model(head).named_parameters()), load_file(folder / f"{head}.safetensors")
    assert len(losses) == STEPS
    for part in figures:
        assert part["trainer_runs"][head] == pytest.approx(losses, rel=1e-4)
    moved = 0
    for name, parameter in parameters.items():
        step = (parameter - start[name]).abs().max().item()
        moved += step > 1e-4
        # float32: gradients of the two runs differ by some 1e-6 of their size, which three steps amplify some ten times
        assert_close(others[name], parameter, atol=1e-4 * step + 1e-6 * parameter.abs().max().item(), rtol=0, msg=name)
    assert moved > len(start) / 2


def test_no_parameter_is_unused(figures):
    """In DDP every parameter of every family and rule has a gradient, for texts of a chunk and less too."""
    for part in figures:
        assert len(part["without_gradient"]) == 2 * 17 + 15 + 12
        assert not {case: names for case, names in part["without_gradient"].items() if names}


def test_gradient_checkpointing(figures):
    """The same loss and gradients to the bit, under DDP; reentrant too, where DDP allows it."""
    for part in figures:
        assert len(part["checkpointed"]) == 7
        assert set(part["checkpointed"].values()) == {0.0}


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_keeps_fast_weights(figures, family):
    """Under bfloat16 autocast the op gets float32 fast weights and rates, and parameters float32 gradients."""
    for part in figures:
        seen = [tuple(entry) for entry in part["autocast_types"][family]]
        if family in ("lact", "lact_nvs"):
            expected = {("argument [4, True]", "torch.float32"), ("argument [4, False]", "torch.bfloat16")}
            expected |= {(f"state w{i}", "torch.float32") for i in range(3)}
        else:
            expected = {("argument [4, False]", "torch.float32")}  # w1, w2, w3; its rule has no rates
        assert set(seen) == expected | {("gradient", "torch.float32")}


@pytest.mark.parametrize("way", ["", ", autocast", ", accelerate"], ids=["float64", "autocast", "accelerate"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fsdp2(figures, family, way):
    """Loss, gradients and their norm are those of DDP, which fast weights that were rounded would change; the blocks
    that `_no_split_modules` names are units of their own."""
    for part in figures:
        found = part["sharded"][family + way]
        assert found["units"] >= blocks(family) + 1
        assert max(found["loss"], found["norm"]) <= 1e-6  # language models compute it in float32
        assert found["gradients"] <= 1e-6


def blocks(family: str) -> int:
    """Modules of the classes that are not to be split."""
    model = make_model(family)
    return sum(type(module).__name__ in model._no_split_modules for module in model.modules())


def launch_environment(name: str) -> dict[str, str]:
    """What `accelerate launch --config_file` tells the processes."""
    file = str(EXAMPLES / "accelerate" / f"{name}.yaml")
    arguments = launch_command_parser().parse_args(["--config_file", file, "script.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    if not arguments.use_deepspeed:
        return prepare_multi_gpu_env(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    return prepare_deepspeed_cmd_env(arguments)[1]


def test_accelerate_configs():
    """Accelerate reads each file, with every key that is in it, and would start as many processes as it says."""
    assert CONFIGS == ["cpu", "ddp", "deepspeed_zero2", "deepspeed_zero3", "fsdp"]
    kinds = {"cpu": "MULTI_GPU", "ddp": "MULTI_GPU", "fsdp": "FSDP"}
    for name in CONFIGS:
        config = load_config_from_file(str(EXAMPLES / "accelerate" / f"{name}.yaml"))  # an unknown key is an error
        assert config.distributed_type == kinds.get(name, "DEEPSPEED")
        assert config.num_processes == (2 if name == "cpu" else 8)
        assert config.mixed_precision == "no"  # fast weights are not rounded
        env = launch_environment(name)
        assert ("FSDP_VERSION" in env) == (name == "fsdp")
        if name.startswith("deepspeed"):
            assert env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == name[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_fsdp_config_wraps_the_blocks(family):
    """The policy of fsdp.yaml takes exactly the blocks that a model names."""
    model, env = make_model(family), launch_environment("fsdp")
    with patch.dict(os.environ, {key: value for key, value in env.items() if key.startswith(("FSDP", "ACCELERATE"))}):
        plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.mixed_precision_policy is None
    plugin.set_auto_wrap_policy(model)
    wraps = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert sum(map(wraps, model.modules())) == blocks(family)


def losses_of_example(text: Path, output_dir: Path, *launch, **arguments) -> list[float]:
    """Losses of four steps of `train_lact_text.py`."""
    options = {"train_file": text, "output_dir": output_dir, "max_steps": 4, "logging_steps": 1, **arguments}
    options |= {"variant": "variant2", "hidden_size": 16, "num_hidden_layers": 1, "num_attn_heads": 2}
    options |= {"num_lact_heads": 2, "lact_chunk_size": 8, "window_size": 8, "block_size": 32, "learning_rate": 1e-2}
    flags = [part for key, value in options.items() for part in (f"--{key}", value)]
    run(*launch, EXAMPLES / "train_lact_text.py", *flags, "--do_train")
    history = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.slow
def test_accelerate_launch(tmp_path):
    """`accelerate launch` with cpu.yaml runs two processes: the losses are those of twice as large batches."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {i} of {i * i % 97} says nothing new.\n" for i in range(60)), encoding="utf-8")
    launch = ("accelerate.commands.launch", "--config_file", EXAMPLES / "accelerate" / "cpu.yaml")
    two = losses_of_example(text, tmp_path / "two", *launch, per_device_train_batch_size=2)
    one = losses_of_example(text, tmp_path / "one", "", per_device_train_batch_size=4)
    assert len(two) == 4 and two == pytest.approx(one, rel=1e-4)
