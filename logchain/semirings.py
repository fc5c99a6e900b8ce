"""How weights are added along a chain: the semirings whose multiplication is the sum of logarithms."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels.plain.semiring import maximum


@dataclass(frozen=True)
class Semiring:
    r"""A way to add log-weights `a` and `b`; they are multiplied by `a + b`.

    What every such addition must have, and the library relies on: it is associative and commutative, and adding a
    constant to all terms adds it to their sum, `sum(a + s) = sum(a) + s`. Its zero is -inf.

    Args:
        name: what it is called in errors and tables.
        sum: `sum(terms, dim)` adds a floating tensor along one axis. It is never passed terms that are all -inf: their
            sum is -inf, with gradient 0, whatever the function. Gradients are those of torch's autograd through it.

    Ready made are `LOG`, `log sum exp` (every path counts), and `MAX`, the maximum (the best path counts; its
    gradient goes to one of the best).

    Source: J. Goodman, "Semiring parsing", Computational Linguistics 25 (1999).

    >>> MAX.sum(torch.tensor([0.0, 3.0, 1.0]), 0)
    tensor(3.)

    Another one, between the two: a maximum at temperature 1/4, which nears `MAX` as it cools.

    >>> SOFT = Semiring("soft maximum", lambda terms, dim: torch.logsumexp(4.0 * terms, dim) / 4.0)
    >>> SOFT.sum(torch.tensor([0.0, 3.0, 3.0]), 0)
    tensor(3.1733)
    """

    name: str
    sum: Callable[[Tensor, int], Tensor]


def _log_sum_exp(terms: Tensor, dim: int) -> Tensor:
    return torch.logsumexp(terms, dim)


LOG = Semiring("log", _log_sum_exp)
MAX = Semiring("max", maximum)
