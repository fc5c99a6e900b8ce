"""Semirings: sums and products of weights, as they are, as logarithms, or of log-weights with a user's sum.

A message passes through a transition in terms of a `Semiring`, for log-partitions, best paths, or any sum over paths.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..autograd.matmul import broadcast_log_matmul

# the most terms of a product of matrices that are in memory at a time
TERMS = 2**20


@dataclass(frozen=True)
class Semiring:
    r"""A semiring of log-weights, defined by its addition; multiplication is `a + b`, zero is -inf, and one is 0.

    The addition must be associative and commutative, and adding a constant to all terms must add it to their sum:
    `reduce(a + s) = reduce(a) + s`.

    `LOG` is log-sum-exp, `MAX` the largest of log-weights, and in `LINEAR` weights are no logarithms.

    Args:
        name: a name for the user.
        reduce: `reduce(terms, dim)` adds a floating tensor along one axis. It is never called with terms that are all
            -inf, whose sum is -inf with gradient 0. Gradients are those of torch's autograd through it.
        zero: the weight that adds nothing.
        one: the weight that multiplies by one.

    Source: J. Goodman, "Semiring parsing", Computational Linguistics 25 (1999).

    >>> from logchain.semirings import LOG, Semiring
    >>> a, b = torch.tensor([0.25, 0.5]).log(), torch.tensor([0.5, 0.0]).log()
    >>> LOG.plus(a, b).exp(), LOG.times(a, b).exp()
    (tensor([0.7500, 0.5000]), tensor([0.1250, 0.0000]))
    >>> LOG.sum(a, 0).exp(), LOG.sum_at(a, torch.tensor([1, 1]), 3).exp()
    (tensor(0.7500), tensor([0.0000, 0.7500, 0.0000]))

    A user's semiring, between `LOG` and `MAX`: a soft maximum with temperature 1/4.

    >>> SOFT = Semiring("soft maximum", lambda terms, dim: torch.logsumexp(4.0 * terms, dim) / 4.0)
    >>> SOFT.sum(torch.tensor([0.0, 3.0, 3.0]), 0)
    tensor(3.1733)
    """

    name: str
    reduce: Callable[[Tensor, int], Tensor]
    zero: float = -math.inf
    one: float = 0.0

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """Products of two weights each, of shapes that broadcast."""
        return a + b

    def plus(self, a: Tensor, b: Tensor) -> Tensor:
        """Sums of two weights each, of shapes that broadcast."""
        return self.sum(torch.stack(torch.broadcast_tensors(a, b)), 0)

    def sum(self, terms: Tensor, dim: int) -> Tensor:
        """Sums over an axis, which is removed."""
        empty = (terms == self.zero).all(dim)
        return self.reduce(terms.masked_fill(empty.unsqueeze(dim), self.one), dim).masked_fill(empty, self.zero)

    def sum_at(self, terms: Tensor, index: Tensor, size: int) -> Tensor:
        """Sums `[..., size]` of those terms `[..., k]` that have the same index, int64 `[k]`, from 0 to size - 1."""
        count = torch.bincount(index, minlength=size)
        order = index.argsort(stable=True)
        rank = torch.arange(len(index), device=index.device) - (count.cumsum(0) - count)[index[order]]
        # the terms of each sum; one more term, which is zero, fills up
        places = index.new_full((size, int(count.max()) + 1), len(index))
        places[index[order], rank] = order
        return self.sum(torch.nn.functional.pad(terms, (0, 1), value=self.zero)[..., places], -1)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Products `[..., m, n]` of matrices `[..., m, k]` and `[..., k, n]`, some columns at a time."""
        terms = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]).numel() * a.shape[-2] * a.shape[-1]
        columns = b.split(max(1, TERMS // max(1, terms)), -1)
        return torch.cat([self.sum(self.times(a[..., None], part[..., None, :, :]), -2) for part in columns], -1)


class _Linear(Semiring):
    """Weights as they are."""

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def plus(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def sum(self, terms: Tensor, dim: int) -> Tensor:
        return terms.sum(dim)

    def sum_at(self, terms: Tensor, index: Tensor, size: int) -> Tensor:
        return terms.new_zeros(*terms.shape[:-1], size).index_add(-1, index, terms)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


class _Log(Semiring):
    """Logarithms of weights; -inf is weight zero, exactly, with gradient 0."""

    def sum_at(self, terms: Tensor, index: Tensor, size: int) -> Tensor:
        top = _largest_at(terms.detach(), index, size)
        empty = top == -math.inf
        top = top.masked_fill(empty, 0.0)
        total = LINEAR.sum_at((terms - top[..., index]).exp(), index, size)
        return (total.masked_fill(empty, 1.0).log() + top).masked_fill(empty, -math.inf)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        dtype = torch.promote_types(a.dtype, b.dtype)
        wide = torch.promote_types(dtype, torch.float32)  # the least that the kernels take
        return broadcast_log_matmul(a.to(wide), b.to(wide)).to(dtype)


class _Max(Semiring):
    """Logarithms of weights, of which the largest is the sum."""

    def sum(self, terms: Tensor, dim: int) -> Tensor:
        return terms.amax(dim)

    def sum_at(self, terms: Tensor, index: Tensor, size: int) -> Tensor:
        return _largest_at(terms, index, size)


class _Best(Semiring):
    """Maxima of logarithms with labels: of equal logarithms, the largest label.

    Messages are complex numbers, a logarithm and its label; parameters are real.
    """

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        # without the NaN of complex sums with an infinite real part
        weights = a.real + b.real
        labels = [terms.imag for terms in (a, b) if terms.is_complex()]
        return torch.complex(weights, sum(labels, torch.zeros_like(weights)))

    def sum(self, terms: Tensor, dim: int) -> Tensor:
        top = terms.real.amax(dim)
        labels = terms.imag.masked_fill(terms.real != top.unsqueeze(dim), -math.inf)
        return torch.complex(top, labels.amax(dim))

    def sum_at(self, terms: Tensor, index: Tensor, size: int) -> Tensor:
        top = _largest_at(terms.real, index, size)
        labels = terms.imag.masked_fill(terms.real != top[..., index], -math.inf)
        return torch.complex(top, _largest_at(labels, index, size))


def _largest_at(terms: Tensor, index: Tensor, size: int) -> Tensor:
    """The largest terms of each index, -inf where there are none."""
    largest = terms.new_full((*terms.shape[:-1], size), -math.inf)
    return largest.scatter_reduce(-1, index.expand_as(terms), terms, "amax")


LINEAR = _Linear("linear", torch.sum, 0.0, 1.0)
LOG = _Log("log", torch.logsumexp)
MAX = _Max("max", torch.amax)
BEST = _Best("best", torch.amax)
