"""Gradients of the factors of a product: sums over sequences and steps, as products of many rows.

The gradient of a factor is the sum of what enters it forward times what enters it backward. A product takes the rows of
several steps, so that its result, as large as the factor, is added up less often; every few of them are added in
float64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .factors import Scaled
from .gemms import add_counts
from .rows import Rows

# SPARE of c/scale.h: what enters backward is larger by 2^SPARE
SPARE = {torch.float32: 30, torch.float64: 64}

# rows of a product, in at most so many steps: sums of blocks lie in cache, those of a large factor should be added up
# rarely; and how many products are added up in the arithmetic's dtype
_ROWS, _ROWS_OF_BLOCKS, _STEPS, _ADDED = 128, 32, 16, 16


class Counts:
    """The gradients of parameters, of which `together` steps are counted at a time.

    Attributes:
        together: see above.
        shares: (n), factors of rows that passes are to apply to counts of the diagonal.
    """

    def __init__(self, rows: Rows, scaled: Scaled, weight: Tensor) -> None:
        dtype, n = rows.chain.dtype, rows.n
        self._rows, self._scaled, self._products = rows, scaled, 0
        each = any(len(one) > 1 for one in scaled.values)
        together = rows.sets.g == 1 or (rows.sets.g == n and all(link.before == 1 for link in rows.forth))
        wanted = _ROWS_OF_BLOCKS if all(link.blocks for link in rows.forth) else _ROWS
        self.together = max(1, min(_STEPS, wanted // n)) if together and not each else 1
        self._sums = [one.new_zeros(one.shape[1:], dtype=dtype) for one in scaled.values]
        self._grads = [
            one.new_zeros(one.shape, dtype=dtype if len(one) > 1 else torch.float64) for one in scaled.values
        ]
        factor, shares = _factored(weight)
        self._factor, self._of_rows = factor * 2.0 ** -SPARE[dtype], None
        if shares is not None:
            self._of_rows = torch.cat([shares[:count] for count in rows.counts]).to(dtype)[:, None]
        self.shares = torch.ones_like(weight) if shares is None else shares
        narrow = [min(link.entering, link.leaving) * link.size // link.leaving for link in rows.forth]
        self._scratch = rows.new(n * self.together * max(narrow) if self._of_rows is not None else 0)
        sets = len(scaled.values[-1][0]) if rows.chain.pattern.diagonal else 0
        self._diagonal = rows.passes.diagonal_counts(sets) if sets else None

    def add(self, low: int, top: int, entering: Sequence[Tensor], behind: Sequence[Tensor]) -> None:
        """Count the transitions from step `low` on into steps up to `top`: rows in front of each stage, and behind."""
        rows = self._rows
        steps = top - low if rows.sets.g > 1 else 1
        stages = zip(rows.forth, rows.chain.pattern.stages, entering, behind, self._sums, strict=False)
        for link, stage, front, back, sums in stages:
            if self._of_rows is not None:
                shares = self._of_rows[rows.starts[low] : rows.starts[top]]
                if front.shape[1] <= back.shape[1]:
                    front = torch.mul(front, shares, out=self._scratch[: front.numel()].view(front.shape))
                else:
                    back = torch.mul(back, shares, out=self._scratch[: back.numel()].view(back.shape))
            front, back = (one.view(steps, -1, one.shape[1]) for one in (front, back))
            add_counts(link, stage.transposed, front, back, sums)
        self._products += 1
        for place in range(len(rows.forth)):
            self._put(place, top, self._products % _ADDED == 0)

    def add_diagonal(self, step: int) -> None:
        """Take over what passes have counted of the diagonal, the last of it of the transition into a step."""
        if self._diagonal is not None:
            torch.sum(self._diagonal, 0, out=self._sums[-1])
            self._diagonal.zero_()
            self._put(len(self._sums) - 1, step, True)

    def _put(self, place: int, step: int, add: bool) -> None:
        """Move sums into the gradient: that of a step, or of all steps, if they are to be added."""
        sums, grads = self._sums[place], self._grads[place]
        if grads.shape[0] > 1:
            self._finish(place, step, sums)
            grads[step - 1] = sums
            sums.zero_()
        elif add:
            grads[0] += sums
            sums.zero_()

    def _finish(self, place: int, step: int, sums: Tensor) -> None:
        """Turn sums over the transitions into a step, or all, into gradients, in place."""
        rows = self._rows
        self._scaled.gradient(place, step, sums, self._factor)
        if rows.ends is not None and len(sums) > 1:  # what no sequence of a set uses may be NaN
            first = step if len(self._grads[place]) > 1 else 1
            unused = (rows.ends.view(rows.sets.g, -1) <= first).all(1)
            sums.masked_fill_(unused.view(-1, *(1 for _ in sums.shape[1:])), 0.0)

    def gradients(self) -> list[Tensor]:
        """The gradients (s, sets, *own)."""
        for place, grads in enumerate(self._grads):
            if len(grads) == 1:
                grads[0] += self._sums[place]
                self._finish(place, 1, grads[0])
        return [one.to(self._rows.chain.dtype) for one in self._grads]


def _factored(weight: Tensor) -> tuple[float, Tensor | None]:
    """Weights (n) of rows that have one, as a factor and the rest: None if they are equal, or all below 1."""
    given = weight[weight != 0]
    if len(given) == 0 or bool((given == given[0]).all()):
        return float(given[0]) if len(given) else 1.0, None
    factor = 2.0 ** int(torch.frexp(given.abs().amax()).exponent)
    return factor, weight / factor
