"""The chain of connectionist temporal classification (CTC): targets without times, aligned to frames."""

import math

import torch
from torch import Tensor

from ..arguments import Lengths, check_choice, check_flag, check_integer, check_integers, check_tensor, tensor_of
from ..chain_arguments import ChainArguments
from ..kernels import on_gpu
from ..product import product
from ..transitions import LOG, Banded


def from_ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    *,
    star: bool = False,
) -> ChainArguments:
    r"""Returns the chain of CTC: `exp(product) = sum_z prod_t exp(log_probs[t, label(z_t)])` over all alignments z.

    The 2 S + 1 states of S labels are blank, first label, blank, second label, ..., blank. A path begins in one of the
    first two states and ends in one of the target's last two; it stays, moves one state on, or skips the blank between
    two different labels. The first five arguments are those of `torch.nn.functional.ctc_loss`.

    Args:
        log_probs: log-probabilities of the C classes `[T, N, C]` or `[T, C]`, in nats; they need not sum to 1.
        targets: labels, integers `[N, S]` with anything past a target's end, or all concatenated
            `[sum(target_lengths)]`; `[S]` for `[T, C]`.
        input_lengths: the number of frames of each sequence `[N]`, from 1 to T; for `[T, C]` one number.
        target_lengths: the number of labels of each sequence `[N]`, from 0 to S; for `[T, C]` one number.
        blank: the class of the states between labels.
        star: whether the label C, which is no class, is a star: a part without transcript, of one frame or more. Its
            log-weight is the `logsumexp` of all classes, blank included: 0 for log-probabilities, as of torchaudio's
            star. No class is more probable, so that in the best alignment labels next to a star last one frame where
            they could last longer. `product` sums over all divisions of frames between a star and labels, and may be
            above 0.

    Returns:
        Weights 0 and 1 in `Banded(values [N, 1, 3, 2 S + 1], (0, 1, 2))`, `x` `[N, T, 2 S + 1]` (S at least 1), -inf at
        the last frame in states where no target ends, and the lengths; for `[T, C]` all without the first axis.
        `product` is exactly -inf, with gradient 0, where a target does not fit into its frames. Its gradient is the
        posterior of each class at each frame. `ctc_labels` maps states of paths to classes.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, or a length, a label or `blank` is out of range.

    Cost: one number of `log_probs` for each state and frame, read into `x`; 3 multiply-adds each in `product`. A star
    takes a copy of `log_probs`. Lengths and labels on a GPU are not checked.

    Source: A. Graves et al., "Connectionist temporal classification", ICML 2006; star: V. Pratap et al., "Star temporal
    classification", NeurIPS 2022.

    >>> from logchain import product
    >>> log_probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.6, 0.1, 0.3]]).log()  # three frames
    >>> arguments = from_ctc(log_probs, torch.tensor([1, 2]), 3, 2)
    >>> product(**arguments._asdict())
    tensor(-1.4524)
    """
    check_tensor("log_probs", log_probs, 2)
    if log_probs.dim() > 3 or 0 in log_probs.shape:
        raise ValueError(f"log_probs: expected [T, N, C] or [T, C], no size of them 0, got {list(log_probs.shape)}")
    frames, *batch, classes = log_probs.shape
    n = math.prod(batch)
    check_integer("blank", blank)
    check_flag("star", star)
    if not 0 <= blank < classes:
        raise ValueError(f"blank: expected a class from 0 to C - 1 = {classes - 1}, got {blank}")
    lengths = _counts("input_lengths", input_lengths, 1, frames)
    labels, counts = padded_labels(targets, target_lengths, blank)
    for name, numbers in (("input_lengths", lengths), ("target_lengths", counts)):
        if len(numbers) != n:
            raise ValueError(f"{name}: expected {n} to go with log_probs {list(log_probs.shape)}, got {len(numbers)}")
    if not on_gpu(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes + star:
        expected = f"labels from 0 to {'C' if star else 'C - 1'} = {classes - 1 + star}"
        raise ValueError(f"targets: expected {expected}, got {int(labels.min())} to {int(labels.max())}")
    labels, counts, lengths = (tensor.to(log_probs.device) for tensor in (labels, counts, lengths))
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
    weights = log_probs.to(dtype).reshape(frames, n, classes)
    if star:
        weights = torch.cat([weights, LOG.sum(weights, -1)[..., None]], -1)
    x = weights.gather(2, index).index_put_((lengths - 1, rows), last, accumulate=True).transpose(0, 1)
    p0 = (state < 2).to(dtype)
    if not batch:
        return ChainArguments(x[0], Banded(values[0], (0, 1, 2)), p0, lengths=lengths[0])
    return ChainArguments(x, Banded(values, (0, 1, 2)), p0, lengths=lengths)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
    *,
    star: bool = False,
) -> Tensor:
    r"""Returns the CTC loss `-log sum_z prod_t exp(log_probs[t, label(z_t)])`, as `torch.nn.functional.ctc_loss`.

    `log_probs` `[T, N, C]` or `[T, C]` in nats, `targets`, the lengths, `blank`, `star` and the errors are those of
    `from_ctc`. `reduction`: "none", "sum", or "mean", the mean of losses divided by the number of labels (by 1 if
    there are none). `zero_infinity`: whether the loss of a target that does not fit into its frames is 0, not inf.

    Returns:
        In nats, `[N]` with "none" (`[]` for `[T, C]`), otherwise `[]`; float64 if `log_probs` are, otherwise float32.
        Gradients are those of `log_probs`, minus the posterior of each class at each frame, and exactly 0 for a target
        that does not fit, never NaN. They can be differentiated again. (torch's are those of logits, correct only
        after `log_softmax`, where both agree.)

    Cost, source: as in `from_ctc`.

    >>> log_probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.6, 0.1, 0.3]]).log()  # three frames
    >>> ctc_loss(log_probs, torch.tensor([1, 2]), 3, 2, reduction="sum")
    tensor(1.4524)
    >>> ctc_loss(log_probs, torch.tensor([1, 1, 1]), 3, 3, zero_infinity=True)  # needs five frames
    tensor(0.)
    """
    check_choice("reduction", reduction, ("none", "mean", "sum"))
    check_flag("zero_infinity", zero_infinity)
    chain = from_ctc(log_probs, targets, input_lengths, target_lengths, blank, star=star)
    loss = -product(**chain._asdict())
    if zero_infinity:
        loss = loss.masked_fill(loss == math.inf, 0.0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    counts = tensor_of(target_lengths, "target_lengths").to(loss.device).reshape(loss.shape)
    return (loss / counts.clamp(min=1)).mean()


def ctc_labels(
    states: Tensor, targets: Tensor, target_lengths: Lengths, blank: int = 0, *, dim: int | None = None
) -> Tensor:
    r"""Returns the class of each frame, `label(z_t)`, for states z of the chain of `from_ctc`.

    `states`: integers of `viterbi` `[N, T]`, of `sample` `[num_samples, N, T]` or of `topk_paths` `[N, k, T]`, all
    without N for `log_probs` `[T, C]`; -1 where there is none. `targets`, `target_lengths` and `blank` are those of
    `from_ctc`. `dim`: the axis of the N sequences in `states`, -2 for `viterbi` and `sample`, 0 for `topk_paths`; by
    default the axis before T whose size is N.

    Returns:
        Integers of the shape of `states`: labels, `blank`, and -1 where `states` are. A label begins where the state
        changes, `states[1:] != states[:-1]`; `align` returns spans.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, a length is out of range, or not exactly one axis has size N.

    Cost: one number read for each state.

    >>> ctc_labels(torch.tensor([[0, 1, 2, 3, -1]]), torch.tensor([[7, 8]]), [2])
    tensor([[ 0,  7,  0,  8, -1]])
    """
    check_integers("states", states)
    labels, _ = padded_labels(targets, target_lengths, blank)
    classes = _classes(labels.to(states.device), blank)  # (N, 2 S + 1)
    n, shape = len(classes), list(states.shape)
    sizes = [1] * (len(shape) - 1)
    if n > 1:
        axes = [axis for axis, size in enumerate(shape[:-1]) if size == n and dim in (None, axis, axis - len(shape))]
        if len(axes) != 1:
            remedy = "pass 0 for states of topk_paths, -2 for those of sample"
            raise ValueError(f"dim: expected the axis of {n} sequences in states {shape}, got {dim}; {remedy}")
        sizes[axes[0]] = n
    rows = classes.view(*sizes, -1).expand(*shape[:-1], -1)
    return torch.where(states < 0, -1, rows.gather(-1, states.clamp(min=0).long()))


def _classes(labels: Tensor, blank: int) -> Tensor:
    """The classes of states (N, 2 S + 1): blank, first label, blank, ..., blank."""
    classes = labels.new_full((len(labels), 2 * labels.shape[1] + 1), blank)
    classes[:, 1::2] = labels
    return classes


def padded_labels(targets: Tensor, target_lengths: Lengths, blank: int) -> tuple[Tensor, Tensor]:
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


def _counts(name: str, value: Lengths, least: int, most: int) -> Tensor:
    """Numbers from `least` to `most` as int64 (N); they are not checked on a GPU."""
    value = tensor_of(value, name)
    check_integers(name, value)
    if value.dim() > 1:
        raise ValueError(f"{name}: expected one number for each sequence, got shape {list(value.shape)}")
    if value.numel() and not on_gpu(value) and not least <= int(value.min()) <= int(value.max()) <= most:
        low, high = int(value.min()), int(value.max())
        raise ValueError(f"{name}: expected numbers from {least} to {most}, got {low} to {high}")
    return value.reshape(-1).long()
