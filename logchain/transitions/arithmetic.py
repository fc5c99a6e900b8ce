"""Sums and products of weights: as they are, as logarithms, and as logarithms of which the largest counts.

A structure says once how a message passes through it, in terms of an `Arithmetic`, and thereby answers for linear
weights, for log-partitions and for best paths.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ..autograd.matmul import broadcast_log_matmul

# terms of a product of matrices whose largest is taken that are held at a time
_TERMS = 2**22


class Arithmetic(ABC):
    """The sum and the product of weights, for tensors that broadcast.

    Attributes:
        zero: the weight that adds nothing.
        one: the weight that multiplies by one.

    >>> from logchain.transitions import LOG
    >>> a, b = torch.tensor([0.25, 0.5]).log(), torch.tensor([0.5, 0.0]).log()
    >>> LOG.plus(a, b).exp(), LOG.times(a, b).exp()
    (tensor([0.7500, 0.5000]), tensor([0.1250, 0.0000]))
    >>> LOG.sum(a, 0).exp(), LOG.sum_at(a, torch.tensor([1, 1]), 3).exp()
    (tensor(0.7500), tensor([0.0000, 0.7500, 0.0000]))
    >>> LOG.matmul(a[None], b[:, None]).exp()
    tensor([[0.1250]])
    """

    zero: float
    one: float

    @abstractmethod
    def plus(self, a: Tensor, b: Tensor) -> Tensor:
        """Sums of two weights each.

        Args:
            a: weights.
            b: weights of a shape that goes with a's.

        Returns:
            Their sums.
        """

    @abstractmethod
    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """Products of two weights each.

        Args:
            a: weights.
            b: weights of a shape that goes with a's.

        Returns:
            Their products.
        """

    @abstractmethod
    def sum(self, terms: Tensor, dim: int) -> Tensor:
        """Sums along an axis.

        Args:
            terms: weights.
            dim: the axis.

        Returns:
            The sums, without it.
        """

    @abstractmethod
    def sum_at(self, terms: Tensor, index: Tensor, size: int) -> Tensor:
        """Sums of those terms that have the same index.

        Args:
            terms: `[..., k]`.
            index: int64 `[k]`, from 0 to size - 1.
            size: the number of sums.

        Returns:
            `[..., size]`.
        """

    @abstractmethod
    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Products of matrices.

        Args:
            a: `[..., m, k]`.
            b: `[..., k, n]`.

        Returns:
            `[..., m, n]`.
        """


class Linear(Arithmetic):
    """Weights as they are."""

    zero, one = 0.0, 1.0

    def plus(self, a: Tensor, b: Tensor) -> Tensor:
        """`a + b`."""
        return a + b

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """`a b`."""
        return a * b

    def sum(self, terms: Tensor, dim: int) -> Tensor:
        """`sum terms`."""
        return terms.sum(dim)

    def sum_at(self, terms: Tensor, index: Tensor, size: int) -> Tensor:
        """`sum terms` of each index."""
        return terms.new_zeros(*terms.shape[:-1], size).index_add(-1, index, terms)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b`."""
        return a @ b


class Log(Arithmetic):
    """Logarithms of weights; -inf is weight zero, exactly, with gradient 0."""

    zero, one = -math.inf, 0.0

    def plus(self, a: Tensor, b: Tensor) -> Tensor:
        """`log(exp a + exp b)`."""
        return self.sum(torch.stack(torch.broadcast_tensors(a, b)), 0)

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """`a + b`."""
        return a + b

    def sum(self, terms: Tensor, dim: int) -> Tensor:
        """`log sum exp terms`."""
        dead = (terms == -math.inf).all(dim)
        return terms.masked_fill(dead.unsqueeze(dim), 0.0).logsumexp(dim).masked_fill(dead, -math.inf)

    def sum_at(self, terms: Tensor, index: Tensor, size: int) -> Tensor:
        """`log sum exp terms` of each index."""
        top = _largest_at(terms.detach(), index, size)
        dead = top == -math.inf
        top = top.masked_fill(dead, 0.0)
        total = LINEAR.sum_at((terms - top[..., index]).exp(), index, size)
        return (total.masked_fill(dead, 1.0).log() + top).masked_fill(dead, -math.inf)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """`log(exp(a) @ exp(b))`."""
        dtype = torch.promote_types(a.dtype, b.dtype)
        wide = torch.promote_types(dtype, torch.float32)  # the least that the kernels take
        return broadcast_log_matmul(a.to(wide), b.to(wide)).to(dtype)


class Max(Arithmetic):
    """Logarithms of weights, of which the largest is the sum."""

    zero, one = -math.inf, 0.0

    def plus(self, a: Tensor, b: Tensor) -> Tensor:
        """`max(a, b)`."""
        return torch.maximum(a, b)

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """`a + b`."""
        return a + b

    def sum(self, terms: Tensor, dim: int) -> Tensor:
        """`max terms`."""
        return terms.amax(dim)

    def sum_at(self, terms: Tensor, index: Tensor, size: int) -> Tensor:
        """`max terms` of each index."""
        return _largest_at(terms, index, size)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """`max_k a[m, k] + b[k, n]`, some columns at a time."""
        terms = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]).numel() * a.shape[-2] * a.shape[-1]
        columns = b.split(max(1, _TERMS // max(1, terms)), -1)
        return torch.cat([self.sum(self.times(a[..., None], some[..., None, :, :]), -2) for some in columns], -1)


class Best(Max):
    """The same for messages with labels: the sum has the label of the largest entry, and of equals the largest label.

    Messages are complex numbers, a logarithm and its label; parameters are real.
    """

    def plus(self, a: Tensor, b: Tensor) -> Tensor:
        """`max(a, b)`."""
        return self.sum(torch.stack(torch.broadcast_tensors(a, b)), 0)

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """`a + b`, without the NaN of complex sums with an infinite real part."""
        weights = a.real + b.real
        labels = [one.imag for one in (a, b) if one.is_complex()]
        return torch.complex(weights, sum(labels, torch.zeros_like(weights)))

    def sum(self, terms: Tensor, dim: int) -> Tensor:
        """`max terms`."""
        top = terms.real.amax(dim)
        labels = terms.imag.masked_fill(terms.real != top.unsqueeze(dim), -math.inf)
        return torch.complex(top, labels.amax(dim))

    def sum_at(self, terms: Tensor, index: Tensor, size: int) -> Tensor:
        """`max terms` of each index."""
        top = _largest_at(terms.real, index, size)
        labels = terms.imag.masked_fill(terms.real != top[..., index], -math.inf)
        return torch.complex(top, _largest_at(labels, index, size))


def _largest_at(terms: Tensor, index: Tensor, size: int) -> Tensor:
    """The largest terms of each index, -inf where there are none."""
    largest = terms.new_full((*terms.shape[:-1], size), -math.inf)
    return largest.scatter_reduce(-1, index.expand_as(terms), terms, "amax")


LINEAR, LOG, MAX, BEST = Linear(), Log(), Max(), Best()
