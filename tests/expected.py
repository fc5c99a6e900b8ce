"""What the outputs of `tests.subjects` have to be, and how exactly: from decimals, or from the float64 reference."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

import logchain
from logchain import reference
from tests import oracle
from tests.contract import Truth, assert_values, k_of, numbers, of_steps, sum_to, ulp, value_bound
from tests.families import F32, F64, FAMILIES, INF, LARGE, Chain
from tests.subjects import LAG, RANKS, Found, other_chain


def sizes(name: str, dtype: torch.dtype, each: bool) -> dict[str, int]:
    """The sizes of a family's chain; in float64 few, for the sake of decimals."""
    if name[-1].isdigit():  # which has sizes of its own
        return {} if dtype == F32 or name in LARGE else {"n": 2, "t": 1}
    if dtype == F64:
        return {"n": 2, "t": 1, "v": 5, "c": 9} if each else {"n": 2, "t": 1, "v": 9, "c": 5}
    return {}


class Expected:
    """The truth of a chain, and checks of outputs by their names."""

    def __init__(self, chain: Chain, truth: Truth, lengths=None):
        self.chain, self.truth = chain, truth
        self._options = {"log_params": chain.log_params, "lengths": lengths}

    def check(self, found: Found) -> None:
        truth, self.k = self.truth, k_of(next(iter(found.values())))
        for name, output in found.items():
            match name:
                case "log_norm":
                    assert output.dtype == truth.dtype
                    assert_values(output, truth.log_norm, truth.value_bound(output.dtype, self.k))
                case "states" | "transitions":
                    exact = getattr(truth, name)
                    assert_posteriors(output, exact, getattr(truth.reach, name), truth.gradient_bound(exact, self.k))
                case "counts":
                    exact, shape = truth.transitions, tuple(self.chain.bulk.shape)
                    arrays = exact, truth.reach.transitions, truth.gradient_bound(exact, self.k)
                    assert_posteriors(output, *(sum_to(array, shape) for array in arrays))
                case "filtered" | "smoothed":
                    self.prefixes(output, 0 if name == "filtered" else LAG)
                case "forward" | "backward":
                    self.messages(output, name)
                case "maximum":
                    assert_values(output, self._best.score, self._best.bound)
                case "score" | "scores":  # which are checked with their paths
                    assert output.dtype == truth.dtype
                case _:
                    getattr(self, name)(found)

    def entropy(self, found: Found) -> None:
        # log Z - E[log w]: the first is off by the mean of errors of paths' log-weights, all of which the contract
        # bounds, and the second by their covariance with log w, which is about as large
        truth = self.truth
        exact = np.reshape(self._decimals(oracle.entropy), truth.log_norm.shape)
        bound = 2 * of_steps(truth.steps, truth.c, truth.depth, dtype=truth.dtype, k=self.k)
        assert_values(found["entropy"], exact, ulp(exact, truth.dtype) + bound)

    def divergence(self, found: Found) -> None:
        other = other_chain(*self.chain[:3])
        pair = (numbers(chain) for chain in (self.chain, Chain(*other)))
        exact = reference.kl_divergence(*pair, **self._options)
        # the reference's own rounding: posteriors to |log Z| spacings, times potentials as large
        finite = self.chain.x[self.chain.x.isfinite()].abs()
        size = np.maximum(self._size(), float(finite.max()) if finite.numel() else 1.0)
        found_, bound = found["divergence"], ulp(exact, self.truth.dtype) + 2.0**-50 * size**2
        if self.truth.dtype == F32:  # both chains are as exact as for an entropy
            bound += 4 * of_steps(self.truth.steps, self.truth.c, self.truth.depth, dtype=F32, k=self.k)
        np.testing.assert_array_less(np.abs(found_.detach().double().numpy() - exact), bound + 1e-300)

    def log_prob(self, found: Found) -> None:
        exact = reference.log_prob(*numbers(self.chain), self.chain.x.argmax(-1), **self._options)
        size = np.abs(np.where(np.isfinite(exact), exact, 0.0))
        weight = size + self._size()
        rounding = torch.finfo(self.truth.dtype).eps * size + 2.0**-52 * self.truth.steps * weight
        assert_values(found["log_prob"], exact, self.truth.value_bound(F64, self.k) + rounding)

    def best(self, found: Found) -> None:
        """No path is better, by more than the contract allows, and the score is that of just these states."""
        known, states = self._best, found["best"]
        assert states.dtype == torch.int64
        np.testing.assert_array_equal(states.cpu().numpy() < 0, known.states < 0)
        own, size = weigh(self.chain, states.cpu().numpy())
        exact, slack = known.score, known.bound + ulp(own, F32 if self.truth.dtype == F32 else F64)
        assert_values(torch.from_numpy(own), exact, slack)
        if "score" in found:
            score = found["score"]
            assert_values(score, exact, known.bound)
            assert_values(score, own, ulp(own, score.dtype) + 2.0**-50 * size)

    def paths(self, found: Found) -> None:
        """Different paths in falling order, each worth its score, and none better."""
        scores, states = found["scores"], found["paths"].movedim(-1, -2)
        exact = reference.topk_paths(*numbers(self.chain), RANKS, **self._options)
        weights = [weigh(self.chain, one.cpu().numpy()) for one in states.unbind(-2)]
        own, size = (np.stack(some, -1) for some in zip(*weights, strict=True))
        assert_values(scores, own, ulp(own, scores.dtype) + 2.0**-50 * size)
        slack = 2 * self._best.bound[..., None] + ulp(own, scores.dtype) + 2.0**-50 * size
        assert_values(scores, exact.scores, slack)
        assert (scores[..., :-1] >= scores[..., 1:]).all()
        np.testing.assert_array_equal(states < 0, exact.states < 0)
        for some in states.reshape(-1, RANKS, states.shape[-1]).tolist():
            possible = [tuple(path) for path in some if path[0] >= 0]
            assert len(set(possible)) == len(possible)

    @functools.cached_property
    def _best(self):
        return best_paths(self.chain, self._options["lengths"])

    @functools.cached_property
    def _messages(self):
        return self._decimals(oracle.messages)

    def _decimals(self, function: Callable) -> list:
        """What a function of one sequence finds in decimals, for each of the batch."""
        x, bulk, p0 = numbers(self.chain)
        batch, options = x.shape[:-2], {"log_params": self.chain.log_params}
        rows = x, np.broadcast_to(bulk, batch + bulk.shape[-3:]), np.broadcast_to(p0, batch + p0.shape[-1:])
        return [function(*(row[index] for row in rows), **options) for index in np.ndindex(batch)]

    def _size(self) -> np.ndarray:
        """|log Z| [*B], or 1."""
        norm = self.truth.log_norm
        return np.maximum(1.0, np.abs(np.where(np.isfinite(norm), norm, 0.0)))

    def prefixes(self, found: torch.Tensor, lag: int) -> None:
        forward = reference.forward_backward(*numbers(self.chain), **self._options).forward
        # the reference is good to float64 at the size of its messages
        rounding = 2.0**-50 * float(np.abs(forward[np.isfinite(forward)]).max(initial=1.0))
        exact, reach = prefixes(self.chain, lag), prefixes(reachable(self.chain), lag)
        assert_posteriors(found, exact, reach, self.truth.gradient_bound(exact, self.k) + rounding)

    def messages(self, found: torch.Tensor, name: str) -> None:
        """Each entry is a log-partition of its own: as exact as one, however far below the others."""
        if self.truth.dtype == F64:
            exact = np.stack([both[name == "backward"] for both in self._messages]).reshape(self.chain.x.shape)
        else:
            exact = getattr(reference.forward_backward(*numbers(self.chain), **self._options), name)
        below = exact.max(-1, keepdims=True) - np.where(np.isfinite(exact), exact, np.inf)
        deep = max(0.0, below.max(initial=0.0, where=np.isfinite(below)))
        (v, c), dtype = self.chain.x.shape[-2:], self.truth.dtype
        assert_values(found, exact, ulp(exact, dtype) + of_steps(v, c, deep, dtype=dtype, k=self.k))


def assert_posteriors(found: torch.Tensor, exact: np.ndarray, reach: np.ndarray, bound: np.ndarray) -> None:
    """Within the bound, and exactly 0 where nothing can be."""
    values = found.detach().double().cpu().numpy()
    assert values.shape == exact.shape
    assert (values[reach == 0] == 0).all(), "the impossible has a posterior"
    error = np.abs(values - exact)
    assert (error <= bound).all(), f"error {error.max():.3g}, {np.nanmax(error / bound):.3g} times the bound"


def counted(values: torch.Tensor, size: int) -> np.ndarray:
    """How often each of 0 to size - 1 is found along the first axis [..., size]."""
    places = (size + 1) * torch.arange(values.shape[1:].numel()).view(values.shape[1:]) + values + 1
    counts = torch.bincount(places.flatten(), minlength=(size + 1) * values.shape[1:].numel())
    return counts.view(*values.shape[1:], size + 1)[..., 1:].numpy()


def assert_drawn(chain: Chain, paths: torch.Tensor, lengths=None) -> None:
    """Paths are possible, -1 past the end, and states and pairs as frequent as their posteriors say."""
    total, c = len(paths), chain.x.shape[-1]
    assert paths.dtype == torch.int64 and paths.shape[1:] == chain.x.shape[:-1]
    truth = reference.marginals(*numbers(chain), log_params=chain.log_params, lengths=lengths)
    weights = logchain.log_prob(*chain[:3], paths, log_params=chain.log_params, lengths=lengths)
    assert torch.isfinite(weights[:, torch.from_numpy(np.isfinite(truth.log_norm))]).all()
    inside = torch.from_numpy(truth.states.sum(-1) > 0.5)
    assert ((paths >= 0) == inside).all()
    before, after = paths[..., :-1], paths[..., 1:]
    pairs = torch.where((before >= 0) & (after >= 0), c * before + after, -1)
    found = counted(paths, c), counted(pairs, c * c).reshape(truth.transitions.shape)
    for counts, exact in zip(found, (truth.states, truth.transitions), strict=True):
        p = exact.clip(0.0, 1.0)
        assert (counts[p == 0] == 0).all()
        assert (np.abs(counts - total * p) <= 6 * np.sqrt(total * p * (1 - p)) + 6).all()


def prefixes(chain: Chain, lag: int) -> np.ndarray:
    """The posterior of each state given `lag` variables more, each from a chain of its own that ends there."""
    (x, bulk, p0), found = numbers(chain), []
    v = x.shape[-2]
    bulk = np.broadcast_to(bulk, (*bulk.shape[:-3], v - 1, *bulk.shape[-2:]))
    for i in range(v):
        stop = min(v, i + lag + 1)
        part = x[..., :stop, :], bulk[..., : stop - 1, :, :], p0
        found.append(reference.marginals(*part, log_params=chain.log_params).states[..., i, :])
    return np.stack(found, -2)


def reachable(chain: Chain) -> Chain:
    """The same states are possible, and all that is possible is about as likely."""
    zero = -torch.inf if chain.log_params else 0.0
    x = chain.x.detach()
    bulk, p0 = (torch.where(operand > zero, 1.0, 0.0) for operand in chain[1:3])
    return Chain(torch.where(x.isneginf(), x, 0.0), bulk, p0)


def weigh(chain: Chain, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The weight of each path of states [*B, v], added without rounding, and the sum of the logarithms' sizes."""
    (x, bulk, p0), batch = numbers(chain), states.shape[:-1]
    if not chain.log_params:
        with np.errstate(divide="ignore"):
            bulk, p0 = np.log(bulk), np.log(p0)
    c = x.shape[-1]
    bulk = np.broadcast_to(bulk, (*batch, states.shape[-1] - 1, c, c))
    p0, found, sizes = np.broadcast_to(p0, (*batch, c)), np.full(batch, -INF), np.zeros(batch)
    for b in np.ndindex(*batch):
        path = [z for z in states[b] if z >= 0]
        if path:
            taken = [p0[b][path[0]], *(bulk[b][i, z, y] for i, (z, y) in enumerate(zip(path, path[1:], strict=False)))]
            found[b] = math.fsum([*taken, *(x[b][i, z] for i, z in enumerate(path))])
            sizes[b] = 0.0 if chain.log_params else np.abs(taken).sum()
    return found, sizes


class BestPaths(NamedTuple):
    """The best paths by the reference, their weights, and how far a score may lie from these."""

    states: np.ndarray
    score: np.ndarray
    bound: np.ndarray


def best_paths(chain: Chain, lengths=None) -> BestPaths:
    options = {"log_params": chain.log_params, "lengths": lengths}
    dtype = F64 if F64 in (operand.dtype for operand in chain[:3]) else torch.float32
    best = reference.viterbi(*numbers(chain), **options)
    forward = reference.forward_backward(*numbers(chain), **options).forward
    inside = best.states >= 0
    own = np.take_along_axis(forward, np.maximum(best.states, 0)[..., None], -1)[..., 0]
    depth = (np.where(inside, forward.max(-1), 0.0) - np.where(inside, own, 0.0)).max(-1)
    score, sizes = weigh(chain, best.states)
    return BestPaths(best.states, score, value_bound(score, *forward.shape[-2:], depth, dtype=dtype) + 2.0**-52 * sizes)


@functools.cache
def expected(name: str, dtype: torch.dtype, each: bool, log: bool) -> Expected:
    chain = FAMILIES[name](dtype, each=each, log=log, **sizes(name, dtype, each))
    return Expected(chain, Truth(chain))
