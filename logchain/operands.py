"""The operands of a chain: as the kernels take them, their dtype, and whether gradients or transforms are active."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .arguments import check_lengths
from .kernels import on_gpu as on_gpu
from .kernels.chain import Chain
from .kernels.weights import NegativeWeights
from .layout import Layout

# the dispatch key of the vmap within `torch.autograd.grad(..., is_grads_batched=True)`
_OLD_VMAP = torch._C._dispatch_key_parse("VmapMode")

_PLAIN = {torch.Tensor, torch.nn.Parameter, bool, int, type(None)}

# entries that are compared with 0 at a time, since a memory-mapped tensor may exceed the memory
_COMPARED = 2**22


class Operands(NamedTuple):
    """The operands of all functions of a chain, see `logchain.product`; `lengths` [*B] have been checked."""

    x: Tensor
    bulk: Tensor
    p0: Tensor
    lengths: Tensor | None
    log_params: bool


def chain_of(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    log_params: bool,
    *,
    by_log: bool = False,
    whole: bool = False,
) -> tuple[Layout, Chain]:
    """The layout and the chain, cut at the longest length unless `whole` or on a GPU, where lengths are not read."""
    layout = Layout.of(x, bulk)
    ends, v = None, x.shape[-2]
    if lengths is not None:
        ends = layout.sequences(lengths)[..., None]
        if not kernels.on_gpu(x):
            check_lengths(lengths, v)
            v = v if whole else int(lengths.max())
    steps, matrices = layout.steps_first(x), layout.matrices(bulk)
    if lengths is not None or v == 1:
        steps, matrices = steps[:v], matrices[: v - 1]
    return layout, Chain(steps, matrices, layout.weights(p0), ends, log_params, arithmetic_dtype(x, bulk, p0), by_log)


def marked(chain: Chain, values: Tensor) -> Tensor:
    """Values (..., g, m, k), overwritten by NaN in sequences whose length is outside 1..v, unchecked on a GPU."""
    if chain.ends is None:
        return values
    return values.masked_fill_((chain.ends < 1) | (chain.ends > chain.v), torch.nan)


def arithmetic_dtype(x: Tensor, bulk: Tensor, p0: Tensor) -> torch.dtype:
    """float64 if an operand is, otherwise float32."""
    return torch.float64 if torch.float64 in (x.dtype, bulk.dtype, p0.dtype) else torch.float32


def unwritten(operands: tuple[Tensor, Tensor, Tensor], needs: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised tensors for the gradients of operands, empty for those that are not needed."""
    x, bulk, p0 = (
        torch.empty_like(operand, memory_format=torch.contiguous_format) if need else operand.new_empty(0)
        for operand, need in zip(operands, needs, strict=True)
    )
    return x, bulk, p0


def differentiated(*args: Any) -> bool:
    """Whether gradients are enabled and some argument requires one."""
    return torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)


def is_plain(args: tuple[Any, ...]) -> bool:
    """Whether arguments are plain tensors, and no dispatch mode, function transform or compiler is active."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
        and not torch._C._dispatch_tls_is_dispatch_key_included(_OLD_VMAP)
        and _PLAIN.issuperset(map(type, args))
    )


class Weights(NamedTuple):
    """Weights that are no logarithms: an argument's name and values, and which of its first entries are read or None.

    `read` has the first axes of `values`, or all, each of its size or 1.
    """

    name: str
    values: Tensor
    read: Tensor | None = None

    def first_negative(self) -> list[int] | None:
        """The place of an entry below 0 that is read, the first along all axes but the longest."""
        values, read = self.values.detach(), self.read
        for axis, (size, stride) in enumerate(zip(values.shape, values.stride(), strict=True)):
            if stride == 0 and size > 1:  # the same entries again
                values = values.narrow(axis, 0, 1)
                read = read if read is None or axis >= read.dim() else read.any(axis, keepdim=True)
        if values.numel() == 0:
            return None
        longest = max(range(values.dim()), key=lambda axis: values.shape[axis])
        size = max(1, _COMPARED * values.shape[longest] // values.numel())
        if read is not None:
            read = read.view(*read.shape, *(1,) * (values.dim() - read.dim())).expand(values.shape)
        for start in range(0, values.shape[longest], size):
            length = min(size, values.shape[longest] - start)
            below = values.narrow(longest, start, length) < 0
            if read is not None:
                below &= read.narrow(longest, start, length)
            if below.any():
                at = below.flatten().to(torch.uint8).argmax()
                place = [int(index) for index in torch.unravel_index(at, below.shape)]
                place[longest] += start
                return place
        return None


def weights_of(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, prefix: str = "") -> list[Weights]:
    """The weights of a chain x [*B, v, c]: `bulk`, those of it that lead into a variable of a sequence, and `p0`."""
    return [
        Weights(prefix + "bulk", bulk, read_steps(bulk.shape[:-2], x.shape[-2], lengths)),
        Weights(prefix + "p0", p0),
    ]


def read_steps(lead: Sequence[int], v: int, lengths: Tensor | None) -> Tensor | None:
    """Which steps [*B or ones, s] of transitions that lead into variables are read; None: all.

    The last of them leads into the last of v variables, or the only one into all but the first.
    """
    *batch, s = lead
    if lengths is None and v > 1:
        return None
    if lengths is None or lengths.numel() == 0:
        return torch.zeros((1,) * len(lead), dtype=torch.bool)
    missing = lengths.dim() - len(batch)
    shared = [axis for axis in range(lengths.dim()) if axis < missing or batch[axis - missing] == 1]
    longest = lengths.amax(shared, keepdim=True) if shared else lengths
    longest = longest.reshape(longest.shape[missing:])[..., None]
    into = torch.arange(v - s, v, device=longest.device) if s > 1 else torch.ones(s, device=longest.device)
    return longest > into


def named(error: NegativeWeights, *weights: Weights) -> NegativeWeights:
    """The error of the first negative weight; the given one if there is none."""
    return _negative(*weights) or error


@contextmanager
def naming(weights: Callable[[], Iterable[Weights]]) -> Iterator[None]:
    """A context whose error of a negative weight says where the first one stands in the weights."""
    try:
        yield
    except NegativeWeights as error:
        raise named(error, *weights()) from None


def check_weights(*weights: Weights) -> None:
    """Check that no weight is negative, of those that are read; all are looked at."""
    error = _negative(*weights)
    if error is not None:
        raise error


def _negative(*weights: Weights) -> NegativeWeights | None:
    for one in weights:
        place = one.first_negative()
        if place is not None:
            value = one.values[tuple(place)].item()
            return NegativeWeights(
                f"{one.name}: expected non-negative weights, got {value:g} at {place};"
                " pass log_params=True for logarithms"
            )
    return None


def at_hand(*tensors: Tensor) -> bool:
    """Whether values can be read: tensors are on a device that has them, no GPU, and neither traced nor mapped."""
    return is_plain(tensors) and not any(on_gpu(tensor) or tensor.is_meta for tensor in tensors)
