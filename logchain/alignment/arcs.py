"""The chains of weighted acceptors: graphs whose arcs have labels and weights, one arc for each frame."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..arguments import Lengths, check_integer, check_integers, check_tensor, checked_lengths
from ..chain_arguments import ChainArguments
from ..product import product
from ..tensors import last_rows
from ..transitions import LOG, Sparse

# the remedy for a transducer's text
_PRINT = "print with `fstprint --acceptor`, after `fstproject` of a transducer, and write a cost as 7.0"


class Acceptor(NamedTuple):
    """A weighted acceptor, as `from_arcs` takes it.

    Attributes:
        arcs: int64 `[arcs, 3]`: from, to, label.
        scores: log-weights of the arcs `[arcs]`.
        final: final log-weights of the states `[states]`; None where arcs with label -1 lead to the final state.
        start: the first state.
    """

    arcs: Tensor
    scores: Tensor
    final: Tensor | None = None
    start: int = 0


class _States(NamedTuple):
    """The chain of a graph, or of one for each sequence, in logarithms; its c states are pairs of target and label."""

    label: Tensor  # ([N,] c)
    final: Tensor  # ([N,] c)
    p0: Tensor  # ([N,] c)
    indices: Tensor  # (2, transitions)
    values: Tensor  # ([N, 1,] transitions)


def from_arcs(
    log_probs: Tensor,
    arcs: Tensor | Sequence[Acceptor],
    scores: Tensor | None = None,
    final: Tensor | None = None,
    start: int = 0,
    *,
    lengths: Lengths | None = None,
) -> ChainArguments:
    r"""Returns the chain of an acceptor: `log sum_a exp(final(a) + sum_t (scores[a_t] + log_probs[t, label(a_t)]))`.

    The sum is over all paths a of arcs from the state `start` to a final one, with one arc for each frame. The states
    of the chain are the pairs of an arc's destination and label, in rising order: those of a path of `viterbi` are
    `arcs[:, 1:][arcs[:, 2] >= 0].unique(dim=0)[states]`.

    Args:
        log_probs: log-probabilities of labels `[*B, T, C]` in nats, batch first as in k2's `DenseFsaVec`.
        arcs: integers `[arcs, 3]`, in any order: source, destination, and label from 0 to C - 1, of which 0 is a class
            like the others. Without `final`, arcs with label -1 lead to the final state and take no frame, as in k2.
            All sequences share the graph. Or a list of N acceptors, without `scores`, `final` and `start`: a graph for
            each sequence of `log_probs` `[N, T, C]`.
        scores: log-weights `[arcs]` in nats, differentiable.
        final: log-weights of ending in each state `[states]`, -inf where no path may end.
        start: the state in which paths begin.
        lengths: the number of frames of each sequence, as in `logchain.product`.

    Returns:
        Logarithms in `Sparse`, and `x` `[*B, T, c]`, with final weights added at the last frame. `product` is k2's
        `get_tot_scores(log_semiring=True)` of `intersect_dense`, and -inf where the graph has no path of this length.
        Gradients of `scores` are expected numbers of uses. Arcs with the same states and label become one.

    With k2: `from_arcs(log_probs, fsa.arcs.values()[:, :3], fsa.scores)`. With OpenFst, whose weights are negative
    logarithms: `from_arcs(log_probs, *openfst_arcs(text))`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, a state or a label is out of range, or no arc has a label; arcs are named.

    Cost: a transition for each arc and each label that enters its source: as many as arcs where each state is entered
    by one label. Arcs are sorted in each call. With several acceptors c is that of the largest, and each sequence takes
    the union of all transitions: N times as many where graphs have none in common.

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
    if frames < 1:
        raise ValueError(f"log_probs: expected [..., T, C], T at least 1, got {list(log_probs.shape)}")
    if not isinstance(arcs, Tensor):
        if scores is not None or final is not None or start:
            raise ValueError("arcs: expected a tensor to go with scores, final and start, got a sequence of acceptors")
        graph = _states_of_batch(batch, arcs, classes)
    elif scores is None:
        raise TypeError("scores: expected a torch.Tensor to go with arcs, got None")
    else:
        graph = _states_of(Acceptor(arcs, scores, final, start), classes)
    device, c = log_probs.device, graph.label.shape[-1]
    label, values, p0 = graph.label.to(device), graph.values.to(device), graph.p0.to(device)
    wide = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    if label.dim() == 1:  # shared: the gradient is faster
        x = wide.reshape(-1, classes).index_select(1, label)
    else:
        x = wide.gather(-1, label[:, None].expand(-1, frames, -1)).view(-1, c)
    ends = checked_lengths(lengths, log_probs)
    x.index_put_((last_rows(log_probs, ends),), graph.final.to(device, x.dtype).view(-1, c), accumulate=True)
    return ChainArguments(x.view(*batch, frames, c), Sparse(graph.indices, values, c), p0, True, ends)


def lattice_total(arcs: Tensor, scores: Tensor, final: Tensor | None = None, start: int = 0) -> Tensor:
    r"""Returns `log sum_a exp(final(a) + sum_i scores[a_i])` over all paths a of a graph without cycles, of any length.

    `arcs` `[arcs, 3]`, `scores` `[arcs]` in nats, `final` `[states]`, `start` and the errors are those of `from_arcs`.
    Labels are not read, except -1 without `final`. This is k2's `get_tot_scores(log_semiring=True)` of a lattice, and
    minus OpenFst's `fstshortestdistance --reverse` in the log semiring.

    Returns:
        `[]` in nats, float64 if `scores` are and otherwise float32; exactly -inf where no path ends. Gradients of
        `scores` are expected numbers of uses. A cycle that can be reached from `start` raises ValueError.

    Cost: a chain of as many steps as the longest path has arcs, with as many transitions as arcs and states.

    Source: M. Mohri, "Semiring frameworks and algorithms for shortest-distance problems", 2002.

    >>> lattice_total(*openfst_arcs("0 1 5 0.5\n1 2 6 0.5\n0 2 7 2.0\n2")).exp()  # e^-1 + e^-2
    tensor(0.5032)
    """
    arcs, scores, final = _checked(Acceptor(arcs, scores, final, start))
    ended = len(final)  # the state of paths that have ended, which stay there
    exits = torch.arange(ended + 1, device=arcs.device)
    rows = torch.cat([arcs, torch.stack([exits, torch.full_like(exits, ended), exits], 1)]) * arcs.new_tensor([1, 1, 0])
    weights = torch.cat([scores, final.to(scores.dtype), scores.new_zeros(1)])
    only_ended = torch.where(exits == ended, 0.0, -math.inf)
    frames = scores.new_zeros(_longest_path(arcs, start, ended) + 1, 1)
    return product(**from_arcs(frames, rows, weights, only_ended, start)._asdict())


def openfst_arcs(text: str) -> Acceptor:
    r"""Returns the acceptor that OpenFst prints: `scores` and `final` are minus the costs of `text`.

    Args:
        text: lines `source destination label [cost]` and `state [cost]`, as of `fstprint --acceptor`, labels as
            numbers. The first line begins with the first state; a missing cost is 0. A fourth field of digits alone
            in every arc is taken for an output label: write a cost of 7 as 7.0.

    Returns:
        The arguments of `from_arcs` after its first, of torch's default dtype.

    Raises:
        ValueError: a line has another form, arcs have output labels, or a label is 0: an epsilon, which takes no
            frame; `fstrmepsilon` removes these.

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
            raise ValueError(f"text: expected {expected}, got {' '.join(fields)!r}; {_PRINT}")
        if len(numbers) == 1:
            ends[numbers[0]] = -cost
        elif numbers[2] == 0:
            raise ValueError(f"text: expected no epsilon arc (label 0), got {' '.join(fields)!r}; use fstrmepsilon")
        else:
            rows.append(numbers)
            costs.append(cost)
    if not rows:
        raise ValueError("text: expected at least one arc, got none")
    if all("".join(fields[3:]).isdecimal() for fields in lines if len(fields) > 2):
        got = next(" ".join(fields) for fields in lines if len(fields) > 2)
        raise ValueError(f"text: expected costs, got an output label in each arc, as {got!r}; {_PRINT}")
    arcs = torch.tensor(rows)
    final = torch.full((max([int(arcs[:, :2].max()), *ends]) + 1,), -math.inf)
    final[list(ends)] = torch.tensor(list(ends.values()))
    return Acceptor(arcs, 0.0 - torch.tensor(costs), final, int(lines[0][0]))


def _longest_path(arcs: Tensor, start: int, states: int) -> int:
    """The largest number of arcs of a path from `start`."""
    source, target, _ = arcs.unbind(1)
    reached = torch.arange(states, device=arcs.device) == start  # after so many arcs
    for length in range(states):
        following = torch.zeros_like(reached).index_fill(0, target[reached[source]], True)
        if not following.any():
            return length
        reached = following
    raise ValueError("arcs: expected no cycle, got one; from_arcs takes graphs with cycles, and a number of frames")


def _states_of(graph: Acceptor, classes: int, at: str = "") -> _States:
    """The chain of one graph."""
    arcs, scores, final = _checked(graph, classes, at)
    source, target, label = arcs.unbind(1)
    pairs, pair = torch.unique(target * classes + label, return_inverse=True)
    c, target, label = len(pairs), pairs // classes, pairs % classes  # of each state (c)
    merged, arc = torch.unique(source * c + pair, return_inverse=True)
    scores, source, pair = LOG.sum_at(scores, arc, len(merged)), merged // c, merged % c  # of each arc
    # states that lead to an arc's source come before it, and are neighbors
    first = torch.searchsorted(target, source)
    count = torch.searchsorted(target, source, right=True) - first
    arc = torch.arange(len(merged), device=arcs.device).repeat_interleave(count)  # of each transition
    before = first[arc] + torch.arange(len(arc), device=arcs.device) - (count.cumsum(0) - count)[arc]
    indices, values = torch.stack([before, pair[arc]]), scores[arc]
    if not len(arc):  # a structure has at least one
        indices, values = indices.new_zeros(2, 1), scores.new_full((1,), -math.inf)
    starts = source == graph.start
    p0 = scores.new_full((c,), -math.inf).index_put((pair[starts],), scores[starts])
    return _States(label, final[target], p0, indices, values)


def _states_of_batch(batch: list[int], graphs: Sequence[Acceptor], classes: int) -> _States:
    """The chains of several graphs, each with the transitions of all, which are -inf where it has none."""
    if batch != [len(graphs)] or not graphs:
        expected = f"an acceptor for each sequence of batch {batch}"
        raise ValueError(f"arcs: expected {expected}, got {len(graphs)}; pass *acceptor for one that all share")
    chains = [_states_of(graph, classes, f"[{i}]") for i, graph in enumerate(graphs)]
    c = max(len(chain.label) for chain in chains)
    places = [chain.indices[0] * c + chain.indices[1] for chain in chains]
    union = torch.cat(places).unique()
    absent = chains[0].values.new_full((len(union),), -math.inf)
    columns = [torch.searchsorted(union, place) for place in places]
    values = [absent.index_put((at,), chain.values) for at, chain in zip(columns, chains, strict=True)]

    padded = partial(pad_sequence, batch_first=True, padding_value=-math.inf)
    return _States(
        pad_sequence([chain.label for chain in chains], batch_first=True),
        padded([chain.final for chain in chains]),
        padded([chain.p0 for chain in chains]),
        torch.stack([union // c, union % c]),
        torch.stack(values)[:, None],
    )


def _checked(graph: Acceptor, classes: int | None = None, at: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """Arcs with labels from 0 on, as int64 on the device of scores, their scores, and final log-weights.

    `classes`: labels are below it. `at`: the place in a list of graphs.
    """
    if not isinstance(graph, Acceptor):
        raise TypeError(f"arcs{at}: expected an Acceptor, got {type(graph).__name__}")
    arcs, scores, final, start = graph
    check_integers(f"arcs{at}", arcs)
    check_tensor(f"scores{at}", scores, 1)
    if arcs.dim() != 2 or arcs.shape[1] != 3 or not len(arcs):
        raise ValueError(f"arcs{at}: expected [arcs, 3], at least one, got {list(arcs.shape)}")
    if scores.shape != arcs.shape[:1]:
        raise ValueError(f"scores{at}: expected [{len(arcs)}] to go with arcs, got {list(scores.shape)}")
    check_integer(f"start{at}", start, 0)
    arcs = arcs.to(scores.device, torch.int64)
    source, target, label = arcs.unbind(1)
    least, states = -1 if final is None else 0, int(arcs[:, :2].max()) + 1
    invalid = (label < least) | (source < 0) | (target < 0)
    if classes is not None:
        invalid |= label >= classes
    if invalid.any():
        row = int(invalid.int().argmax())
        most = "" if classes is None else f" to C - 1 = {classes - 1}"
        expected = f"states from 0 on and labels from {least}{most}"
        raise ValueError(f"arcs{at}: expected {expected}, got {arcs[row].tolist()} as arc {row}")
    inside = label >= 0
    if not inside.any():
        raise ValueError(f"arcs{at}: expected a label from 0 on, got -1 on every arc")
    if final is None:  # arcs with label -1 end a path
        if inside.all():
            raise ValueError(f"final{at}: expected final log-weights where no arc has label -1, got None")
        final = LOG.sum_at(scores[~inside], source[~inside], states)
        arcs, scores = arcs[inside], scores[inside]
    check_tensor(f"final{at}", final, 1)
    if final.dim() > 1 or len(final) < states:
        raise ValueError(f"final{at}: expected [states], at least {states}, got {list(final.shape)}")
    if start >= len(final):
        raise ValueError(f"start{at}: expected a state from 0 to {len(final) - 1}, got {start}")
    return arcs, scores, final.to(scores.device)
