"""The total of a chain in a semiring; torch's autograd differentiates it, through the semiring's own sum."""

from dataclasses import replace

from torch import Tensor

from .. import kernels
from ..arguments import check_lengths
from ..kernels.chain import Chain
from ..kernels.plain import semiring as semiring_chain
from ..layout import Layout
from ..operands import arithmetic_dtype
from .operator import checked_values


def total(
    x: Tensor, bulk: Tensor, p0: Tensor, ends: Tensor | None, log_params: bool, add: semiring_chain.Add
) -> Tensor:
    """The total [*B] in float64, where `add` sums terms along an axis. Arguments have been checked.

    With gradients every step keeps its terms, c^2 for each sequence.
    """
    layout = Layout.of(x, bulk)
    dtype = arithmetic_dtype(x, bulk, p0)
    chain = Chain(layout.steps_first(x), layout.matrices(bulk), layout.weights(p0), None, log_params, dtype)
    if ends is not None:
        ends = layout.steps_first(_checked(ends, chain.v)[..., None, None])  # (1, *lead, 1)
        chain = replace(chain, ends=ends.reshape(*semiring_chain.grid(chain), 1))
    return layout.batched(semiring_chain.forward(chain, add))


def _check(lengths: Tensor, v: int) -> None:
    if not kernels.on_gpu(lengths):
        check_lengths(lengths, v)


_checked = checked_values("checked_lengths", _check)
