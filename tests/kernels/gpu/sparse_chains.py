"""Chains of bands and of arcs, what they are as dense chains, and whether kernels find the decimals' truth for them."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from logchain.kernels.structured import Arcs, Gradients, Structured, Walk
from tests import oracle

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")


def places(pattern: Any, c: int) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets of a parameter's entries, in its own shape; sources outside of 0..c-1 are none."""
    if isinstance(pattern, Arcs):
        return pattern.source.numpy(), pattern.target.numpy()
    target = np.broadcast_to(np.arange(c), (len(pattern), c))
    return target - np.array(pattern)[:, None], target


def structured(
    pattern: Any, batch: tuple[int, ...], v: int, c: int, *, seed: int = 0, shared: tuple[int, ...] | None = None,
    steps: int | None = None, lengths: list | None = None, log_params: bool = False, dtype: torch.dtype = F32,
    x_size: float = 1.0, p_size: float = 1.0, by_log: bool = False,
) -> Structured:  # fmt: skip
    """A random chain whose parameter and p0 have the batch axes `shared`; a fifth of all weights is 0."""
    draw = np.random.default_rng(seed)
    own = places(pattern, c)[0].shape
    shared = batch if shared is None else shared

    def weights(*shape: int, sizes: float) -> torch.Tensor:
        logs = np.where(draw.random(shape) < 0.2, -INF, sizes * draw.normal(size=shape))
        return torch.from_numpy(logs if log_params else np.exp(logs)).to(dtype)

    x = torch.from_numpy(x_size * draw.normal(size=(*batch, v, c))).to(dtype)
    p = weights(*shared, v - 1 if steps is None else steps, *own, sizes=p_size)
    p0 = weights(*shared, c, sizes=1.0)
    p0[..., 0] = -0.5 if log_params else 0.5
    ends = None if lengths is None else torch.tensor(lengths)
    return Structured(x, (p,), p0, pattern, ends, log_params, F64 if dtype == F64 else F32, by_log)


def dense(chain: Structured) -> torch.Tensor:
    """The transition matrices [*B or ones, s, c, c], float64."""
    (p,), (source, target) = chain.parameters, places(chain.pattern, chain.c)
    own, c = source.ndim, chain.c
    bulk = torch.full((*p.shape[: p.ndim - own], c, c), -INF if chain.log_params else 0.0, dtype=F64)
    exists = (source >= 0) & (source < c)
    bulk[..., source[exists], target[exists]] = p.double()[..., torch.from_numpy(exists)]
    return bulk


def run(module, chain: Structured, weight: torch.Tensor, device: str) -> tuple[Walk, Gradients]:
    """All results, on the CPU."""
    there = on_device(chain, device)
    walk = module.forward(there, True)
    found = module.backward(there, walk, weight.to(device), (True, True, True))
    assert not walk.redone.any() and walk.redone.shape == walk.log_norm.shape == chain.batch
    assert sum(kept.numel() for kept in walk.kept) == 2 * chain.x.numel()
    for gradient, operand in ((found.x, chain.x), (found.parameters[0], chain.parameters[0]), (found.p0, chain.p0)):
        assert gradient.shape == operand.shape and gradient.dtype == chain.dtype and gradient.is_contiguous()
    found = Gradients(found.x.cpu(), (found.parameters[0].cpu(),), found.p0.cpu())
    return walk._replace(log_norm=walk.log_norm.cpu()), found


def on_device(chain: Structured, device: str) -> Structured:
    pattern = chain.pattern
    return replace(
        chain, x=chain.x.to(device), parameters=(chain.parameters[0].to(device),), p0=chain.p0.to(device),
        pattern=Arcs(*(end.to(device) for end in pattern)) if isinstance(pattern, Arcs) else pattern,
        ends=None if chain.ends is None else chain.ends.to(device),
    )  # fmt: skip


def weights(chain: Structured) -> torch.Tensor:
    return torch.linspace(0.5, 2.0, chain.batch.numel(), dtype=F64).view(chain.batch)


def check(module, chain: Structured, device: str) -> tuple[Walk, Gradients]:
    """Values within the contract, and gradients too, for paths that lie nowhere below others; zeros are exact."""
    weight = weights(chain)
    walk, found = run(module, chain, weight, device)
    x, p, p0 = (tensor.double().numpy() for tensor in (chain.x, chain.parameters[0], chain.p0))
    truth = oracle.chain(x, dense(chain).numpy(), p0, log_params=chain.log_params, lengths=chain.ends)
    unit = 2.0**-53 if chain.dtype == F64 else 2.0**-24
    wrong = chain.v * (chain.c + 8) * unit
    assert_near(walk.log_norm, truth.log_norm, wrong + np.spacing(np.abs(truth.log_norm)))

    factor = weight.numpy()[..., None, None]
    states = factor * truth.states
    assert_near(found.x, states, 2 * wrong * states)
    source, target = places(chain.pattern, chain.c)
    exists = (source >= 0) & (source < chain.c)
    counts = truth.transitions[..., np.where(exists, source, 0), target] * exists
    counts = counts * weight.numpy().reshape(*chain.batch, *[1] * (1 + source.ndim))
    starts = states[..., 0, :]
    if not (chain.log_params or chain.by_log):
        counts, starts = divided(counts, np.where(exists, p, 0.0)), divided(starts, p0)
    for gradient, expected in ((found.parameters[0], counts), (found.p0, starts)):
        axes = tuple(axis for axis, size in enumerate(gradient.shape) if size != expected.shape[axis])
        expected = expected.sum(axes, keepdims=True)
        assert_near(gradient, expected, 2 * wrong * expected)
    return walk, found


def divided(counts: np.ndarray, parameter: np.ndarray) -> np.ndarray:
    """0 where the parameter is."""
    return np.where(parameter == 0, 0.0, counts / np.where(parameter == 0, 1.0, parameter))


def assert_near(found: torch.Tensor, expected: np.ndarray, bound: np.ndarray) -> None:
    """Zeros and -inf are exact; what is not normal in the dtype is as exact as the dtype has it."""
    tiny = 4 * torch.finfo(found.dtype).tiny
    found = found.double().numpy()
    assert found.shape == expected.shape
    same = (found == expected) & ((expected == 0) | np.isinf(expected))
    error = np.abs(np.where(same, 0.0, found) - np.where(same, 0.0, expected))
    allowed = np.where(expected == 0, 0.0, np.maximum(bound, tiny))
    assert (same | (error <= allowed)).all(), f"{np.nanmax(error / np.where(allowed == 0, 1e-300, allowed)):.3g} x"


def nan_stays_in_its_sequence(module, chain: Structured, place: str, device: str) -> None:
    """`chain` has two sequences with their own parameters; a NaN in the second one leaves the first as it was."""
    clean, before = run(module, chain, weights(chain), device)
    tensor = {"x": chain.x, "parameter": chain.parameters[0], "p0": chain.p0}[place]
    tensor[1].view(-1)[-1] = NAN
    dirty, after = run(module, chain, weights(chain), device)
    assert dirty.log_norm[0] == clean.log_norm[0] and dirty.log_norm[1].isnan()
    for one, other in ((after.x, before.x), (after.parameters[0], before.parameters[0]), (after.p0, before.p0)):
        assert torch.equal(one[0], other[0])
    assert after.x[1].isnan().all() and after.p0[1][chain.p0[1] != 0].isnan().all()
    used = chain.parameters[0][1] != 0
    source, _ = places(chain.pattern, chain.c)
    used &= torch.from_numpy((source >= 0) & (source < chain.c))
    assert after.parameters[0][1][used].isnan().all()
    nothing = run(module, chain, torch.zeros(2, dtype=F64), device)[1]
    assert not any(gradient.any() for gradient in (nothing.x, *nothing.parameters, nothing.p0))


def nothing_behind_an_end_matters(module, chain: Structured, device: str) -> None:
    """x and parameters of each step, of sequences' own, are poisoned behind the ends."""
    clean, before = run(module, chain, weights(chain), device)
    for sequence, end in enumerate(chain.ends.tolist()):
        chain.x[sequence, end:] = NAN
        chain.parameters[0][sequence, end - 1 :] = NAN
    dirty, after = run(module, chain, weights(chain), device)
    assert torch.equal(dirty.log_norm, clean.log_norm) and torch.equal(after.x, before.x)
    assert torch.equal(after.parameters[0], before.parameters[0]) and torch.equal(after.p0, before.p0)
