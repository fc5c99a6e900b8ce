"""Launches of compiled kernels that are held in a dict: a fraction of the Python that `kernel[grid]` takes.

Triton finds the compiled kernel of a call by binding, describing and printing all arguments. Here the key is what
Triton compiles for, and nothing else: the device; of pointers the dtype, whether they are None, and whether they are
multiples of 16 bytes; of integers whether 64 bits are needed and, unless the kernel does not specialise them, whether
they are 1 and whether 16 divides them; the compile-time arguments, warps and stages. What does not have one is launched
by Triton, which compiles it or knows it, and says which it is.

Triton launches everything itself where a profiler listens (`triton.knobs.runtime.launch_enter_hook`), on ROCm, where
it compiles for sizes of tensors too, in its interpreter, and in releases whose compiled kernels are called otherwise.
Not looked at after the first launch: settings of Triton (`TRITON_DEBUG` and its like).

Device and stream are those that are current at the call, as for Triton; threads may share all this, since entries of
the dicts are only added, and equal.
"""

from operator import getitem
from typing import Any

import torch

try:
    from triton import knobs
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction
except ImportError:  # Triton before 3.4
    knobs = None

# where Triton launches everything
_ABSENT = knobs is None or torch.version.hip is not None


class _Kinds(dict[int, int]):
    """A number for what Triton makes of an integer."""

    def __init__(self, specialised: bool) -> None:
        super().__init__()
        self.specialised = specialised

    def __missing__(self, value: int) -> int:
        assert type(value) is int, f"expected an integer, got {value!r}"
        if len(self) > 10_000:  # strides of ever other batches
            self.clear()
        kind = 2 if value >= 2**63 else 1 if not -(2**31) <= value < 2**31 else 0
        if self.specialised:
            kind += 8 if value == 1 else 4 if value % 16 == 0 else 0
        self[value] = kind
        return kind


_KINDS = {specialised: _Kinds(specialised) for specialised in (False, True)}


class _Held:
    """The compiled kernels of one function: pointers first, whose names end with `_ptr`, integers, and constexprs."""

    def __init__(self, kernel: Any) -> None:
        run_time = [parameter for parameter in kernel.params if not parameter.is_constexpr]
        self.pointers = sum(parameter.name.endswith("_ptr") for parameter in run_time)
        self.kinds = [_KINDS[not parameter.do_not_specialize] for parameter in run_time[self.pointers :]]
        self.names = [parameter.name for parameter in kernel.params]
        assert [parameter.num for parameter in run_time] == list(range(len(run_time)))
        assert all(name.endswith("_ptr") for name in self.names[: self.pointers])
        self.compiled: dict[Any, tuple[Any, ...]] = {}


_held: dict[Any, _Held] = {}


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel with its run-time arguments in order, and its constexprs, warps and stages by name."""
    if (
        _ABSENT
        or type(kernel) is not JITFunction
        or kernel.pre_run_hooks
        or getattr(knobs.runtime.launch_enter_hook, "calls", True)
        or getattr(knobs.runtime.launch_exit_hook, "calls", True)
    ):
        kernel[grid](*arguments, **options)
        return
    held = _held.get(kernel.fn)
    if held is None:
        held = _held.setdefault(kernel.fn, _Held(kernel))
    pointers, addresses = arguments[: held.pointers], 0
    dtypes: list[torch.dtype | None] = []
    for tensor in pointers:
        if tensor is None:
            dtypes.append(None)
        else:
            addresses |= tensor.data_ptr()
            dtypes.append(tensor.dtype)
    odd = addresses & 15 and tuple(tensor is not None and tensor.data_ptr() & 15 for tensor in pointers)
    device = driver.active.get_current_device()
    key = (
        device, odd, *dtypes, *map(getitem, held.kinds, arguments[held.pointers :]), *options, *options.values()
    )  # fmt: skip
    found = held.compiled.get(key)
    if found is not None:
        launch, function, metadata, constants = found
        stream = driver.active.get_current_stream(device)
        launch(*grid, *_ONES[len(grid)], stream, function, metadata, None, None, None, *arguments, *constants)
        return
    assert len(arguments) == held.pointers + len(held.kinds), "constexprs by name, all others in order"
    compiled = kernel[grid](*arguments, **options)
    if isinstance(compiled, CompiledKernel):
        constants = tuple(options[name] for name in held.names[len(arguments) :])
        held.compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, constants


# what a grid of so many axes lacks
_ONES = ((1, 1, 1), (1, 1), (1,), ())
