"""A chain walked from its last step to its first, by the same kernels: forward messages there are backward ones here.

    c_{v-1} = exp x_{v-1}        c_{i-1} = exp x_{i-1} (P_i c_i)        Z = p0 c_0

The matrices are transposed, and the walk begins with ones. On a CPU the operands are read where they lie; elsewhere
they are copied in the order of the walk.
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
