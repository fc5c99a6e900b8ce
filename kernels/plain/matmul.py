"""The log-semiring matrix product `c = log(exp(a) exp(b))` with two derivatives, by shifted products and rescue.

    c = log s + row maximum + column maximum        s = exp(a - row maximum) exp(b - column maximum)

Where s is too small to be good, outputs are redone by the pairwise maximum in float64, forward and backward. Which ones
those are, what operands may be, and how large products are cut is the business of `log_matmul_pieces`. Definition:
`logchain.reference.matmul`.
"""

import torch
from torch import Tensor

from ..numbers import near_one
from .matmul_pieces import Groups, Piece, pairs, pieces


def forward(a: Tensor, b: Tensor, depth: torch.dtype = torch.float32) -> tuple[Tensor, int]:
    """`log(exp(a) exp(b))` (*batch, m, n), and how many of its entries were rescued.

    A term D nats below its shifts is known to D roundings. So float64, too, is trusted only as deep as float32 reaches,
    unless the caller has use for as deep as its own exponent range: `depth=torch.float64`.
    """
    groups = Groups.of(a, b)
    out = a.new_empty(groups.shape)
    into, rescued = groups.joint(out), 0
    for t in pieces(groups, a, b, depth):
        # in float64: row + column may be rounded more coarsely than the result
        c = (t.row.double() + t.column.double()).add_(t.s.log_())
        for z, i, j in t.rescues:
            c[z, i, j] = torch.logsumexp(pairs(t, z, i, j), -1).to(c.dtype)
            rescued += len(z)
        t.put_joint(c, into)
    return out, rescued


def backward(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    need_a: bool,
    need_b: bool,
    depth: torch.dtype = torch.float32,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `sum(weight * c)`: `weight_ij exp(a_ik + b_kj - c_ij)` summed over j, and over i."""
    groups = Groups.of(a, b)
    grad_a, grad_b = torch.empty_like(a) if need_a else None, torch.empty_like(b) if need_b else None
    into_a = None if grad_a is None else groups.left(grad_a)
    into_b = None if grad_b is None else groups.right(grad_b)
    weights = groups.joint(weight)
    for t in pieces(groups, a, b, depth):
        weight, scale = near_one(t.joint(weights))  # what is divided by a small sum
        g = t.divide(weight)
        part_a = torch.bmm(g, t.eb.mT).mul_(t.ea) if need_a else None
        part_b = torch.bmm(t.ea.mT, g).mul_(t.eb) if need_b else None
        for z, i, j in t.rescues:
            shares = torch.softmax(pairs(t, z, i, j), -1).mul_(weight[z, i, j, None])
            _scatter(shares, part_a, part_b, z, i, j)
        if part_a is not None and into_a is not None:
            t.put_left(part_a if scale == 1.0 else part_a.mul_(scale), into_a)
        if part_b is not None and into_b is not None:
            t.put_right(part_b if scale == 1.0 else part_b.mul_(scale), into_b)
    return grad_a, grad_b


def tangent(a: Tensor, b: Tensor, along_a: Tensor, along_b: Tensor) -> Tensor:
    """The derivative of c along tangents of `a` and `b`; 0 where c is -inf.

    With the shares p_k = exp(a_ik + b_kj - c_ij) it is the mean `sum p_k (along_a_ik + along_b_kj)`.
    """
    groups = Groups.of(a, b)
    out = a.new_empty(groups.shape)
    into, along_a, along_b = groups.joint(out), groups.left(along_a), groups.right(along_b)
    for t in pieces(groups, a, b, torch.float32):
        t.put_joint(_mean(t, t.left(along_a), t.right(along_b)), into)
    return out


def second(
    weight: Tensor, a: Tensor, b: Tensor, along_a: Tensor, along_b: Tensor, along_weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `sum(grad_a * along_a) + sum(grad_b * along_b)` with respect to the weight, `a` and `b`.

    The first is `tangent`; the other two, the derivatives of `backward`, sum `weight p_k (u_k - mean)` with u_k =
    along_a_ik + along_b_kj, and `along_weight p_k` where the weight has a tangent too.
    """
    groups = Groups.of(a, b)
    out, grad_a, grad_b = a.new_empty(groups.shape), torch.empty_like(a), torch.empty_like(b)
    into, into_a, into_b = groups.joint(out), groups.left(grad_a), groups.right(grad_b)
    weights, alongs_a, alongs_b = groups.joint(weight), groups.left(along_a), groups.right(along_b)
    along_weights = None if along_weight is None else groups.joint(along_weight)
    for t in pieces(groups, a, b, torch.float32):
        weight, along_a, along_b = t.joint(weights), t.left(alongs_a), t.right(alongs_b)
        along_weight = None if along_weights is None else t.joint(along_weights)
        mean = _mean(t, along_a, along_b)
        g, ua, ub = t.divide(weight), t.ea * along_a, t.eb * along_b
        h = g * mean
        if along_weight is not None:
            h.sub_(t.divide(along_weight))
        part_a = torch.bmm(g, ub.mT).sub_(torch.bmm(h, t.eb.mT)).mul_(t.ea).add_(torch.bmm(g, t.eb.mT).mul_(ua))
        part_b = torch.bmm(ua.mT, g).sub_(torch.bmm(t.ea.mT, h)).mul_(t.eb).add_(torch.bmm(t.ea.mT, g).mul_(ub))
        for z, i, j in t.rescues:
            shares = torch.softmax(pairs(t, z, i, j), -1)
            u = (along_a[z, i] + along_b[z, :, j]).double().sub_(mean[z, i, j, None])
            terms = u.mul_(weight[z, i, j, None])
            if along_weight is not None:
                terms += along_weight[z, i, j, None]
            _scatter(shares.mul_(terms), part_a, part_b, z, i, j)
        t.put_joint(mean, into)
        t.put_left(part_a, into_a)
        t.put_right(part_b, into_b)
    return out, grad_a, grad_b


def _mean(t: Piece, along_a: Tensor, along_b: Tensor) -> Tensor:
    mean = t.divide(torch.bmm(t.ea * along_a, t.eb).add_(torch.bmm(t.ea, t.eb * along_b)))
    for z, i, j in t.rescues:
        shares = torch.softmax(pairs(t, z, i, j), -1)
        mean[z, i, j] = shares.mul_(along_a[z, i] + along_b[z, :, j]).sum(-1).to(mean.dtype)
    return mean


def _scatter(terms: Tensor, grad_a: Tensor | None, grad_b: Tensor | None, z: Tensor, i: Tensor, j: Tensor) -> None:
    """Add the terms (f, k) of some outputs to the rows and columns they come from."""
    if grad_a is not None:
        grad_a.index_put_((z, i), terms.to(grad_a.dtype), accumulate=True)
    if grad_b is not None:
        grad_b.mT.index_put_((z, j), terms.to(grad_b.dtype), accumulate=True)
