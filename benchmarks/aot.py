# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Compiles every kernel that the Triton files list, for GPUs that need not be there, and checks what comes out:

    python benchmarks/aot.py                                      # all files, all targets; writes results/aot.csv
    python benchmarks/aot.py --modules hf_ttt.ttt_triton_x --targets sm_90 --output sm_90.csv

A case passes if it compiles in time, fits into shared memory, spills at most 64 bytes for each thread, and multiplies
16-bit matrices with the target's matrix instruction, not serialised. `hf_ttt.ttt_triton` says how a file
lists its cases.
"""

import argparse
import contextlib
import csv
import importlib
import io
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported: kernels are to be compiled here
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # what was compiled before has no log

import hf_ttt  # noqa: E402
from hf_ttt.ttt_triton import LEAST_SHARED_MEMORY, AOTCase, triton  # noqa: E402

RESULTS = Path(__file__).parent / "results"
MAX_SPILL = 64  # bytes for each thread: a few come and go between versions of the compiler


class Target(NamedTuple):
    """What a program can have on a GPU."""

    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int
    matrix: str  # the instruction for products of at least 64 rows by at least 4 warps
    small_matrix: str


TARGETS = {
    "sm_80": Target("cuda", 80, 32, LEAST_SHARED_MEMORY, "mma.sync", "mma.sync"),  # of sm_86, which runs it too
    "sm_90": Target("cuda", 90, 32, 227 * 1024, "wgmma.mma_async", "mma.sync"),
    "sm_100": Target("cuda", 100, 32, 227 * 1024, "tcgen05.mma", "mma.sync"),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024, "v_mfma", "v_mfma"),
}


class Resources(NamedTuple):
    """What a compiled kernel takes."""

    registers: int  # of each thread
    spill_bytes: int  # of each thread
    shared_bytes: int
    instructions: tuple[str, ...]  # for 16-bit matrices, those that it contains
    missing: str | None  # the matrix instruction that it should contain and does not
    serialised: bool  # whether each matrix instruction waits for the one before


def compile_case(case: AOTCase, target: str) -> Resources:
    """Compile a case. Pointers and integers count as multiples of 16, as those of usual tensors and lengths are."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = case.kernel
    while not isinstance(kernel, triton.JITFunction):  # autotuned, or with heuristics
        kernel = kernel.fn
    check_arguments(case, kernel.arg_names)
    signature = {name: case.types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = [i for i, kind in enumerate(signature.values()) if kind[0] in "*i"]
    source = ASTSource(kernel, signature, case.constexprs, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(source, target=GPUTarget(*TARGETS[target][:3]), options=options)
    return read_resources(compiled, case.num_warps, TARGETS[target], log.getvalue())


def check_arguments(case: AOTCase, names: list[str]) -> None:
    """Raises ValueError if a case does not give each argument once."""
    given = [*case.types, *case.constexprs]
    if sorted(given) != sorted(names):
        raise ValueError(f"the case gives {sorted(given)}; the kernel takes {sorted(names)}")


def read_resources(compiled: Any, num_warps: int, target: Target, log: str) -> Resources:
    """What a compiled kernel takes, by the assembly and the assembler's log."""
    if target.backend == "cuda":
        assembly = compiled.asm["ptx"]
        registers = max(int(n) for n in re.findall(r"Used (\d+) registers", log))
        spill = max(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    else:
        assembly = compiled.asm["amdgcn"]
        registers, spill = (
            int(re.search(rf"\.{name}:\s*(\d+)", assembly)[1]) for name in ("vgpr_count", "vgpr_spill_count")
        )
        spill *= 4
    names = sorted({target.matrix, target.small_matrix})
    instructions = tuple(name for name in names if re.search(re.escape(name) + r"[\w.:]*f16", assembly))
    rows = sixteen_bit_products(compiled.asm["ttir"])
    needed = target.matrix if max(rows, default=0) >= 64 and num_warps >= 4 else target.small_matrix
    missing = needed if rows and needed not in instructions else None
    return Resources(registers, spill, compiled.metadata.shared, instructions, missing, "serialized" in log)


def sixteen_bit_products(ir: str) -> list[int]:
    """The numbers of rows of all products of bf16 or fp16 matrices in Triton's intermediate representation."""
    return [int(rows) for rows in re.findall(r"tt\.dot .*: tensor<(?:\d+x)*?(\d+)x\d+x(?:bf16|f16)> \*", ir)]


def problems_of(resources: Resources, target: str) -> list[str]:
    """What is wrong with a compiled kernel."""
    limit = TARGETS[target].shared_bytes
    checks = {
        f"{resources.shared_bytes} bytes of shared memory, over {limit}": resources.shared_bytes > limit,
        f"spills {resources.spill_bytes} bytes, over {MAX_SPILL}": resources.spill_bytes > MAX_SPILL,
        f"no {resources.missing}": resources.missing is not None,
        "matrix instructions are serialised": resources.serialised,
    }
    return [text for text, wrong in checks.items() if wrong]


def compile_to(pipe: multiprocessing.connection.Connection, case: AOTCase, target: str) -> None:
    """In a process of its own: send the resources, or the text of the error."""
    os.setsid()  # the assembler, too, ends with this process
    try:
        pipe.send(compile_case(case, target))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]  # a compiler's may hold the whole source
        pipe.send(f"{type(error).__name__}: {' … '.join(dict.fromkeys((lines[0], lines[-1])))}"[:300])


class Job:
    """A case that is being compiled for a target, in a process with a time limit."""

    def __init__(self, case: AOTCase, target: str, limit: float):
        self.case, self.target = case, target
        self.start = time.monotonic()
        self.deadline = self.start + limit
        context = multiprocessing.get_context("fork")  # the imports are shared
        self.pipe, other = context.Pipe(duplex=False)
        self.process = context.Process(target=compile_to, args=(other, case, target))
        self.process.start()
        other.close()

    def result(self) -> dict[str, object] | None:
        """The row of the table once it is known."""
        if self.pipe.poll():
            try:
                outcome = self.pipe.recv()
            except EOFError:
                self.process.join()
                outcome = f"the compiler ended with exit code {self.process.exitcode}"
        elif time.monotonic() > self.deadline:
            outcome = f"not compiled after {self.deadline - self.start:.0f} s"
        else:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        return self.row(outcome)

    def row(self, outcome: Resources | str) -> dict[str, object]:
        case = self.case
        row: dict[str, object] = {
            "kernel": case.kernel.__name__,
            "types": " ".join(f"{name}={kind}" for name, kind in case.types.items()),
            "constexprs": " ".join(f"{name}={value}" for name, value in case.constexprs.items()),
            "num_warps": case.num_warps,
            "num_stages": case.num_stages,
            "target": self.target,
            "seconds": round(time.monotonic() - self.start, 1),
            **dict.fromkeys(("registers", "spill_bytes", "shared_bytes", "matrix_instructions")),
        }
        if isinstance(outcome, str):
            return {**row, "problems": outcome}
        row.update(registers=outcome.registers, spill_bytes=outcome.spill_bytes, shared_bytes=outcome.shared_bytes)
        row["matrix_instructions"] = " ".join(outcome.instructions)
        return {**row, "problems": "; ".join(problems_of(outcome, self.target))}


def compile_all(cases: list[AOTCase], targets: list[str], limit: float, processes: int) -> Iterator[dict[str, object]]:
    """The rows of all cases for those of the targets that they are for, as they come."""
    waiting = [(case, target) for case in cases for target in targets if target in case.targets]
    running: list[Job] = []
    while waiting or running:
        while waiting and len(running) < processes:
            running.append(Job(*waiting.pop(0), limit))
        multiprocessing.connection.wait([job.pipe for job in running], timeout=0.5)
        for job in list(running):
            row = job.result()
            if row is not None:
                running.remove(job)
                yield row


def kernel_modules() -> list[str]:
    """The names of all files that list cases; others only call the kernels of these."""
    files = sorted(Path(hf_ttt.__file__).parent.glob("ttt_triton_*.py"))
    return [f"hf_ttt.{path.stem}" for path in files if "\ndef aot_cases(" in path.read_text()]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--modules", nargs="*", default=kernel_modules(), help="modules with aot_cases()")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--limit", type=float, default=120, help="seconds for each compilation")
    parser.add_argument("--processes", type=int, default=2, help="compilations at the same time")
    parser.add_argument("--output", type=Path, default=RESULTS / "aot.csv")
    options = parser.parse_args(arguments)
    if triton is None:
        sys.exit("Triton is not installed: pip install triton")
    cases = [AOTCase(*case) for name in options.modules for case in importlib.import_module(name).aot_cases()]
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for row in compile_all(cases, options.targets, options.limit, options.processes):
            print("BAD" if row["problems"] else "ok ", *(f"{name}={value}" for name, value in row.items()), flush=True)
            rows.append({**row, "triton": triton.__version__})
    if not rows:
        sys.exit(f"no case for {', '.join(options.targets)} in {', '.join(options.modules) or 'no module'}")
    write_table(options.output, rows)
    bad = sum(bool(row["problems"]) for row in rows)
    sys.exit(f"{bad} of {len(rows)} are bad" if bad else 0)


def write_table(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows, in an order that does not depend on which was ready first and without their times."""
    path.parent.mkdir(exist_ok=True)
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(
            sorted(rows, key=lambda row: [str(row[name]) for name in ("kernel", "types", "constexprs", "target")])
        )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
