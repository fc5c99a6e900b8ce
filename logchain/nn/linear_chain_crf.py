"""The linear-chain conditional random field as a layer with the interface of pytorch-crf's."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..arguments import (
    check_choice,
    check_device,
    check_flag,
    check_has_values,
    check_integers,
    check_is_tensor,
    check_tensor,
)
from ..chain_arguments import ChainArguments
from ..internals import is_jit_traced
from ..log_prob import log_prob
from ..marginals import marginals
from ..product import product
from ..sample import sample
from ..tensors import is_readable
from ..topk_paths import topk_paths
from ..viterbi import Path, viterbi
from .checks import check_count


class Sequences(NamedTuple):
    """The sequences of a mask: variables that are not masked are moved to the front of each, and back.

    `inside` (n, v) is the mask, `lengths` (n) are the numbers of variables that count, `order` (n, v) is the step from
    which each variable is taken, `empty` (n) marks sequences without variables: they are computed as sequences of one,
    whose results are replaced. `order` and `empty` are None where the mask is known to leave the first variables of
    each sequence, at least one; `empty` is None where it has to leave the first; all are None without a mask.
    """

    inside: Tensor | None = None
    lengths: Tensor | None = None
    order: Tensor | None = None
    empty: Tensor | None = None

    def gathered(self, values: Tensor) -> Tensor:
        """Values (n, v) or (n, v, c) with those that are not masked at the front."""
        if self.order is None or self.inside is None:
            return values
        # masked values are zeroed, since an empty sequence is computed from one of them
        values = torch.where(_like(self.inside, values), values, 0)
        return values.gather(1, _like(self.order, values))

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """Values (n, v) or (n, v, c) moved from the front back to where they were, with `fill` where masked."""
        if self.order is None or self.inside is None:
            return values
        values = values.gather(1, _like(self.order.argsort(1), values))
        return torch.where(_like(self.inside, values), values, fill)

    def zero_where_empty(self, values: Tensor) -> Tensor:
        """Log-weights (n) with 0 for empty sequences, whose only path has weight 1."""
        return values if self.empty is None else values.masked_fill(self.empty, 0.0)


class LinearChainCRF(nn.Module):
    r"""`log p(z) = start(z_0) + sum_i (T(z_{i-1}, z_i) + emissions_i(z_i)) + end(z_{v-1}) - log Z` for tags `z`.

    The parameters, their names and their initial values are those of `torchcrf.CRF`, so that a `state_dict` of either
    loads into the other; `forward` and `decode` take its arguments and give its results. Unlike in pytorch-crf, masks
    may have holes, and masked tags may be anything.

    Args:
        num_tags: number of tags, c.
        batch_first: emissions are `[n, v, c]` instead of `[v, n, c]`, and tags, masks and results accordingly.
        strict_mask: a mask that is off at the first step of a sequence is refused, as pytorch-crf does: often it is
            upside down. With False sequences may begin after masked positions, or be empty.

    Attributes:
        start_transitions: log-weights of the first tag `[c]`, nats.
        end_transitions: log-weights of the last tag `[c]`, nats.
        transitions: log-weights `[c, c]`, `[from, to]`, nats. -inf forbids a transition and stays -inf under Adam and
            AdamW, since its gradient is exactly 0. (SGD adds weight decay to the gradient: -inf then becomes NaN.)

    Every method takes
        emissions: log-potentials of the tags in nats, `[v, n, c]` or, if `batch_first`, `[n, v, c]`: float32, float64,
            bfloat16 or float16. Arithmetic and results are at least float32; the gradient has the dtype of the
            emissions. -inf forbids a tag.
        mask: bool or integers, `[v, n]` or `[n, v]`: nonzero where a variable counts, the opposite of torch's
            `key_padding_mask`; by default everywhere. Masked positions are dropped and the others joined: padding may
            be at the end, between (the pieces of a word) and, with `strict_mask=False`, in front (a classifier's first
            token). Masked values have no influence, not even NaN, and gradient 0. The log-likelihood and the
            log-partition of a sequence without variables are 0.

    Values of masks and tags are checked on a CPU only: `forward` never makes the host wait for a GPU, where a tag out
    of range is the device's error (-1 counts as an impossible tag), and a first step that must not be off makes the
    sequence's log-likelihood NaN and its tags -1. Inside `torch.compile` the errors on a CPU are those of the chain:
    they name `lengths`, of which one is 0 where a first step is off, and `states`.

    The layer works under `torch.compile` without a graph break and in `torch.export`, not in
    TorchScript (`torch.jit`); in autocast and in DistributedDataParallel; a batch may be empty.
    DataParallel gathers tensors: use `viterbi` there, not the lists of `decode`.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: sizes or devices do not go together, there is no tag or no step, a choice or a tag is out of range,
            or the first step of a mask is off.
        NotImplementedError: `torch.jit.script` or `torch.jit.trace` meets the layer.

    Cost: that of `logchain.log_prob` for `forward`: `v c^2` multiply-adds a sequence, and twice that backward; one copy
    of the emissions, and two more where a mask has holes or lies on a GPU.

    Source: J. Lafferty, A. McCallum and F. Pereira, "Conditional random fields", ICML (2001).

    >>> crf = LinearChainCRF(2, batch_first=True)
    >>> crf
    LinearChainCRF(num_tags=2, batch_first=True)
    >>> _ = crf.load_state_dict({
    ...     "start_transitions": torch.zeros(2),
    ...     "end_transitions": torch.zeros(2),
    ...     "transitions": torch.tensor([[0.0, -1.0], [-torch.inf, 0.0]]),  # tag 1 is never left
    ... })
    >>> emissions = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [0.0, 0.5]]])
    >>> loss = -crf(emissions, torch.tensor([[0, 1, 1]]))
    >>> loss
    tensor(0.5460, grad_fn=<NegBackward0>)
    >>> crf.decode(emissions)
    [[0, 1, 1]]
    >>> crf.decode(emissions, torch.tensor([[True, False, True]]))
    [[0, 0]]
    >>> crf.marginals(emissions).detach()
    tensor([[[0.7869, 0.2131],
             [0.2076, 0.7924],
             [0.1293, 0.8707]]])
    """

    def __init__(self, num_tags: int, batch_first: bool = False, *, strict_mask: bool = True) -> None:
        check_count("num_tags", num_tags)
        check_flag("batch_first", batch_first)
        check_flag("strict_mask", strict_mask)
        super().__init__()
        self.num_tags = num_tags
        self.batch_first = batch_first
        self.strict_mask = strict_mask
        self.start_transitions = nn.Parameter(torch.empty(num_tags))
        self.end_transitions = nn.Parameter(torch.empty(num_tags))
        self.transitions = nn.Parameter(torch.empty(num_tags, num_tags))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters uniformly from -0.1 to 0.1.

        >>> crf = LinearChainCRF(2)
        >>> crf.reset_parameters()
        >>> bool(crf.transitions.abs().max() <= 0.1)
        True
        """
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def extra_repr(self) -> str:
        """The number of tags, and the options that are not the default."""
        batch_first, any_mask = ", batch_first=True" * self.batch_first, ", strict_mask=False" * (not self.strict_mask)
        return f"num_tags={self.num_tags}{batch_first}{any_mask}"

    def __prepare_scriptable__(self) -> None:
        """Raise for `torch.jit.script`, which calls this, instead of an error of its compiler within the library."""
        name = type(self).__name__
        raise NotImplementedError(f"{name}: expected torch.compile or torch.export, got torch.jit.script")

    def forward(
        self,
        emissions: Tensor,
        tags: Tensor,
        mask: Tensor | None = None,
        reduction: Literal["none", "sum", "mean", "token_mean"] = "sum",
    ) -> Tensor:
        """The log-likelihood `log p(tags)` of given tags; its negative is the training loss.

        Args:
            emissions: `[v, n, c]`, or `[n, v, c]` if `batch_first`, nats.
            tags: integers `[v, n]`, or `[n, v]` if `batch_first`. Masked ones may be anything, such as -100.
            mask: `[v, n]` or `[n, v]`, see the class.
            reduction: "none" for `[n]`; "sum" over sequences; "mean", the sum divided by n; "token_mean", the sum
                divided by the number of variables that are not masked.

        Returns:
            Nats, `[n]` or `[]`: float64 if emissions or parameters are, otherwise float32. Exactly -inf, with gradient
            0, for tags that are impossible. It can be differentiated twice. Every sum and mean of no sequences is 0.

        >>> crf = LinearChainCRF(2, batch_first=True)
        >>> crf(torch.zeros(4, 3, 2), torch.zeros(4, 3, dtype=torch.int64), reduction="none").shape
        torch.Size([4])
        """
        check_choice("reduction", reduction, ("none", "sum", "mean", "token_mean"))
        chain, unmasked = self._chain(emissions, mask)
        states = unmasked.gathered(self._checked(tags, emissions, unmasked))
        return reduced(log_prob(**chain._asdict(), states=states), unmasked, reduction, tags.numel())

    @torch.no_grad()
    def decode(self, emissions: Tensor, mask: Tensor | None = None) -> list[list[int]]:
        """The most probable tags of each sequence as lists, without masked variables.

        Returns:
            n lists of tags, which are -1 in a sequence in which every path is impossible or an emission is NaN.

        >>> crf = LinearChainCRF(2, batch_first=True)
        >>> emissions = torch.tensor([[[9.0, 0.0], [0.0, 9.0]], [[9.0, 0.0], [0.0, 9.0]]])
        >>> crf.decode(emissions, torch.tensor([[True, True], [True, False]]))
        [[0, 1], [0]]
        """
        chain, unmasked = self._chain(emissions, mask)
        states = viterbi(**chain._asdict()).states
        return [row[0] for row in as_lists(self._tags(states)[:, None], unmasked)]

    def viterbi(self, emissions: Tensor, mask: Tensor | None = None) -> Path:
        """The most probable tags of each sequence and their log-weights: see `logchain.viterbi`.

        Returns:
            `Path(states, score)`: tags int64 `[v, n]` (or `[n, v]`), -1 where masked, and log-weights `[n]` in nats,
            which have a gradient. A log-weight minus `log_partition` is a log-probability.

        >>> crf = LinearChainCRF(2, batch_first=True)
        >>> crf.viterbi(torch.tensor([[[9.0, 0.0], [0.0, 9.0]]])).states
        tensor([[0, 1]])
        """
        chain, unmasked = self._chain(emissions, mask)
        path = viterbi(**chain._asdict())
        tags = unmasked.spread(self._tags(path.states), -1)
        return Path(self._as_given(tags), unmasked.zero_where_empty(path.score))

    def topk(self, emissions: Tensor, k: int, mask: Tensor | None = None) -> tuple[list[list[list[int]]], Tensor]:
        """The `k` most probable paths of tags of each sequence: see `logchain.topk_paths`.

        Returns:
            Lists of tags, best path first, and log-weights `[n, k]` in nats. Where fewer than `k` paths are possible,
            the others have tags -1 and log-weight -inf.

        >>> crf = LinearChainCRF(2, batch_first=True)
        >>> paths, log_weights = crf.topk(torch.tensor([[[9.0, 0.0], [0.0, 5.0]]]), 2)
        >>> paths
        [[[0, 1], [0, 0]]]
        """
        chain, unmasked = self._chain(emissions, mask)
        paths = topk_paths(**chain._asdict(), k=k)
        scores = paths.scores
        if unmasked.empty is not None:
            no_tags = torch.zeros_like(scores[:1]).index_fill(1, torch.arange(1, k, device=scores.device), -torch.inf)
            scores = torch.where(unmasked.empty[:, None], no_tags, scores)
        return as_lists(self._tags(paths.states), unmasked), scores

    def sample(
        self,
        emissions: Tensor,
        num_samples: int,
        mask: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Independent draws of `num_samples` paths of tags of each sequence from the posterior: see `logchain.sample`.

        Returns:
            int64 `[num_samples, v, n]` (or `[num_samples, n, v]`), -1 where masked.

        >>> crf = LinearChainCRF(2, batch_first=True)
        >>> crf.sample(torch.tensor([[[99.0, 0.0], [0.0, 99.0]]]), 3)
        tensor([[[0, 1]],
        <BLANKLINE>
                [[0, 1]],
        <BLANKLINE>
                [[0, 1]]])
        """
        chain, unmasked = self._chain(emissions, mask)
        states = sample(**chain._asdict(), num_samples=num_samples, generator=generator)
        tags = unmasked.spread(self._tags(states).movedim(0, -1), -1)  # (n, v, num_samples)
        return self._as_given(tags).movedim(-1, 0)

    def marginals(self, emissions: Tensor, mask: Tensor | None = None) -> Tensor:
        """The posterior probability of each tag: see `logchain.marginals`.

        Returns:
            Probabilities in the shape of `emissions`, 0 where masked. They can be differentiated once.

        >>> crf = LinearChainCRF(2, batch_first=True)
        >>> crf.marginals(torch.tensor([[[9.0, 0.0], [0.0, 9.0]]])).detach().round()
        tensor([[[1., 0.],
                 [0., 1.]]])
        """
        chain, unmasked = self._chain(emissions, mask)
        return self._as_given(unmasked.spread(marginals(**chain._asdict()).states, 0.0))

    def log_partition(self, emissions: Tensor, mask: Tensor | None = None) -> Tensor:
        """The log-partition `log Z` of each sequence: see `logchain.product`.

        Returns:
            `[n]` in nats, 0 for a sequence without variables.

        >>> crf = LinearChainCRF(2, batch_first=True)
        >>> emissions = torch.zeros(4, 3, 2)
        >>> crf.log_partition(emissions) > crf.viterbi(emissions).score
        tensor([True, True, True, True])
        """
        chain, unmasked = self._chain(emissions, mask)
        return unmasked.zero_where_empty(product(**chain._asdict()))

    def _chain(self, emissions: Tensor, mask: Tensor | None) -> tuple[ChainArguments, Sequences]:
        if is_jit_traced():
            name = type(self).__name__
            raise NotImplementedError(f"{name}: expected torch.compile or torch.export, got torch.jit.trace")
        _check(emissions, mask, self.num_tags, self.batch_first)
        check_device("emissions", emissions, self.transitions)
        if not self.batch_first:
            emissions, mask = emissions.transpose(0, 1), None if mask is None else mask.T
        unmasked = _sequences(mask, self.strict_mask)
        x = _with_end(unmasked.gathered(emissions), self.end_transitions, unmasked.lengths)
        # converted here, not in log Z and the path's weight apart, whose nearly equal gradients would be rounded first
        start, transitions = self.start_transitions.to(x.dtype), self.transitions.to(x.dtype)
        return ChainArguments(x, transitions[None], start, True, unmasked.lengths), unmasked

    def _tags(self, states: Tensor) -> Tensor:
        """The tags of the chain's states; -1 stays."""
        return states

    def _checked(self, tags: Tensor, emissions: Tensor, unmasked: Sequences) -> Tensor:
        """Tags as (n, v), after checks of their kind, their shape and, on a CPU, their values."""
        check_integers("tags", tags)
        if tags.shape != emissions.shape[:2]:
            raise ValueError(f"tags: expected shape {list(emissions.shape[:2])}, got {list(tags.shape)}")
        check_device("tags", tags, emissions)
        tags = tags if self.batch_first else tags.T
        if is_readable(tags) and tags.numel():
            counted = tags if unmasked.inside is None else torch.where(unmasked.inside, tags, 0)
            low, high = (int(bound) for bound in torch.aminmax(counted))
            if low < 0 or high >= self.num_tags:
                raise ValueError(f"tags: expected values from 0 to {self.num_tags - 1}, got {low} to {high}")
        return tags

    def _as_given(self, values: Tensor) -> Tensor:
        """Values (n, v, ...) as (n, v, ...) or (v, n, ...), whichever layout the emissions have."""
        return values if self.batch_first else values.transpose(0, 1)


def _check(emissions: Tensor, mask: Tensor | None, c: int, batch_first: bool) -> None:
    """Check the kinds and sizes of emissions and mask, in the layer's layout."""
    check_tensor("emissions", emissions, 3)
    if emissions.dim() != 3 or emissions.shape[-1] != c:
        axes = "n, v" if batch_first else "v, n"
        raise ValueError(f"emissions: expected shape [{axes}, {c}], got {list(emissions.shape)}")
    if emissions.shape[int(batch_first)] < 1:
        raise ValueError(f"emissions: expected at least one step, got {list(emissions.shape)}")
    if mask is not None:
        check_mask("mask", mask, emissions)


def check_mask(name: str, mask: Tensor, emissions: Tensor) -> None:
    """Check for bool or integers of the shape of the steps."""
    check_is_tensor(name, mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"{name}: expected bool or integers, got {str(mask.dtype)[6:]}")
    if mask.shape != emissions.shape[:2]:
        raise ValueError(f"{name}: expected shape {list(emissions.shape[:2])}, got {list(mask.shape)}")
    check_device(name, mask, emissions)


def _with_end(emissions: Tensor, end: Tensor, lengths: Tensor | None) -> Tensor:
    """Emissions (n, v, c), float32 at least, plus the end transitions (c) at the last variable of each sequence."""
    v = emissions.shape[1]
    steps = torch.arange(1, v + 1, device=emissions.device)
    last = steps == (v if lengths is None else lengths[:, None])  # (v) or (n, v)
    emissions = emissions.to(torch.promote_types(emissions.dtype, torch.float32))
    return emissions + torch.where(last[..., None], end, 0.0)


def reduced(log_likelihood: Tensor, unmasked: Sequences, reduction: str, variables: int) -> Tensor:
    """Log-likelihoods (n), their sum or a mean, of so many variables if none is masked."""
    log_likelihood = unmasked.zero_where_empty(log_likelihood)
    if reduction == "none":
        return log_likelihood
    if reduction == "mean":
        return log_likelihood.sum() / max(len(log_likelihood), 1)
    if reduction == "token_mean":
        counted = max(variables, 1) if unmasked.inside is None else unmasked.inside.sum().clamp(min=1)
        return log_likelihood.sum() / counted
    return log_likelihood.sum()


def as_lists(states: Tensor, unmasked: Sequences) -> list[list[list[int]]]:
    """Paths (n, k, v) as lists without the masked variables at their ends."""
    check_has_values("emissions", states)
    n, _, v = states.shape
    lengths = [v] * n if unmasked.inside is None else unmasked.inside.sum(1).tolist()
    return [[path[:length] for path in paths] for paths, length in zip(states.tolist(), lengths, strict=True)]


def _sequences(mask: Tensor | None, strict: bool) -> Sequences:
    """The sequences of a mask (n, v), whose first steps have to be on if `strict`.

    Values that are on a GPU, for which the host would wait, or traced are not read: a first step that is off makes the
    length 0, which on a GPU makes results NaN, and on a CPU is refused where the chain is computed.
    """
    if mask is None:
        return Sequences()
    inside = mask.bool()
    lengths, steps = inside.sum(1), torch.arange(mask.shape[1], device=mask.device)
    if is_readable(mask):
        first = steps < lengths[:, None]
        if inside.equal(first) and lengths.all():
            return Sequences(inside, lengths)
        if strict and not inside[:, 0].all():
            off = inside[:, 0].tolist().index(False)
            raise ValueError(
                f"mask: expected the first step of every sequence on, got it off in sequence {off}; if the mask is not"
                " upside down, pass strict_mask=False to the layer"
            )
    order = torch.where(inside, steps, steps + mask.shape[1]).argsort(dim=1)  # distinct: ONNX has no stable sort
    if strict:
        return Sequences(inside, torch.where(inside[:, 0], lengths, 0), order)
    return Sequences(inside, lengths.clamp(min=1), order, lengths == 0)


def _like(steps: Tensor, values: Tensor) -> Tensor:
    """Steps (n, v) expanded to the shape of values (n, v) or (n, v, c)."""
    return steps if values.dim() == 2 else steps[..., None].expand_as(values)
