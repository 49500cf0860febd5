# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What Triton kernels share, the choice of their backend, and the corrected interpreter."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from triton_interpreter import install, narrow, widen
from ttt_cases import attend, make_inputs

import hf_ttt.ttt_interface
import hf_ttt.ttt_triton
from hf_ttt import TTTInterface, TTTRule
from hf_ttt.ttt_interface import CallSize
from hf_ttt.ttt_ops import TTT_FUNCTIONS
from hf_ttt.ttt_parallel import ttt_parallel
from hf_ttt.ttt_triton import (
    INTERPRETED,
    block,
    check_available,
    contiguous,
    dot,
    is_available,
    jit,
    kernel_context,
    load_tile,
    namespace,
    register_vmap,
    store_tile,
    tl,
    triton,
)

LAST = TTTRule(update="last", weight_norm="none")
GPU = torch.device("cuda")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="about the interpreter, which a GPU or no Triton leaves out")
device = "cuda" if torch.cuda.is_available() else "cpu"


# ---- shared helpers ----


@pytest.mark.parametrize(("width", "expected"), [(1, 16), (16, 16), (17, 32), (48, 64), (384, 512), (512, 512)])
def test_block(width, expected):
    assert block(width) == expected


def test_namespace_is_a_hash_of_the_source(tmp_path):
    """The same source has the same operators, wherever it lies; another revision of it or of a kernel file that it may
    import has others."""
    names = []
    for folder, text, other in (("a", "x = 1", "y"), ("b", "x = 1", "y"), ("c", "x = 2", "y"), ("d", "x = 1", "z")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ttt_triton_scan.py").write_text(other)
        file = tmp_path / folder / "ttt_triton_x.py"
        file.write_text(text)
        names.append(namespace(str(file)))
    assert names[0] == names[1] == "hf_ttt_" + hashlib.sha256(b"yx = 1").hexdigest()[:8]
    assert len(set(names)) == 3


def test_availability(monkeypatch):
    monkeypatch.setattr(hf_ttt.ttt_triton, "triton", object())
    monkeypatch.setattr(hf_ttt.ttt_triton, "INTERPRETED", True)
    assert is_available("cpu") and is_available("cuda:1")
    monkeypatch.setattr(hf_ttt.ttt_triton, "INTERPRETED", False)
    assert not is_available("cpu") and is_available("cuda:1") and is_available("meta")
    with pytest.raises(ImportError, match="needs a CUDA or ROCm device instead of 'cpu'.*use backend='torch'"):
        check_available("cpu")
    check_available(GPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ImportError, match="instead of 'cpu'"):
        check_available()
    monkeypatch.setattr(hf_ttt.ttt_triton, "triton", None)
    for there in ("cpu", GPU, None):
        with pytest.raises(ImportError, match="not installed: run `pip install triton`, or use backend='torch'"):
            check_available(there)


@pytest.mark.parametrize("size", [64 * 1024, 99 * 1024])
def test_a_gpu_with_little_shared_memory(monkeypatch, size):
    """Tiles for large GPUs ran out of shared memory on a T4; it has no kernels here, and 99 KiB are enough."""
    monkeypatch.setattr(hf_ttt.ttt_triton, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    properties = types.SimpleNamespace(shared_memory_per_block_optin=size)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    assert is_available(GPU) == (size > 64 * 1024)
    if size > 64 * 1024:
        check_available(GPU)
    else:
        with pytest.raises(ImportError, match="shared memory a program, which Tesla T4 has not.*backend='torch'"):
            check_available(GPU)


WITHOUT_TRITON = f"""
import sys
import types
sys.path[:] = {sys.path!r}
sys.modules["triton"] = None
from hf_ttt import ttt_triton
assert ttt_triton.triton is None and ttt_triton.tl is None and not ttt_triton.INTERPRETED

def kernel(x, N): ...
assert ttt_triton.jit(kernel) is kernel
"""


def test_the_file_is_imported_without_triton():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True, timeout=600, env=environment)


def test_kernel_context_turns_autocast_off():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with kernel_context(x):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
        with kernel_context(x.to("meta")):
            assert (x @ x).dtype == torch.float32


def test_contiguous_keeps_what_is_and_what_is_not_there():
    x = torch.ones(2, 3)
    same, none, copy = contiguous(x, None, x.mT)
    assert same is x and none is None and copy.is_contiguous() and torch.equal(copy, x.mT)


@torch.library.custom_op("hf_ttt_tests::divide", mutates_args=())
def divide(x: torch.Tensor, y: torch.Tensor | None, digits: int) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.sum(0, keepdim=True) if y is None else x / y
    return total.round(decimals=digits), x.sum()


register_vmap(divide)


@torch.library.custom_op("hf_ttt_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


register_vmap(double)


def test_vmap_stacks_the_results_of_each_example():
    """Along any dimension, with and without other tensors, whether or not those are batched, in several levels."""
    x, y = torch.rand(3, 4, 5), torch.rand(4, 5)
    for dims in (0, 1, 2):
        got = torch.vmap(lambda t: divide(t, None, 3), in_dims=dims)(x)
        want = [divide(t, None, 3) for t in x.unbind(dims)]
        assert all(torch.equal(g, torch.stack(w)) for g, w in zip(got, zip(*want, strict=True), strict=True))
    got = torch.vmap(lambda t: divide(t, y, 3)[0])(x)
    assert torch.equal(got, torch.stack([divide(t, y, 3)[0] for t in x]))
    got = torch.vmap(lambda t, u: divide(t, u, 3)[1], in_dims=(0, None))(x, y)
    assert torch.equal(got, torch.stack([t.sum() for t in x]))
    assert torch.equal(torch.vmap(torch.vmap(double), in_dims=1)(x), 2 * x.transpose(0, 1))


# ---- choice ----


def test_a_lazy_evaluation_is_loaded_by_the_first_call():
    registry, loads = TTTInterface(), []
    registry.register_lazy("parallel", "torch", lambda: loads.append(1) or max)
    assert registry.resolve(LAST) == ("parallel", "torch")
    function = registry.get(LAST)
    assert loads == []
    assert function(1, 3, key=lambda x: -x) == 1 and loads == [1]


def test_a_lazy_evaluation_is_traced(monkeypatch):
    """The import inside of it, the check for Triton and the choice leave one graph."""

    def load():
        from hf_ttt.ttt_parallel import ttt_parallel

        return ttt_parallel

    monkeypatch.setattr(TTT_FUNCTIONS, "_functions", dict(TTT_FUNCTIONS._functions))
    monkeypatch.setattr(hf_ttt.ttt_triton, "is_available", lambda device: True)
    TTT_FUNCTIONS.register_lazy("parallel", "triton", load)
    x = make_inputs(LAST, length=9, requires_grad=False)
    attention = attend(LAST, 4, implementation="parallel", backend="triton")
    torch._dynamo.reset()
    assert torch.equal(torch.compile(attention, fullgraph=True, backend="eager")(x), attend(LAST, 4)(x))


@pytest.fixture
def registry(monkeypatch):
    """One with a kernel that is faster for width ≤ 64 from 1,000 tokens, and for width ≤ 128 from 5,000."""
    registry = TTTInterface()
    for implementation in ("recurrent", "parallel"):
        registry.register(implementation, "torch", ttt_parallel)
    registry.register_lazy("parallel", "triton", lambda: ttt_parallel, faster={64: 1000, 128: 5000})
    monkeypatch.setattr(hf_ttt.ttt_triton, "triton", object())
    monkeypatch.setattr(hf_ttt.ttt_triton, "INTERPRETED", False)
    for once in ("info_once", "warning_once"):
        getattr(logging.Logger, once).cache_clear()
    return registry


@pytest.mark.parametrize(
    ("width", "tokens", "backend"),
    [(64, 1000, "triton"), (48, 10**6, "triton"), (64, 999, "torch"), (65, 4999, "torch"), (65, 5000, "triton")]
    + [(129, 10**6, "torch")],
)
def test_auto_takes_triton_where_it_was_measured_to_be_faster(registry, width, tokens, backend):
    assert registry.resolve(LAST, size=CallSize(GPU, width, tokens)) == ("parallel", backend)
    assert registry.resolve(LAST, "recurrent", size=CallSize(GPU, width, tokens)) == ("recurrent", "torch")
    assert registry.resolve(LAST, backend="torch", size=CallSize(GPU, width, tokens)) == ("parallel", "torch")


def test_auto_is_torch_without_a_gpu_or_a_measurement(registry):
    assert registry.resolve(LAST, size=CallSize(torch.device("cpu"), 64, 1000)) == ("parallel", "torch")
    assert registry.resolve(LAST) == ("parallel", "torch")
    assert TTT_FUNCTIONS.resolve(LAST, size=CallSize(GPU, 64, 10**6)) == ("parallel", "torch")


def test_triton_needs_a_device_that_it_runs_on(registry):
    assert registry.resolve(LAST, backend="triton", size=CallSize(GPU, 512, 1)) == ("parallel", "triton")
    with pytest.raises(ImportError, match="needs a CUDA or ROCm device instead of 'cpu'"):
        registry.resolve(LAST, backend="triton", size=CallSize(torch.device("cpu"), 64, 1000))
    with pytest.raises(ImportError, match="backend='triton' has no 'recurrent' evaluation"):
        registry.resolve(LAST, "recurrent", "triton", size=CallSize(GPU, 64, 1000))


def test_the_choice_and_its_reason_are_logged_once(registry, caplog, monkeypatch):
    monkeypatch.setattr(hf_ttt.ttt_interface.logger, "propagate", True)
    with caplog.at_level(logging.INFO, "hf_ttt.ttt_interface"):
        for _ in range(3):
            registry.get(LAST, size=CallSize(GPU, 64, 1000))
        registry.get(TTTRule(), backend="torch")
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("TTT layers are evaluated by 'parallel' on backend 'triton'")
    assert first.endswith("'parallel' is exact for this rule; measured to be faster at this size")
    assert second.startswith("TTT layers are evaluated by 'recurrent' on backend 'torch'")
    assert "and 'parallel' is not: " in second


def test_a_slow_fallback_on_a_gpu_is_warned_of_once(registry, caplog, monkeypatch):
    monkeypatch.setattr(hf_ttt.ttt_interface.logger, "propagate", True)
    monkeypatch.setattr(hf_ttt.ttt_triton, "triton", None)
    with caplog.at_level(logging.WARNING, "hf_ttt.ttt_interface"):
        for _ in range(3):
            assert registry.resolve(LAST, size=CallSize(GPU, 64, 1000)) == ("parallel", "torch")
    (record,) = caplog.records
    assert "Triton is not installed" in record.getMessage() and "pip install triton" in record.getMessage()


# ---- bfloat16 in the interpreter ----


def special_values() -> torch.Tensor:
    """float32 numbers of all sizes, ties between bfloat16 neighbours, the greatest, subnormal ones, infinities, NaN."""
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ties = (bits & ~0xFFFF) | 0x8000
    edges = torch.tensor([0.0, -0.0, 1.0, 3.3895e38, 3.4028e38, 1e-45, -1e-40, torch.inf, -torch.inf, torch.nan])
    return torch.cat([bits.view(torch.float32), ties.view(torch.float32), edges])


def test_narrow_and_widen_are_those_of_torch():
    x = special_values()
    rounded = x.bfloat16()
    assert torch.equal(torch.from_numpy(widen(narrow(x.numpy()))).nan_to_num(7.0), rounded.float().nan_to_num(7.0))
    assert np.array_equal(np.isnan(widen(narrow(x.numpy()))), x.isnan().numpy())


@jit
def cast_kernel(x, out, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + places, mask=places < n, other=0.0)
    tl.store(out + places, value.to(out.dtype.element_ty), mask=places < n)


@jit
def product_kernel(a, b, c, out, N: tl.constexpr):
    places = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    total = tl.dot(tl.load(a + places), tl.load(b + places), tl.load(c + places), input_precision="ieee")
    tl.store(out + places, total)


@jit
def arithmetic_kernel(a, b, out, N: tl.constexpr):
    places = tl.arange(0, N)
    x, y = tl.load(a + places), tl.load(b + places)
    tl.store(out + places, tl.where(x > y, x * y, x - y))


@jit
def sum_kernel(a, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(a + tl.arange(0, N)), 0))


def poisoned(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def normal(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


needs_kernels = pytest.mark.skipif(not is_available(device), reason="Triton is an extra, absent on this platform")


@needs_kernels
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # to infinity in float16, as it should
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
def test_casts_are_those_of_torch(source, target):
    x = special_values().to(device, source)
    out = poisoned(x.numel(), dtype=target)
    cast_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), 1024)
    torch.testing.assert_close(out, x.to(target), rtol=0, atol=0, equal_nan=True)


@needs_kernels
def test_product_of_bfloat16_matrices():
    """It multiplied bit patterns. Products of bfloat16 are exact in float32, so only the sum's rounding is left."""
    a, b = (normal(32, 32, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    c, out = normal(32, 32, seed=2), poisoned(32, 32)
    product_kernel[(1,)](a, b, c, out, 32)
    expected = a.double() @ b.double() + c
    assert ((out - expected).norm() / expected.norm()).item() < 32 * 2**-24


@needs_kernels
def test_arithmetic_of_bfloat16():
    """Each operation on the values, rounded once, as in torch; a comparison gives truth values."""
    a, b = (normal(1024, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    out = poisoned(1024, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](a, b, out, 1024)
    assert torch.equal(out, torch.where(a > b, a * b, a - b))


@interpreted
def test_reductions_of_bfloat16_are_refused():
    with pytest.raises(Exception, match="reduction or scan of bfloat16 is not interpreted"):
        sum_kernel[(1,)](normal(16, dtype=torch.bfloat16), poisoned(1, dtype=torch.bfloat16), 16)


@interpreted
def test_install_changes_the_interpreter_once():
    from triton.runtime.interpreter import InterpreterBuilder

    before = InterpreterBuilder.create_dot
    install()
    assert InterpreterBuilder.create_dot is before and not hasattr(before.__wrapped__, "__wrapped__")


# ---- parts of kernels ----


@jit
def copy_kernel(x, out, first, ROWS, COLUMNS, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tile = load_tile(x, first + o, o, o < ROWS, o < COLUMNS, STRIDE)
    store_tile(out, tile, o, o, o < BLOCK, o < BLOCK, BLOCK)


@needs_kernels
def test_tiles_are_zero_outside_of_their_masks():
    x, out = normal(5, 7), poisoned(16, 16, dtype=torch.bfloat16)
    copy_kernel[(1,)](x, out, 1, 3, 6, 7, 16)
    want = torch.zeros_like(out)
    want[:3, :6] = x[1:4, :6]
    assert torch.equal(out, want)


@needs_kernels
def test_offsets_of_more_than_32_bits():
    """Rows and strides fit into 32 bits, and their product, 2³¹, does not. Memory that nothing touches is not used."""
    stride, first = 2**20, 2**11
    x, out = torch.empty(stride * first + 32, dtype=torch.uint8, device=device), poisoned(16, 16)
    x[-32:] = torch.arange(32)
    copy_kernel[(1,)](x, out, first, 1, 16, stride, 16)
    assert torch.equal(out[0], torch.arange(16.0, device=device)) and not out[1:].any()


@jit
def dot_kernel(a, b, out, N: tl.constexpr):
    o = tl.arange(0, N)
    inside = o < N
    total = dot(load_tile(a, o, o, inside, inside, N), load_tile(b, o, o, inside, inside, N))
    store_tile(out, total, o, o, inside, inside, N)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dot_rounds_no_operand_and_sums_in_float32(dtype):
    """TF32 would be 2⁻¹¹ off."""
    a, b, out = normal(64, 64, dtype=dtype), normal(64, 64, seed=1, dtype=dtype), poisoned(64, 64)
    dot_kernel[(1,)](a, b, out, 64)
    expected = a.double() @ b.double()
    assert ((out - expected).norm() / expected.norm()).item() < 64 * 2**-24
