"""The semi-Markov conditional random field: segments of one tag each, whose durations have log-weights."""

from typing import Literal

import torch
from torch import Tensor, nn

from ..arguments import check_choice
from ..chain_arguments import ChainArguments
from ..log_prob import log_prob
from ..marginals import marginals
from ..tensors import is_readable
from ..transitions import Duration
from ..viterbi import viterbi
from .checks import check_count
from .linear_chain_crf import LinearChainCRF, Sequences, as_lists, check_mask, reduced


class SemiMarkovCRF(LinearChainCRF):
    r"""A conditional random field of segments, of 1 to D steps with the same tag.

    The log-weight of segments k = 0..K-1 of tags `z_k` and durations `d_k` is

        start(z_0) + sum_k (sum_i emissions_i(z_k) + durations(z_k, d_k)) + sum_k T(z_{k-1}, z_k) + end(z_{K-1})

    where i runs over the steps of segment k; their log-probability is that minus log Z, the log-sum-exp over all
    segmentations. Arguments, methods and masks are those of `LinearChainCRF`, which it equals with D = 1. `forward`
    also takes `begins`, and `decode_segments` and `segment_marginals` return segments. `torch.compile` computes the
    chain between graphs; `torch.export` does not take it.

    Args:
        num_tags: number of tags, c.
        max_duration: the largest number of steps of a segment, D.
        batch_first: see `LinearChainCRF`, as for `strict_mask`.

    Attributes:
        start_transitions: log-weights of the first segment's tag `[c]`, nats.
        end_transitions: log-weights of the last segment's tag `[c]`, nats.
        transitions: log-weights of the tags of neighboring segments `[c, c]`, `[from, to]`, nats. A diagonal of -inf
            forbids segments of one tag next to each other, and stays.
        durations: log-weights `[c, D]` of the durations: `durations[s, d - 1]` is that of d steps, nats; -inf forbids a
            duration, and stays.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: as for `LinearChainCRF`, or a segment of the tags has more than D steps (checked on a CPU; elsewhere
            its log-likelihood is -inf).

    Cost: `v (c D + c^2)` multiply-adds a sequence, and twice that backward, and memory for messages `[n, v, c D]`.

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
    """

    def __init__(
        self, num_tags: int, max_duration: int, batch_first: bool = False, *, strict_mask: bool = True
    ) -> None:
        check_count("max_duration", max_duration)
        super().__init__(num_tags, batch_first, strict_mask=strict_mask)
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
        begins: Tensor | None = None,
    ) -> Tensor:
        """The log-likelihood of a segmentation; its negative is the training loss.

        Arguments and result are those of `LinearChainCRF.forward`. A segment begins where the tag changes, and where
        `begins`, bool or integers of the shape of the tags, is nonzero: pass it if neighboring segments have the same
        tag. Durations do not include masked steps.

        >>> crf = SemiMarkovCRF(2, 2, batch_first=True)
        >>> tags = torch.zeros(1, 3, dtype=torch.int64)
        >>> crf(torch.zeros(1, 3, 2), tags, begins=torch.tensor([[True, False, True]])).exp() < 1
        tensor(True)
        """
        check_choice("reduction", reduction, ("none", "sum", "mean", "token_mean"))
        chain, unmasked = self._chain(emissions, mask)
        steps = unmasked.gathered(self._checked(tags, emissions, unmasked))
        changes = steps[:, 1:] != steps[:, :-1]
        if begins is not None:
            check_mask("begins", begins, emissions)
            begins = unmasked.gathered(begins if self.batch_first else begins.T)
            changes = changes | begins[:, 1:].bool()
        states = self._states(steps, changes, unmasked.lengths)
        return reduced(log_prob(**chain._asdict(), states=states), unmasked, reduction, tags.numel())

    @torch.no_grad()
    def decode_segments(self, emissions: Tensor, mask: Tensor | None = None) -> list[list[tuple[int, int, int]]]:
        """The most probable segmentation of each sequence.

        Returns:
            n lists of segments (tag, first step, duration); no segments where every segmentation is impossible or an
            emission is NaN. Steps are counted without masked ones.

        >>> crf = SemiMarkovCRF(2, 3, batch_first=True)
        >>> crf.decode_segments(torch.tensor([[[9.0, 0.0], [0.0, 9.0]]]))
        [[(0, 0, 1), (1, 1, 1)]]
        """
        chain, unmasked = self._chain(emissions, mask)
        assert isinstance(chain.bulk, Duration)
        best = chain.bulk.path_segments(viterbi(**chain._asdict()).states)
        return [
            [(tag, step, duration) for step, (tag, duration) in enumerate(zip(*rows, strict=True)) if duration]
            for rows in as_lists(torch.stack([best.states, best.durations], 1), unmasked)
        ]

    def marginals(self, emissions: Tensor, mask: Tensor | None = None) -> Tensor:
        """The posterior probability of each tag at each step: see `LinearChainCRF.marginals`."""
        states: Tensor = super().marginals(emissions, mask).unflatten(-1, (self.num_tags, self.max_duration))
        return states.sum(-1)

    def segment_marginals(self, emissions: Tensor, mask: Tensor | None = None) -> Tensor:
        """The posterior probability that a segment of a tag begins at a step and has a duration.

        Returns:
            Probabilities `[v, n, c, D]` (or `[n, v, c, D]`), 0 where masked. They can be differentiated once.

        >>> crf = SemiMarkovCRF(2, 3, batch_first=True)
        >>> segments = crf.segment_marginals(torch.tensor([[[9.0, 0.0], [0.0, 9.0], [9.0, 0.0]]]))
        >>> segments.sum((-1, -2)).detach().round()  # a segment begins at every step
        tensor([[1., 1., 1.]])
        """
        chain, unmasked = self._chain(emissions, mask)
        assert isinstance(chain.bulk, Duration)
        posteriors = chain.bulk.marginal_segments(marginals(**chain._asdict(), transitions="full")).durations
        return self._as_given(unmasked.spread(posteriors.flatten(-2), 0.0).view_as(posteriors))

    def _chain(self, emissions: Tensor, mask: Tensor | None) -> tuple[ChainArguments, Sequences]:
        (x, _, start, _, lengths, _), unmasked = super()._chain(emissions, mask)
        structure = Duration(self.transitions.to(x.dtype), self.durations.to(x.dtype))
        return structure.arguments(x, start, log_params=True, lengths=lengths), unmasked

    def _tags(self, states: Tensor) -> Tensor:
        return states // self.max_duration

    def _states(self, tags: Tensor, changes: Tensor, lengths: Tensor | None) -> Tensor:
        """The counting states (n, v) of tags (n, v), and of whether a segment begins at each step but the first.

        Where values are not read, those of a segment with too many steps are -1, which is impossible.
        """
        n, v = tags.shape
        steps = torch.arange(v, device=tags.device)
        ends = torch.cat([changes, changes.new_ones(n, 1)], 1)
        if lengths is not None:
            ends = ends | (steps >= lengths[:, None] - 1)
        last = torch.where(ends, steps, v).flip(1).cummin(1).values.flip(1)
        left = last - steps
        if is_readable(left) and left.numel() and (longest := int(left.max()) + 1) > self.max_duration:
            expected = f"segments of at most {self.max_duration} steps, got one of {longest}"
            raise ValueError(f"tags: expected {expected}; pass a larger max_duration to the layer, or begins")
        return torch.where(left < self.max_duration, tags * self.max_duration + left, -1)
