# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Every Triton kernel compiles to good code for its GPUs; and `benchmarks/aot.py`, which says so, sees bad code."""

from __future__ import annotations

import csv
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import hf_ttt
from hf_ttt.ttt_triton import TARGETS, AOTCase, block, jit, tl, triton

ROOT = Path(__file__).parent.parent
SOURCE = Path(hf_ttt.__file__).parent
KERNELS = [f.stem for f in sorted(SOURCE.glob("ttt_triton_*.py")) if re.search(r"@jit|def aot_cases", f.read_text())]

pytestmark = pytest.mark.skipif(triton is None, reason="Triton is an extra, and there is none for this platform")


@jit
def product_kernel(a, b, out, n, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out [n, WIDTH] = a [n, WIDTH] b [WIDTH, WIDTH]ᵀ."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < n)[:, None] & (columns < WIDTH)[None, :]
    places = rows[:, None].to(tl.int64) * WIDTH + columns[None, :]
    square = (columns < WIDTH)[:, None] & (columns < WIDTH)[None, :]
    x = tl.load(a + places, mask=mask, other=0.0)
    y = tl.load(b + columns[:, None] + columns[None, :] * WIDTH, mask=square, other=0.0)
    tl.store(out + places, tl.dot(x, y, input_precision="ieee"), mask=mask)


def product_case(width: int, rows: int, kind: str = "*bf16", warps: int = 4, **options) -> AOTCase:
    types = {"a": kind, "b": kind, "out": "*fp32", "n": "i32"}
    constexprs = {"WIDTH": width, "ROWS": rows, "BLOCK": block(width)}
    return AOTCase(product_kernel, types, constexprs, warps, num_stages=1, **options)


def aot_cases() -> Iterator[AOTCase]:
    """Good ones, with large and small products, one that only some targets have, and one twice."""
    yield product_case(64, 64)
    yield product_case(48, 16, "*fp16", warps=1)
    yield product_case(32, 16, "*fp32", targets=("sm_80", "gfx942"))
    yield product_case(32, 16, "*fp32", targets=("sm_80",))


def run_aot(folder: Path, *modules: str, **settings: str) -> tuple[int, str, list[dict[str, str]]]:
    """Exit code, output and table of a fresh process, in which Triton does not interpret."""
    output = folder / "aot.csv"
    options = [f"--{name}={value}" for name, value in settings.items()]
    path = os.pathsep.join([str(folder), str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, str(ROOT / "benchmarks/aot.py"), "--processes=1", f"--output={output}", *options]
    command += ["--modules", *modules]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=1800)
    rows = list(csv.DictReader(output.open())) if output.exists() else []
    return done.returncode, done.stdout + done.stderr, rows


@pytest.mark.slow
@pytest.mark.parametrize("module", KERNELS)
def test_kernels_compile_to_good_code(module, tmp_path):
    code, text, rows = run_aot(tmp_path, f"hf_ttt.{module}")
    assert code == 0, text
    assert {row["target"] for row in rows} == set(TARGETS)


@pytest.mark.slow
def test_table_of_good_cases(tmp_path):
    """One row for each case and target that it is for; large products take the target's large instruction."""
    code, text, rows = run_aot(tmp_path, "test_triton_aot")
    assert code == 0 and len(rows) == 2 * len(TARGETS) + 3, text
    large = {row["target"]: row for row in rows if "ROWS=64" in row["constexprs"]}
    instructions = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
    assert {target: row["matrix_instructions"] for target, row in large.items()} == instructions
    for row in rows:
        assert row["kernel"] == "product_kernel" and row["problems"] == "" and row["triton"] == triton.__version__
        assert 8 <= int(row["registers"]) <= 255 and 0 <= int(row["spill_bytes"]) <= 64
    assert {row["target"] for row in rows if row["matrix_instructions"] == ""} == {"sm_80", "gfx942"}  # float32
    assert int(large["sm_90"]["shared_bytes"]) >= 2 * 64 * 64 * 2  # both operands


BAD = """
from test_triton_aot import product_case

def aot_cases():
    yield product_case(256, 128, warps=8, targets=("sm_80", "gfx942"))
    yield product_case(128, 64, warps=1, targets=("sm_80",))
    case = product_case(16, 16, targets=("sm_80",))
    yield case._replace(types={"a": "*bf16"})
    yield case._replace(constexprs={**case.constexprs, "BLOCK": 24})
"""


@pytest.mark.slow
def test_bad_cases_are_found(tmp_path):
    """Too much shared memory, spills, arguments that do not fit, and code that does not compile."""
    (tmp_path / "bad_cases.py").write_text(BAD)
    code, text, rows = run_aot(tmp_path, "bad_cases")
    assert code == 1 and text.count("BAD") == len(rows) == 5 and "5 of 5 are bad" in text
    found = {(row["target"], row["constexprs"]): row["problems"] for row in rows}
    expected = {
        ("sm_80", "WIDTH=256 ROWS=128 BLOCK=256"): "196608 bytes of shared memory, over 101376",
        ("gfx942", "WIDTH=256 ROWS=128 BLOCK=256"): r"\d+ bytes of shared memory, over 65536",
        ("sm_80", "WIDTH=128 ROWS=64 BLOCK=128"): r"spills \d+ bytes, over 64",
        ("sm_80", "WIDTH=16 ROWS=16 BLOCK=16"): "ValueError: the case gives .*; the kernel takes .*'b', 'n', 'out'",
        ("sm_80", "WIDTH=16 ROWS=16 BLOCK=24"): "CompilationError: .* must be a power of 2",
    }
    assert found.keys() == expected.keys()
    for key, pattern in expected.items():
        assert re.match(pattern, found[key]), (key, found[key])


@pytest.fixture
def aot(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("aot")


PRODUCT = "%d = tt.dot %a, %b, %c : tensor<{rows}x32x{kind}> * tensor<32x16x{kind}> -> tensor<{rows}x16xf32>"
LOG = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are {} due to a call\n"
LOG += "    0 bytes stack frame, 68 bytes spill stores, 4 bytes spill loads\nptxas info : Used 255 registers"
SMALL_BFLOAT16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
SMALL_TFLOAT32 = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"


@pytest.mark.parametrize(
    ("rows", "kind", "warps", "assembly", "missing"),
    [
        (64, "bf16", 4, SMALL_BFLOAT16, "wgmma.mma_async"),
        (64, "f16", 4, "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16", None),
        (64, "bf16", 2, SMALL_BFLOAT16, None),
        (32, "bf16", 4, SMALL_BFLOAT16, None),
        (32, "bf16", 4, SMALL_TFLOAT32, "mma.sync"),
        (32, "bf16", 4, "fma.rn.f32", "mma.sync"),
        (64, "f32", 4, "fma.rn.f32", None),
    ],
)
def test_a_missing_matrix_instruction_is_found(aot, rows, kind, warps, assembly, missing):
    asm = {"ptx": assembly, "ttir": PRODUCT.format(rows=rows, kind=kind)}
    compiled = SimpleNamespace(asm=asm, metadata=SimpleNamespace(shared=1024))
    resources = aot.read_resources(compiled, warps, aot.TARGETS["sm_90"], LOG.format("fine"))
    assert resources.missing == missing and resources[:3] == (255, 68, 1024)
    assert aot.problems_of(resources, "sm_90") == ["spills 68 bytes, over 64"] + [f"no {missing}"] * bool(missing)


def test_serialised_instructions_are_found(aot):
    compiled = SimpleNamespace(asm={"ptx": "", "ttir": ""}, metadata=SimpleNamespace(shared=0))
    resources = aot.read_resources(compiled, 4, aot.TARGETS["sm_90"], LOG.format("serialized"))
    assert aot.problems_of(resources, "sm_90")[-1] == "matrix instructions are serialised"


@pytest.mark.slow
def test_compilation_has_a_time_limit(tmp_path):
    """A kernel that spills much kept the assembler busy for minutes."""
    code, text, rows = run_aot(tmp_path, "test_triton_aot", limit="0.01", targets="sm_90")
    assert code == 1 and len(rows) == 2
    assert {row["problems"] for row in rows} == {"not compiled after 0 s"}


def test_nothing_to_compile_is_an_error(aot, tmp_path, monkeypatch):
    (tmp_path / "no_cases.py").write_text("def aot_cases():\n    return iter(())\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="no case for sm_90 in no_cases"):
        aot.main(["--modules", "no_cases", "--targets", "sm_90"])
