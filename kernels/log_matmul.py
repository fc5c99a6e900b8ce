"""The log-semiring matrix product `c = log(exp(a) exp(b))` with two derivatives, by shifted products and rescue.

    s = exp(a - row maximum) exp(b - column maximum)        c = log s + row maximum + column maximum

is one matrix product and good wherever s is not tiny. Outputs whose s is tiny although a finite term exists are found
and redone by the pairwise maximum in float64, forward and backward; those without a finite term are found by a product
of zeros and ones, asked for only where some s is tiny. Operands are (g, m, k) and (g, k, n), float32 or float64, of one
dtype. Definition: `logchain.reference.matmul`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .exponentials import exp_shifted, finite, near_one, trusted_sum

# pairwise terms held at a time
_PAIRS = 2**20


def forward(a: Tensor, b: Tensor, depth: torch.dtype = torch.float32) -> tuple[Tensor, int]:
    """`log(exp(a) exp(b))` (g, m, n), and how many of its entries were rescued.

    A term D nats below its shifts is known to D roundings. So float64, too, is trusted only as deep as float32 reaches,
    unless the caller has use for as deep as its own exponent range: `depth=torch.float64`.
    """
    t = _shifted(a, b, depth)
    # in float64: row + column may be rounded more coarsely than the result
    out = (t.row.double() + t.column.double()).add_(t.s.log_()).to(a.dtype)
    for z, i, j in t.rescues:
        out[z, i, j] = torch.logsumexp(_pairs(a, b, z, i, j), -1).to(out.dtype)
    return out, sum(len(z) for z, _, _ in t.rescues)


def backward(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    need_a: bool,
    need_b: bool,
    depth: torch.dtype = torch.float32,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `sum(weight * c)`: `weight_ij exp(a_ik + b_kj - c_ij)` summed over j, and over i."""
    t = _shifted(a, b, depth)
    weight, scale = near_one(weight)  # what is divided by a small sum
    g = t.divide(weight)
    grad_a = torch.bmm(g, t.eb.mT).mul_(t.ea) if need_a else None
    grad_b = torch.bmm(t.ea.mT, g).mul_(t.eb) if need_b else None
    for z, i, j in t.rescues:
        shares = torch.softmax(_pairs(a, b, z, i, j), -1).mul_(weight[z, i, j, None])
        _scatter(shares, grad_a, grad_b, z, i, j)
    if scale != 1.0:
        for gradient in (grad_a, grad_b):
            if gradient is not None:
                gradient.mul_(scale)
    return grad_a, grad_b


def tangent(a: Tensor, b: Tensor, along_a: Tensor, along_b: Tensor) -> Tensor:
    """The derivative of c along tangents of `a` and `b`; 0 where c is -inf.

    With the shares p_k = exp(a_ik + b_kj - c_ij) it is the mean `sum p_k (along_a_ik + along_b_kj)`.
    """
    t = _shifted(a, b, torch.float32)
    return _mean(t, a, b, along_a, along_b)


def second(
    weight: Tensor, a: Tensor, b: Tensor, along_a: Tensor, along_b: Tensor, along_weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `sum(grad_a * along_a) + sum(grad_b * along_b)` with respect to the weight, `a` and `b`.

    The first is `tangent`; the other two, the derivatives of `backward`, sum `weight p_k (u_k - mean)` with u_k =
    along_a_ik + along_b_kj, and `along_weight p_k` where the weight has a tangent too.
    """
    t = _shifted(a, b, torch.float32)
    mean = _mean(t, a, b, along_a, along_b)
    g, ua, ub = t.divide(weight), t.ea * along_a, t.eb * along_b
    h = g * mean
    if along_weight is not None:
        h.sub_(t.divide(along_weight))
    grad_a = torch.bmm(g, ub.mT).sub_(torch.bmm(h, t.eb.mT)).mul_(t.ea).add_(torch.bmm(g, t.eb.mT).mul_(ua))
    grad_b = torch.bmm(ua.mT, g).sub_(torch.bmm(t.ea.mT, h)).mul_(t.eb).add_(torch.bmm(t.ea.mT, g).mul_(ub))
    for z, i, j in t.rescues:
        shares = torch.softmax(_pairs(a, b, z, i, j), -1)
        u = (along_a[z, i] + along_b[z, :, j]).double().sub_(mean[z, i, j, None])
        some = u.mul_(weight[z, i, j, None])
        if along_weight is not None:
            some += along_weight[z, i, j, None]
        _scatter(shares.mul_(some), grad_a, grad_b, z, i, j)
    return mean, grad_a, grad_b


def _mean(t: "_Shifted", a: Tensor, b: Tensor, along_a: Tensor, along_b: Tensor) -> Tensor:
    mean = t.divide(torch.bmm(t.ea * along_a, t.eb).add_(torch.bmm(t.ea, t.eb * along_b)))
    for z, i, j in t.rescues:
        shares = torch.softmax(_pairs(a, b, z, i, j), -1)
        mean[z, i, j] = shares.mul_(along_a[z, i] + along_b[z, :, j]).sum(-1).to(mean.dtype)
    return mean


Piece = tuple[Tensor, Tensor, Tensor]


@dataclass
class _Shifted:
    """`exp(a - row)`, `exp(b - column)` and their product `s`.

    `small` marks where s is too small to be good, None for nowhere; `rescues` lists those of them that have a finite
    term, as pieces of indices (z, i, j).
    """

    ea: Tensor
    eb: Tensor
    row: Tensor
    column: Tensor
    s: Tensor
    small: Tensor | None
    rescues: list[Piece]

    def divide(self, by_s: Tensor) -> Tensor:
        """`by_s / s`, and 0 where s is not good."""
        quotient = by_s / self.s
        return quotient if self.small is None else quotient.masked_fill_(self.small, 0.0)


def _shifted(a: Tensor, b: Tensor, depth: torch.dtype) -> _Shifted:
    row, column = finite(a.amax(-1, keepdim=True)), finite(b.amax(-2, keepdim=True))
    ea, eb = (exp_shifted(t, shift, torch.empty_like(t), torch.empty_like(t)) for t, shift in ((a, row), (b, column)))
    s = torch.bmm(ea, eb)
    threshold = 2 * trusted_sum(depth, a.shape[-1])
    if s.amin().item() >= threshold:
        return _Shifted(ea, eb, row, column, s, None, [])
    small = s < threshold
    possible = torch.bmm((a > -math.inf).to(s.dtype), (b > -math.inf).to(s.dtype)) > 0
    indices = possible.logical_and_(small).nonzero(as_tuple=True)
    size = max(1, _PAIRS // a.shape[-1])
    rescues = list(zip(*(index.split(size) for index in indices), strict=True)) if len(indices[0]) else []
    return _Shifted(ea, eb, row, column, s, small, rescues)


def _pairs(a: Tensor, b: Tensor, z: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The terms a_ik + b_kj of some outputs (f, k), in float64."""
    return a[z, i].double() + b[z, :, j].double()


def _scatter(terms: Tensor, grad_a: Tensor | None, grad_b: Tensor | None, z: Tensor, i: Tensor, j: Tensor) -> None:
    """Add the terms (f, k) of some outputs to the rows and columns they come from."""
    if grad_a is not None:
        grad_a.index_put_((z, i), terms.to(grad_a.dtype), accumulate=True)
    if grad_b is not None:
        grad_b.mT.index_put_((z, j), terms.to(grad_b.dtype), accumulate=True)
