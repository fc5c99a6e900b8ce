"""Triton's interpreter made stricter, faster, and as much like hardware as is asked for.

Assertions fire; `tl.dot`, `tl.fma` and bfloat16 round as devices do. What else kernels find on NVIDIA's hardware are
options.
"""

import functools
import math
import types
from collections.abc import Callable

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.kernels.gpu import tensor_cores

# as Triton has them: `install` replaces some
_PLAIN = dict(vars(InterpreterBuilder))


def install(*, truncating: bool = False, fmax: bool = False, ftz: bool = False, shuffled: bool = False) -> None:
    """Change the interpreter of this process; the options are those of `methods`."""
    # what can be interpreted is too small to overflow, and looking for that took a fifth of the time
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    for name, method in methods(truncating=truncating, fmax=fmax, ftz=ftz, shuffled=shuffled).items():
        setattr(InterpreterBuilder, name, method)
    _know_dtypes()
    _patch_once()


def methods(
    *, truncating: bool = False, fmax: bool = False, ftz: bool = False, shuffled: bool = False
) -> dict[str, Callable]:
    """The methods of Triton's builder that are replaced, by name.

    Args:
        truncating: products in TF32 and 3xTF32 lose bits towards zero, as Hopper's tensor cores do.
        fmax: maxima and minima of two ignore NaN, as `max.f32` does, unless the kernel asks for `PropagateNan.ALL`.
            Those of a whole axis do so in Triton's interpreter already.
        ftz: an exponential that is a denormal float32 is 0, as `ex2.approx.ftz` has it. Nothing else that the kernels
            use flushes: the PTX of Triton 3.6.0 and 3.7.1 has logarithms of denormals, and `add`, `mul` and `fma` keep
            them.
        shuffled: the programs of a grid run in random order, the same one for every grid of so many programs; none
            comes in its own place.
    """
    return {
        "create_dot": _dot(tensor_cores.truncating if truncating else tensor_cores.rounding),
        "cast_impl": _cast,
        "create_fma": _fused,
        "create_maxnumf": _ignoring_nan(np.fmax) if fmax else _PLAIN["create_maxnumf"],
        "create_minnumf": _ignoring_nan(np.fmin) if fmax else _PLAIN["create_minnumf"],
        "create_exp2": _exp2_flushed if ftz else _PLAIN["create_exp2"],
        "set_grid_dim": _set_grid_dim_shuffled if shuffled else _PLAIN["set_grid_dim"],
        "set_grid_idx": _set_grid_idx_shuffled if shuffled else _PLAIN["set_grid_idx"],
    }


def _dot(multiply: Callable) -> Callable:
    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if a.dtype.scalar == tl.bfloat16:
            raise TypeError("tl.dot of bfloat16 is wrong in the interpreter: convert the operands to float32")
        if a.dtype.scalar != tl.float32:
            return _PLAIN["create_dot"](self, a, b, d, input_precision, max_num_imprecise_acc)
        return TensorHandle(multiply(a.data, b.data, d.data, input_precision), d.dtype.scalar)

    return create_dot


@np.errstate(over="ignore", invalid="ignore")
def _fused(self, x, y, z):
    """A product that is not rounded before the sum."""
    if x.dtype.scalar != tl.float32:
        return _PLAIN["create_fma"](self, x, y, z)
    exact = x.data.astype(np.float64) * y.data + z.data
    return TensorHandle(exact.astype(np.float32), x.dtype.scalar)


def _cast(self, src, dst_type):
    if (src.dtype.scalar, dst_type.scalar) == (tl.float32, tl.bfloat16):
        return TensorHandle(_bfloat16(src.data), dst_type.scalar)
    if src.dtype.scalar == tl.bfloat16 and dst_type.scalar in (tl.float32, tl.float64):  # Triton loses denormal numbers
        bits = np.asarray(src.data, np.uint16).astype(np.uint32) << 16
        kind = np.float32 if dst_type.scalar == tl.float32 else np.float64
        return TensorHandle(bits.view(np.float32).astype(kind), dst_type.scalar)
    return _PLAIN["cast_impl"](self, src, dst_type)


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of a float32 rounded to bfloat16, half to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def _ignoring_nan(choose: np.ufunc) -> Callable:
    return lambda self, lhs, rhs: self.binary_op(lhs, rhs, choose)


def _exp2_flushed(self, arg):
    found = _PLAIN["create_exp2"](self, arg)
    if found.data.dtype == np.float32:
        found.data = np.where(found.data < np.finfo(np.float32).tiny, np.float32(0), found.data)
    return found


def _set_grid_dim_shuffled(self, *dim):
    _PLAIN["set_grid_dim"](self, *dim)
    count = math.prod(dim)
    places = np.random.default_rng(count).permutation(count)
    # each takes the place of the one drawn before it
    order = np.empty_like(places)
    order[places] = np.roll(places, 1)
    self.order = np.stack(np.unravel_index(order, dim), -1).reshape(*dim, 3).tolist()


def _set_grid_idx_shuffled(self, x, y, z):
    _PLAIN["set_grid_idx"](self, *self.order[x][y][z])


def _know_dtypes() -> None:
    """Look up the dtype of a scalar once, instead of in a dictionary made for every value."""
    plain = interpreter._get_np_dtype
    known = functools.cache(plain)

    def np_dtype(kind):
        scalar = kind.scalar
        return plain(kind) if isinstance(scalar, tl.pointer_type) else known(scalar)

    interpreter._get_np_dtype = np_dtype


def _patch_once() -> None:
    """Replace the language once a launch, not at every call of one function by another, which took half of the time."""
    launch, patch, patched = interpreter.GridExecutor.__call__, interpreter._patch_lang, set()

    def launch_afresh(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    def patch_lang(fn):
        languages = {value for value in fn.__globals__.values() if isinstance(value, types.ModuleType)} & {tl, tl.core}
        if languages <= patched:
            return None
        patched.update(languages)
        return patch(fn)

    interpreter.GridExecutor.__call__ = launch_afresh
    interpreter._patch_lang = patch_lang
