"""The entropy of paths, or their divergence, of few long chains on a CPU: segments side by side, as in `overlapped`.

    H = sum over s of E[t_s]      t_s: the terms of a path in segment s

What is expected given the last state of a segment has to be weighted by all that follows. Three messages

    S, S f, S f'      S: that leaves the segment; f, f': 1 + max(0, e - m), 1 + max(0, m - e)
                      e = E[t_s | last state]; m: its mean

walk on through the first steps of the next segment. The ratios of their entries are then f and f', expected given a
later state, and m + f - f' the terms. Once they are the same for all states, up to `overlapped.tolerance`, they are so
whatever follows.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain, segments_of
from ..kernels.message import normalised
from ..operands import arithmetic_dtype
from ..rescues import report_boundaries
from .cut import Cut
from .overlapped import assumed, early, unlike


def entropies(chains: Sequence[Chain], segments: int) -> tuple[Tensor, Tensor]:
    """The entropies, or divergences, and whether they are unknown (g, m), as of `kernels.cpu.entropy.expected`."""
    cuts = _cuts(chains, segments)
    steps = [early(cut, _through, mended=0) for cut in cuts]
    if not cuts or 0 in steps:
        values, unknown = kernels.entropies().expected(chains)[:2]
        return values, unknown
    values, unknown, refused = _side_by_side(cuts, max(steps))
    if refused.any():
        report_boundaries(refused)
        whole, some = kernels.entropies().expected(chains), refused.any(0)
        values, unknown = torch.where(some, whole.values, values), torch.where(some, whole.unknown, unknown)
    return values, unknown


def _cuts(chains: Sequence[Chain], segments: int) -> list[Cut]:
    """The chains in float64, cut into segments; none if they are too short, or cannot be cut alike."""
    count, one_matrix = segments_of(chains[0].v, segments)[0], {len(chain.bulk) == 1 for chain in chains}
    alike = len(one_matrix) == 1 and count > 0
    return [Cut(replace(chain, dtype=torch.float64), count) for chain in chains] if alike else []


def _side_by_side(cuts: Sequence[Cut], steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values and whether they are unknown (g, m), and which boundaries (count, g, m) are refused."""
    expected, cut = kernels.entropies().expected, cuts[0]
    head = expected([_as_read(one.head()) for one in cuts], leave=True)
    begun = [assumed(one, steps, left, _through) for one, left in zip(cuts, head.leaving, strict=True)]
    entering = torch.stack(begun).masked_fill_(~cut.reached()[..., None], 0.0)  # nothing lossy enters what is not there
    by_set = torch.stack([*map(cut.by_set, entering)])
    behind = expected([_as_read(one.segments()) for one in cuts], by_set, leave=True)
    leaving = [_in_turn(cut, *messages) for messages in zip(head.leaving, behind.leaving, strict=True)]
    wrong = [unlike(one.chain, left[:-1], entered) for one, left, entered in zip(cuts, leaving, entering, strict=True)]
    terms, means = _in_turn(cut, head.terms, behind.terms), _in_turn(cut, head.values, behind.values)
    later, lost, depends = _expected_later(cut, leaving[0][:-1], terms[:-1], means[:-1], steps)
    possible = (leaving[0].amax(-1) > -torch.inf).all(0)
    values = torch.where(possible, later.sum(0) + means[-1], 0.0)
    unknown = _in_turn(cut, head.unknown, behind.unknown).any(0)
    refused = torch.stack(wrong).any(0) & cut.reached() | depends & cut.reached(steps) | lost
    return values, unknown, refused


def _in_turn(cut: Cut, head: Tensor, segments: Tensor) -> Tensor:
    """Values of the head (g, m, ...) and of the segments (g', m', ...) in turn (count + 1, g, m, ...)."""
    return torch.cat([head[None], cut.by_segment(segments)])


def _expected_later(cut: Cut, leaving: Tensor, terms: Tensor, mean: Tensor, steps: int) -> tuple[Tensor, ...]:
    """Terms (count, g, m) expected given all up to so many steps later.

    And whether they are lost, as something would underflow on the way, and whether they depend on the state there.
    `leaving` (count, g, m, c) are the messages that enter segments; `terms` (count, g, m, c) are expected given each
    last state, and `mean` (count, g, m) given all up to it.
    """
    above = terms - mean[..., None]
    factors = torch.stack([torch.zeros_like(above), above.clamp(min=0).log1p(), (-above).clamp(min=0).log1p()], 3)
    weighted, total = normalised(leaving.unsqueeze(3) + factors)
    chain = cut.chain
    x = chain.x.unsqueeze(-2).expand(*chain.x.shape[:-1], 3, chain.c)
    ends = None if chain.ends is None else chain.ends.repeat_interleave(3, 1)
    together = Cut(replace(chain, x=x, ends=ends), cut.count)
    left = kernels.entropies().passed(_as_read(together.window(0, steps)), together.entering(weighted.flatten(2, 3)))
    later = together.by_segment(left.values).unflatten(2, (-1, 3))
    scales = torch.stack([*(together.by_segment(part).unflatten(2, (-1, 3)) for part in left.scale), total])
    # large numbers, and their rounding errors, are subtracted from each other before they are added
    up, down = (scales[..., 1:] - scales[..., :1]).sum(0).exp().unbind(-1)
    depends = unlike(chain, later[..., 1:, :], later[..., :1, :]).any(-1)
    return mean + (up - down), later.isnan().any(-1).any(-1), depends


def _through(cut: Cut, start: int, stop: int, entering: Tensor) -> Tensor:
    """The messages (count, g, m, c) that leave steps `start` to before `stop` of the segments, from those entering."""
    window = _as_read(cut.window(start, stop))
    return cut.by_segment(kernels.entropies().passed(window, cut.entering(entering)).values)


def _as_read(chain: Chain) -> Chain:
    """The chain in the dtype in which the loops read its operands; they compute in float64."""
    return replace(chain, dtype=arithmetic_dtype(chain.x, chain.bulk, chain.p0))
