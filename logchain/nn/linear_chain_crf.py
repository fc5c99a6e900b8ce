"""The linear-chain conditional random field as a layer with the interface of pytorch-crf's."""

from typing import Any, Literal, NoReturn

import torch
from torch import Generator, Tensor, nn

from ..arguments import check_choice, check_flag, check_integers, check_is_tensor, check_tensor
from ..autograd.log_partition import log_norm
from ..chain import Chain
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
from .tag_layout import TagLayout, check_mask, check_steps


class LinearChainCRF(nn.Module):
    r"""`log p(z) = start(z_0) + sum_i (T(z_{i-1}, z_i) + emissions_i(z_i)) + end(z_{v-1}) - log Z` for tags `z`.

    Parameters, their names and initial values are those of `torchcrf.CRF`: a `state_dict` of either loads into the
    other, and `forward` and `decode` take its arguments and return its results.

    Args:
        num_tags: number of tags, c.
        batch_first: emissions are `[n, v, c]` instead of `[v, n, c]`, and tags, masks and results accordingly.
        strict_mask: whether to refuse a mask that is off at the first step of a sequence, as pytorch-crf does, since it
            is often inverted by mistake. With False, sequences may begin after masked positions, or be empty.
        allowed_transitions: bool `[c, c]`, `[from, to]`: whether each transition is possible; by default all are. For
            BIO tags, `bio_constraints` returns this and the following two.
        allowed_starts, allowed_ends: bool `[c]`: whether each tag may be the first, and the last.

    Attributes:
        start_transitions, end_transitions: log-weights of the first and of the last tag `[c]`, nats.
        transitions: log-weights `[c, c]`, `[from, to]`, nats. -inf forbids a transition and stays -inf under Adam and
            AdamW, since its gradient is exactly 0. (SGD adds weight decay to the gradient: -inf then becomes NaN.)
        allowed_transitions, allowed_starts, allowed_ends: buffers, or None. Log-weights of what is not allowed are
            -inf, while the parameters stay finite through weight decay, averaging and `reset_parameters`. Buffers that
            were passed are in the `state_dict`: one without them loads with `strict=False`.

    Every method takes
        emissions: log-potentials of the tags in nats, `[v, n, c]` or, if `batch_first`, `[n, v, c]`: float32, float64,
            bfloat16 or float16. Arithmetic and results are at least float32; the gradient has the dtype of the
            emissions. -inf forbids a tag.
        mask: bool or integers, `[v, n]` or `[n, v]`: nonzero where a variable counts, the opposite of torch's
            `key_padding_mask`; by default everywhere. Masked positions are dropped and the others joined: padding may
            be at the end, between (the pieces of a word) and, with `strict_mask=False`, in front (a classifier's first
            token). Masked values have no influence, not even NaN, and gradient 0. The log-likelihood and the
            log-partition of a sequence without variables are 0.
        cu_seqlens: instead of a mask, the offsets `[n + 1]` of packed sequences, from 0 to total, as in
            `logchain.product`. Then emissions are `[total, c]`, and `total` takes the place of both axes of tags and
            results.

    Values of masks and tags are checked on a CPU only: the host never waits for a GPU, except for `cu_seqlens` and
    lists. On a GPU a tag out of range is the device's error (-1 is an impossible tag without `partial=True`), and where
    `strict_mask` refuses a first step, the sequence's log-likelihood is NaN and its tags are -1. Inside `torch.compile`
    errors on a CPU name `lengths`, of which one is 0 where a first step is off, and `states`.

    The layer works under `torch.compile` without a graph break and in `torch.export`, not in TorchScript (`torch.jit`);
    in autocast and in DistributedDataParallel; a batch may be empty. DataParallel gathers tensors: use `viterbi` there,
    not the lists of `decode`.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: sizes or devices do not go together, there is no tag or no step, a choice or a tag is out of range,
            or the first step of a mask is off.
        NotImplementedError: `torch.jit.script` or `torch.jit.trace` compiles the layer.

    Cost: that of `logchain.log_prob` for `forward`: `v c^2` multiply-adds per sequence, and twice that backward; one
    copy of the emissions, and a second one where a mask has holes or is on a GPU.

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
    >>> crf.decode(emissions), crf.viterbi(emissions).states
    ([[0, 1, 1]], tensor([[0, 1, 1]]))
    >>> crf.decode(emissions, torch.tensor([[True, False, True]]))
    [[0, 0]]
    >>> paths, log_weights = crf.topk(emissions, 2)
    >>> paths, log_weights.exp().sum() < crf.log_partition(emissions).exp()
    ([[[0, 1, 1], [1, 1, 1]]], tensor([True]))
    >>> crf.sample(emissions, 5).shape
    torch.Size([5, 1, 3])
    >>> crf.marginals(emissions).detach()
    tensor([[[0.7869, 0.2131],
             [0.2076, 0.7924],
             [0.1293, 0.8707]]])
    """

    allowed_transitions: Tensor | None
    allowed_starts: Tensor | None
    allowed_ends: Tensor | None

    def __init__(
        self,
        num_tags: int,
        batch_first: bool = False,
        *,
        strict_mask: bool = True,
        allowed_transitions: Tensor | None = None,
        allowed_starts: Tensor | None = None,
        allowed_ends: Tensor | None = None,
    ) -> None:
        check_count("num_tags", num_tags)
        check_flag("batch_first", batch_first)
        check_flag("strict_mask", strict_mask)
        super().__init__()
        self.num_tags, self.batch_first, self.strict_mask = num_tags, batch_first, strict_mask
        self.start_transitions = nn.Parameter(torch.empty(num_tags))
        self.end_transitions = nn.Parameter(torch.empty(num_tags))
        self.transitions = nn.Parameter(torch.empty(num_tags, num_tags))
        constraints = {"starts": allowed_starts, "ends": allowed_ends, "transitions": allowed_transitions}
        for (kind, allowed), weights in zip(constraints.items(), self.parameters(), strict=True):
            name = f"allowed_{kind}"
            if allowed is not None:
                check_is_tensor(name, allowed)
                if allowed.dtype != torch.bool:
                    raise TypeError(f"{name}: expected bool, got {str(allowed.dtype)[6:]}; pass its .bool()")
                if allowed.shape != weights.shape:
                    raise ValueError(f"{name}: expected shape {list(weights.shape)}, got {list(allowed.shape)}")
                allowed = allowed.clone()
            self.register_buffer(name, allowed)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters uniformly from -0.1 to 0.1."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def extra_repr(self) -> str:
        """The number of tags, and the options that are not the default."""
        batch_first, any_mask = ", batch_first=True" * self.batch_first, ", strict_mask=False" * (not self.strict_mask)
        return f"num_tags={self.num_tags}{batch_first}{any_mask}"

    def __prepare_scriptable__(self) -> None:
        """Raise for `torch.jit.script`, which calls this, instead of an error of its compiler within the library."""
        self._refuse("torch.jit.script")

    def _refuse(self, compiler: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__}: expected torch.compile or torch.export, got {compiler}")

    def forward(
        self,
        emissions: Tensor,
        tags: Tensor,
        mask: Tensor | None = None,
        reduction: Literal["none", "sum", "mean", "token_mean"] = "sum",
        *,
        cu_seqlens: Tensor | None = None,
        partial: bool = False,
    ) -> Tensor:
        """The log-likelihood `log p(tags)`; its negative is the training loss.

        Args:
            emissions: see the class.
            tags: integers `[v, n]`, or `[n, v]` if `batch_first`. Masked ones may be anything, such as -100. -1 is an
                unknown tag: the result is the log-probability of all taggings that agree with the tags that are known.
            mask: see the class; `mask=tags != -100` drops labels of -100.
            reduction: "none" for `[n]`; "sum" over sequences; "mean", the sum divided by n; "token_mean", the sum
                divided by the number of variables that are not masked.
            cu_seqlens: see the class.
            partial: whether tags may be -1. It is needed on a GPU and inside `torch.compile`, where values are not
                read, and costs a second log-partition, as unknown tags do on a CPU.

        Returns:
            Nats, `[n]` or `[]`: float64 if emissions or parameters are, otherwise float32. Exactly -inf, with gradient
            0, for tags that are impossible. It can be differentiated twice. Every sum and mean of no sequences is 0.

        >>> crf = LinearChainCRF(2, batch_first=True)
        >>> crf(torch.zeros(1, 3, 2), torch.tensor([[-1, -1, -1]])).exp().detach()  # of all taggings
        tensor(1.)
        """
        return self._log_likelihood(emissions, tags, mask, reduction, cu_seqlens, partial)

    @torch.no_grad()
    def decode(
        self, emissions: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> list[list[int]]:
        """The most probable tags of each sequence as lists, without masked variables.

        Returns:
            n lists of tags, which are -1 in a sequence in which every path is impossible or an emission is NaN.
        """
        chain, sequences = self._chain(emissions, mask, cu_seqlens)
        return sequences.lists(self._tags(viterbi(**chain).states))

    def viterbi(self, emissions: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> Path:
        """The most probable tags of each sequence and their log-weights: see `logchain.viterbi`.

        Returns:
            `Path(states, score)`: tags int64 `[v, n]` (or `[n, v]`), -1 where masked, and log-weights `[n]` in nats,
            which have a gradient. A log-weight minus `log_partition` is a log-probability.
        """
        chain, sequences = self._chain(emissions, mask, cu_seqlens)
        path = viterbi(**chain)
        return Path(sequences.spread(self._tags(path.states), -1), path.score)

    def topk(
        self, emissions: Tensor, k: int, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[list[list[list[int]]], Tensor]:
        """The `k` most probable paths of tags of each sequence: see `logchain.topk_paths`.

        Returns:
            Lists of tags, best path first, and log-weights `[n, k]` in nats. Where fewer than `k` paths are possible,
            the others have tags -1 and log-weight -inf.
        """
        chain, sequences = self._chain(emissions, mask, cu_seqlens)
        states, log_weights = topk_paths(**chain, k=k)
        ranked = states if cu_seqlens is not None else states.movedim(1, 0)
        tags = zip(*(sequences.lists(self._tags(paths)) for paths in ranked), strict=True)
        return [list(paths) for paths in tags], log_weights

    def sample(
        self,
        emissions: Tensor,
        num_samples: int,
        mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        """Independent draws of `num_samples` paths of tags of each sequence from the posterior: see `logchain.sample`.

        Returns:
            int64 `[num_samples, v, n]` (or `[num_samples, n, v]`), -1 where masked.
        """
        chain, sequences = self._chain(emissions, mask, cu_seqlens)
        states = sample(**chain, num_samples=num_samples, generator=generator)
        return sequences.spread(self._tags(states).movedim(0, -1), -1).movedim(-1, 0)

    def marginals(self, emissions: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """The posterior probabilities of tags: see `logchain.marginals`.

        Returns:
            Probabilities in the shape of `emissions`, 0 where masked. They can be differentiated once.
        """
        chain, sequences = self._chain(emissions, mask, cu_seqlens)
        return sequences.spread(marginals(**chain).states, 0.0)

    def log_partition(
        self, emissions: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """The log-partition `log Z` `[n]` of each sequence, nats: see `logchain.product`."""
        return product(**self._chain(emissions, mask, cu_seqlens)[0])

    def _log_likelihood(
        self,
        emissions: Tensor,
        tags: Tensor,
        mask: Tensor | None,
        reduction: str,
        cu_seqlens: Tensor | None,
        partial: bool,
        begins: Tensor | None = None,
    ) -> Tensor:
        check_choice("reduction", reduction, ("none", "sum", "mean", "token_mean"))
        check_flag("partial", partial)
        chain, sequences = self._chain(emissions, mask, cu_seqlens)
        check_integers("tags", tags)
        check_steps("tags", tags, emissions)
        tags = tags if mask is None else torch.where(mask.bool(), tags, 0)
        partial = self._has_unknown(tags) or partial
        tags = sequences.gathered(tags)
        begins = None if begins is None else sequences.gathered(begins).bool()
        if partial:
            result = _log_probability(chain, self._agreeing(tags, begins, sequences))
        else:
            result = log_prob(**chain, states=self._states(tags, begins, sequences))
        if reduction == "none":
            return result
        counted: int | Tensor = 1
        if reduction == "mean":
            counted = max(len(result), 1)
        elif reduction == "token_mean":
            counted = max(tags.numel(), 1) if sequences.inside is None else sequences.inside.sum().clamp(min=1)
        return result.sum() / counted

    def _chain(
        self, emissions: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[dict[str, Any], TagLayout]:
        """The arguments of functions of a chain, and how its variables lie in the emissions."""
        if is_jit_traced():
            self._refuse("torch.jit.trace")
        sequences = self._sequences(emissions, mask, cu_seqlens)
        x = sequences.gathered(emissions)
        dtype = torch.promote_types(torch.promote_types(x.dtype, self.transitions.dtype), torch.float32)
        # converted here, not in log Z and the path's weight apart, whose nearly equal gradients would be rounded first
        start, end, transitions = (
            weights.to(dtype) if allowed is None else weights.to(dtype).masked_fill(~allowed, -torch.inf)
            for weights, allowed in (
                (self.start_transitions, self.allowed_starts),
                (self.end_transitions, self.allowed_ends),
                (self.transitions, self.allowed_transitions),
            )
        )
        last = sequences.ended(x.shape[-2], x.device)[..., None]
        x, empty = x.to(dtype) + torch.where(last, end, 0.0), None
        if sequences.inside is not None and not self.strict_mask:
            empty = ~sequences.inside.any(1, keepdim=True)
            x = x.masked_fill(empty[..., None], 0.0)
        chain = self._arguments(x, start, transitions, sequences)
        if empty is not None:  # the only path of an empty sequence, of state 0, has weight 1
            only = torch.arange(chain.p0.shape[-1], device=x.device) == 0
            chain = chain._replace(p0=torch.where(empty, torch.where(only, 0.0, -torch.inf), chain.p0))
        return {**chain._asdict(), "cu_seqlens": cu_seqlens}, sequences

    def _sequences(self, emissions: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> TagLayout:
        """The layout of the emissions; arguments are checked, the first steps of a strict mask where they are read."""
        axes = ["total"] if cu_seqlens is not None else ["n", "v"] if self.batch_first else ["v", "n"]
        check_tensor("emissions", emissions, 2, self.transitions)
        if emissions.dim() != len(axes) + 1 or emissions.shape[-1] != self.num_tags:
            expected = f"[{', '.join(axes)}, {self.num_tags}]"
            raise ValueError(f"emissions: expected shape {expected}, got {list(emissions.shape)}")
        if cu_seqlens is None and emissions.shape[axes.index("v")] < 1:
            raise ValueError(f"emissions: expected at least one step, got {list(emissions.shape)}")
        if cu_seqlens is not None:
            check_is_tensor("cu_seqlens", cu_seqlens)
        if mask is None:
            return TagLayout(self.batch_first, cu_seqlens=cu_seqlens)
        check_mask("mask", mask, emissions)
        if cu_seqlens is not None:
            raise ValueError("mask: expected None with cu_seqlens; leave masked rows out of the emissions")
        inside = mask.bool() if self.batch_first else mask.bool().T
        first = inside[:, 0]
        if self.strict_mask and is_readable(mask) and not first.all():
            raise ValueError(
                "mask: expected the first step of every sequence on, got it off in sequence"
                f" {first.tolist().index(False)}; if the mask is not upside down, pass strict_mask=False to the layer"
            )
        lengths, steps, order = inside.sum(1), torch.arange(inside.shape[1], device=mask.device), None
        if not is_readable(mask) or not inside.equal(steps < lengths[:, None]):  # other variables than the first ones
            order = torch.where(inside, steps, steps + inside.shape[1]).argsort(dim=1)  # ONNX has no stable sort
        lengths = torch.where(first, lengths, 0) if self.strict_mask else lengths.clamp(min=1)
        return TagLayout(self.batch_first, inside, order, lengths)

    def _arguments(self, x: Tensor, start: Tensor, transitions: Tensor, sequences: TagLayout) -> ChainArguments:
        return ChainArguments(x, transitions[None], start, True, sequences.lengths)

    def _tags(self, states: Tensor) -> Tensor:
        """The tags of the chain's states; -1 stays."""
        return states

    def _states(self, tags: Tensor, begins: Tensor | None, sequences: TagLayout) -> Tensor:
        """The chain's states of tags, of which none is unknown."""
        return tags

    def _agreeing(self, tags: Tensor, begins: Tensor | None, sequences: TagLayout) -> Tensor:
        """Whether each state of each variable agrees with its tag."""
        return (tags[..., None] == torch.arange(self.num_tags, device=tags.device)) | (tags[..., None] == -1)

    def _has_unknown(self, tags: Tensor) -> bool:
        """Whether a tag is known to be -1; values are checked, on a CPU."""
        if not is_readable(tags) or not tags.numel():
            return False
        low, high = (int(bound) for bound in torch.aminmax(tags))
        if low < -1 or high >= self.num_tags:
            expected = f"values from 0 to {self.num_tags - 1}, got {low} to {high}"
            raise ValueError(f"tags: expected {expected}; pass -1 for unknown tags, mask=tags != -100 to drop others")
        return low < 0


def _log_probability(chain: dict[str, Any], agreeing: Tensor) -> Tensor:
    """The log-probability of all paths through states that agree; both log-partitions are float64."""
    x = chain["x"]
    both = [Chain.of(**{**chain, "x": terms}).in_place() for terms in (torch.where(agreeing, x, -torch.inf), x)]
    weight, norm = (chains.by_sequence(chains.map(log_norm)) for chains in both)
    # the whole sequence may be impossible: -inf - (-inf) must not become NaN
    impossible = (weight == -torch.inf) & ~norm.isnan()
    return torch.where(impossible, -torch.inf, weight - norm).to(x.dtype)
