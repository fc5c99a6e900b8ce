"""Triton's interpreter made strict and faster: assertions fire, and it rounds and truncates as devices do."""

import functools
import types

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

# Triton's own methods, which `install` replaces
_DOT, _CAST = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl


def install() -> None:
    """Changes the interpreter of this process."""
    # interpreted sizes are too small to overflow, and looking for that took a fifth of the time
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    InterpreterBuilder.create_dot, InterpreterBuilder.create_fma, InterpreterBuilder.cast_impl = _dot, _fma, _cast
    _patch_once()


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    kind = a.dtype.scalar
    if kind == tl.bfloat16:
        raise TypeError("tl.dot of bfloat16 is wrong in the interpreter: convert the operands to float32")
    if kind != tl.float32 or input_precision == ir.INPUT_PRECISION.IEEE:
        return _DOT(self, a, b, d, input_precision, max_num_imprecise_acc)
    if input_precision != ir.INPUT_PRECISION.TF32:
        raise TypeError(f"tl.dot: expected input_precision ieee or tf32, got {input_precision}; call scaled.multiply")
    product = _truncated(a.data) @ _truncated(b.data)
    return TensorHandle((product + d.data).astype(np.float32), d.dtype.scalar)


def _truncated(x):
    """What a tensor core sees of a float32, in float64: the low 13 bits are ignored."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32).astype(np.float64)


@np.errstate(over="ignore", invalid="ignore")
def _fma(self, x, y, z):
    """In float32 the product is not rounded before the sum."""
    exact = x.data.astype(np.float64) * y.data + z.data
    return TensorHandle(exact.astype(x.data.dtype), x.dtype.scalar)


def _cast(self, src, dst_type):
    """Triton loses denormal numbers from bfloat16, and truncates to it."""
    kinds = src.dtype.scalar, dst_type.scalar
    if kinds == (tl.float32, tl.bfloat16):
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16  # half to even
        return TensorHandle(np.where(np.isnan(src.data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)
    if kinds in ((tl.bfloat16, tl.float32), (tl.bfloat16, tl.float64)):
        value = (np.asarray(src.data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        return TensorHandle(value.astype(interpreter._get_np_dtype(dst_type)), dst_type.scalar)
    return _CAST(self, src, dst_type)


def _patch_once() -> None:
    """Replace the language once a launch, not at every call of one function by another, which took half of the time."""
    launch, patch, patched = interpreter.GridExecutor.__call__, interpreter._patch_lang, set()

    @functools.cache
    def languages(fn):
        return {value for value in fn.__globals__.values() if isinstance(value, types.ModuleType)} & {tl, tl.core}

    def launch_again(self, *args, **kwargs):
        patched.clear()
        with np.errstate(all="ignore"):  # devices do not warn of an overflow
            return launch(self, *args, **kwargs)

    def patch_lang(fn):
        if not languages(fn) <= patched:
            patched.update(languages(fn))
            return patch(fn)

    interpreter.GridExecutor.__call__ = launch_again
    interpreter._patch_lang = patch_lang
