# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""bfloat16 in Triton's CPU interpreter, which keeps it as raw 16-bit integers and computes with those.

`install()` makes products and arithmetic take the values instead, and casts round to nearest even, as a GPU does. It
changes private parts of Triton: `constraints.txt` names the version that it is for.
"""

import functools
from collections.abc import Callable

import numpy as np


def widen(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 bit patterns."""
    return (np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """The bit patterns of float32 values rounded to bfloat16, ties to even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    low, last = bits & 0xFFFF, (bits >> 16) & 1
    up = (low > 0x8000) | ((low == 0x8000) & (last == 1))  # may carry into the exponent: the next float, or infinity
    rounded = (bits >> 16) + up
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def install() -> None:
    """Correct the interpreter of this process, once."""
    from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps

    if hasattr(InterpreterBuilder.create_dot, "__wrapped__"):
        return
    for name in ("binary_op", "unary_op", "ternary_op", "create_fma", "create_rsqrt", "create_erf", "create_dot"):
        setattr(InterpreterBuilder, name, _with_values(getattr(InterpreterBuilder, name)))
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(InterpreterBuilder, name, _with_rounding(getattr(InterpreterBuilder, name)))
    for operations in (ReduceOps, ScanOps):
        operations.apply_impl = _without_bfloat16(operations.apply_impl)


def _is_bfloat16(x: object) -> bool:
    import triton.language as tl

    return hasattr(x, "dtype") and x.dtype.scalar == tl.bfloat16


def _with_values(method: Callable) -> Callable:
    """The method on the values of bfloat16 operands. A number that it computes has the type of the last operand."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    @functools.wraps(method)
    def wrapped(self, *arguments):
        operands = [x for x in arguments if isinstance(x, TensorHandle)]
        if not any(map(_is_bfloat16, operands)):
            return method(self, *arguments)
        values = (
            TensorHandle(widen(x.data), tl.float32) if isinstance(x, TensorHandle) and _is_bfloat16(x) else x
            for x in arguments
        )
        result = method(self, *values)
        if _is_bfloat16(operands[-1]) and result.data.dtype != np.bool_:  # a comparison gives truth values
            return TensorHandle(narrow(result.data), tl.bfloat16)
        return result

    return wrapped


def _with_rounding(method: Callable) -> Callable:
    """A cast from bfloat16 takes its value, one to bfloat16 rounds to nearest even unless it asks to round to zero."""
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import TensorHandle

    @functools.wraps(method)
    def wrapped(self, source, target, *rounding):
        narrows = target.scalar == tl.bfloat16
        if _is_bfloat16(source) and not narrows:
            source = TensorHandle(widen(source.data), tl.float32)
            return source if target.scalar == tl.float32 else method(self, source, target, *rounding)
        if narrows and not _is_bfloat16(source) and ir.ROUNDING_MODE.RTZ not in rounding:
            return TensorHandle(narrow(source.data), tl.bfloat16)
        return method(self, source, target, *rounding)

    return wrapped


def _without_bfloat16(method: Callable) -> Callable:
    """A reduction or scan that refuses bfloat16: on a GPU it is computed in float32, and its order is another."""

    @functools.wraps(method)
    def wrapped(self, operands):
        if any(map(_is_bfloat16, operands)):
            raise TypeError("a reduction or scan of bfloat16 is not interpreted: cast to float32 first")
        return method(self, operands)

    return wrapped
