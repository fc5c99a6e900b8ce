"""Means of logarithms of weights, as `kernels.plain.entropy` defines them, by the C library."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .arguments import fields, run, shared


class Arguments(ctypes.Structure):
    """`Means` of c/means.h, field by field."""

    _fields_ = fields(
        "first last steps sequences entries logarithms *weights *others weights_step weights_sequence others_step"
        " others_sequence *shares *products *exact *means *room"
    )


def means(
    weights: Sequence[Tensor], log: bool, shares: Tensor, exact: Tensor | None = None, products: Tensor | None = None
) -> Tensor:
    """The means (g, m), see `kernels.plain.entropy`; their terms are written to `products` (s, g, m, k)."""
    s, g, m, k = shares.shape
    out = torch.empty(g, m, dtype=torch.float64, device="cpu")
    a = Arguments(steps=s, sequences=g * m, entries=k, logarithms=log, shares=shares.data_ptr(), means=out.data_ptr())
    a.products = None if products is None else products.data_ptr()
    a.exact = None if exact is None else exact.data_ptr()
    held = [one.to(shares.dtype).resolve_neg().reshape(s, g * m, k) for one in weights]
    held = [one if one.stride(-1) == 1 or k == 1 else one.contiguous() for one in held]
    a.weights, (a.weights_step, a.weights_sequence) = held[0].data_ptr(), held[0].stride()[:2]
    if len(held) > 1:
        a.others, (a.others_step, a.others_sequence) = held[1].data_ptr(), held[1].stride()[:2]
    run(a, shares.dtype, "means", shared(g * m, 32 * shares.numel()))
    return out
