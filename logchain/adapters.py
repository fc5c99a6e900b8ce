"""What other packages call a chain, as the arguments of `logchain`'s functions; none of those packages is imported."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .arguments import check_tensor
from .masks import check_crf, with_end
from .matmul import matmul


class ChainArguments(NamedTuple):
    """The arguments of every function of a chain: `product(**arguments._asdict())`.

    `x` `[*B, v, c]` in nats, `bulk` `[*B or less, v-1 or 1, c, c]` as `[from, to]`, `p0` `[*B or less, c]`, whether
    `bulk` and `p0` are logarithms, and how many variables each sequence has, where they differ.
    """

    x: Tensor
    bulk: Tensor
    p0: Tensor
    log_params: bool = False
    lengths: Tensor | None = None


def from_torch_struct(crf: Any) -> ChainArguments:
    r"""The linear chain of torch-struct: `log Z = log sum_z exp(sum_i log_potentials[i, z_{i+1}, z_i])`.

    Its edges are `[to, from]`, one less than there are variables; the first also holds what is known of the first two
    variables alone. So `bulk` is the edges transposed, and `x` and `p0` are zeros.

    Args:
        crf: a `torch_struct.LinearChainCRF` with its lengths, or its log-potentials alone `[*B, v-1, c, c]` in nats.

    Returns:
        Logarithms. Gradients reach the log-potentials, where those of `product` are torch-struct's marginals.

    Raises:
        TypeError: `crf` is neither; its log-potentials are not a floating tensor.
        ValueError: the log-potentials are not square or have less than three axes.

    Cost: none; `bulk` is a view, `x` is `v c` zeros a sequence.

    Source: A. Rush, "Torch-Struct: deep structured prediction library" (arXiv:2002.00876).

    >>> from logchain import product
    >>> edges = torch.tensor([[[[1.0, 5.0], [2.0, 3.0]]]])  # two variables; from state 1 to state 0 is 5
    >>> arguments = from_torch_struct(edges)
    >>> arguments.bulk[0, 0]
    tensor([[1., 2.],
            [5., 3.]])
    >>> product(**arguments._asdict()), edges.logsumexp((1, 2, 3))
    (tensor([5.1852]), tensor([5.1852]))
    """
    edges = getattr(crf, "log_potentials", crf)
    lengths = getattr(crf, "lengths", None)
    check_tensor("crf", edges, 3)
    *batch, steps, c, origin = edges.shape
    if c != origin:
        raise ValueError(f"crf: expected log-potentials [..., v-1, c, c], got {list(edges.shape)}")
    zeros = edges.new_zeros(*batch, steps + 1, c)
    return ChainArguments(zeros, edges.mT, zeros.new_zeros(c), True, lengths)


def from_pyro(hmm: Any, value: Tensor) -> ChainArguments:
    r"""Pyro's hidden Markov model: `log p(value) = log sum_z I(z_0) prod_i T_i(z_i, z_{i+1}) p(value_i | z_{i+1})`.

    Its initial distribution stands one transition before the first observation, so `p0 = I T_0` and `bulk` is what
    remains of `T`.

    Args:
        hmm: a `pyro.distributions.DiscreteHMM`: initial logits `[*B, c]`, transition logits `[*B, v or 1, c, c]`
            (`[from, to]`), and the distribution of an observation, with batch shape `[*B, v or 1, c]`.
        value: observations `[*B, v, *event]`.

    Returns:
        Logarithms. Gradients reach the logits and the parameters of the observations' distribution.

    Raises:
        TypeError: `hmm` is no DiscreteHMM; `value` is not a tensor.
        ValueError: `value` has no axis of steps, or not as many steps as the transitions.

    Cost: `c^2` for the first transition, and what the observations' densities cost.

    Source: `pyro.distributions.DiscreteHMM`, after S. Sarkka and A. Garcia-Fernandez, "Temporal parallelization of
    Bayesian smoothers" (arXiv:1905.13002).

    >>> from types import SimpleNamespace
    >>> from torch.distributions import Bernoulli
    >>> from logchain import product
    >>> hmm = SimpleNamespace(
    ...     initial_logits=torch.tensor([0.0, -torch.inf]),
    ...     transition_logits=torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log(),
    ...     observation_dist=Bernoulli(torch.tensor([0.5, 0.25])),
    ... )
    >>> arguments = from_pyro(hmm, torch.tensor([1.0]))
    >>> arguments.p0.exp()
    tensor([0.9000, 0.1000])
    >>> product(**arguments._asdict()).exp()  # 0.9 / 2 + 0.1 / 4
    tensor(0.4750)
    """
    _check_attributes("hmm", hmm, "a pyro DiscreteHMM", "initial_logits", "transition_logits", "observation_dist")
    if not isinstance(value, Tensor):
        raise TypeError(f"value: expected a torch.Tensor, got {type(value).__name__}")
    initial, transitions, emission = hmm.initial_logits, hmm.transition_logits, hmm.observation_dist
    event = len(emission.event_shape)
    if value.dim() < event + 1:
        raise ValueError(f"value: expected observations [..., v{', ...' * (event > 0)}], got {list(value.shape)}")
    x = emission.log_prob(value.unsqueeze(-1 - event))  # [..., v, c]
    transitions = transitions if transitions.dim() > 2 else transitions[None]
    v, steps = x.shape[-2], transitions.shape[-3]
    if steps not in (1, v):
        raise ValueError(f"value: expected {steps} steps, as the transition logits have, got {v}")
    batch = torch.broadcast_shapes(initial.shape[:-1], transitions.shape[:-3], x.shape[:-2])
    first = matmul(initial[..., None, :], transitions[..., 0, :, :])[..., 0, :]
    bulk = transitions if steps == 1 else transitions[..., 1:, :, :]
    return ChainArguments(x.expand(*batch, -1, -1), bulk, first, True)


def from_hmmlearn(model: Any, X: Any, lengths: Sequence[int] | None = None) -> ChainArguments:
    r"""A fitted hidden Markov model of hmmlearn: `log p(X) = log sum_z pi(z_0) prod_i A(z_{i-1}, z_i) p(X_i | z_i)`.

    Its conventions are those of `logchain`: `p0` is `startprob_`, `bulk` is `transmat_`, and `x` holds the samples'
    log-likelihoods. Sequences come one behind the other there, and side by side here.

    Args:
        model: any model of `hmmlearn` with parameters.
        X: samples `[samples, features]`.
        lengths: how many samples each sequence has, in their order; one sequence by default.

    Returns:
        Probabilities in float64 with `x` `[v, c]`; with `lengths`, `x` `[n, max(lengths), c]` and the lengths. The sum
        of `product` over the sequences is `model.score(X, lengths)`.

    Raises:
        TypeError: `model` is none of hmmlearn's, or has no parameters yet; `lengths` are no integers.
        ValueError: `X` has not two axes, or `lengths` do not add up to its samples.

    Cost: that of the samples' densities, and one copy of them.

    Source: `hmmlearn.base.BaseHMM`.

    >>> from logchain import product
    >>> class Coins:
    ...     startprob_, transmat_ = [0.5, 0.5], [[0.9, 0.1], [0.2, 0.8]]
    ...
    ...     def _compute_log_likelihood(self, X):
    ...         return np.log(np.where(X == 1, [0.5, 0.25], [0.5, 0.75]))
    >>> product(**from_hmmlearn(Coins(), [[1], [1], [0]], lengths=[2, 1])._asdict()).exp()
    tensor([0.1563, 0.6250], dtype=torch.float64)
    """
    _check_attributes(
        "model", model, "a fitted model of hmmlearn", "startprob_", "transmat_", "_compute_log_likelihood"
    )
    X = np.asarray(X)
    if X.ndim != 2:
        raise ValueError(f"X: expected [samples, features], got {list(X.shape)}")
    x, p0, bulk = _float64(model._compute_log_likelihood(X)), _float64(model.startprob_), _float64(model.transmat_)
    if lengths is None:
        return ChainArguments(x, bulk[None], p0)
    counts = np.asarray(lengths).tolist()
    if not isinstance(counts, list) or not all(type(count) is int for count in counts):
        raise TypeError(f"lengths: expected integers, one for each sequence, got {lengths!r}")
    if sum(counts) != len(x) or min(counts, default=0) < 1:
        raise ValueError(f"lengths: expected positive integers that add up to {len(x)} samples, got {counts}")
    x = torch.nn.utils.rnn.pad_sequence(x.split(counts), batch_first=True)  # (n, v, c)
    return ChainArguments(x, bulk[None], p0, lengths=torch.tensor(counts))


def from_pytorch_crf(crf: Any, emissions: Tensor, mask: Tensor | None = None) -> ChainArguments:
    r"""The layer of pytorch-crf: `log Z = log sum_z exp(start + sum_i (T(z_{i-1}, z_i) + emissions_i(z_i)) + end)`.

    Start transitions are `p0`; end transitions are added to the last variable of each sequence.

    Args:
        crf: a `torchcrf.CRF`: start and end transitions `[c]`, transitions `[c, c]` (`[from, to]`), in nats.
        emissions: `[v, n, c]`, or `[n, v, c]` if `crf.batch_first`.
        mask: `[v, n]`, or `[n, v]` if `crf.batch_first`; true on the variables of a sequence, which come first.

    Returns:
        Logarithms with `x` `[n, v, c]`, and the lengths if there is a mask. Gradients reach the layer's parameters and
        the emissions. The layer's log-likelihood is the tags' log-weight minus `product`.

    Raises:
        TypeError: `crf` is no such layer; `emissions` is not a floating tensor, or `mask` none of bool or integers.
        ValueError: sizes do not go together, or `mask` is empty for a sequence or has a hole.

    Cost: one copy of the emissions. A mask is looked at, for which a GPU has to wait.

    Source: J. Lafferty, A. McCallum and F. Pereira, "Conditional random fields", ICML 2001.

    >>> from types import SimpleNamespace
    >>> from logchain import product
    >>> crf = SimpleNamespace(
    ...     start_transitions=torch.tensor([0.0, -1.0]),
    ...     transitions=torch.zeros(2, 2),
    ...     end_transitions=torch.tensor([-2.0, 0.0]),
    ...     batch_first=True,
    ... )
    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> arguments = from_pytorch_crf(crf, torch.zeros(2, 3, 2), mask)
    >>> arguments.x[1], arguments.lengths
    (tensor([[-2.,  0.],
            [ 0.,  0.],
            [ 0.,  0.]]), tensor([3, 1]))
    >>> product(**arguments._asdict())
    tensor([ 1.1333, -0.6867])
    """
    names = ("start_transitions", "transitions", "end_transitions", "batch_first")
    _check_attributes("crf", crf, "a torchcrf CRF", *names)
    check_crf(emissions, mask, len(crf.start_transitions), crf.batch_first)
    ends = None if mask is None else _ends_of(mask if crf.batch_first else mask.T)
    x = with_end(emissions if crf.batch_first else emissions.transpose(0, 1), crf.end_transitions, ends)
    return ChainArguments(x, crf.transitions[None], crf.start_transitions, True, ends)


def from_statsmodels(results: Any) -> ChainArguments:
    r"""A Markov-switching model of statsmodels: the weight of a path of regimes is that of the Hamilton filter.

    An autoregression of order r looks at the last r + 1 regimes, so a state is such a tuple, the latest first:
    `state // k^r` is the regime. Transitions are `[to, from]` there; those before the first observation are in `p0`.

    Args:
        results: what `MarkovRegression` or `MarkovAutoregression` give from `fit`, `smooth` or `filter`, with `k`
            regimes; transition probabilities may vary in time.

    Returns:
        Probabilities in float64 with `x` `[v, k^(r+1)]`, the conditional log-likelihoods. `product` is `results.llf`.
        Zeros are zeros, where statsmodels puts 1e-20.

    Raises:
        TypeError: `results` are no such results.

    Cost: `k^(2r+2)` numbers for `bulk`, times `v - 1` where transitions vary.

    Source: J. Hamilton, "A new approach to the economic analysis of nonstationary time series", Econometrica 57 (1989).

    >>> from types import SimpleNamespace
    >>> results = SimpleNamespace(
    ...     order=1,
    ...     regime_transition=np.array([[[0.9], [0.2]], [[0.1], [0.8]]]),
    ...     conditional_loglikelihoods=np.zeros((2, 2, 5)),
    ...     predicted_joint_probabilities=np.full((2, 2, 5), 0.25),
    ... )
    >>> from_statsmodels(results).bulk[0]  # states are (now, before): 00, 01, 10, 11
    tensor([[0.9000, 0.0000, 0.1000, 0.0000],
            [0.9000, 0.0000, 0.1000, 0.0000],
            [0.0000, 0.2000, 0.0000, 0.8000],
            [0.0000, 0.2000, 0.0000, 0.8000]], dtype=torch.float64)
    """
    arrays = ("regime_transition", "conditional_loglikelihoods", "predicted_joint_probabilities")
    _check_attributes("results", results, "results of a Markov-switching model", "order", *arrays)
    transitions, conditional, predicted = (_float64(getattr(results, name)) for name in arrays)
    k, order, v = len(transitions), int(results.order), conditional.shape[-1]
    if order == 0 and conditional.dim() == 3:  # a regression keeps the regime before, on which nothing depends
        conditional, predicted = conditional[:, 0], predicted.sum(1)
    transitions = transitions.permute(2, 1, 0)  # (v or 1, from, to)
    bulk = transitions[1:] if len(transitions) == v else transitions
    if order:
        # the regimes that are kept become the earlier ones; the oldest is forgotten
        kept = torch.eye(k**order, dtype=bulk.dtype)
        rows = bulk.repeat_interleave(k ** (order - 1), 1)  # (steps, kept regimes, latest)
        bulk = (rows[:, :, None, :, None] * kept[:, None, None, :]).expand(-1, -1, k, -1, -1)
        bulk = bulk.reshape(len(rows), k ** (order + 1), k ** (order + 1))
    return ChainArguments(conditional.flatten(0, -2).T, bulk, predicted[..., 0].flatten())


def _check_attributes(name: str, value: object, expected: str, *attributes: str) -> None:
    missing = [attribute for attribute in attributes if not hasattr(value, attribute)]
    if missing:
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__} without {', '.join(missing)}")


def _float64(array: Any) -> Tensor:
    """A copy, whose memory nobody else writes."""
    return torch.from_numpy(np.array(array, np.float64))


def _ends_of(mask: Tensor) -> Tensor:
    """How many variables the mask (n, v) leaves to each sequence: int64 [n]."""
    inside = mask.bool()
    ends = inside.sum(1)
    first = torch.arange(inside.shape[1], device=mask.device) < ends[:, None]
    if not (inside.equal(first) and (ends > 0).all()):
        raise ValueError("mask: expected the variables of each sequence first, and at least one; got a hole")
    return ends
