# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What the benchmarks share: interleaved timing, peak memory, and one CSV with the machine beside every number."""

import csv
import datetime
import itertools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import hf_ttt

RESULTS = Path(__file__).parent / "results"


def interleaved(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each function. They take turns, so that a slow moment of the machine meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(series[1:]) for name, series in times.items()}


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


def machine() -> dict[str, str | int]:
    """The machine and the versions that a number was measured with."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_ttt": hf_ttt.__version__,
    }


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
