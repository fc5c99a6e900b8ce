"""Log-densities that are linear in sufficient statistics T, as products of matrices in float64."""

import math

import torch
from torch import Tensor

from ...tensors import is_readable


def linear_log_density(features: Tensor, natural: Tensor, dtype: torch.dtype, *, zeros: bool = True) -> Tensor:
    """`T . eta` `[..., *U, c]` of T `[..., *U, f]` and natural parameters eta `[*U, c, f]`, rounded once.

    The axes U of T may have size 1. With `zeros`, eta may be -inf where T is not negative; times 0 that is 0.
    """
    natural = natural.double()
    never = natural == -torch.inf if zeros else None
    if never is None or (is_readable(never) and not bool(never.any())):
        products = _products(features, natural)
    else:
        products = _products(features, natural.masked_fill(never, 0.0))
        products = products.masked_fill(_products(features, never.double()) > 0, -torch.inf)
    return products.to(dtype, memory_format=torch.contiguous_format)


def _products(features: Tensor, natural: Tensor) -> Tensor:
    if natural.dim() == 2:
        return features @ natural.mT
    units = natural.shape[:-1]
    products = by_group(features, units) @ natural.reshape(-1, *natural.shape[-2:]).mT
    return products.transpose(0, 1).view(*features.shape[: -len(units)], *units)


def weighted_sums(flow: Tensor, features: Tensor, units: tuple[int, ...]) -> Tensor:
    """`sum flow T` `[*U, c, f]` in float64, over all axes before U, of a flow `[..., *U, c]` and T `[..., *U, f]`."""
    products = groups_of(flow.double(), units).mT @ by_group(features, units)  # (groups, c, f)
    return products.view(*units, -1)


def by_group(features: Tensor, units: tuple[int, ...]) -> Tensor:
    """Features `[..., *U, f]`, where axes U may have size 1, as `[groups, n, f]` with a group for each entry of U."""
    lead = features.shape[: -len(units)]
    return groups_of(features.expand(*lead, *units[:-1], features.shape[-1]), units)


def groups_of(values: Tensor, units: tuple[int, ...]) -> Tensor:
    """Values `[..., *U, f]` as `[groups, n, f]`."""
    lead = values.shape[: -len(units)]
    return values.reshape(lead.numel(), math.prod(units[:-1]), values.shape[-1]).transpose(0, 1)
