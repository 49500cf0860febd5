# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""The benchmark runner: its providers are right, a wrong one has no number, tables keep what they hold."""

from __future__ import annotations

import csv
import functools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import ops, plots, problems, providers  # noqa: E402
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.common import commit, environment, merge_rows, relative_error  # noqa: E402
from benchmarks.problems import Peaks, Problem, Size, floor_seconds, flop  # noqa: E402
from benchmarks.providers import PROVIDERS, Provider, plain_loop, published_parallel  # noqa: E402

from hf_ttt.configuration_ttt import VARIANTS  # noqa: E402

SIZE = Size(1, 96, 2, 16, 32)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(variant: str, dtype: str = "fp32", **size: int) -> Problem:
    return Problem(variant, SIZE._replace(**size), dtype, problems.MUON_DTYPES[dtype], DEVICE)


def run(folder: Path, *options: str, op: str = "table2") -> list[dict[str, str]]:
    """The table after a quick run."""
    main(["run", "--op", op, "--device", "cpu", "--quick", "--output", str(folder), *options])
    return read(folder / f"{op}_quick.csv")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def add_provider(monkeypatch):
    return functools.partial(monkeypatch.setitem, PROVIDERS)


# ---------------------------------------------------------------------------------------------------------------- gate


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [name for name, provider in PROVIDERS.items() if not provider.compiled])
def test_providers_are_right(name, variant):
    """Output and gradients, with a rest after the last whole chunk. Kernels are interpreted where there is no GPU."""
    provider, case = PROVIDERS[name], problem(variant, tokens=83)
    if "triton" in name:
        case = replace(case, size=case.size._replace(heads=1))
        try:
            providers.resolve(name.split("/")[0], DEVICE)
        except ImportError as error:
            pytest.skip(f"not here: {error}")
    elif provider.missing(DEVICE):
        pytest.skip(f"not here: {provider.missing(DEVICE)}")
    if provider.limit(case):
        assert name.startswith(("parallel", "cublas")) and variant in ("baseline", "variant1")
        return
    error = ops.check(name, provider, case, backward=True)
    assert error < 1e-4 if provider.same else math.isnan(error)


@pytest.mark.parametrize("variant", ops.PARALLEL)
def test_published_algorithm_is_right(variant):
    """Also for several rows, and a number of tokens below a chunk."""
    provider = Provider("", published_parallel)
    assert ops.check("published", provider, problem(variant, tokens=83), backward=True) < 1e-4
    assert ops.check("published", provider, problem(variant, tokens=7), backward=True) < 1e-5


@pytest.mark.parametrize(("name", "variant"), [("compiled", "baseline"), ("published-parallel", "variant2")])
def test_compiled_providers_are_right(name, variant, monkeypatch):
    """As one graph; what a compiler makes of it takes too long here."""
    monkeypatch.setattr(providers, "COMPILER", "eager")
    assert ops.check(name, PROVIDERS[name], problem(variant, tokens=83), backward=False) < 1e-4
    torch.compiler.reset()


@pytest.mark.parametrize("variant", VARIANTS)
def test_gate_lets_bfloat16_pass(variant):
    case = problem(variant, "bf16", tokens=192, width=64, chunk=64)
    assert ops.check("eager", PROVIDERS["eager"], case, backward=True) > 1e-4


def wrong_gradient(**inputs):
    out = plain_loop(**inputs)
    return out + (out - out.detach())


WRONG = {
    "scaled": lambda **inputs: 1.01 * plain_loop(**inputs),
    "gradient": wrong_gradient,
    "not a number": lambda **inputs: plain_loop(**inputs) * math.nan,
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_provider_has_no_number(fault, add_provider, tmp_path):
    """The run stops with its name, and its table is not written."""
    add_provider("eager", Provider("", WRONG[fault]))
    part = "gradient of" if fault == "gradient" else "output"
    with pytest.raises(SystemExit, match=rf"eager is wrong for variant2 .* {part}.*relative error (nan|\d)"):
        run(tmp_path, "--providers", "recurrent/torch", "eager", "--variants", "variant2", "--backward")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variant", "change"),
    [("variant2", {"momentum": None}), ("variant4", {"momentum": None}), ("baseline", {"lr0": None}), ("variant3", {})],
)
def test_gate_finds_wrong_rules_in_bfloat16(variant, change):
    """Without the momentum, the rates of w0, the orthogonalisation: in the type with the widest tolerance."""

    def function(rule, **inputs):
        rule = rule if change else replace(rule, muon=None)
        return plain_loop(**{**inputs, **change}, rule=rule)

    with pytest.raises(SystemExit, match="output: relative error"):
        ops.check("wrong", Provider("", function), problem(variant, "bf16", width=64, tokens=192, chunk=64), False)


# --------------------------------------------------------------------------------------------------------------- table


def test_run_writes_a_table_and_replaces_rows(tmp_path):
    options = ("--providers", "eager", "sdpa", "--variants", "variant6")
    rows = run(tmp_path, *options)
    assert [(row["provider"], row["tokens"]) for row in rows] == [
        (provider, str(size.tokens)) for size in ops.QUICK for provider in ("eager", "sdpa")
    ]
    for row in rows:
        assert float(row["milliseconds_20"]) <= float(row["milliseconds"]) <= float(row["milliseconds_80"])
        tokens = int(row["batch"]) * int(row["tokens"])
        assert float(row["tokens_per_s"]) == pytest.approx(1e3 * tokens / float(row["milliseconds"]), rel=2e-3)
        output = tokens * int(row["heads"]) * int(row["width"]) * 4
        assert output <= int(row["peak_bytes"]) < 100 * output
        assert (row["op"], row["dtype"], row["direction"], row["threads"]) == ("table2", "fp32", "forward", "1")
        assert row["torch"] == torch.__version__ and row["commit"] == commit() and row["device"]
        assert row["relative_error"] == "nan" if row["provider"] == "sdpa" else float(row["relative_error"]) < 1e-5
    again = run(tmp_path, *options, "--backward")
    assert len(again) == 2 * len(rows) and {row["direction"] for row in again} == set(problems.DIRECTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["table2_quick.csv"]


def test_merge_keeps_other_rows_and_columns(tmp_path):
    path = tmp_path / "new" / "table.csv"
    merge_rows(path, [{"op": "a", "size": 1, "ms": 1.5}, {"op": "a", "size": 2, "ms": 2.5}], ("op", "size"))
    merge_rows(path, [{"op": "a", "size": 2, "ms": 3.5, "extra": "x"}, {"op": "b", "size": 2, "ms": 4}], ("op", "size"))
    assert read(path) == [
        {"op": "a", "size": "1", "ms": "1.5", "extra": ""},
        {"op": "a", "size": "2", "ms": "3.5", "extra": "x"},
        {"op": "b", "size": "2", "ms": "4", "extra": ""},
    ]
    before = path.read_bytes()
    with pytest.raises(TypeError):
        merge_rows(path, [{"op": "c", "size": 1, "ms": Unprintable()}], ("op", "size"))
    assert path.read_bytes() == before


class Unprintable:
    def __str__(self):
        raise TypeError


def test_outside_of_a_checkout_the_commit_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert commit() == "unknown"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment("cpu")["commit"] == "unknown"


def test_relative_error_of_zeros():
    zero, two = torch.zeros(4), torch.full((4,), 2.0)
    assert relative_error(zero, zero) == 0 and relative_error(two, zero) == 4 and relative_error(zero, two) == 1


# ---------------------------------------------------------------------------------------------------------------- work


@pytest.mark.parametrize("variant", VARIANTS)
def test_operations_are_those_of_the_plain_loop(variant):
    """torch counts the same; the identity as features has an exact count backward, too."""
    case = problem(variant)
    for direction in problems.DIRECTIONS[: 2 if variant == "variant6" else 1]:
        with FlopCounterMode(display=False) as counter:
            ops.evaluate(plain_loop, case, backward=direction != "forward")
        assert flop(case, direction) == counter.get_total_flops()
    both = flop(case, "forward+backward")
    assert 2.3 * flop(case, "forward") < both <= 3 * flop(case, "forward") <= 1.5 * both
    assert (flop(case, "forward+backward", recompute=True) == both) == (variant == "variant6")


def test_floor_at_a_known_size():
    """4 heads, 32,768 tokens, width 64, bf16 on an H200: memory decides without Muon, operations with it."""
    h200 = problems.KNOWN_PEAKS["NVIDIA H200", "bf16"]
    case = replace(problem("variant6", "bf16"), size=Size(1, 32768, 4, 64, 2048))
    tensor, state = 2 * 32768 * 4 * 64, 16 * 4 * 64 * 64
    forward = (4 * tensor + 12 * state) / 4.3e12
    assert floor_seconds(case, "forward", h200) == pytest.approx(forward, rel=1e-12)
    both = forward + (7 * tensor + 14 * state) / 4.3e12
    assert floor_seconds(case, "forward+backward", h200) == pytest.approx(both, rel=1e-12)
    case = replace(case, variant="variant2", size=case.size._replace(width=512))
    state = 16 * 4 * 512 * 512
    expected = flop(case, "forward") / 790e12 + 12 * state / 4.3e12
    assert floor_seconds(case, "forward", h200) == pytest.approx(expected, rel=1e-12)
    assert floor_seconds(replace(case, variant="variant1"), "forward", Peaks(1e12, 1e12)) is None


def test_floor_of_an_unknown_device_is_asked_for(tmp_path):
    options = ("--variants", "variant6", "--providers", "cublas")
    with pytest.raises(SystemExit, match="give --peak-tflops and --bandwidth"):
        run(tmp_path, *options, op="floor")
    rows = run(tmp_path, *options, "--peak-tflops", "0.05", "--bandwidth", "0.01", op="floor")
    case, peaks = problem("variant6"), Peaks(0.05e12, 0.01e12)
    expected = 1e3 * floor_seconds(case, "forward", peaks) / float(rows[0]["milliseconds"])
    assert float(rows[0]["fraction_of_floor"]) == pytest.approx(expected, rel=2e-3)


# ----------------------------------------------------------------------------------------------------- what is measured


def test_limits_of_providers():
    """What is not exact or never ends has no row, and says why."""
    why_not = lambda name, variant, **size: PROVIDERS[name].limit(problem(variant, **size))  # noqa: E731
    for name in ("parallel/torch", "parallel/triton", "published-parallel", "cublas"):
        assert "update='all'" in why_not(name, "baseline") and "weight_norm" in why_not(name, "variant1")
    assert why_not("published-parallel", "variant2", tokens=16 * 32) is None
    assert "is wrong" in why_not("published-parallel", "variant2", tokens=17 * 32)
    assert why_not("published-parallel", "variant6", tokens=17 * 32) is None
    assert why_not("compiled", "baseline", tokens=64 * 32) is None
    assert "too long" in why_not("compiled", "baseline", tokens=65 * 32)
    assert why_not("sdpa", "baseline", tokens=2048) is None and why_not("sdpa", "baseline", tokens=2**20)


def test_compiled_providers_are_asked_for_on_a_cpu():
    usual = ops.choose(replace(problem("variant6"), device="cpu"), None, tuple(PROVIDERS))
    assert set(usual) == {"recurrent/torch", "parallel/torch", "eager", "cublas", "sdpa"}
    asked = ops.choose(replace(problem("variant6"), device="cpu"), ["eager", "published-parallel"], tuple(PROVIDERS))
    assert set(asked) == {"eager", "published-parallel"} or providers._no_compiler("cpu")


def test_interpreted_kernels_are_not_timed(monkeypatch):
    monkeypatch.setattr(providers, "resolve", lambda implementation, device: None)
    monkeypatch.setattr(providers, "INTERPRETED", True)
    assert "TRITON_INTERPRET" in PROVIDERS["parallel/triton"].missing("cpu")
    monkeypatch.setattr(providers, "INTERPRETED", False)
    assert PROVIDERS["parallel/triton"].missing("cpu") is None


def test_fla_is_optional(monkeypatch):
    """Where it is not installed a reason; where it is, its kernel is called on the tokens as they are."""
    fla = PROVIDERS["fla"]
    assert "GPU" in fla.missing("cpu")
    monkeypatch.setitem(sys.modules, "fla", None)
    assert "pip install flash-linear-attention" in fla.missing("cuda")
    kernel = lambda q, k, v, scale, normalize: (q + k + v if scale == 1.0 and not normalize else None, None)  # noqa: E731
    linear_attn = SimpleNamespace(chunk_linear_attn=kernel)
    for name, module in {
        "fla": SimpleNamespace(),
        "fla.ops": SimpleNamespace(),
        "fla.ops.linear_attn": linear_attn,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert fla.missing("cuda") is None
    case = problem("variant6")
    inputs = problems.make_inputs(case)
    assert torch.equal(fla.function(**inputs, rule=case.rule, chunk_size=32), inputs["q"] + inputs["k"] + inputs["v"])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_graphs_and_launches_on_a_gpu(tmp_path):
    main(["run", "--op", "table2", "--quick", "--backward", "--output", str(tmp_path), "--variants", "variant2"])
    rows = read(tmp_path / "table2_quick.csv")
    timings = {(row["provider"], row["direction"]): row["timing"] for row in rows}
    assert timings["eager", "forward"] == "CUDA graph" and timings["eager", "forward+backward"] == "launches"
    assert all(float(row["milliseconds"]) > 0 and row["driver"] for row in rows)


# -------------------------------------------------------------------------------------------------------- command line


def test_list_names_everything(capsys):
    main(["list"])
    text = capsys.readouterr().out
    for name in (*ops.OPS, *PROVIDERS):
        assert f"  {name} " in text
    assert "cpu: available" in text and "its kernels are for GPUs" in text


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["run", "plot", "list", "models"]),
        (["run"], ["--op", "table2", "--peak-tflops", "CUDA graph"]),
        (["list"], ["available"]),
        (["plot"], ["--results"]),
    ],
)
def test_help(command, words, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and all(word in text for word in words)


def test_module_and_scripts_start():
    """The package beside the scripts that import its files as modules of their own."""
    for command in (["-m", "benchmarks", "--help"], ["benchmarks/bench_ttt_ops.py", "--help"]):
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "usage: " in done.stdout, done.stderr


# ---------------------------------------------------------------------------------------------------------------- plots


DEVICES = (("NVIDIA H200", "cuda"), ("Intel(R) Xeon(R) Processor @ 2.60GHz", "cpu"))


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Every table with made-up rows of a GPU, one of them also with those of a CPU."""
    folder = tmp_path_factory.mktemp("tables")
    for name, op in ops.OPS.items():
        rows = []
        for device, kind in DEVICES[: 2 if name == "table2" else 1]:
            for case in (
                Problem(v, size, "bf16", "bfloat16", kind) for v in op.variants for size in op.sizes(kind, False)
            ):
                for i, provider in enumerate(name for name in op.providers if not PROVIDERS[name].limit(case)):
                    for direction in problems.DIRECTIONS:
                        row = ops.make_row(case, direction, [1e-3 * (i + 1)], 1, Peaks(790e12, 4.3e12))
                        threads = "1" if kind == "cpu" else ""
                        rows.append({"op": name, "provider": provider, "device": device, "threads": threads, **row})
        merge_rows(folder / f"{name}.csv", rows, ops.KEY)
    return folder


def test_plot_draws_each_table_for_each_device(tables, capsys):
    main(["plot", "--results", str(tables)])
    names = {f"{op}_nvidia-h200-bf16.png" for op in ops.OPS} | {"table2_intel-xeon-1-thread-bf16.png"}
    assert {path.name for path in tables.glob("*.png")} == names
    assert set(capsys.readouterr().out.split("\n")) == {"", *(f"wrote {tables / name}" for name in names)}
    assert all((tables / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_bars_and_lines_are_the_rows(tables):
    rows = [row for row in read(tables / "table2.csv") if row["device"] == "NVIDIA H200"]
    axis = plots.draw_variants(rows, "title").axes[0]
    heights = sorted(patch.get_height() for patch in axis.patches)
    assert heights == sorted(float(row["tokens_per_s"]) for row in rows if row["direction"] == "forward")
    earlier = [{**row, "chunk": "1"} for row in rows] + [{**row, "muon": "float32"} for row in rows if row["muon"]]
    assert len(plots.draw_variants(earlier + rows, "title").axes[0].patches) == len(heights)
    rows = [row for row in read(tables / "length.csv") if row["device"] == "NVIDIA H200"]
    axis = plots.draw_lines(rows, "title", "tokens").axes[0]
    points = sorted((x, y) for line in axis.lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True))
    wanted = [row for row in rows if (row["variant"], row["direction"]) == ("baseline", "forward")]
    assert points == sorted((int(row["tokens"]), float(row["tokens_per_s"])) for row in wanted)
    plots.plt.close("all")
