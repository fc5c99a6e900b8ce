"""The total of a chain in a semiring, for each sequence: differentiated by torch's autograd, not by rules of ours."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_lengths
from ..kernels.chain import Chain
from ..kernels.plain import semiring as semiring_chain
from ..layout import Layout
from ..operands import arithmetic_dtype
from .operator import operator


def total(
    x: Tensor, bulk: Tensor, p0: Tensor, ends: Tensor | None, log_params: bool, add: semiring_chain.Add
) -> Tensor:
    """The total [*B] in float64, by an addition of terms along an axis. Arguments have been checked.

    Under autograd every step keeps its terms, c^2 a sequence.
    """
    layout = Layout.of(x, bulk)
    dtype = arithmetic_dtype(x, bulk, p0)
    chain = Chain(layout.steps_first(x), layout.matrices(bulk), layout.weights(p0), None, log_params, dtype)
    if ends is not None:
        ends = layout.steps_first(_checked(ends, chain.v)[..., None, None])  # (1, *lead, 1)
        chain = replace(chain, ends=ends.reshape(*semiring_chain.grid(chain), 1))
    return layout.batched(semiring_chain.forward(chain, add))


def _check(lengths: Tensor, v: int) -> Tensor:
    if not kernels.on_gpu(lengths):
        check_lengths(lengths, v)
    return lengths.clone()


def _shape(lengths: Tensor, v: int) -> Tensor:
    return torch.empty_like(lengths)


def _vmap(info: Any, in_dims: tuple[Any, ...], lengths: Tensor, v: int) -> tuple[Tensor, Any]:
    return _checked(lengths, v), in_dims[0]


# an operator, since only there the values can be looked at where the call is traced or mapped
_checked = operator("checked_lengths(Tensor lengths, SymInt v) -> Tensor", _check, _shape)
torch.library.register_vmap("logchain::checked_lengths", _vmap)
