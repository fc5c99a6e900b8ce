"""Stacks of matrices in named families, their products in 34-digit decimals, and how far a product may lie off."""

import math
from decimal import Decimal, localcontext

import numpy as np
import torch

import logchain
from logchain import reference
from tests import oracle
from tests.contract import assert_gradient, assert_values, gradient_bound, k_of, value_bound
from tests.families import F32, F64, INF, Numbers

BOTH = logchain.matrix_product, logchain.prefix_products


# a stack (2, s, c, c) in float64 of each family


def dense(draw, *shape):
    return draw.normal(*shape)


def sharp(draw, *shape):
    """Too widely spread for linear numbers."""
    return 100.0 * draw.normal(*shape)


def misaligned(draw, g, s, c, _, depth=200.0):
    """Columns fall by 200 nats where the next rows climb by 200."""
    slope = -depth * torch.linspace(0, 1, c, dtype=F64)
    climbs = (torch.arange(s) % 2 > 0)[:, None, None]
    return torch.where(climbs, slope.flip(0)[:, None].expand(c, c), slope.expand(c, c)) + 0.1 * draw.normal(g, s, c, c)


def abyss(draw, *shape):
    return misaligned(draw, *shape, depth=1000.0)


def left_to_right(draw, g, s, c, _):
    band = torch.ones(c, c).triu().tril(1)
    return (20.0 * draw.normal(g, s, c, c)).masked_fill(band == 0, -INF)


def offsets(draw, g, s, c, _):
    """Every matrix on a scale of its own."""
    return draw.normal(g, s, c, c) + 1e4 * (draw.uniform(g, s, 1, 1) - 0.3)


def sparse(draw, *shape):
    return torch.where(draw.uniform(*shape) < 0.7, -INF, 20.0 * draw.normal(*shape))


def dead(draw, g, s, c, _):
    """Nothing is possible in the first, and a row and a column are shut in one matrix of the second."""
    stack = draw.normal(g, s, c, c)
    stack[0], stack[1, s // 2, 0], stack[1, s // 2, :, c - 1] = -INF, -INF, -INF
    return stack


def mixed(draw, g, s, c, _):
    """Linear numbers hold the first set, and of the second only some matrices."""
    stack = draw.normal(g, s, c, c)
    stack[1, s // 2 :] *= 100.0
    return stack


FAMILIES = {
    draw.__name__: draw for draw in (dense, sharp, misaligned, abyss, left_to_right, offsets, sparse, dead, mixed)
}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw(name, s, c, dtype=F32, seed=0):
    return FAMILIES[name](Numbers(seed), 2, s, c, c).to(dtype)


class Truth:
    """All prefixes [s, c, c] of one stack in 34-digit decimals, and the expected uses of its entries by the paths."""

    def __init__(self, stack):
        with localcontext(oracle.DIGITS):
            self._linear = oracle._exp(stack)
            self._prefixes = [self._linear[0]]
            for matrix in self._linear[1:]:
                self._prefixes.append(self._prefixes[-1] @ matrix)
            self.values = oracle._log(np.stack(self._prefixes))

    def uses(self, weights):
        """Of weights [s, c, c] of the prefixes' entries, what each entry of the stack [s, c, c] receives."""
        found = np.zeros_like(self.values)
        with localcontext(oracle.DIGITS):
            shares = np.zeros_like(self._linear[0]) + Decimal(0)
            for i in reversed(range(len(found))):
                weight = np.vectorize(Decimal, otypes=[object])(weights[i])
                possible = self._prefixes[i] > 0
                shares = shares + np.where(possible, weight / np.where(possible, self._prefixes[i], Decimal(1)), 0)
                # shares_kj sum_i prefix_ik matrix_kj: adjoint of a linear product
                adjoint = shares if i == 0 else self._prefixes[i - 1].T @ shares
                found[i] = (adjoint * self._linear[i]).astype(np.float64)
                shares = shares @ self._linear[i].T
        return found


def depth(stack):
    """The product [c, c], and how far below their matrix's maximum the nodes run that make up an entry, on average."""
    s = len(stack)
    if s == 1:
        top = stack[0].max()
        return stack[0], np.where(np.isfinite(stack[0]), (0.0 if np.isinf(top) else top) - stack[0], 0.0)
    half = 2 ** math.ceil(math.log2(s) - 1)
    (left, below_left), (right, below_right) = depth(stack[:half]), depth(stack[half:])
    value = reference.matmul(left, right)
    shares = np.exp(left[:, :, None] + right - np.where(np.isfinite(value), value, 0.0)[:, None, :])
    below = shares * np.maximum(below_left[:, :, None], below_right[None, :, :])
    own = np.where(np.isfinite(value), (value.max() if np.isfinite(value.max()) else 0.0) - value, 0.0)
    return value, np.maximum(below.sum(1), own)


def depths(stack):
    """The same for all prefixes [2, s, c, c]."""
    return np.stack([np.stack([depth(part[: i + 1])[1] for i in range(len(part))]) for part in stack])


def assert_contract(stack, *functions, device="cpu"):
    """Values and gradients of `matrix_product`, `prefix_products` or both, of a stack [2 or 1, s, c, c]."""
    g, s, c, _ = stack.shape
    dtype = stack.dtype if stack.dtype == F64 else F32
    wide = stack.double().numpy()
    truths = [Truth(part) for part in wide]
    prefixes, below = np.stack([truth.values for truth in truths]), depths(wide)
    k = k_of(stack.to(device))
    bound = value_bound(prefixes, s, c, below, dtype=dtype, k=k)
    for function in functions:
        last = function is logchain.matrix_product
        leaf = stack.detach().to(device).requires_grad_()
        out = function(leaf)
        assert out.dtype == dtype
        assert_values(out, prefixes[:, -1] if last else prefixes, bound[:, -1] if last else bound)
        weights = torch.arange(out.numel(), dtype=dtype).cos().view(out.shape)
        out.backward(weights.to(device))
        received = np.zeros_like(wide)
        received[:, s - 1 if last else slice(None)] = weights.double().numpy()
        uses, reach, sizes = (
            np.stack([truth.uses(weight) for truth, weight in zip(truths, some, strict=True)])
            for some in (received, (received != 0) * 1.0, abs(received))
        )
        outputs = c * c * (1 if last else s)
        allowed = gradient_bound(sizes, s, c, below.max(), dtype=dtype, k=k, terms=outputs)
        assert_gradient(leaf, uses, reach, allowed)
