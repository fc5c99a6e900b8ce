"""The chain of connectionist temporal classification (CTC): targets without times, aligned to frames."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import check_integer, check_integers, check_tensor, tensor_of
from ..chain_arguments import ChainArguments
from ..kernels import on_gpu
from ..transitions import Banded

Counts = Tensor | int | Sequence[int]


def from_ctc(
    log_probs: Tensor, targets: Tensor, input_lengths: Counts, target_lengths: Counts, blank: int = 0
) -> ChainArguments:
    r"""The chain of CTC: `-product` is the loss `-log sum_z prod_t exp(log_probs[t, label(z_t)])` of all alignments z.

    The 2 S + 1 states of S labels are blank, first label, blank, second label, ..., blank. A path begins in one of the
    first two states and ends in one of the target's last two; it stays, moves one state on, or skips the blank between
    two different labels. Arguments are those of `torch.nn.functional.ctc_loss`.

    Args:
        log_probs: log-probabilities of the C classes `[T, N, C]` or `[T, C]`, in nats; they need not sum to 1.
        targets: labels, integers `[N, S]` with anything past a target's end, or all concatenated
            `[sum(target_lengths)]`; `[S]` for `[T, C]`.
        input_lengths: the number of frames of each sequence `[N]`, from 1 to T; for `[T, C]` one number.
        target_lengths: the number of labels of each sequence `[N]`, from 0 to S; for `[T, C]` one number.
        blank: the class of the states between labels.

    Returns:
        Weights 0 and 1 in `Banded(values [N, 1, 3, 2 S + 1], (0, 1, 2))`, `x` `[N, T, 2 S + 1]` (S at least 1), -inf at
        the last frame in states where no target ends, and the lengths; for `[T, C]` all without the first axis.
        `-product` equals `ctc_loss(..., reduction="none")`, and is exactly inf, with gradient 0, where a target does
        not fit into its frames. Gradients are those of `log_probs` themselves: minus the posterior of each class at
        each frame. (torch's are those of logits, correct only after `log_softmax`, where both agree.)

        `viterbi`, `sample` and `topk_paths` give alignments, whose labels are `ctc_labels`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, or a length, a label or `blank` is out of range.

    Cost: one number of `log_probs` for each state and frame, read into `x`; 3 multiply-adds each in `product`. Lengths
    and labels on a GPU are not checked.

    Source: A. Graves et al., "Connectionist temporal classification", ICML 2006.

    >>> from logchain import product, viterbi
    >>> log_probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.6, 0.1, 0.3]]).log()  # three frames
    >>> arguments = from_ctc(log_probs, torch.tensor([1, 2]), 3, 2)
    >>> loss = torch.nn.functional.ctc_loss(log_probs, torch.tensor([1, 2]), (3,), (2,), reduction="none")
    >>> product(**arguments._asdict()), loss
    (tensor(-1.4524), tensor(1.4524))
    >>> states = viterbi(**arguments._asdict()).states
    >>> states, ctc_labels(states, torch.tensor([1, 2]), 2)
    (tensor([0, 1, 3]), tensor([0, 1, 2]))
    """
    check_tensor("log_probs", log_probs, 2)
    if log_probs.dim() > 3 or 0 in log_probs.shape:
        raise ValueError(f"log_probs: expected [T, N, C] or [T, C], no size of them 0, got {list(log_probs.shape)}")
    frames, *batch, classes = log_probs.shape
    n = math.prod(batch)
    check_integer("blank", blank)
    if not 0 <= blank < classes:
        raise ValueError(f"blank: expected a class from 0 to C - 1 = {classes - 1}, got {blank}")
    lengths = _counts("input_lengths", input_lengths, 1, frames)
    labels, counts = _padded(targets, target_lengths, blank)
    for name, numbers in (("input_lengths", lengths), ("target_lengths", counts)):
        if len(numbers) != n:
            raise ValueError(f"{name}: expected {n} to go with log_probs {list(log_probs.shape)}, got {len(numbers)}")
    if not on_gpu(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        low, high = int(labels.min()), int(labels.max())
        raise ValueError(f"targets: expected labels from 0 to C - 1 = {classes - 1}, got {low} to {high}")
    labels, counts, lengths = (each.to(log_probs.device) for each in (labels, counts, lengths))
    end = 2 * counts[:, None]  # the state of a target's last blank
    state = torch.arange(2 * labels.shape[1] + 1, device=log_probs.device)
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    values = (state <= end).to(dtype)[:, None, None].repeat(1, 1, 3, 1)  # (N, 1, bands, 2 S + 1)
    values[:, 0, 2] = 0.0
    values[:, 0, 2, 3::2] = (labels[:, 1:] != labels[:, :-1]) & (state[3::2] <= end)
    last = torch.zeros_like(end, dtype=dtype).masked_fill((state != end) & (state != end - 1), -math.inf)
    rows = torch.arange(n, device=log_probs.device)
    index = _classes(labels, blank).expand(frames, -1, -1)
    # in float32 at least, in which gradients of blanks are summed over states
    x = log_probs.to(dtype).reshape(frames, n, classes).gather(2, index)
    x = x.index_put_((lengths - 1, rows), last, accumulate=True).transpose(0, 1)
    p0 = (state < 2).to(dtype)
    if not batch:
        return ChainArguments(x[0], Banded(values[0], (0, 1, 2)), p0, lengths=lengths[0])
    return ChainArguments(x, Banded(values, (0, 1, 2)), p0, lengths=lengths)


def ctc_labels(states: Tensor, targets: Tensor, target_lengths: Counts, blank: int = 0) -> Tensor:
    r"""The class of each frame, `label(z_t)`, for states z of the chain of `from_ctc`.

    Args:
        states: integers `[..., N, T]` or `[..., T]`, of `viterbi`, `sample` or `topk_paths`; -1 where there is none.
        targets: as in `from_ctc`.
        target_lengths: as in `from_ctc`.
        blank: as in `from_ctc`.

    Returns:
        Integers of the shape of `states`: labels, `blank`, and -1 where `states` are. Equal states side by side are one
        label that lasts: `states[1:] != states[:-1]` tells where labels begin.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, or a length is out of range.

    Cost: one number read for each state.

    >>> ctc_labels(torch.tensor([[0, 1, 2, 3, -1]]), torch.tensor([[7, 8]]), [2])
    tensor([[ 0,  7,  0,  8, -1]])
    """
    check_integers("states", states)
    labels, _ = _padded(targets, target_lengths, blank)
    classes = _classes(labels.to(states.device), blank)  # (N, 2 S + 1)
    rows = states if states.dim() > 1 else states[None]
    if len(classes) not in (1, rows.shape[-2]):
        raise ValueError(f"states: expected [..., {len(classes)}, T] to go with targets, got {list(states.shape)}")
    found = classes.expand(*rows.shape[:-1], -1).gather(-1, rows.clamp(min=0).long())
    return torch.where(states < 0, -1, found.view(states.shape))


def _classes(labels: Tensor, blank: int) -> Tensor:
    """The classes of states (N, 2 S + 1): blank, first label, blank, ..., blank."""
    classes = labels.new_full((len(labels), 2 * labels.shape[1] + 1), blank)
    classes[:, 1::2] = labels
    return classes


def _padded(targets: Tensor, target_lengths: Counts, blank: int) -> tuple[Tensor, Tensor]:
    """Labels int64 (N, S), S at least 1, blank past a target's end; and the numbers of labels int64 (N)."""
    check_integers("targets", targets)
    if targets.dim() not in (1, 2):
        raise ValueError(f"targets: expected [N, S] or [sum(target_lengths)], got {list(targets.shape)}")
    counts = _counts("target_lengths", target_lengths, 0, targets.shape[-1]).to(targets.device)
    if targets.dim() == 2 or len(counts) == 1:
        rows = targets if targets.dim() == 2 else targets[None]
    elif int(counts.sum()) == len(targets):
        rows = torch.nn.utils.rnn.pad_sequence(targets.split(counts.tolist()), batch_first=True)
    else:
        raise ValueError(f"target_lengths: expected a sum of {len(targets)} labels, got {int(counts.sum())}")
    if len(rows) != len(counts):
        raise ValueError(f"target_lengths: expected {len(rows)} to go with targets, got {len(counts)}")
    rows = torch.nn.functional.pad(rows.long(), (0, int(rows.shape[1] == 0)))
    return rows.masked_fill(torch.arange(rows.shape[1], device=rows.device) >= counts[:, None], blank), counts


def _counts(name: str, value: Counts, least: int, most: int) -> Tensor:
    """Numbers from `least` to `most` as int64 (N); they are not checked on a GPU."""
    value = tensor_of(value, name)
    check_integers(name, value)
    if value.dim() > 1:
        raise ValueError(f"{name}: expected one number for each sequence, got shape {list(value.shape)}")
    if value.numel() and not on_gpu(value) and not least <= int(value.min()) <= int(value.max()) <= most:
        low, high = int(value.min()), int(value.max())
        raise ValueError(f"{name}: expected numbers from {least} to {most}, got {low} to {high}")
    return value.reshape(-1).long()
