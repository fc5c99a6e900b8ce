"""The vector that passes through the products of a chain's segments, there and back, one product after the other.

    w_s = w_{s-1} M_s        f_{s-1} = M_s f_s        w_{-1}: the head's last message        f of the last segment: 1

In float64, over their maxima, with the logarithms of those summed. What may matter and underflowed is found as in
`certificate`: in the sums before an emission, where some path reaches them.
"""

from functools import cached_property

import torch
from torch import Tensor

from .certificate import Reach
from .chain import Matrices
from .cut import Cut
from .numbers import exact_sum, finite, trusted_sum
from .segments import Products

_TINY = torch.finfo(torch.float64).tiny

# by step, a path may run so far below the largest term: its rounding stays within float64's contract
_SHALLOW = 2.0**-24


class Between:
    """The head and the products, multiplied.

    `log_norm` (g, m), `messages` (steps, g, m, c) and `scales` (steps + 1, g, m, 1) are the head's.
    """

    def __init__(self, cut: Cut, products: Products, log_norm: Tensor, messages: Tensor, scales: Tensor) -> None:
        chain, count = cut.chain, cut.count
        shape = count, chain.g * chain.m, chain.c
        self._cut, self._products = cut, products
        self._ended = None if cut.ended is None else cut.ended.reshape(count, -1, 1)

        high, low = (cut.by_segment(part).reshape(shape) for part in products.scale)
        top = high.amax(-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0.0)
        self._matrices = cut.by_segment(products.values).reshape(*shape, chain.c).double()
        self._matrices *= (high - top + low).exp_()[..., None]

        x = chain.x[cut.rest + cut.length :: cut.length].reshape(shape).double()
        shift = finite(x.amax(-1, keepdim=True))
        self._possible, self._emission = x > -torch.inf, (x - shift).exp_()
        if self._ended is not None:
            self._possible |= self._ended
            self._emission.masked_fill_(self._ended, 1.0)
            shift.masked_fill_(self._ended, 0.0)

        start = messages[-1].double().reshape(-1, chain.c)
        if chain.ends is not None:  # of what has ended there is no message, but a sum
            start = torch.where(chain.ends.reshape(-1, 1) <= cut.rest, scales[-1].double().view(-1, 1), start)
        taken = self._pass(start)
        total = self._values[0].sum(-1)
        start_scale = torch.where(total == 0, 0.0, log_norm.reshape(-1) - total.log())
        rest = (cut.by_segment(part).reshape(count, -1) for part in products.shift)
        self._taken = torch.cat([start_scale[None], top[..., 0], shift[..., 0], taken, *rest])

    def _pass(self, start: Tensor) -> Tensor:
        """The vectors (count + 1, g m, c), the sums before each emission, and the scales taken out after it."""
        self._values = start.new_empty(len(self._emission) + 1, *start.shape)
        self._sums = torch.empty_like(self._emission)
        self._scales = torch.empty_like(self._emission[..., :1])
        torch.div(start, _top(start), out=self._values[0])
        values, sums = self._values.unsqueeze(-2).unbind(0), self._sums.unsqueeze(-2).unbind(0)
        emissions, scales = self._emission.unsqueeze(-2).unbind(0), self._scales.unsqueeze(-2).unbind(0)
        for s, matrices in enumerate(self._matrices.unbind(0)):
            torch.bmm(values[s], matrices, out=sums[s])
            torch.mul(sums[s], emissions[s], out=values[s + 1])
            torch.amax(values[s + 1], -1, keepdim=True, out=scales[s]).clamp_(min=_TINY)
            values[s + 1].div_(scales[s])
        return self._scales[..., 0].log()

    def log_norm(self) -> Tensor:
        """The log-partition (g, m)."""
        total, lost = exact_sum(self._taken.clone())
        return (total + (lost + self._values[-1].sum(-1).log())).view(self._cut.chain.g, self._cut.chain.m)

    def doubtful(self) -> bool:
        """Whether something underflowed that a path reaches, or ran so deep that float64 is too coarse."""
        chain = self._cut.chain
        trusted = trusted_sum(torch.float64, chain.c)
        small = self._sums < trusted
        if self._ended is not None:  # of what has ended only the sum counts
            small = torch.where(self._ended, self._sums.amax(-1, keepdim=True) < trusted, small)
        if small.any() and (small & self._reach[0]).any():
            return True
        shallow = self._scales < _SHALLOW
        if chain.dtype != torch.float64:  # before the last step the sums that follow tell
            shallow = self._scales[-1:] < trusted
        return bool(shallow.any()) and bool((shallow & self._reach[1][-len(shallow) :].any(-1, keepdim=True)).any())

    def entering(self) -> Tensor | None:
        """What enters each segment (count, g, m, c), over its maximum; None where an entry that a path reaches is lost.

        Of what is impossible, or has ended, ones.
        """
        cut, chain = self._cut, self._cut.chain
        shape = cut.count, chain.g, chain.m, chain.c
        matrices, _ = cut.between()
        found = cut.by_segment(torch.bmm(cut.by_set(self._values[:-1].view(shape)), matrices))
        nothing = self._values[-1].eq(0.0).all(-1).view(1, *shape[1:3], 1)
        if cut.ends is not None:
            nothing = nothing | (cut.ends == 0)
        found = torch.where(nothing, 1.0, found / _top(found))
        small = found < trusted_sum(chain.dtype, chain.c)
        if small.any():
            alive = torch.cat([self._start_reach[None], self._reach[1][:-1]]).view(shape)
            reached = cut.by_segment(torch.bmm(cut.by_set(alive.double()), (matrices > 0).double())) > 0
            if (small & reached).any():
                return None
        return found.to(chain.dtype)

    def final(self) -> Tensor | None:
        """The weights of the states that the head and each segment end in (count + 1, g, m, c), over their maximum.

        None where those of the states that count are lost.
        """
        chain = self._cut.chain
        found = torch.ones_like(self._values)
        columns, room = found.unsqueeze(-1).unbind(0), torch.empty_like(found[0].unsqueeze(-1))
        top = torch.empty_like(room[:, :1])
        emissions, products = self._emission.unsqueeze(-1).unbind(0), self._matrices.unbind(0)
        for s in reversed(range(len(products))):
            torch.mul(emissions[s], columns[s + 1], out=room)
            torch.bmm(products[s], room, out=columns[s])
            torch.amax(columns[s], 1, keepdim=True, out=top).clamp_(min=_TINY)
            columns[s].div_(top)
        total = (found * self._values).sum(-1)
        if ((total < trusted_sum(chain.dtype, chain.c)) & (self._values[-1].sum(-1) > 0)).any():
            return None
        return found.view(-1, chain.g, chain.m, chain.c).to(chain.dtype)

    @cached_property
    def _start_reach(self) -> Tensor:
        """In which states some path can end the head (g m, c)."""
        head, chain = self._cut.head(), self._cut.chain
        found = Reach(head, Matrices(head)).at(self._cut.rest) > 0
        return found.expand(chain.g, chain.m, chain.c).reshape(-1, chain.c)

    @cached_property
    def _reach(self) -> tuple[Tensor, Tensor]:
        """Which states some path reaches, before and after the emissions: the zeros of the products are exact."""
        reached, alive = torch.empty_like(self._possible), torch.empty_like(self._possible)
        linked = (self._cut.by_segment(self._products.values) > 0).reshape(*reached.shape, -1).double()
        state = self._start_reach
        for s, link in enumerate(linked):
            reached[s] = torch.bmm(state.double().unsqueeze(-2), link)[:, 0] > 0
            state = torch.logical_and(reached[s], self._possible[s], out=alive[s])
        return reached, alive


def _top(values: Tensor) -> Tensor:
    """The maximum of each vector, above 0 where that is 0."""
    return values.amax(-1, keepdim=True).clamp_(min=_TINY)
