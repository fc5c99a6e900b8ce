"""Means of log-potentials and of logarithms of matrices under posteriors, by the C library, see c/means.h."""

import ctypes

import torch
from torch import Tensor

from .arguments import Pointing, fields, function

_FIELDS = (
    "steps sequences states *posteriors *x *base x_step x_sequence base_step base_sequence *arrived *weighted *exact"
    " *mean *error"
)


class Arguments(ctypes.Structure):
    """`Means` of c/means.h, field by field."""

    _fields_ = fields(_FIELDS)


class _Call(Pointing):
    def __init__(self, steps: int, sequences: int, states: int) -> None:
        self.arguments, self._held = Arguments(steps=steps, sequences=sequences, states=states), {}

    def place(self, name: str, values: Tensor, own: int) -> None:
        """Point to values (steps, g, m, *own) whose last `own` axes are contiguous."""
        rows = values.resolve_neg().reshape(len(values), -1, *values.shape[-own:])
        rows = rows if rows[0, 0].is_contiguous() else rows.contiguous()
        self.point(**{name: rows})
        self.set(**{f"{name}_step": rows.stride(0), f"{name}_sequence": rows.stride(1)})

    def run(self, name: str, dtype: torch.dtype) -> int:
        return int(function(name, dtype)(ctypes.byref(self.arguments)))


def add_potentials(x: Tensor, base: Tensor, posteriors: Tensor, exact: Tensor, mean: Tensor) -> None:
    """Add the mean of log-potentials x (v, g, m, c) to `mean` (2, g, m), a sum and its rounding error.

    `base`: those that posteriors are computed from, which C loops have raised unless `exact`.
    """
    v, g, m, c = posteriors.shape
    call = _Call(v, g * m, c)
    call.place("x", x, 1)
    call.place("base", base, 1)
    call.point(posteriors=posteriors, exact=exact.contiguous(), mean=mean[0], error=mean[1])
    call.run("means", x.dtype)


def add_quotients(sums: Tensor, posteriors: Tensor, mean: Tensor) -> None:
    """Add the mean of the second half of sums (k, g, m, 2 c) over the first."""
    k, g, m, c = posteriors.shape
    sums, call = sums.contiguous(), _Call(k, g * m, c)
    call.point(posteriors=posteriors, mean=mean[0], error=mean[1], arrived=sums, weighted=sums[..., c:])
    call.run("means", sums.dtype)


def by_logs(matrices: Tensor, others: Tensor | None) -> Tensor | None:
    """P and P log P, or P log(P' / P) for other matrices, as (s, g, c, 2 c); None if entries are not near 1."""
    s, g, c, _ = matrices.shape
    out, call = matrices.new_empty(s, g, c, 2 * c), _Call(s, g, c)
    call.place("x", matrices, 2)
    if others is not None:
        call.place("base", others, 2)
    call.point(arrived=out, weighted=out[..., c:])
    return None if call.run("by_logs", out.dtype) else out
