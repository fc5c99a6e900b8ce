"""The log-semiring matrix product `c = log(exp(a) exp(b))`, its gradients and its second derivatives.

    c = log s + row maximum + column maximum        s = exp(a - row maximum) exp(b - column maximum)

Entries whose s underflowed are recomputed by log-sum-exp in float64, forward and backward. `matmul_pieces` finds them,
cuts large products into pieces, and says which operands are taken. Definition: `logchain.reference.matmul`.
"""

import torch
from torch import Tensor

from ..numbers import near_one
from .matmul_pieces import Groups, Indices, Piece, add_to, pieces


def forward(a: Tensor, b: Tensor, depth: torch.dtype = torch.float32) -> tuple[Tensor, int]:
    """`log(exp(a) exp(b))` (*batch, m, n), and the number of its entries that were recomputed.

    `depth` is the dtype whose exponent range decides how small an s is trusted. It is float32 for float64 operands too,
    because an entry D nats below its maxima has an error of D roundings; a caller whose contract allows that passes
    `torch.float64` and has fewer entries recomputed.
    """
    groups = Groups.of(a, b)
    out = a.new_empty(groups.shape)
    into, recomputed = groups.joint(out), 0
    for piece in pieces(groups, a, b, depth):
        # row + column may be far larger than c, so that their sum needs float64
        c = (piece.row.double() + piece.column.double()).add_(piece.s.log_())
        for at, terms in piece.terms():
            c[at] = torch.logsumexp(terms, -1).to(c.dtype)
            recomputed += len(terms)
        into_piece = into[piece.cut.joint]
        into_piece.copy_(c.view(into_piece.shape))
    return out, recomputed


def backward(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    need_a: bool,
    need_b: bool,
    depth: torch.dtype = torch.float32,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `sum(weight * c)`: `weight_ij exp(a_ik + b_kj - c_ij)` summed over j for a, and over i for b."""
    groups = Groups.of(a, b)
    grad_a, grad_b = torch.zeros_like(a) if need_a else None, torch.zeros_like(b) if need_b else None
    into_a = None if grad_a is None else groups.left(grad_a)
    into_b = None if grad_b is None else groups.right(grad_b)
    weights = groups.joint(weight)
    for piece in pieces(groups, a, b, depth):
        weight, scale = near_one(piece.joint(weights))  # the quotient by a small sum must not overflow
        g = piece.divide(weight)
        part_a = torch.bmm(g, piece.eb.mT).mul_(piece.ea) if need_a else None
        part_b = torch.bmm(piece.ea.mT, g).mul_(piece.eb) if need_b else None
        for at, terms in piece.terms():
            _scatter(torch.softmax(terms, -1).mul_(weight[at][:, None]), part_a, part_b, at)
        for part, into, cut in ((part_a, into_a, piece.cut.left), (part_b, into_b, piece.cut.right)):
            if part is not None and into is not None:
                add_to(into, cut, part if scale == 1.0 else part.mul_(scale))
    return grad_a, grad_b


def second(weight: Tensor, a: Tensor, b: Tensor, along_a: Tensor, along_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `sum(grad_a * along_a) + sum(grad_b * along_b)` with respect to the weight, `a` and `b`.

    With p_k = exp(a_ik + b_kj - c_ij), the share of term k in entry (i, j), and u_k = along_a_ik + along_b_kj, the
    first is the mean `sum p_k u_k`, and 0 where c is -inf; the other two sum `weight p_k (u_k - mean)`.
    """
    groups = Groups.of(a, b)
    out, grad_a, grad_b = a.new_zeros(groups.shape), torch.zeros_like(a), torch.zeros_like(b)
    into = groups.joint(out), groups.left(grad_a), groups.right(grad_b)
    weights, alongs_a, alongs_b = groups.joint(weight), groups.left(along_a), groups.right(along_b)
    for piece in pieces(groups, a, b, torch.float32):
        weight, along_a, along_b = piece.joint(weights), piece.left(alongs_a), piece.right(alongs_b)
        mean = _mean(piece, along_a, along_b)
        g, ea, eb = piece.divide(weight), piece.ea, piece.eb
        ua, ub, h = ea * along_a, eb * along_b, g * mean
        part_a = torch.bmm(g, ub.mT).sub_(torch.bmm(h, eb.mT)).mul_(ea).add_(torch.bmm(g, eb.mT).mul_(ua))
        part_b = torch.bmm(ua.mT, g).sub_(torch.bmm(ea.mT, h)).mul_(eb).add_(torch.bmm(ea.mT, g).mul_(ub))
        for (z, i, j), terms in piece.terms():
            u = (along_a[z, i] + along_b[z, :, j]).double().sub_(mean[z, i, j, None])
            _scatter(torch.softmax(terms, -1).mul_(u.mul_(weight[z, i, j, None])), part_a, part_b, (z, i, j))
        cut = piece.cut
        for total, slices, part in zip(into, (cut.joint, cut.left, cut.right), (mean, part_a, part_b), strict=True):
            add_to(total, slices, part)
    return out, grad_a, grad_b


def _mean(piece: Piece, along_a: Tensor, along_b: Tensor) -> Tensor:
    """The means `sum p_k u_k` of `second` for one piece (g, m, n)."""
    mean = piece.divide(torch.bmm(piece.ea * along_a, piece.eb).add_(torch.bmm(piece.ea, piece.eb * along_b)))
    for (z, i, j), terms in piece.terms():
        mean[z, i, j] = torch.softmax(terms, -1).mul_(along_a[z, i] + along_b[z, :, j]).sum(-1).to(mean.dtype)
    return mean


def _scatter(terms: Tensor, grad_a: Tensor | None, grad_b: Tensor | None, at: Indices) -> None:
    """Add terms (f, k) of entries with indices z, i, j (f) to row i of `grad_a` and to column j of `grad_b`."""
    z, i, j = at
    if grad_a is not None:
        grad_a.index_put_((z, i), terms.to(grad_a.dtype), accumulate=True)
    if grad_b is not None:
        grad_b.mT.index_put_((z, j), terms.to(grad_b.dtype), accumulate=True)
