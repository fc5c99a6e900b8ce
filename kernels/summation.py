"""Sums over steps whose error is that of one rounding, however many terms of whatever sign there are."""

import torch
from torch import Tensor


def exact_sum(terms: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of float64 terms over the first axis, and what its rounding lost; infinite where the plain sum is.

    The terms are overwritten. They are added in pairs, level by level, and the error of each addition, which is itself
    a float, is kept (D. E. Knuth's two-sum). Add the two parts last.
    """
    lost, found = torch.zeros_like(terms[0]), torch.empty_like(terms[0])
    room = torch.empty(2, len(terms) // 2, *found.shape, dtype=terms.dtype, device=terms.device)
    count = len(terms)
    while count > 1:
        half = count // 2
        a, b, (total, other) = terms[:half], terms[half : 2 * half], room[:, :half]
        torch.add(a, b, out=total)
        torch.sub(total, a, out=other)
        b -= other
        a -= torch.sub(total, other, out=other)
        lost += torch.sum(a.add_(b), 0, out=found)
        a.copy_(total)
        if count % 2:
            terms[half] = terms[count - 1]
        count -= half
    return terms[0], lost.masked_fill_(~terms[0].isfinite(), 0.0)
