# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What all Triton kernel files share; it imports, and so do they, where Triton is not installed.

A kernel file `ttt_triton_x.py` imports torch, this module and torch modules beside it. It begins with `from __future__
import annotations`, so that without Triton the `tl.constexpr` of a signature is never looked up:

    _NAMESPACE = namespace(__file__)

    @jit
    def _scale_kernel(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr): ...

    @torch.library.custom_op(f"{_NAMESPACE}::scale", mutates_args=())
    def _scale(x: Tensor, factor: float) -> Tensor:
        with kernel_context(x):
            ...

    register_vmap(_scale)  # and register_fake, register_autograd with a backward that is an operator of its own

    def aot_cases() -> Iterator[AOTCase]:
        types = {"x": "*bf16", "out": "*bf16", "n": "i32"}
        yield AOTCase(_scale_kernel, types, {"FACTOR": 2.0, "BLOCK": 1024}, num_warps=4, num_stages=2)

`aot_cases()` yields every kernel with every configuration that the file launches it with, for the representative widths
and types. `benchmarks/aot.py` compiles each case for each of its targets, without a GPU, and checks what comes out;
pointers and integers count there as multiples of 16, as those of usual tensors and lengths are.
A fast path imports a kernel file inside a function, so that importing the package does not import Triton.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

# Triton reads the variable when it decorates a kernel: set it before the first import of Triton.
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
LEAST_SHARED_MEMORY = 99 * 1024  # bytes a program: the kernels of sm_80 take up to 80 KiB, and GPUs have 64 KiB or this


class AOTCase(NamedTuple):
    """A kernel as it is launched, to be compiled ahead of time."""

    kernel: Any  # what @jit returned
    types: dict[str, str]  # of each argument that is no constexpr: "*bf16", "*fp16", "*fp32", "i32", "i64", "fp32"
    constexprs: dict[str, Any]  # of all others; a pointer that may be None and is goes here, as None
    num_warps: int
    num_stages: int
    targets: tuple[str, ...] = TARGETS  # those that are launched with this configuration


def jit(function: Callable) -> Any:
    """`triton.jit`; without Triton the function itself, which cannot be launched."""
    return function if triton is None else triton.jit(function)


def namespace(file: str) -> str:
    """The namespace of a file's operators: "hf_ttt_" and a hash of its source and that of the kernel files beside it.

    Another revision, whose operators would replace these if they had their names, has another one.
    """
    sources = sorted({Path(file), *Path(file).parent.glob("ttt_triton*.py")})
    return f"hf_ttt_{hashlib.sha256(b''.join(source.read_bytes() for source in sources)).hexdigest()[:8]}"


def block(width: int) -> int:
    """The next power of two ≥ 16: a block, or an operand of a dot, that holds `width` channels."""
    return max(16, 1 << (width - 1).bit_length())


def is_available(device: torch.device | str) -> bool:
    """Whether kernels run on this device: Triton is there, and the device is a GPU with enough shared memory, "meta",
    where nothing runs, or kernels are interpreted."""
    device = torch.device(device)
    if triton is None:
        return False
    return INTERPRETED or device.type == "meta" or (device.type == "cuda" and not is_too_small(device))


def is_too_small(device: torch.device) -> bool:
    """Whether a GPU of NVIDIA has less shared memory than the kernels of the oldest target take."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    properties: Any = torch.cuda.get_device_properties(device)  # whose type hints lack the field
    return properties.shared_memory_per_block_optin < LEAST_SHARED_MEMORY


def check_available(device: torch.device | str | None = None) -> None:
    """Does nothing where kernels run on this device; None for the best of this machine.

    Raises:
        ImportError: where they do not, with what to do.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    otherwise = "use backend='torch' (ttt_backend='torch' in a model)"
    if triton is None:
        raise ImportError(
            f"backend='triton' needs Triton, which is not installed: run `pip install triton`, or {otherwise}"
        )
    if not is_available(device) and torch.device(device).type == "cuda":
        raise ImportError(
            f"backend='triton' needs {LEAST_SHARED_MEMORY} bytes of shared memory a program, which "
            f"{torch.cuda.get_device_name(device)} has not (compute capability 8.0 and later have): {otherwise}"
        )
    if not is_available(device):
        raise ImportError(
            f"backend='triton' needs a CUDA or ROCm device instead of {str(device)!r}: move the model there, or "
            f"{otherwise}. With TRITON_INTERPRET=1 set before Python starts, the CPU interprets kernels, slowly"
        )


def check_types(*tensors: Tensor | None) -> None:
    """Does nothing for types that kernels take.

    Raises:
        ValueError: for float64.
    """
    for x in tensors:
        if x is not None and x.dtype == torch.float64:
            raise ValueError(
                "backend='triton' got a float64 tensor, but its kernels accumulate in float32: "
                "use float32, bfloat16 or float16, or backend='torch' (ttt_backend='torch' in a model)"
            )


@contextlib.contextmanager
def kernel_context(x: Tensor) -> Iterator[None]:
    """For the body of an operator: autocast off, and the GPU that holds x is the current one."""
    with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
        if x.is_cuda:
            with torch.cuda.device(x.device):
                yield
        else:
            yield


def register_vmap(operator: Any) -> None:
    """Lets `torch.vmap` call an operator of tensors: once for each example, whose results are stacked."""

    def batched(info, in_dims, *args):
        results = []
        for i in range(info.batch_size):
            given = [x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True)]
            results.append(operator(*given))
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    operator.register_vmap(batched)


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """Each tensor in one piece, as kernels without strides take it."""
    return [None if x is None else x.contiguous() for x in tensors]


def launch(kernel: Any, programs: int, tiles: Any, *args, **constexprs) -> None:
    """Launch so many programs, if any, with `num_warps` and `num_stages` of `tiles`."""
    if programs:
        kernel[(programs,)](*args, **constexprs, num_warps=tiles.num_warps, num_stages=tiles.num_stages)


def processors(device: torch.device) -> int:
    """How many programs keep the device busy."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b for batches of matrices, accumulated and returned in float32."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda and torch.version.hip is None and hasattr(torch.ops.aten.bmm, "dtype"):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


# ----------------------------------------------------------------------------------------------------- parts of kernels


@jit
def load_tile(base, rows, columns, row_mask, column_mask, STRIDE: tl.constexpr):
    """[rows, columns] of a matrix whose rows are STRIDE elements apart; 0 outside the masks."""
    mask = row_mask[:, None] & column_mask[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * STRIDE + columns[None, :], mask=mask, other=0.0)


@jit
def store_tile(base, x, rows, columns, row_mask, column_mask, STRIDE: tl.constexpr):
    """The counterpart of `load_tile`, in the type of the matrix."""
    mask = row_mask[:, None] & column_mask[None, :]
    place = base + rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    tl.store(place, x.to(base.dtype.element_ty), mask=mask)


@jit
def dot(a, b):
    """a b, accumulated in float32; float32 operands are multiplied as such, not in TF32."""
    return tl.dot(a, b, input_precision="ieee")
