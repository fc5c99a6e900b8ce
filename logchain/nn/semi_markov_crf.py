"""The semi-Markov conditional random field: segments of one tag each, whose durations have log-weights."""

from typing import Literal

import torch
from torch import Tensor, nn

from ..chain_arguments import ChainArguments
from ..marginals import marginals
from ..tensors import is_readable
from ..transitions import Duration
from ..viterbi import viterbi
from .checks import check_count
from .linear_chain_crf import LinearChainCRF
from .tag_layout import TagLayout, check_mask


class SemiMarkovCRF(LinearChainCRF):
    r"""A conditional random field of segments, of 1 to D steps with the same tag.

    The log-weight of segments k = 0..K-1 of tags `z_k` and durations `d_k` is

        start(z_0) + sum_k (sum_i emissions_i(z_k) + durations(z_k, d_k)) + sum_k T(z_{k-1}, z_k) + end(z_{K-1})

    where i runs over the steps of segment k; their log-probability is that minus log Z, the log-sum-exp over all
    segmentations. Methods, masks and other arguments are those of `LinearChainCRF`, which it equals with D = 1.
    `torch.compile` computes the chain between graphs; `torch.export` does not take it.

    Args:
        num_tags: number of tags, c.
        max_duration: the largest number of steps of a segment, D.
        batch_first: see `LinearChainCRF`.
        strict_mask: see `LinearChainCRF`.
        allowed_transitions: see `LinearChainCRF`; those between segments.
        allowed_starts: see `LinearChainCRF`.
        allowed_ends: see `LinearChainCRF`.

    Attributes:
        start_transitions, end_transitions: log-weights of the first and of the last segment's tag `[c]`, nats.
        transitions: log-weights of the tags of neighboring segments `[c, c]`, `[from, to]`, nats. A diagonal of -inf
            forbids segments of one tag next to each other, and stays.
        durations: log-weights `[c, D]` of the durations: `durations[s, d - 1]` is that of d steps, nats; -inf forbids a
            duration, and stays.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: as for `LinearChainCRF`, or a segment of the tags has more than D steps (checked on a CPU; elsewhere
            its log-likelihood is -inf).

    Cost: `v (c D + c^2)` multiply-adds per sequence, and twice that backward, and memory for messages `[n, v, c D]`.

    Source: S. Sarawagi and W. Cohen, "Semi-Markov conditional random fields for information extraction", NIPS (2004).

    >>> crf = SemiMarkovCRF(2, 3, batch_first=True)
    >>> crf
    SemiMarkovCRF(num_tags=2, max_duration=3, batch_first=True)
    >>> with torch.no_grad():
    ...     for parameter in crf.parameters():
    ...         _ = parameter.zero_()
    ...     _ = crf.transitions.fill_diagonal_(-torch.inf)
    ...     crf.durations[1, 0] = -torch.inf  # segments of tag 1 take two steps or three
    >>> emissions = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [0.5, 0.0], [1.0, 0.0]]])
    >>> crf.decode_segments(emissions)  # tag, first step, duration
    [[(0, 0, 1), (1, 1, 2), (0, 3, 1)]]
    >>> crf.decode(emissions)
    [[0, 1, 1, 0]]
    >>> -crf(emissions, torch.tensor([[0, 1, 1, 0]]))
    tensor(0.5744, grad_fn=<NegBackward0>)
    >>> crf.marginals(emissions)[..., 1].detach()  # of tag 1 at each step
    tensor([[0.2018, 0.9720, 0.8744, 0.2352]])
    >>> crf.segment_marginals(emissions)[0, 1, 1].detach()  # of tag 1 from step 1 on, for one step to three
    tensor([0.0000, 0.5630, 0.2071])
    """

    def __init__(
        self,
        num_tags: int,
        max_duration: int,
        batch_first: bool = False,
        *,
        strict_mask: bool = True,
        allowed_transitions: Tensor | None = None,
        allowed_starts: Tensor | None = None,
        allowed_ends: Tensor | None = None,
    ) -> None:
        check_count("max_duration", max_duration)
        super().__init__(
            num_tags,
            batch_first,
            strict_mask=strict_mask,
            allowed_transitions=allowed_transitions,
            allowed_starts=allowed_starts,
            allowed_ends=allowed_ends,
        )
        self.max_duration = max_duration
        self.durations = nn.Parameter(torch.empty(num_tags, max_duration).uniform_(-0.1, 0.1))

    def extra_repr(self) -> str:
        """The numbers of tags and steps, and the options that are not the default."""
        tags, *options = super().extra_repr().split(", ")
        return ", ".join((tags, f"max_duration={self.max_duration}", *options))

    def forward(
        self,
        emissions: Tensor,
        tags: Tensor,
        mask: Tensor | None = None,
        reduction: Literal["none", "sum", "mean", "token_mean"] = "sum",
        *,
        cu_seqlens: Tensor | None = None,
        partial: bool = False,
        begins: Tensor | None = None,
    ) -> Tensor:
        """The log-likelihood of a segmentation; its negative is the training loss.

        Arguments and result are those of `LinearChainCRF.forward`. A segment begins where the tag changes, and where
        `begins`, bool or integers of the shape of the tags, is nonzero: pass it if neighboring segments have the same
        tag. Durations do not include masked steps. Before and after an unknown tag, -1, segments may begin or not.

        >>> crf = SemiMarkovCRF(2, 2, batch_first=True)
        >>> tags = torch.zeros(1, 3, dtype=torch.int64)
        >>> crf(torch.zeros(1, 3, 2), tags, begins=torch.tensor([[True, False, True]])).exp() < 1
        tensor(True)
        """
        if begins is not None:
            check_mask("begins", begins, emissions)
        return self._log_likelihood(emissions, tags, mask, reduction, cu_seqlens, partial, begins)

    @torch.no_grad()
    def decode_segments(
        self, emissions: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> list[list[tuple[int, int, int]]]:
        """The most probable segmentation of each sequence.

        Returns:
            n lists of segments (tag, first step, duration); no segments where every segmentation is impossible or an
            emission is NaN. Steps are counted without masked ones.
        """
        chain, sequences = self._chain(emissions, mask, cu_seqlens)
        best = chain["bulk"].path_segments(viterbi(**chain).states, cu_seqlens)
        pairs = zip(sequences.lists(best.states), sequences.lists(best.durations), strict=True)
        return [
            [(tag, step, duration) for step, (tag, duration) in enumerate(zip(*pair, strict=True)) if duration]
            for pair in pairs
        ]

    def marginals(self, emissions: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """The posterior probabilities of tags at each step: see `LinearChainCRF.marginals`."""
        states = super().marginals(emissions, mask, cu_seqlens=cu_seqlens)
        return states.view(*states.shape[:-1], self.num_tags, -1).sum(-1)

    def segment_marginals(
        self, emissions: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """The posterior probability that a segment of a tag begins at a step and has a duration.

        Returns:
            Probabilities `[v, n, c, D]` (or `[n, v, c, D]`), 0 where masked. They can be differentiated once.
        """
        chain, sequences = self._chain(emissions, mask, cu_seqlens)
        posteriors = marginals(**chain, transitions="full")
        return sequences.spread(chain["bulk"].marginal_segments(posteriors, cu_seqlens).durations, 0.0)

    def _arguments(self, x: Tensor, start: Tensor, transitions: Tensor, sequences: TagLayout) -> ChainArguments:
        structure = Duration(transitions, self.durations.to(x.dtype))
        lengths, cu_seqlens = sequences.lengths, sequences.cu_seqlens
        return structure.arguments(x, start, log_params=True, lengths=lengths, cu_seqlens=cu_seqlens)

    def _tags(self, states: Tensor) -> Tensor:
        return states // self.max_duration

    def _ends(self, tags: Tensor, begins: Tensor | None, sequences: TagLayout) -> Tensor:
        """Whether a segment ends at each step: before another tag, before `begins`, and with the sequence."""
        ends = sequences.ended(tags.shape[-1], tags.device) | (tags != tags.roll(-1, -1))
        return ends if begins is None else ends | begins.roll(-1, -1)

    def _states(self, tags: Tensor, begins: Tensor | None, sequences: TagLayout) -> Tensor:
        """The counting states of tags; where values are not read, those of segments with too many steps are -1."""
        steps = torch.arange(tags.shape[-1], device=tags.device)
        ends = self._ends(tags, begins, sequences)
        last = torch.where(ends, steps, len(steps)).flip(-1).cummin(-1).values.flip(-1)
        left = last - steps
        if is_readable(left) and left.numel() and (longest := int(left.max()) + 1) > self.max_duration:
            expected = f"segments of at most {self.max_duration} steps, got one of {longest}"
            raise ValueError(f"tags: expected {expected}; pass a larger max_duration to the layer, or begins")
        return torch.where(left < self.max_duration, tags * self.max_duration + left, -1)

    def _agreeing(self, tags: Tensor, begins: Tensor | None, sequences: TagLayout) -> Tensor:
        """Whether counting states agree with tags; next to an unknown tag a segment may end or not."""
        left = torch.arange(self.max_duration, device=tags.device)
        free = (tags == -1) | (tags.roll(-1, -1) == -1)
        if begins is not None:
            free = free & ~begins.roll(-1, -1)
        ends = self._ends(tags, begins, sequences)[..., None]
        steps = torch.where(ends, left == 0, left > 0) | free[..., None]
        return (super()._agreeing(tags, begins, sequences)[..., None] & steps[..., None, :]).flatten(-2)
