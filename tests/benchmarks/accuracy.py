"""How far everybody's log-partitions and posteriors lie from float64: `python -m tests.benchmarks run accuracy`.

Each provider gets the same float32 numbers and computes as it does: hmmlearn in float64, the others in float32. The
truth is the reference. An error is the largest of a case, inf where one number is infinite and the other is not.
"""

import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from logchain import reference
from tests import contract, families
from tests.benchmarks import aside, kept, peers, results
from tests.benchmarks.aside import Item, Said
from tests.benchmarks.cases import ONE, STEP, Chain, Truth, Workload, draw, truth
from tests.benchmarks.peers import Provider
from tests.benchmarks.results import GRADIENTS, Row


@functools.cache
def cases() -> dict[str, Chain]:
    """Chains with one matrix for all steps, which every provider takes."""
    two = torch.tensor([0.5, 0.5])
    peaks = torch.tensor([[[0.0, 0.0], [-200.0, 0.0], [0.0, 0.0]]])
    apart = torch.tensor([[[0.0, -200.0], [-300.0, 0.0], [0.0, 0.0]]])
    dense = draw(Workload(4, 64, 16, ONE))
    alive = (torch.arange(16) % 5 > 0)[:, None]
    long = draw(Workload(1, 4096, 8, ONE))
    equal = draw(Workload(1, 10_000, 16, ONE))
    stays = (1 - 1e-6) * torch.eye(16) + 1e-6 / 16
    wide = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0)).mul(-60).exp()
    return {
        "dense": dense,
        "misaligned maxima: two peaks": Chain(peaks, torch.tensor([[1.0, 1e-30]] * 2)[None, None], two),
        "misaligned maxima: two peaks, no way between": Chain(apart, torch.eye(2)[None, None], two),
        "evidence jumps, Bakis": family("bakis_jump", n=4),
        "impossible evidence": family("impossible", n=1),
        "dead rows": dense._replace(bulk=dense.bulk * alive),
        "log Z near 500,000": long._replace(x=long.x + 500_000 / 4096),
        "transitions from exp(-60) to 1": dense._replace(bulk=wide),
        "10,000 equal steps": equal._replace(x=torch.zeros_like(equal.x)),
        "states that stay, 10,000 steps": equal._replace(x=equal.x / 100, bulk=stays[None, None]),
    }


def family(name: str, n: int) -> Chain:
    """One of the families that the tests use, with its first matrix for all steps; p0 sums to 1, as some ask for."""
    x, bulk, p0, _ = families.FAMILIES[name](torch.float32, n=n, t=1)
    return Chain(x[:, 0].contiguous(), bulk[:1, 0, :1].contiguous(), p0[0, 0] / p0[0, 0].sum())


def taken(provider: Provider, case: Chain) -> Chain:
    """The same chain, with a matrix for each step where one for all is not taken."""
    if ONE in provider.matrices:
        return case
    assert STEP in provider.matrices
    return case._replace(bulk=case.bulk.expand(-1, case.x.shape[1] - 1, -1, -1).contiguous())


def worst(found: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """The largest error, NaN if any is, and the number that has it."""
    found, truth = np.broadcast_to(np.asarray(found, np.float64), truth.shape).ravel(), truth.ravel()
    with np.errstate(invalid="ignore"):  # of equal infinities
        errors = np.where(found == truth, 0.0, np.abs(found - truth))
    return errors.max(), found[errors.argmax()]


def bounds(case: Chain) -> tuple[str, str]:
    """What the contract allows logchain, in nats and in probability."""
    allowed = contract.Truth(families.Chain(case.x[:, None], case.bulk[:, None], case.p0))
    return f"<= {allowed.value_bound().max():.3g}", f"<= {allowed.gradient_bound(allowed.states).max():.3g}"


def by_reference(case: Chain) -> Truth:
    """Log-partitions [n] and posteriors [n, v, c], whatever the numbers."""
    forward, backward, log_norm = reference.forward_backward(*case)
    norm = np.where(np.isneginf(log_norm), 0.0, log_norm)[:, None, None]
    return log_norm, np.exp(forward + backward - norm)


def rows_of(folder: Path, item: Item) -> Iterator[Row]:
    """The errors of one provider in one case."""
    name, provider, case = item.workload, peers.every()[item.provider], cases()[item.workload]
    values, posteriors = provider.make(taken(provider, case), item.mode)()
    log_norm, states = truth(name, case, folder, by_reference)
    bars = bounds(case) if provider.name == "logchain" else ("", "")
    error, value = worst(values, log_norm)
    yield Row(*item.key, "error of a log-partition", error, "nats", bars[0])
    yield Row(*item.key, "log-partition", value, "nats")
    error, _ = worst(np.stack([np.asarray(one) for one in posteriors]), states)
    yield Row(*item.key, "error of a posterior", error, "", bars[1])


def errors(folder: Path, todo: Sequence[Item]) -> Iterator[Said]:
    """Some cases of one provider."""
    return aside.attempts(todo, functools.partial(rows_of, folder))


def main(only: Sequence[str] = (), patterns: Sequence[str] = ()) -> None:
    """Measure some providers and cases, or all, and write the results file after each provider."""
    names = [name for name in cases() if not patterns or any(text in name for text in patterns)]
    with tempfile.TemporaryDirectory() as folder:
        task = functools.partial(errors, Path(folder))
        for provider in (one for one in peers.chosen(only) if not one.floor):
            todo = [Item(name, provider.name, GRADIENTS) for name in names]
            kept.put(results.ACCURACY, *aside.measure(provider.package, todo, task), list(cases()))
