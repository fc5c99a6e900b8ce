"""The kernels that launchers would launch on a device that is not here, with the arguments that they would pass.

Launchers run on tensors without memory that say they are on a device, which says that it is of the target.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from logchain.kernels.gpu import launch
from tests.kernels.gpu.compiled import Case

# what devices of each target say: their compute capability, and how many multiprocessors they have
DEVICES = {"sm_80": ((8, 0), 108), "sm_86": ((8, 6), 84), "sm_90": ((9, 0), 132), "gfx942": ((9, 4), 304)}

_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


class _OnDevice(TorchFunctionMode):
    """Tensors that are made have no memory, and all say that they are on a device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function == torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        if function == torch.Tensor.data_ptr:  # no two begin at one address
            return 16 * id(args[0])
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


@contextmanager
def on(target: str) -> Iterator[list[tuple[tuple, dict]]]:
    """The launches to come: kernel, grid and arguments, and options. Nothing is launched."""
    capability, processors = DEVICES[target]
    properties = mock.Mock(multi_processor_count=processors)
    found = []
    with (
        mock.patch("torch.cuda.get_device_capability", lambda *_: capability),
        mock.patch("torch.cuda.get_device_properties", lambda *_: properties),
        mock.patch("torch.version.hip", None if target.startswith("sm_") else "7.0"),
        mock.patch.object(launch, "run", lambda *launched, **options: found.append((launched, options))),
        _OnDevice(),
    ):  # fmt: skip
        yield found


def recorded(target: str, name: str, call: Callable[[], object], **changes: Any) -> list[Case]:
    """The cases of all launches of a call, which makes its tensors; `changes` are those of `Case`.

    A case is called after its kernel, and after `name`.
    """
    with on(target) as launches:
        call()
    return [_case(name, *launched, options, **changes) for launched, options in launches]


def _case(name, kernel, grid, *values, **changes) -> Case:
    *values, options = values
    module, function = kernel.fn.__module__.split(".")[-1], kernel.fn.__name__.removesuffix("_kernel").strip("_")
    title = f"{module}_{function} {name}".strip()
    arguments, constants, divisible, size = {}, {}, [], 0
    for parameter, value in zip(kernel.params, values, strict=False):
        specialised = not parameter.do_not_specialize
        if value is None or (type(value) is int and value == 1 and specialised):
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            arguments[parameter.name] = f"*{_TYPES[value.dtype]}"
            divisible.append(parameter.name)  # as all memory that torch allocates
            entries = (length for length, stride in zip(value.shape, value.stride(), strict=True) if stride)
            size += value.element_size() * math.prod(entries)
        else:
            arguments[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if specialised and value % 16 == 0:
                divisible.append(parameter.name)
    constants |= {name: value for name, value in options.items() if name in kernel.arg_names}
    fields = {"warps": "num_warps", "stages": "num_stages", "registers": "maxnreg"}
    chosen = {field: options[option] for field, option in fields.items() if option in options}
    known = {"dot": None, "grid": grid, "bytes": size}
    return Case(title, kernel, arguments, constants, tuple(divisible), **known | chosen | changes)
