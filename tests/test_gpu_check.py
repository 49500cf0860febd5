# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""`benchmarks/gpu_check.sh`, mostly with an interpreter that only says what it was asked to run."""

from __future__ import annotations

import csv
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"
PARTS = ("tests", "table2", "table2-compiled", "floor", "width", "length", "models", "models-triton", "plot")
pytestmark = pytest.mark.skipif(
    shutil.which("bash") is None or shutil.which("timeout") is None, reason="the script needs bash and GNU timeout"
)

# In place of Python: writes what it is to run into a file, and fails, or takes long, where it is told to.
STUB = """#!/bin/sh
echo "$*" | tr '\\n' ' ' >>"$STUB_LOG"
echo >>"$STUB_LOG"
case $* in
    *metadata*) echo "${STUB_TRANSFORMERS:-5.24.0}" ;;
    *"import xdist"*) exit "${STUB_XDIST:-0}" ;;
    *"import hf_ttt"*) echo "device          a stub"; exit "${STUB_ENVIRONMENT:-0}" ;;
    *pytest*) echo "3 passed, 1 skipped in 2.00s" ;;
esac
case $* in
    *${STUB_SLOW:-nothing}*) exec sleep 60 ;;
    *${STUB_WRONG:-nothing}*) echo "it went wrong"; exit 1 ;;
esac
"""


def check(*arguments, **environment):
    """The script run to its end."""
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, cwd="/")


@pytest.fixture
def stubbed(tmp_path):
    """Runs the script with the stub; the result, and what the stub was asked to run."""
    stub, log = tmp_path / "stub", tmp_path / "stub.log"
    stub.write_text(STUB)
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)

    def run(*arguments, **environment):
        log.write_text("")
        settings = {"PYTHON": str(stub), "STUB_LOG": str(log), "TRITON_INTERPRET": "1"}
        done = check(*arguments, tmp_path / "out", **settings, **environment)
        return done, log.read_text().splitlines()

    return run


def summary(folder):
    """{part: what it came to}."""
    lines = (folder / "summary.txt").read_text().splitlines()
    return {line[:16].strip(): line[16:].strip() for line in lines}


def test_help():
    done = check("--help")
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("OUTPUT", "--wheels", "--budget", "--device", "--quick", "Exit code"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "an output folder is expected"),
        (["a", "b"], "one output folder is expected, and both a and b are given"),
        (["--fast", "a"], "--fast is not an option"),
        (["a", "--budget"], "--budget needs a value"),
        (["a", "--budget", "0"], "--budget 0: a number of seconds is expected"),
        (["a", "--device", "tpu"], "--device tpu: cuda or cpu is expected"),
        (["a", "--wheels", "/nowhere"], "--wheels /nowhere: no such folder"),
    ],
)
def test_bad_arguments(arguments, message):
    done = check(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_all_parts_run(stubbed, tmp_path):
    done, asked = stubbed()
    assert done.returncode == 0, done.stderr
    result = summary(tmp_path / "out")
    assert [part for part in result if part in PARTS] == list(PARTS)
    assert all(result[part].startswith("done after") for part in PARTS)
    assert result["device"] == "a stub"
    assert result["pytest"] == "3 passed, 1 skipped in 2.00s"
    assert {path.stem for path in (tmp_path / "out").glob("*.log")} == set(PARTS)
    assert not any("pip" in line for line in asked)
    (tests,) = (line for line in asked if "-m pytest" in line)
    assert "not slow" in tests and " -n " in tests
    assert all(str(path.relative_to(ROOT)) in tests for path in (ROOT / "tests").glob("test_ttt_triton*.py"))
    benchmarks = [line for line in asked if line.startswith("-m benchmarks") and "plot" not in line]
    assert len(benchmarks) == 7 and all(f"--output {tmp_path / 'out'}" in line for line in benchmarks)
    assert all("--device cuda" in line for line in benchmarks)


def test_a_slow_part_is_stopped_and_the_others_run(stubbed, tmp_path):
    """With 10 seconds in all; a benchmark that was stopped is no failure, tests that were are one."""
    done, _ = stubbed("--budget", "10", STUB_SLOW="--op table2 --backward")
    result = summary(tmp_path / "out")
    assert result["table2"].startswith("stopped after")
    assert all(result[part].startswith("done after") for part in PARTS if part != "table2")
    assert done.returncode == 0
    done, _ = stubbed("--budget", "10", STUB_SLOW="-m pytest")
    result = summary(tmp_path / "out")
    assert result["tests"].startswith("stopped after")
    assert all(result[part].startswith("done after") for part in PARTS if part != "tests")
    assert done.returncode == 1


@pytest.mark.parametrize(("part", "command"), [("tests", "-m pytest"), ("width", "--op width")])
def test_a_failure_is_the_exit_code(stubbed, tmp_path, part, command):
    done, _ = stubbed(STUB_WRONG=command)
    assert done.returncode == 1
    result = summary(tmp_path / "out")
    assert result[part].startswith("failed with exit code 1")
    assert all(result[other].startswith("done after") for other in PARTS if other != part)
    assert "it went wrong" in done.stdout


@pytest.mark.parametrize(("version", "installs"), [("0", True), ("4.57.1", True), ("5.17.0", True), ("5.18.0", False)])
def test_wheels_are_installed_where_transformers_is_too_old(stubbed, tmp_path, version, installs):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "transformers.whl").touch()
    done, asked = stubbed("--wheels", wheels, STUB_TRANSFORMERS=version)
    assert done.returncode == 0, done.stderr
    installed = [line for line in asked if line.startswith("-m pip install")]
    assert [line.split()[-1] for line in installed] == [str(wheels / "transformers.whl")] * installs
    assert all("--no-index --no-deps" in line and "--target" in line for line in installed)
    if installs:
        done, _ = stubbed(STUB_TRANSFORMERS=version)
        assert done.returncode == 2
        assert f"transformers is {version}, and 5.18 or newer is needed" in done.stderr


def test_without_xdist_or_a_usable_environment(stubbed, tmp_path):
    done, asked = stubbed(STUB_XDIST="1")
    assert done.returncode == 0
    assert not any("pytest" in line and " -n " in line for line in asked)
    done, asked = stubbed(STUB_ENVIRONMENT="1")
    assert done.returncode == 2
    assert "this environment cannot run the kernels" in done.stderr
    assert not any("-m " in line for line in asked)


NEEDED = """
import importlib, sys
from importlib.machinery import PathFinder
class Others(PathFinder):
    @classmethod
    def find_spec(cls, name, *args):
        return None if name.split(".")[0] in {hidden} else PathFinder.find_spec(name, *args)
sys.meta_path[sys.meta_path.index(PathFinder)] = Others
sys.path[:0] = [{root!r}, {tests!r}]
import conftest
for name in {modules}:
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_what_the_script_runs_needs_no_optional_package():
    """An image with torch, Triton, transformers and pytest is enough; matplotlib only draws."""
    modules = [path.stem for path in sorted((ROOT / "tests").glob("test_ttt_triton*.py"))]
    modules += ["benchmarks.__main__", "benchmarks.ops", "benchmarks.models"]
    hidden = {"accelerate", "datasets", "evaluate", "peft", "typer", "matplotlib", "pandas", "sklearn", "fla"}
    code = NEEDED.format(hidden=hidden, root=str(ROOT), tests=str(ROOT / "tests"), modules=modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_a_trial_on_a_cpu(tmp_path):
    """The whole script, nothing replaced."""
    pytest.importorskip("triton", reason="Triton is an extra, and there is none for this platform")
    done = check("--device", "cpu", "--quick", "--budget", 500, tmp_path, PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    result = summary(tmp_path)
    parts = [part for part in PARTS if part not in ("table2-compiled", "models-triton")]
    assert all(result[part].startswith("done after") for part in parts)
    assert "passed" in result["pytest"] and "failed" not in result["pytest"]
    assert all(result[name] for name in ("device", "torch", "triton", "transformers", "commit", "seconds"))
    for table in ("table2_quick", "floor_quick", "width_quick", "length_quick", "models"):
        with (tmp_path / f"{table}.csv").open(newline="") as file:
            assert list(csv.DictReader(file))
