"""The arguments that chains of bands and of arcs have in common, for loops in C over one sequence after another."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..structured import Structured, places
from .arguments import Pointing, run, shared


class SparseCall(Pointing):
    """The arguments of a chain with one parameter, with the tensors that they point to.

    Attributes:
        n: the number of sequences.
        parameter: the parameter in the dtype of the arithmetic.
        set_of: the set of parameters of each sequence (n), of `sets`.
    """

    def __init__(self, arguments: Any, chain: Structured) -> None:
        (parameter,), batch = chain.parameters, chain.batch
        # the memory of a negative view holds other numbers
        x, self.parameter, p0 = (one.to(chain.dtype).resolve_neg() for one in (chain.x, parameter, chain.p0))
        x = x if x.stride(-1) == 1 or chain.c == 1 else x.contiguous()
        self.chain, self.arguments, self._held, self.n = chain, arguments, {"parameter": self.parameter}, batch.numel()
        own = parameter.shape[: len(batch)]
        self.sets = own.numel()
        self.set_of = torch.arange(self.sets, device="cpu").view(own).expand(batch).flatten().contiguous()
        self.one = parameter.shape[len(batch)] == 1  # for all steps
        self.set(steps=chain.v, states=chain.c, one_matrix=self.one, logarithms=chain.log_params, by_log=chain.by_log)
        self.set(x_step=x.stride(-2), p0_state=p0.stride(-1))
        self.point(x=x, x_at=places(x, batch), p0=p0, p0_at=places(p0, batch))
        self.point(order=torch.argsort(self.set_of, stable=True))
        self.point(ends=None if chain.ends is None else chain.ends.expand(batch).contiguous())

    def spans(self, work: int, *, whole_sets: bool = False, most: int | None = None) -> list[tuple[int, int]]:
        """The first place in `order` of each thread and the one after its last, for so many multiply-adds.

        With `whole_sets`, each set of parameters belongs to one thread; at most `most` threads share an only set.
        """
        if not whole_sets or self.sets == 1:
            return shared(self.n, work, most if whole_sets else None)
        ends = [0, *torch.bincount(self.set_of, minlength=self.sets).cumsum(0).tolist()]
        return [(ends[first], ends[last]) for first, last in shared(self.sets, work)]

    def sums(self, threads: int) -> list[Tensor]:
        """Zeros like the parameter for its gradient: one tensor, or one for each thread if these share an only set.

        They are in float64 where all steps share the parameter.
        """
        dtype, copies = torch.float64 if self.one else self.chain.dtype, threads if self.sets == 1 else 1
        shape = self.parameter.shape
        return [torch.zeros(shape, dtype=dtype, device="cpu") for _ in range(copies)]

    def run(self, name: str, spans: Sequence[tuple[int, int]], field: str = "", sums: Sequence[Tensor] = ()) -> int:
        """The sum of what a function returns for spans of places, a thread for each; `sums` add up in the first."""
        each = [{field: sums[i % len(sums)]} for i in range(len(spans))] if sums else ()
        found = run(self.arguments, self.chain.dtype, name, spans, each)
        for more in sums[1:]:
            sums[0].add_(more)
        return found
