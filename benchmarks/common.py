# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What the benchmarks share: timing, peak memory, and CSVs with the machine beside every number."""

import csv
import datetime
import itertools
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

import hf_ttt
from hf_ttt import ttt_triton

RESULTS = Path(__file__).parent / "results"
WARM_UP = 3  # calls on a GPU before those that are measured
FLUSH_BYTES = 2**28  # more than any L2 cache holds


def interleaved(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each function. They take turns, so that a slow moment of the machine meets all of them."""
    return {name: statistics.median(series) for name, series in interleaved_seconds(functions, repeats).items()}


def interleaved_seconds(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call after a first one, on a CPU."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: series[1:] for name, series in times.items()}


def gpu_seconds(function: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each call by CUDA events, after a warm-up; before each one the L2 cache is overwritten."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for _ in range(WARM_UP):
        function()
    for start, stop in events:
        flush.zero_()
        start.record()
        function()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) / 1e3 for start, stop in events]


def capture(function: Callable[[], object]) -> tuple[Callable[[], None] | None, str]:
    """The kernels of a call as a CUDA graph, to be launched at once; or None, and why they cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what happens only once, such as compilation, must not happen in the graph
        for _ in range(WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return None, str(error).splitlines()[0]
    return graph.replay, ""


def peak_bytes(function: Callable[[], object], device: str) -> int:
    """Bytes that a call on a CPU or a GPU holds at most, over those from before it."""
    if device == "cpu":
        return peak_memory(function)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_memory(function: Callable[[], object]) -> int:
    """Bytes of tensors that a call holds at most, over those from before it. Exact: every allocation is counted."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    held = itertools.accumulate(event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"]))
    return max(held, default=0)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def machine() -> dict[str, str | int]:
    """The machine and the versions that a number was measured with."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_ttt": hf_ttt.__version__,
    }


def environment(device: str) -> dict[str, str | int]:
    """What a number on "cuda" or "cpu" was measured with."""
    on_gpu = device == "cuda"
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None
    return {
        "device": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "threads": "" if on_gpu else torch.get_num_threads(),
        "driver": driver.splitlines()[0] if driver else "",
        "torch": torch.__version__,
        "triton": getattr(ttt_triton.triton, "__version__", ""),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def commit() -> str:
    """The commit that is checked out, with "+changes" if the sources differ from it; "unknown" outside a checkout."""
    git = ("git", "-C", str(Path(__file__).parent.parent))
    head = _output(*git, "rev-parse", "--short", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+changes" if _output(*git, "diff", "--stat", "HEAD", "--", "src", "benchmarks/*.py") else "")


def _output(*command: str) -> str | None:
    """What a command prints; None if it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def merge_rows(path: Path, rows: list[dict[str, object]], key: Sequence[str]) -> None:
    """Add rows to a CSV: those of the same key are replaced, all others stay. An interrupted call changes nothing."""
    old: list[dict[str, object]] = []
    if path.exists():
        with path.open(newline="") as file:
            old = list(csv.DictReader(file, restval=""))
    new = {_identity(row, key): row for row in rows}
    merged = [row for row in old if _identity(row, key) not in new] + list(new.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    with scratch.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(name for row in merged for name in row)))
        writer.writeheader()
        writer.writerows(merged)
    scratch.replace(path)


def _identity(row: dict[str, object], key: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(row.get(name, "")) for name in key)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖; where all of `expected` is zero, ‖actual‖."""
    norm = expected.double().norm()
    return ((actual.double() - expected.double()).norm() / torch.where(norm > 0, norm, 1.0)).item()


def write_rows(name: str, rows: list[dict[str, object]]) -> Path:
    """Write rows to results/<name>.csv, each with the machine, and print them."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    rows = [{**row, **machine()} for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path}")
    return path


def check_close(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """The correctness gate: no number is printed for a function that is wrong.

    Raises:
        SystemExit: if the greatest difference over the greatest value exceeds the tolerance.
    """
    error = ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()
    if not error <= tolerance:
        raise SystemExit(f"{name} is wrong: relative error {error:.2e} > {tolerance:.0e}; nothing was measured")
