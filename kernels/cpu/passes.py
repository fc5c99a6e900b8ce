"""Calls of the C passes over rows of messages, see c/passes.h."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from . import team
from .arguments import Pointing, fields, function

# entries of rows for which another thread is woken, and those that scratch is longer than a row
_WORTH, _SPARE = 2**16, 64


class Pass(ctypes.Structure):
    """`Pass` of c/passes.h, field by field."""

    _fields_ = fields(
        "first last step steps rows states members *x *x_at x_step *ends *p0 *p0_at p0_state logarithms"
        " *sums blocks together *before *diagonal diagonal_set *bounds *shifts *exponents *state *scales *taken"
        " *taken_exponents *marks *log_norm *live *weight *count_weight *source *grad_x *grad_at grad_step"
        " *grad_diagonal counted_sets *room"
    )


class Passes(Pointing):
    """The arguments of passes over rows of c entries, with the tensors that they point to."""

    def __init__(self, dtype: torch.dtype, rows: int, c: int, members: int) -> None:
        self.arguments, self._dtype = Pass(rows=rows, states=c, members=members), dtype
        self._held = {}
        self.threads = max(1, min(torch.get_num_threads(), rows, rows * c // _WORTH))
        self._room = torch.empty(self.threads, c + _SPARE, dtype=dtype, device="cpu")
        self._counts: Tensor | None = None

    def diagonal_counts(self, sets: int) -> Tensor:
        """New sums (threads, sets, c), zeros, to which each thread adds the counts of the diagonal."""
        self._counts, self.arguments.counted_sets = (
            self._room.new_zeros(self.threads, sets, self.arguments.states),
            sets,
        )
        return self._counts

    def run(self, name: str, rows: int) -> int:
        """The sum of what a pass returns for the first rows, shared among threads."""
        loop, a = function(name, self._dtype), self.arguments
        count = max(1, min(self.threads, rows))
        if count == 1:
            self._take(a, 0, 0, rows)
            return int(loop(ctypes.byref(a)))
        copies = (Pass * count)(*[a] * count)
        for index, one in enumerate(copies):
            self._take(one, index, rows * index // count, rows * (index + 1) // count)
        results: Sequence[int] = team.calls(loop, copies)
        return sum(results)

    def _take(self, arguments: Pass, thread: int, first: int, last: int) -> None:
        """Set the rows of a thread, and the memory that is its own."""
        arguments.first, arguments.last, arguments.room = first, last, self._room[thread].data_ptr()
        arguments.grad_diagonal = None if self._counts is None else self._counts[thread].data_ptr()
