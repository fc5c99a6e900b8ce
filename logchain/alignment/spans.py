"""Forced alignment: the frames of each label, and how certain they are."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import Lengths
from ..marginals import marginals
from ..viterbi import viterbi
from .ctc import from_ctc, padded_labels


class Spans(NamedTuple):
    """The labels of targets and their frames, tensors `[N, S]`, or `[S]` for `[T, C]`: see `align`."""

    label: Tensor
    start: Tensor
    end: Tensor
    log_prob: Tensor
    confidence: Tensor


@torch.no_grad()
def align(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    *,
    star: bool = False,
) -> Spans:
    r"""Returns the frames `start, ..., end - 1` of each label in the best alignment, the path of `viterbi`.

    `log_probs` `[T, N, C]` or `[T, C]` in nats, time first, `targets`, the lengths, `blank`, `star` and the errors are
    those of `from_ctc`. This is torchaudio's `forced_align` and `merge_tokens`: a label lasts while its state does, and
    other frames are blank.

    Returns:
        `Spans`, tensors `[N, S]`, or `[S]` for `[T, C]`, S at least 1, without gradient:

        - `label`: int64, those of the targets, and -1 past a target's end.
        - `start`, `end`: int64, the first frame and one more than the last, as in torchaudio's `TokenSpan`; -1 past a
          target's end and where no alignment is possible, as where a target does not fit into its frames.
        - `log_prob`: the sum of `log_probs[t, label]` over these frames, in nats, `end - start` times torchaudio's
          `score`; -inf where no alignment is possible, NaN for a sequence that holds NaN, 0 past a target's end.
        - `confidence`: the mean over these frames of the label's posterior, conditional on the target; NaN for a
          sequence that holds NaN, otherwise 0 where there are no frames. Low where times are uncertain, whereas a low
          `log_prob` says that the label does not match what was recorded.

    Cost: that of `viterbi` and `marginals`; memory: some tensors `[N, T, 2 S + 1]`.

    Source: L. Kürzinger et al., "CTC-segmentation of large corpora for German end-to-end speech recognition", 2020.

    >>> log_probs = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.6, 0.3], [0.1, 0.1, 0.8]]).log()
    >>> spans = align(log_probs, torch.tensor([1, 2]), 4, 2)
    >>> spans.label, spans.start, spans.end
    (tensor([1, 2]), tensor([1, 3]), tensor([3, 4]))
    >>> spans.log_prob.exp(), spans.confidence
    (tensor([0.4800, 0.8000]), tensor([0.7641, 0.9653]))
    """
    chain = from_ctc(log_probs, targets, input_lengths, target_lengths, blank, star=star)
    *batch, _, c = chain.x.shape
    labels, counts = (tensor.to(log_probs.device) for tensor in padded_labels(targets, target_lengths, blank))
    present = (torch.arange(c // 2, device=log_probs.device) < counts[:, None]).view(*batch, -1)
    best = viterbi(**chain._asdict())
    path = best.states.masked_fill(best.states < 0, c)  # states never fall along it
    label_states = torch.arange(1, c, 2, device=log_probs.device).expand(*batch, -1).contiguous()
    start, end = (torch.searchsorted(path, label_states, right=right) for right in (False, True))
    weight, share = (_sums(values, path) for values in (chain.x, marginals(**chain._asdict()).states))
    score = best.score.view(*batch, 1)  # -inf, or NaN, where there is no path
    aligned, impossible = end > start, present & (end == start)
    return Spans(
        labels.view(*batch, -1).masked_fill(~present, -1),
        start.masked_fill(~aligned, -1),
        end.masked_fill(~aligned, -1),
        torch.where(impossible, score, weight),
        torch.where(impossible, score.exp(), share / (end - start).clamp(min=1)),
    )


def _sums(values: Tensor, states: Tensor) -> Tensor:
    """Sums of values [*B, T, c] on a path [*B, T] over the frames of each label [*B, S]; states of c are left out."""
    c = values.shape[-1]
    on_path = values.gather(-1, states.clamp(max=c - 1)[..., None])[..., 0].double()
    total = on_path.new_zeros(*states.shape[:-1], c + 1).scatter_add(-1, states, on_path)
    return total[..., 1:c:2].to(values.dtype)
