"""The chain of a weighted acceptor: a graph whose arcs carry labels and weights, one arc for each frame."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import Lengths, as_lengths, check_integer, check_integers, check_lengths, check_tensor
from ..chain_arguments import ChainArguments
from ..kernels import on_gpu
from ..transitions import LOG, Sparse


class Acceptor(NamedTuple):
    """A weighted acceptor, as `from_arcs` takes it.

    Attributes:
        arcs: int64 `[arcs, 3]`: from, to, label.
        scores: log-weights of the arcs `[arcs]`.
        final: final log-weights of the states `[states]`.
        start: the first state.
    """

    arcs: Tensor
    scores: Tensor
    final: Tensor
    start: int


def from_arcs(
    log_probs: Tensor,
    arcs: Tensor,
    scores: Tensor,
    final: Tensor | None = None,
    start: int = 0,
    *,
    lengths: Lengths | None = None,
) -> ChainArguments:
    r"""The chain of an acceptor: `log sum_a exp(final(a) + sum_t (scores[a_t] + log_probs[t, label(a_t)]))`.

    The sum is over all paths a of arcs from the state `start` to a final one, with one arc for each frame. Labels stand
    on arcs, and potentials of a chain on states: a state of the chain is a pair of an arc's destination and its label,
    in rising order: `arcs[:, 1:][arcs[:, 2] >= 0].unique(dim=0)[states]` are the pairs of a path that `viterbi` finds.

    Args:
        log_probs: log-probabilities of labels `[*B, T, C]` in nats, batch first as in k2's `DenseFsaVec`.
        arcs: integers `[arcs, 3]`: the state that an arc leads from, the one that it leads to, and its label from 0 to
            C - 1, in any order. Without `final`, arcs with label -1 lead to the final state, with no frame, as in k2.
            There label 0 is a class like others, often that of blanks. All sequences share the graph.
        scores: log-weights `[arcs]` in nats, differentiable.
        final: log-weights of ending in each state `[states]`, -inf where no path may end.
        start: the state in which paths begin.
        lengths: the number of frames of each sequence, as in `logchain.product`.

    Returns:
        Logarithms in `Sparse`, with `x` `[*B, T, c]`, final weights added at the last frame. `product` is k2's
        `get_tot_scores(log_semiring=True)` of `intersect_dense`, and -inf where the graph has no path of this length.
        Gradients of `scores` are expected numbers of uses. Arcs that have both states and their label in common are
        added up to one.

    With k2: `from_arcs(log_probs, fsa.arcs.values()[:, :3], fsa.scores)`. With OpenFst, whose weights are negative
    logarithms: `from_arcs(log_probs, *openfst_arcs(text))`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, a state or a label is out of range, or no arc has a label; arcs are named.

    Cost: a transition for each arc and each label that enters the state it leads from: as many as arcs where each state
    is entered by one label. Arcs are sorted in each call.

    Source: M. Mohri, F. Pereira and M. Riley, "Weighted finite-state transducers in speech recognition", 2002.

    >>> from logchain import product
    >>> arcs = torch.tensor([[0, 0, 0], [0, 1, 1], [1, 1, 1], [1, 2, -1]])  # zeros, then ones, at least one
    >>> log_probs = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]).log()
    >>> arguments = from_arcs(log_probs, arcs, torch.zeros(4))
    >>> product(**arguments._asdict()).exp()  # 001, 011 and 111
    tensor(0.4400)
    """
    check_tensor("log_probs", log_probs, 2)
    *batch, frames, classes = log_probs.shape
    arcs, scores, final = _checked(arcs, scores, final, start, classes)
    inside = arcs[:, 2] >= 0
    source, target, label = arcs[inside].unbind(1)
    if final is None:  # arcs with label -1 end a path
        final = LOG.sum_at(scores[~inside], arcs[~inside, 0], int(arcs[:, :2].max()) + 1)
    pairs, pair = torch.unique(target * classes + label, return_inverse=True)
    c, target, label = len(pairs), pairs // classes, pairs % classes  # of each state (c)
    merged, arc = torch.unique(source * c + pair, return_inverse=True)
    scores, source, pair = LOG.sum_at(scores[inside], arc, len(merged)), merged // c, merged % c  # of each arc
    # states that lead to an arc's source come before it, and lie side by side
    first = torch.searchsorted(target, source)
    count = torch.searchsorted(target, source, right=True) - first
    arc = torch.arange(len(merged), device=arcs.device).repeat_interleave(count)  # of each transition
    before = first[arc] + torch.arange(len(arc), device=arcs.device) - (count.cumsum(0) - count)[arc]
    indices, values = torch.stack([before, pair[arc]]), scores[arc]
    if not len(arc):  # a structure has at least one
        indices, values = indices.new_zeros(2, 1), scores.new_full((1,), -math.inf)
    starts = source == start
    p0 = scores.new_full((c,), -math.inf).index_put((pair[starts],), scores[starts])
    # frames of all sequences, concatenated
    device = log_probs.device
    x = log_probs.reshape(-1, classes).index_select(1, label.to(device))
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    last = torch.arange(1, math.prod(batch) + 1, device=device) * frames - 1
    ends = None if lengths is None else as_lengths(lengths, log_probs)
    if ends is not None:
        if not on_gpu(ends):
            check_lengths(ends, frames)
        last += ends.flatten() - frames
    x.index_put_((last,), final[target].to(device, x.dtype)[None], accumulate=True)
    x, values, p0 = x.view(*batch, frames, c), values.to(device), p0.to(device)
    return ChainArguments(x, Sparse(indices, values, c), p0, True, ends)


def openfst_arcs(text: str) -> Acceptor:
    r"""The acceptor that OpenFst prints: `scores` and `final` are minus the costs of `text`.

    Args:
        text: lines `source destination label [cost]` and `state [cost]`, as of `fstprint --acceptor`, labels as
            numbers. The first line begins with the first state; what is not said costs 0.

    Returns:
        The arguments of `from_arcs` after its first, of torch's default dtype.

    Raises:
        ValueError: a line is another, or an arc's label is 0: epsilon, which takes no frame. Remove these before by
            `fstrmepsilon`.

    Cost: that of reading.

    Source: C. Allauzen et al., "OpenFst: a general and efficient weighted finite-state transducer library", 2007.

    >>> acceptor = openfst_arcs("0 1 3 0.5\n1 1 4\n1 0.25")
    >>> acceptor.arcs.tolist(), acceptor.scores.tolist(), acceptor.final.tolist(), acceptor.start
    ([[0, 1, 3], [1, 1, 4]], [-0.5, 0.0], [-inf, -0.25], 0)
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    rows, costs, ends = [], [], {}
    for fields in lines:
        size = 3 if len(fields) > 2 else 1
        try:
            numbers, cost = [int(field) for field in fields[:size]], sum(map(float, fields[size:]), 0.0)
        except ValueError:
            numbers = [-1]
        if len(fields) > size + 1 or min(numbers) < 0:
            expected = "lines `source destination label [cost]` or `state [cost]`"
            raise ValueError(f"text: expected {expected}, got {' '.join(fields)!r}")
        if len(numbers) == 1:
            ends[numbers[0]] = -cost
        elif numbers[2] == 0:
            raise ValueError(f"text: expected no epsilon arc (label 0), got {' '.join(fields)!r}")
        else:
            rows.append(numbers)
            costs.append(cost)
    if not rows:
        raise ValueError("text: expected at least one arc, got none")
    arcs = torch.tensor(rows)
    final = torch.full((max([int(arcs[:, :2].max()), *ends]) + 1,), -math.inf)
    final[list(ends)] = torch.tensor(list(ends.values()))
    return Acceptor(arcs, 0.0 - torch.tensor(costs), final, int(lines[0][0]))


def _checked(
    arcs: Tensor, scores: Tensor, final: Tensor | None, start: int, classes: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Arcs as int64 on the device of scores, scores and final log-weights, of kinds and sizes that go together."""
    check_integers("arcs", arcs)
    check_tensor("scores", scores, 1)
    if arcs.dim() != 2 or arcs.shape[1] != 3 or not len(arcs):
        raise ValueError(f"arcs: expected [arcs, 3], at least one, got {list(arcs.shape)}")
    if scores.shape != arcs.shape[:1]:
        raise ValueError(f"scores: expected [{len(arcs)}] to go with arcs, got {list(scores.shape)}")
    check_integer("start", start)
    least = -1 if final is None else 0
    wrong = (arcs[:, 2] < least) | (arcs[:, 2] >= classes) | (arcs[:, :2] < 0).any(1)
    if wrong.any():
        at = int(wrong.int().argmax())
        expected = f"states from 0 on and labels from {least} to C - 1 = {classes - 1}"
        raise ValueError(f"arcs: expected {expected}, got {arcs[at].tolist()} as arc {at}")
    if not (arcs[:, 2] >= 0).any():
        raise ValueError("arcs: expected a label from 0 on, got -1 on every arc")
    if final is None and not (arcs[:, 2] < 0).any():
        raise ValueError("final: expected final log-weights where no arc has label -1, got None")
    if final is not None:
        check_tensor("final", final, 1)
        if final.dim() > 1 or len(final) <= int(arcs[:, :2].max()):
            raise ValueError(
                f"final: expected [states], at least {int(arcs[:, :2].max()) + 1}, got {list(final.shape)}"
            )
        final = final.to(scores.device)
    return arcs.to(scores.device, torch.int64), scores, final
