"""Checks of the public functions' arguments: kinds, sizes and values, before anything is computed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .internals import is_fake
from .kernels import on_gpu
from .kernels.chain import check_ends
from .kernels.weights import Weights
from .tensors import is_readable

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Lengths = Tensor | int | Sequence[int] | Sequence[Sequence[int]]


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values: it is neither on the meta device nor a fake one."""
    return not (tensor.is_meta or is_fake(tensor))


def check_has_values(name: str, value: Tensor) -> None:
    """Check for a tensor whose values can be read, where a result depends on them."""
    if value.is_meta:
        raise ValueError(f"{name}: expected a device that holds values, got meta")
    if not has_values(value):
        raise ValueError(f"{name}: expected a tensor that holds values, got a fake one")


def check_is_tensor(name: str, value: object) -> None:
    """Check for a tensor of any dtype and shape."""
    if not isinstance(value, Tensor):
        remedies = {"ndarray": f"; pass torch.from_numpy({name})", "list": f"; pass torch.tensor({name})"}
        kind = type(value).__name__
        raise TypeError(f"{name}: expected a torch.Tensor, got {kind}{remedies.get(kind, '')}")


def check_dense(name: str, value: Tensor) -> None:
    """Check for a tensor that is neither sparse nor nested."""
    check_is_tensor(name, value)
    if value.layout != torch.strided or value.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got {'a nested one' if value.is_nested else value.layout}")


def check_integers(name: str, value: Tensor) -> None:
    """Check for a dense tensor of integers."""
    check_dense(name, value)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name}: expected integers, got {str(value.dtype)[6:]}")


def check_device(name: str, value: Tensor, like: Tensor) -> None:
    """Check for a tensor on the device of `like`."""
    if value.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, got {value.device}")


def check_tensor(name: str, value: Tensor, axes: int, like: Tensor | None = None) -> None:
    """Check for a dense floating tensor with at least `axes` axes, on the device of `like` unless that is None."""
    check_dense(name, value)
    if value.dtype not in FLOATS:
        remedy = "" if value.is_complex() else f"; pass {name}.float()"
        raise TypeError(f"{name}: expected float32, float64, bfloat16 or float16, got {str(value.dtype)[6:]}{remedy}")
    if value.dim() < axes:
        raise ValueError(f"{name}: expected at least {axes} axes, got shape {list(value.shape)}")
    if like is not None:
        check_device(name, value, like)


def batch_sizes(batch: list[int], axes: int) -> list[tuple[int, ...]]:
    """Sizes that each of an operand's leading axes may have, 1 or that of the batch, aligned at the right."""
    return [(1, size) for size in batch[max(0, len(batch) - axes) :]]


def check_sizes(
    name: str, value: Tensor, allowed: Sequence[tuple[int, ...]], x: Tensor, *, steps: int | None = None
) -> None:
    """Check the size of each axis against those that are allowed; `steps` is the axis of steps, if there is one."""
    shape = value.shape
    if len(allowed) == len(shape) and all(size in sizes for size, sizes in zip(shape, allowed, strict=True)):
        return
    texts = []
    for axis, sizes in enumerate(allowed):
        texts.append(" or ".join(str(size) for size in sorted(set(sizes), reverse=axis == steps)))
    expected = f"expected shape [{', '.join(texts)}] to go with x {list(x.shape)}"
    per_sequence = steps == 0 and x.dim() == 3 and tuple(shape) == (len(x), x.shape[-1], x.shape[-1])
    remedy = f"; a matrix for each sequence is {name}[:, None]" if per_sequence else ""
    raise ValueError(f"{name}: {expected}, got {list(shape)}{remedy}")


def check_stack(stack: Tensor) -> None:
    """Check for a stack of at least one square matrix."""
    check_tensor("stack", stack, 3)
    s, rows, columns = stack.shape[-3:]
    if s < 1 or rows != columns:
        raise ValueError(f"stack: expected at least one square matrix [..., s, c, c], got {list(stack.shape)}")


def check_integer(name: str, value: object, least: int | None = None) -> None:
    """Check for an int, no bool, that is not below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name}: expected {least} or more, got {value}")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Check for one of the choices."""
    if value not in choices:
        texts = [repr(choice) for choice in choices]
        expected = " or ".join(texts) if len(texts) < 3 else f"one of {', '.join(texts)}"
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def check_alone(name: str, value: object, expected: str, excluded: dict[str, bool]) -> None:
    """Check that an option is not combined with an argument that excludes it; `excluded` says which are present."""
    for argument, is_present in excluded.items():
        if is_present:
            raise ValueError(f"{name}: expected {expected} with {argument}, got {value!r}")


def check_float_dtype(name: str, value: torch.dtype | None) -> None:
    """Check for a floating dtype, or None."""
    if value is not None and value not in FLOATS:
        got = str(value)[6:] if isinstance(value, torch.dtype) else repr(value)
        raise TypeError(f"{name}: expected float32, float64, bfloat16, float16 or None, got {got}")


def tensor_of(lengths: Lengths, name: str = "lengths") -> Tensor:
    """Lengths as a tensor; numbers become one on the host."""
    if isinstance(lengths, Tensor):
        return lengths
    try:
        return torch.tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected integers, got {lengths!r}") from error


def as_lengths(
    lengths: Lengths,
    x: Tensor,
    device: torch.device | None = None,
    *,
    of: tuple[str, Tensor] | None = None,
    least: int = 1,
) -> Tensor:
    """Lengths 1..v of the shape of the first batch axes, checked, as int64 [*B] on `device` (by default that of x).

    `given`: the name and value of what the caller passed in the place of x. `least`: 0 in a piece of a stream.
    """
    batch, v, device = x.shape[:-2], x.shape[-2], device or x.device
    # values of a tensor on x's device are checked later, by the operator: here the tensor may be traced or mapped
    on_host = not isinstance(lengths, Tensor) or (lengths.device.type == "cpu" and device.type != "cpu")
    lengths = tensor_of(lengths)
    check_dense("lengths", lengths)
    if lengths.is_meta:
        check_device("lengths", lengths, x)
    if lengths.numel():
        check_integers("lengths", lengths)
    axes = lengths.dim()
    if lengths.shape != batch[:axes]:
        prefixes = " or ".join(str(list(batch[:end])) for end in range(1, len(batch) + 1)) or "[]"
        name, value = of or ("x", x)
        text = f"to go with {name} {list(value.shape)}, got {list(lengths.shape)}"
        raise ValueError(f"lengths: expected shape {prefixes} {text}")
    if on_host and not torch.compiler.is_compiling() and has_values(lengths):
        check_ends(lengths, v, least)
    lengths = lengths.to(device, torch.int64)
    return lengths.reshape(lengths.shape + (1,) * (len(batch) - axes)).expand(batch)


def check_lengths(lengths: Tensor, v: int) -> None:
    """Check that lengths lie from 1 to v, except on a GPU, which would wait, and without values."""
    if has_values(lengths) and not on_gpu(lengths):
        check_ends(lengths, v)


def checked_lengths(lengths: Lengths | None, x: Tensor, least: int = 1) -> Tensor | None:
    """None, or lengths as `as_lengths` returns them, checked where values can be read."""
    if lengths is None:
        return None
    ends = as_lengths(lengths, x, least=least)
    if is_readable(ends):
        check_ends(ends, x.shape[-2], least)
    return ends


def check_flag(name: str, value: object) -> None:
    """Check for True or False; numbers and strings are refused."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def check_values(*operands: Weights) -> None:
    """Check for NaN and +inf among the entries that are read, some at a time."""
    for operand in operands:
        check_has_values(operand.name, operand.values)
    for operand in operands:
        nan = infinite = 0
        for _, _, part, inside in operand.parts():
            nan += int((part.isnan() & inside).sum())
            infinite += int(((part == torch.inf) & inside).sum())
        if nan:
            raise ValueError(f"{operand.name}: expected no NaN, got {nan}")
        if infinite:
            raise ValueError(f"{operand.name}: expected no +inf, got {infinite}")
