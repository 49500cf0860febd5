# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Runs the benchmarks of the op: first whether each provider is right, then its time and memory, then the table.

On a GPU each call is timed by CUDA events after a warm-up, with the L2 cache overwritten before it; a forward is
captured as a CUDA graph where that works, so that the time is that of its kernels and not of Python. On a CPU the
providers take turns. The time of a call is the median of all its measurements.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hf_ttt import ttt_attention
from hf_ttt.configuration_ttt import VARIANTS

from .common import capture, environment, gpu_seconds, interleaved_seconds, merge_rows, peak_bytes, relative_error
from .problems import KNOWN_PEAKS, MUON_DTYPES, Inputs, Peaks, Problem, Size, floor_seconds, flop, make_inputs
from .providers import PROVIDERS, Provider

KEY = ("op", "provider", "variant", *Size._fields, "dtype", "muon", "direction", "device", "threads")
PARALLEL = ("variant2", "variant3", "variant4", "variant5", "variant6")
QUICK = [Size(1, 96, 2, 16, 32), Size(2, 64, 2, 24, 32)]  # sizes of any op that only shows that everything runs


@dataclass(frozen=True)
class Op:
    """A table: what is measured at which sizes. A CPU gets smaller ones."""

    text: str
    variants: tuple[str, ...]
    cuda: list[Size]
    cpu: list[Size]
    providers: tuple[str, ...] = tuple(PROVIDERS)

    def sizes(self, device: str, quick: bool) -> list[Size]:
        return QUICK if quick else self.cuda if device == "cuda" else self.cpu


OPS = {
    "table2": Op(
        "the rows of the paper's Table 2: 4 heads, 32,768 tokens, width 384, chunk 2,048 (CPU: 4,096, 32, 256)",
        VARIANTS,
        [Size(1, 32768, 4, 384, 2048)],
        [Size(1, 4096, 4, 32, 256)],
    ),
    "length": Op(
        "rows of 2k to 1M tokens, 1M in all, width 128, chunk 2,048 (CPU: 512 to 8,192, 8,192 in all, 32, 256)",
        ("baseline", "variant2", "variant6"),
        [Size(2**20 // tokens, tokens, 4, 128, 2048) for tokens in (2**11, 2**13, 2**15, 2**17, 2**19, 2**20)],
        [Size(2**13 // tokens, tokens, 4, 32, 256) for tokens in (2**9, 2**11, 2**13)],
    ),
    "width": Op(
        "heads of 64 to 512 channels, 32,768 tokens, chunk 2,048 (CPU: 32 to 128, 2,048, 512)",
        ("baseline", "variant2", "variant6"),
        [Size(1, 32768, 4, width, 2048) for width in (64, 128, 256, 384, 512)],
        [Size(1, 2048, 4, width, 512) for width in (32, 64, 128)],
    ),
    "floor": Op(
        "the parallel evaluations against the least time of the device, widths 64 to 512 (CPU: 32 to 128)",
        PARALLEL,
        [Size(1, 32768, 4, width, 2048) for width in (64, 128, 384, 512)],
        [Size(1, 2048, 4, width, 512) for width in (32, 64, 128)],
        ("parallel/torch", "parallel/triton", "published-parallel", "cublas"),
    ),
}

# The greatest ‖error‖ / ‖value‖ of the output and of a gradient that counts as rounding: some four times the greatest
# that was measured on a CPU over all evaluations here, widths 16 to 384. Orthogonalisation amplifies rounding by up to
# 490, and where all weights are updated, an error goes through all later updates; below 1 a gradient of zeros or of
# the wrong sign is still found.
TOLERANCES = {
    ("fp32", "plain"): (1e-5, 1e-5),
    ("fp32", "muon"): (1e-4, 1.1e-3),
    ("fp32", "all"): (1e-4, 1.1e-3),
    ("bf16", "plain"): (1.2e-2, 1.4e-2),
    ("bf16", "muon"): (0.1, 0.31),
    ("bf16", "all"): (0.2, 0.9),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cuda = torch.cuda.is_available()
    parser.add_argument("--op", required=True, choices=OPS, help="the table")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="of the tokens (default: bf16 on a GPU, fp32 on a CPU)"
    )
    parser.add_argument("--muon-dtype", choices=("bfloat16", "float32"), help="default: bfloat16 with bf16 tokens")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, metavar="NAME", help="default: all that are there")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help="default: those of the table")
    parser.add_argument("--backward", action="store_true", help="measure forward and backward, too")
    parser.add_argument("--repeats", type=int, default=30, help="measurements of each call (default: 30)")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU (default: 1)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, three repeats: whether everything runs")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--peak-tflops", type=float, help="of the device in this type, for the floor (known: H200, bf16)"
    )
    parser.add_argument("--bandwidth", type=float, help="of the device, TB/s, for the floor (known: H200)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the CSV")


def main(options: argparse.Namespace) -> None:
    """Measure a table and write its CSV, problem by problem.

    Raises:
        SystemExit: if a provider is wrong, or the device is not there.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: there is no GPU")
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    op, dtype = OPS[options.op], options.dtype or ("bf16" if options.device == "cuda" else "fp32")
    muon = options.muon_dtype or MUON_DTYPES[dtype]
    peaks = find_peaks(options, dtype)
    path = options.output / f"{options.op}{'_quick' if options.quick else ''}.csv"
    for size, variant in itertools.product(op.sizes(options.device, options.quick), options.variants or op.variants):
        problem = Problem(variant, size, dtype, muon, options.device)
        providers = choose(problem, options.providers, op.providers)
        errors = {name: check(name, provider, problem, options.backward) for name, provider in providers.items()}
        rows = measure(problem, providers, peaks, options)
        shared = {"op": options.op, **environment(options.device)}
        rows = [{**row, "relative_error": f"{errors[row['provider']]:.1e}", **shared} for row in rows]
        if rows:
            merge_rows(path, [{name: row[name] for name in dict.fromkeys((*KEY, *row))} for row in rows], KEY)
    print(f"wrote {path}")


def find_peaks(options: argparse.Namespace, dtype: str) -> Peaks | None:
    """What the floor is computed with; None, and no column in the table, where that is not known.

    Raises:
        SystemExit: if it is not known and asked for.
    """
    if options.peak_tflops and options.bandwidth:
        return Peaks(options.peak_tflops * 1e12, options.bandwidth * 1e12)
    name = environment(options.device)["device"]
    peaks = KNOWN_PEAKS.get((str(name), dtype))
    if peaks is None and options.op == "floor":
        raise SystemExit(f"the floor of {name} in {dtype} is not known: give --peak-tflops and --bandwidth")
    return peaks


def choose(problem: Problem, asked: list[str] | None, usual: tuple[str, ...]) -> dict[str, Provider]:
    """The providers that evaluate a problem here; says why others do not."""
    names = asked or [name for name in usual if not (PROVIDERS[name].compiled and problem.device == "cpu")]
    chosen = {}
    for name in names:
        why_not = PROVIDERS[name].why_not(problem)
        if why_not is None:
            chosen[name] = PROVIDERS[name]
        elif asked or not PROVIDERS[name].missing(problem.device):
            print(f"{describe(problem)} {name}: not measured: {why_not}", flush=True)
    if any(provider.compiled for provider in chosen.values()):
        torch.compiler.reset()  # each problem is compiled for its sizes: no limit of recompilations is reached
    return chosen


def describe(problem: Problem) -> str:
    size = " ".join(f"{name} {value}" for name, value in problem.size._asdict().items())
    return f"{problem.variant} {problem.dtype} {size}:"


# ---------------------------------------------------------------------------------------------------------------- gate


def check(name: str, provider: Provider, problem: Problem, backward: bool) -> float:
    """The relative error of a provider's output, with float64 as the truth; NaN for a yardstick, which is not the op.

    The rule and the width are those of the problem; there is one row, of at most 16 chunks, 3 where all weights are
    updated.

    Raises:
        SystemExit: if the output, or with `backward` a gradient, is wrong.
    """
    if not provider.same:
        return float("nan")
    all_updated = len(problem.rule.updated) == 3
    size = problem.size
    small = replace(
        problem, size=size._replace(batch=1, tokens=min(size.tokens, (3 if all_updated else 16) * size.chunk))
    )
    kind = "plain" if problem.rule.muon is None else "all" if all_updated else "muon"
    tolerances = TOLERANCES[problem.dtype, kind]
    actual, expected = evaluate(provider.function, small, backward), truth(small, backward)
    for part, value in expected.items():
        error = relative_error(actual[part], value)
        if not error <= tolerances[part != "output"]:
            raise SystemExit(
                f"{name} is wrong for {describe(small)} {part}: relative error {error:.2e} > "
                f"{tolerances[part != 'output']:.0e}; it was not measured"
            )
    return relative_error(actual["output"], expected["output"])


def evaluate(function: Callable[..., Tensor], problem: Problem, backward: bool) -> dict[str, Tensor]:
    """The output and, with `backward`, the gradients of a random weighted sum of it."""
    return _results(function, make_inputs(problem, grad=backward), problem, backward)


@functools.lru_cache(maxsize=1)  # all providers of a problem are compared with it
def truth(problem: Problem, backward: bool) -> dict[str, Tensor]:
    """`evaluate` of the recurrence in float64, on the same numbers."""
    inputs = {
        name: None if x is None else x.detach().double().requires_grad_(backward)
        for name, x in make_inputs(problem).items()
    }
    recurrence = functools.partial(ttt_attention, implementation="recurrent", backend="torch")
    return _results(recurrence, inputs, replace(problem, muon="float32"), backward)


def _results(function, inputs: Inputs, problem: Problem, backward: bool) -> dict[str, Tensor]:
    with torch.set_grad_enabled(backward):
        out = function(**inputs, rule=problem.rule, chunk_size=problem.size.chunk)
    results = {"output": out.detach()}
    if backward:
        leaves = {name: x for name, x in inputs.items() if x is not None}
        gradients = torch.autograd.grad(out, list(leaves.values()), _gradient(out), allow_unused=True)
        for (name, x), gradient in zip(leaves.items(), gradients, strict=True):
            results[f"gradient of {name}"] = torch.zeros_like(x) if gradient is None else gradient
    return results


def _gradient(out: Tensor) -> Tensor:
    """The same numbers for every type, which float64 and bf16 hold exactly."""
    generator = torch.Generator(out.device).manual_seed(1)
    return torch.randn(out.shape, generator=generator, device=out.device).bfloat16().to(out.dtype)


# --------------------------------------------------------------------------------------------------------- measurement


def measure(
    problem: Problem, providers: dict[str, Provider], peaks: Peaks | None, options: argparse.Namespace
) -> list[dict]:
    """The rows of a problem. What does not fit into a GPU's memory is reported and has no row."""
    repeats = 3 if options.quick else options.repeats
    rows = []
    for direction in ("forward", "forward+backward")[: 1 + options.backward]:
        for name, memory, seconds, timing in timings(problem, providers, direction, repeats, not options.no_graphs):
            row = make_row(problem, direction, seconds, memory, peaks)
            row = {"provider": name, **row, "timing": timing}
            print(
                f"{describe(problem)} {direction} {name} {row['milliseconds']} ms, {memory / 2**20:.1f} MiB", flush=True
            )
            rows.append(row)
    return rows


def timings(
    problem: Problem, providers: dict[str, Provider], direction: str, repeats: int, graphs: bool
) -> Iterator[tuple[str, int, list[float], str]]:
    """Name, bytes, seconds of each measurement, and how it was measured."""
    inputs = make_inputs(problem, grad=direction != "forward")
    calls = {name: make_call(provider, inputs, problem, direction) for name, provider in providers.items()}
    if problem.device == "cpu":
        memory = {name: peak_bytes(call, "cpu") for name, call in calls.items()}
        for name, seconds in interleaved_seconds(calls, repeats).items():
            yield name, memory[name], seconds, "in turns"
        return
    for name, call in calls.items():
        try:
            call()
            memory = peak_bytes(call, "cuda")
            replay, why_not = capture(call) if graphs and direction == "forward" else (None, "")
            if why_not:
                print(f"{describe(problem)} {name}: not captured as a CUDA graph: {why_not}", flush=True)
            yield name, memory, gpu_seconds(replay or call, repeats), "CUDA graph" if replay else "launches"
        except torch.cuda.OutOfMemoryError:
            print(f"{describe(problem)} {direction} {name}: not measured: out of memory", flush=True)
        replay = None  # frees the memory of the graph
        torch.cuda.empty_cache()


def make_call(provider: Provider, inputs: Inputs, problem: Problem, direction: str) -> Callable[[], object]:
    """The call that is timed."""
    forward = functools.partial(provider.function, **inputs, rule=problem.rule, chunk_size=problem.size.chunk)
    if direction == "forward":
        return torch.no_grad()(forward)
    leaves = [x for x in inputs.values() if x is not None]
    gradient = torch.randn_like(inputs["v"])
    return lambda: torch.autograd.grad(forward(), leaves, gradient, allow_unused=True)


def make_row(problem: Problem, direction: str, seconds: list[float], memory: int, peaks: Peaks | None) -> dict:
    median = statistics.median(seconds)
    percentiles = statistics.quantiles(seconds, n=5, method="inclusive") if len(seconds) > 1 else seconds
    floor = floor_seconds(problem, direction, peaks) if peaks else None
    return {
        "variant": problem.variant,
        **problem.size._asdict(),
        "dtype": problem.dtype,
        "muon": problem.muon if problem.rule.muon else "",
        "direction": direction,
        "milliseconds": _digits(1e3 * median),
        "milliseconds_20": _digits(1e3 * percentiles[0]),
        "milliseconds_80": _digits(1e3 * percentiles[-1]),
        "repeats": len(seconds),
        "tokens_per_s": _digits(problem.size.batch * problem.size.tokens / median),
        "peak_bytes": memory,
        "tflops": _digits(flop(problem, direction) / median / 1e12),
        "fraction_of_floor": _digits(floor / median) if floor else "",
        "peak_tflops": peaks.flop / 1e12 if peaks else "",
        "bandwidth_tb_per_s": peaks.bytes / 1e12 if peaks else "",
    }


def _digits(x: float) -> str:
    """Four significant digits."""
    return f"{float(f'{x:.4g}'):.12g}"
