"""The accuracy contract as functions: how far a value or a gradient may lie from the truth.

Nothing cancels in sums of what is not negative, so relative errors of factors add up: a step counts as the exact one of
factors that are wrong by at most (k c + 8 + 2 d) u, relative. k is 1 for IEEE sums and 4 for 3xTF32; d is how many nats
a state lies below the largest entry of its message, or of its x, and where matrices are logarithms, of its matrix.
"""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

import logchain
from logchain import reference
from tests import oracle
from tests.families import Chain

# k of products in 3xTF32, in which Triton multiplies
TENSOR_CORES = 4

# a path matters to a step where it has more than this share of the posterior
_MATTERS = 1e-3


def unit(dtype: torch.dtype) -> float:
    """The relative rounding u of float64, or of float32, in which half types are computed too."""
    return 2.0**-53 if dtype == torch.float64 else 2.0**-24


def k_of(tensor: torch.Tensor) -> int:
    """k of the sums by which what computes with this tensor multiplies."""
    return TENSOR_CORES if logchain.kernels.on_gpu(tensor) else 1


def ulp(truth: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The spacing of float32 or float64 at the truth; 0 where the truth is not finite."""
    size = np.abs(truth).astype(np.float64 if dtype == torch.float64 else np.float32)
    return np.where(np.isfinite(truth), np.spacing(np.where(np.isfinite(truth), size, 0)), 0.0).astype(np.float64)


def of_steps(v, c: int, depth=0.0, *, dtype: torch.dtype, k: int = 1):
    """What v steps of c states may be wrong by, in nats, where paths run `depth` nats below the largest entries."""
    tiles = 1 if dtype == torch.float64 else k  # float64 is never cut
    return v * (tiles * c + 8 + 2 * depth) * unit(dtype)


def value_bound(truth: np.ndarray, v, c: int, depth=0.0, *, dtype: torch.dtype, k: int = 1) -> np.ndarray:
    """How far log Z may lie from the truth: a result's rounding and that of its steps."""
    return ulp(truth, dtype) + of_steps(v, c, depth, dtype=dtype, k=k)


def gradient_bound(
    posteriors: np.ndarray, v, c: int, depth=0.0, *, dtype: torch.dtype, k: int = 1, terms: int = 1
) -> np.ndarray:
    """How far posteriors, or sums of so many `terms`, may lie from the truth: `v` and `depth` broadcast with them."""
    return 2 * of_steps(v, c, depth, dtype=dtype, k=k) * np.abs(posteriors) + terms * c * unit(dtype) / 4


def depth(messages: np.ndarray, posteriors: np.ndarray) -> np.ndarray:
    """D [*B]: how far a state that matters lies below the largest entry of its step in `messages` [*B, v, c]."""
    matters = posteriors > _MATTERS
    top = messages.max(-1, keepdims=True)
    return np.where(matters, top - np.where(matters, messages, 0.0), 0.0).max((-2, -1), initial=0.0)


def numbers(chain: Chain) -> list[np.ndarray]:
    return [operand.detach().double().numpy() for operand in chain[:3]]


class Truth:
    """Values, posteriors and bounds of one chain: float64 reference, or decimals where the arithmetic is float64."""

    def __init__(self, chain: Chain, lengths=None, *, edges: bool = False) -> None:
        """At the `edges` of a format the truth is the reference's in any dtype, and bounds include its rounding."""
        x, bulk, p0 = numbers(chain)
        options = {"log_params": chain.log_params, "lengths": lengths}
        self.dtype = torch.float64 if torch.float64 in (t.dtype for t in chain[:3]) else torch.float32
        find = oracle.chain if self.dtype == torch.float64 and not edges else reference.marginals
        found = find(x, bulk, p0, **options)
        self.log_norm, self.states, self.transitions = found.log_norm, found.states, found.transitions
        # Above 0 where some path passes, however unlikely: elsewhere gradients are exactly 0.
        allowed = (np.asarray(array > (-np.inf if chain.log_params else 0.0), float) for array in (bulk, p0))
        self.reach = reference.marginals(np.where(np.isneginf(x), x, 0.0), *allowed, lengths=lengths)
        messages = reference.forward_backward(x, bulk, p0, **options)
        levels = [(array, self.states) for array in (messages.forward, messages.backward, x)]
        if chain.log_params:  # whose largest entries are subtracted too
            matrices, pairs = (array.reshape(*array.shape[:-2], x.shape[-1] ** 2) for array in (bulk, self.transitions))
            levels += [(p0[..., None, :], self.states[..., :1, :]), (matrices, pairs)]
        self.depth = np.max([depth(*level) for level in levels], 0)
        steps = np.asarray(x.shape[-2] if lengths is None else lengths)
        if steps.ndim:  # lengths belong to the first batch axes
            steps = steps.reshape(steps.shape + (1,) * (self.log_norm.ndim - steps.ndim))
        self.steps, self.c, self.edges = np.zeros(self.log_norm.shape, int) + steps, x.shape[-1], edges
        self.slack = np.zeros(self.log_norm.shape)
        if edges:
            arrays = messages.forward, messages.backward, x
            largest = np.max([np.where(np.isfinite(array), np.abs(array), 0).max((-2, -1)) for array in arrays], 0)
            self.slack = 2 * self.steps * (self.c + 8 + 2 * largest) * 2.0**-53

    def value_bound(self, dtype: torch.dtype | None = None, k: int = 1) -> np.ndarray:
        """How far log Z [*B] may lie from the truth."""
        steps = of_steps(self.steps, self.c, self.depth, dtype=self.dtype, k=k)
        return ulp(self.log_norm, dtype or self.dtype) + steps + self.slack

    def gradient_bound(self, posteriors: np.ndarray, k: int = 1) -> np.ndarray:
        """How far posteriors [*B, ...], of states or transitions, times weights or not, may lie from these."""
        steps, depth, slack = (
            array.reshape(array.shape + (1,) * (np.ndim(posteriors) - array.ndim))
            for array in (self.steps, self.depth, self.slack)
        )
        bound = gradient_bound(posteriors, steps, self.c, depth, dtype=self.dtype, k=k)
        return bound + 2 * slack * np.abs(posteriors)


def assert_values(out: torch.Tensor, truth: np.ndarray, bound: np.ndarray) -> None:
    """`out` is exactly -inf where the truth is, never NaN, and within the bound elsewhere."""
    found = out.detach().double().cpu().numpy()
    assert found.shape == truth.shape, f"shape {found.shape}, expected {truth.shape}"
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(truth))
    possible = ~np.isneginf(truth)
    error = np.abs(found[possible] - truth[possible])
    allowed = np.broadcast_to(bound, truth.shape)[possible]
    assert (error <= allowed).all(), f"error {error.max():.3g}, {np.nanmax(error / allowed):.3g} times the bound"


def assert_gradient(
    operand: torch.Tensor,
    weights: np.ndarray,
    reach: np.ndarray,
    bound: np.ndarray,
    log: bool = True,
    edges: bool = False,
) -> None:
    """`operand.grad` is the sum of `weights` over the operand's broadcast axes: exactly 0 where nothing reaches.

    A linear operand's gradient is compared as its logarithm's, that is multiplied by the operand. At the `edges` of a
    format that of a linear entry may be out of its range, and sequences may even give inf - inf.
    """
    if operand.numel() == 0 and operand.grad is None:
        return
    found, value = operand.grad.double().cpu().numpy(), operand.detach().double().cpu().numpy()
    assert operand.grad.dtype == operand.dtype
    assert found.shape == value.shape, f"shape {found.shape}, expected {value.shape}"
    forbidden = np.isneginf(value) if log else value == 0
    assert (found[forbidden | (sum_to(reach, value.shape) == 0)] == 0).all(), "the impossible has a gradient"
    size, limits = 1.0 if log else value, torch.finfo(operand.dtype)
    expected, allowed = sum_to(weights, value.shape), sum_to(np.broadcast_to(bound, weights.shape), value.shape)
    if operand.dtype in (torch.bfloat16, torch.float16):
        allowed = allowed + limits.eps / 2 * np.abs(expected)
    error = np.abs(found * size - expected)
    if edges:
        beyond = ~np.isfinite(found) & (allowed + sum_to(np.abs(weights), value.shape) > limits.max / 2 * size)
        error, allowed = np.where(beyond, 0.0, error), allowed + 2 * limits.tiny * size
    assert (error <= allowed).all(), f"error {error.max():.3g}, {np.nanmax(error / allowed):.3g} times the bound"


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN: what reads a buffer before writing it shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def sum_to(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes that broadcasting `shape` to the array's shape would add or repeat."""
    array = array.sum(tuple(range(array.ndim - len(shape))))
    repeated = tuple(i for i, size in enumerate(shape) if size == 1 and array.shape[i] != 1)
    return array.sum(repeated, keepdims=True)


def assert_contract(
    chain: Chain,
    lengths=None,
    wanted: str = "x bulk p0",
    truth: Truth | None = None,
    device: str = "cpu",
    call: Callable[..., torch.Tensor] = logchain.product,
    **options,
) -> None:
    """Value and wanted gradients of `logchain.product` lie within the contract, and its inputs stay as they are."""
    truth = truth or Truth(chain, lengths)
    names = wanted.split()
    leaves = {name: getattr(chain, name).detach().to(device) for name in ("x", "bulk", "p0")}
    before = {name: leaf.clone() for name, leaf in leaves.items()}
    for name in names:
        leaves[name].requires_grad_()
    out = call(**leaves, log_params=chain.log_params, lengths=lengths, **options)
    k = k_of(leaves["x"])
    assert out.dtype == truth.dtype
    assert_values(out, truth.log_norm, truth.value_bound(out.dtype, k))

    # Upstream weights in [-1, 1], another one for every sequence, and 0 for some.
    upstream = torch.arange(out.numel(), dtype=torch.float64).cos().reshape(out.shape)
    upstream = upstream.masked_fill(upstream.abs() < 0.2, 0.0)
    out.backward(upstream.to(out))
    weight = upstream.to(out.dtype).double().numpy()[..., None, None]
    states, counts = weight * truth.states, weight[..., None] * truth.transitions
    for name, expected, reach in (
        ("x", states, truth.reach.states),
        ("bulk", counts, truth.reach.transitions),
        ("p0", states[..., 0, :], truth.reach.states[..., 0, :]),
    ):
        if name in names:
            log = chain.log_params or name == "x"
            assert_gradient(leaves[name], expected, reach, truth.gradient_bound(expected, k), log, truth.edges)
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.detach(), before[name], rtol=0, atol=0, equal_nan=True)
        assert name in names or leaf.grad is None
