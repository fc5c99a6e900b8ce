"""The chain of pytorch-crf's layer."""

from typing import Any

import torch
from torch import Tensor

from ..arguments import check_device, check_is_tensor, check_tensor
from .chain_arguments import ChainArguments, check_attributes


def from_pytorch_crf(crf: Any, emissions: Tensor, mask: Tensor | None = None) -> ChainArguments:
    r"""The chain of pytorch-crf's layer: `Z = sum_z exp(start + sum_i (T(z_{i-1}, z_i) + emissions_i(z_i)) + end)`.

    `p0` are the start transitions; the end transitions are added to `x` at the last variable of each sequence.

    Args:
        crf: a `torchcrf.CRF`: start and end transitions `[c]`, transitions `[c, c]` (`[from, to]`), in nats.
        emissions: `[v, n, c]`, or `[n, v, c]` if `crf.batch_first`.
        mask: bool or integers `[v, n]`, or `[n, v]` if `crf.batch_first`; true on the first variables of each sequence.

    Returns:
        Logarithms with `x` `[n, v, c]`, and the lengths if there is a mask, with gradients for the layer's parameters
        and the emissions. The layer's log-likelihood is the tags' log-weight minus `product`.

    Raises:
        TypeError: `crf` is no such layer, `emissions` no floating tensor, or `mask` no tensor of bool or integers.
        ValueError: sizes do not go together, or a sequence's mask is false everywhere or before a true entry.

    Cost: one copy of the emissions. The values of a mask are read, which waits for a GPU.

    Source: J. Lafferty, A. McCallum and F. Pereira, "Conditional random fields", ICML 2001.

    >>> from types import SimpleNamespace
    >>> from logchain import product
    >>> crf = SimpleNamespace(
    ...     start_transitions=torch.tensor([0.0, -1.0]),
    ...     transitions=torch.zeros(2, 2),
    ...     end_transitions=torch.tensor([-2.0, 0.0]),
    ...     batch_first=True,
    ... )
    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> arguments = from_pytorch_crf(crf, torch.zeros(2, 3, 2), mask)
    >>> arguments.x[1], arguments.lengths
    (tensor([[-2.,  0.],
            [ 0.,  0.],
            [ 0.,  0.]]), tensor([3, 1]))
    >>> product(**arguments._asdict())
    tensor([ 1.1333, -0.6867])
    """
    names = ("start_transitions", "transitions", "end_transitions", "batch_first")
    check_attributes("crf", crf, "a torchcrf CRF", *names)
    check_crf(emissions, mask, len(crf.start_transitions), crf.batch_first)
    lengths = None
    if mask is not None:
        inside = (mask if crf.batch_first else mask.T).bool()  # (n, v)
        lengths = inside.sum(1)
        first = torch.arange(inside.shape[1], device=mask.device) < lengths[:, None]
        if not (inside.equal(first) and (lengths > 0).all()):
            raise ValueError("mask: expected the variables of each sequence first, and at least one; got a hole")
    x = with_end(emissions if crf.batch_first else emissions.transpose(0, 1), crf.end_transitions, lengths)
    return ChainArguments(x, crf.transitions[None], crf.start_transitions, True, lengths)


def check_crf(emissions: Tensor, mask: Tensor | None, c: int, batch_first: bool) -> None:
    """Check the kinds and sizes of emissions and mask, in the layer's layout."""
    check_tensor("emissions", emissions, 3)
    if emissions.dim() != 3 or emissions.shape[-1] != c:
        axes = "n, v" if batch_first else "v, n"
        raise ValueError(f"emissions: expected shape [{axes}, {c}], got {list(emissions.shape)}")
    if emissions.shape[int(batch_first)] < 1:
        raise ValueError(f"emissions: expected at least one step, got {list(emissions.shape)}")
    if mask is None:
        return
    check_is_tensor("mask", mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"mask: expected bool or integers, got {str(mask.dtype)[6:]}")
    if mask.shape != emissions.shape[:2]:
        raise ValueError(f"mask: expected shape {list(emissions.shape[:2])}, got {list(mask.shape)}")
    check_device("mask", mask, emissions)


def with_end(emissions: Tensor, end: Tensor, lengths: Tensor | None) -> Tensor:
    """Emissions (n, v, c), float32 at least, plus the end transitions (c) at the last variable of each sequence."""
    v = emissions.shape[1]
    steps = torch.arange(1, v + 1, device=emissions.device)
    last = steps == (v if lengths is None else lengths[:, None])  # (v) or (n, v)
    emissions = emissions.to(torch.promote_types(emissions.dtype, torch.float32))
    return emissions + torch.where(last[..., None], end, 0.0)
