"""A chain walked from its last step to its first, by the same kernels: forward messages there are backward ones here.

    c_{v-1} = exp x_{v-1}        c_{i-1} = exp x_{i-1} (P_i c_i)        Z = p0 c_0 = a P_0 c_0

The matrices are transposed, and the walk begins with ones. On a CPU the operands are read where they lie; elsewhere
they are copied in the order of the walk. The first step of a tail, P_0, which a message `a` enters, is a walk of its
own.
"""

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain
from ..kernels.message import Kept, Message


class Turned:
    """The walk of a chain without lengths, from its last step on; gradients are those of the chain.

    `forward` and `backward` return walks for `kernels.at_once`.
    """

    def __init__(self, chain: Chain) -> None:
        assert chain.ends is None and chain.starts is None
        ones = torch.full_like(chain.p0[(slice(1),) * (chain.p0.dim() - 1)], float(not chain.log_params))
        self._chain, self._walks, self._in_place = chain, kernels.chain_walks(chain.x), kernels.in_c(chain.x)
        if self._in_place:
            self._walked = replace(chain, p0=ones, turned=True)
        else:
            self._walked = replace(chain, x=chain.x.flip(0), bulk=chain.bulk.flip(0).mT, p0=ones)

    def forward(self, keep: Tensor | None) -> Generator[Any, int, tuple[Kept, Message]]:
        """What `backward` reads, with messages in the order of the walk, and the message c_0."""
        kept, leaving = yield from self._walks.forward(self._walked, keep=keep, leave=True)
        return kept, leaving

    def backward(
        self, kept: Kept, weight: Tensor, preceding: Tensor, grad_x: Tensor | None, grad_bulk: Tensor | None
    ) -> Generator[Any, int, None]:
        """Write gradients; arguments as in `kernels.plain.backward`.

        `preceding` (g, m, c): the logarithms of the message that arrives at the first step, without that step's x.
        """
        if self._in_place:
            yield from self._walks.backward(self._walked, kept, weight, preceding, grad_x, grad_bulk)
            return
        into_x, into_bulk = (None if into is None else torch.empty_like(into) for into in (grad_x, grad_bulk))
        yield from self._walks.backward(self._walked, kept, weight, preceding, into_x, into_bulk)
        if grad_x is not None and into_x is not None:
            grad_x.copy_(into_x.flip(0))
        if grad_bulk is not None and into_bulk is not None:
            grad_bulk.copy_(into_bulk.flip(0).mT)


class Tail:
    """The last steps of a chain, which a message enters: as many matrices as steps, or one for all."""

    def __init__(self, chain: Chain) -> None:
        self._one_matrix = len(chain.bulk) == 1 and chain.v > 1
        self.rest = chain if self._one_matrix else replace(chain, bulk=chain.bulk[1:])
        no_x = chain.x.new_zeros(()).expand(1, *chain.x.shape[1:])
        self._first = replace(chain, x=no_x, bulk=chain.bulk[:1])
        self._walk, self._turned = kernels.chain_kernels(chain.x), Turned(self.rest)

    def forward(self, keep: Tensor | None) -> Generator[Any, int, tuple[Kept, Message]]:
        """What `backward` reads, with messages in the order of the walk, and the message c_0, see `Turned.forward`."""
        return self._turned.forward(keep)

    def before(self, last: Message) -> tuple[Message, Tensor]:
        """The message P_0 c_0 of c_0, and which sequences (g, m) were redone exactly."""
        kept, before = self._walk.forward(replace(self._first, bulk=self._first.bulk.mT), last, leave=True)
        return before, kept.redone

    def backward(
        self,
        kept: Kept,
        last: Tensor,
        weight: Tensor,
        entering: Message,
        grad_x: Tensor | None,
        grad_bulk: Tensor | None,
    ) -> Generator[Any, int, None]:
        """Write gradients, from the values of c_0 and the message that enters."""
        first, shared = self._first, self._one_matrix
        messages = first.new(2, first.g, first.m, first.c)
        between, leaving = self._walk.forward(first, entering, keep=messages, leave=True)
        between = between._replace(log_norm=kept.log_norm)
        rest = grad_bulk
        if grad_bulk is not None:
            rest = torch.empty_like(grad_bulk) if shared else grad_bulk[1:]
            self._walk.backward(first, between, weight, last, None, grad_bulk[:1])
        yield from self._turned.backward(kept, weight, leaving.values, grad_x, rest)
        if grad_bulk is not None and rest is not None and shared:
            grad_bulk.add_(rest)
