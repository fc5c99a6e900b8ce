"""The forum's case, checked against scipy and timed: what `python -m logchain` prints."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import _forum, reference
from ._measure import median_seconds, peak_bytes
from .product import product

Product = Callable[[Tensor, Tensor, Tensor], Tensor]

# Sequences that scipy and the forum's code take on; they are independent, so a slice stands for itself.
SLICE = 4


class Chain(NamedTuple):
    """The arguments of `product`: x [n, 1, v, c], bulk [1, 1, v-1, c, c] and p0 [1, 1, c]."""

    x: Tensor
    bulk: Tensor
    p0: Tensor


def dense_chain(n: int, v: int, c: int, *, seed: int = 0, scale: float = 1.0) -> Chain:
    """A dense float32 chain: normal log-potentials times `scale`, random normalised transitions shared by all."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, v, c, generator=generator) * scale
    bulk = torch.rand(1, 1, v - 1, c, c, generator=generator)
    p0 = torch.rand(1, 1, c, generator=generator)
    return Chain(x, bulk / bulk.sum(-1, keepdim=True), p0 / p0.sum(-1, keepdim=True))


def forward(chain: Chain, product: Product = product) -> list[Tensor]:
    """The log-partitions alone, by anyone's product."""
    with torch.no_grad():
        return [product(*chain)]


def forward_backward(chain: Chain, product: Product = product) -> list[Tensor]:
    """The log-partitions and the gradients of their sum for x, bulk and p0."""
    leaves = [tensor.detach().requires_grad_() for tensor in chain]
    result = product(*leaves)
    return [result.detach(), *torch.autograd.grad(result.sum(), leaves)]


def gemms(chain: Chain, *, backward: bool = False) -> Callable[[], Sequence[Tensor]]:
    """The floor: one [n, c] times [c, c] product for each step, two more with the backward pass."""
    n, _, v, c = chain.x.shape
    message, other = chain.x[:, 0, 0].softmax(-1), chain.x[:, 0, -1].softmax(-1)
    matrices = chain.bulk[0, 0]
    step, counts = torch.empty(n, c), torch.empty(c, c)

    def run() -> Sequence[Tensor]:
        for i in range(v - 1):
            torch.mm(message, matrices[i], out=step)
            if backward:
                torch.mm(other, matrices[i].mT, out=step)
                torch.mm(message.mT, other, out=counts)
        return step, counts

    return run


def demonstrate(n: int = 500, v: int = 40, c: int = 200) -> str:
    """The whole demonstration as text, computed on one thread: two that share a busy machine wait for each other.

    Args:
        n: sequences.
        v: variables (time steps) of each, at least 2.
        c: hidden states.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _report(dense_chain(n, v, c))
    finally:
        torch.set_num_threads(threads)


def _report(chain: Chain) -> str:
    n, _, v, c = chain.x.shape
    few = Chain(chain.x[:SLICE], chain.bulk, chain.p0)
    size = f"n={n} t=1 v={v} c={c}"
    return "\n".join(
        [
            f"{size}: float32, one set of {v - 1} transition matrices for all sequences, "
            f"torch {torch.__version__}, one thread",
            "",
            f"Error against scipy in float64, on the first {len(few.x)} of {n} sequences (they are independent)",
            _table(("", "logchain", "scipy", "largest error", "promised"), _accuracy(chain, few)),
            "",
            "Cost, median of 5; memory is the peak beyond inputs, result and gradients",
            _table(("", "time", "of the GEMMs", "memory"), _cost(chain)),
            "",
            "The forum's code, on sizes that fit",
            _table(
                ("", "scipy", "logchain", "forum", "forum's error", "its time", "its memory"), _baseline(chain, few)
            ),
            f"  * its time and memory for {len(few.x)} of the sequences, times {n / len(few.x):g}; all take longer",
        ]
    )


def _accuracy(chain: Chain, few: Chain) -> list[tuple[str, ...]]:
    """Values and x-gradients of the whole batch, read on the slice; bulk and p0 sum over sequences: the slice alone."""
    truth = reference.marginals(*few)
    n = len(few.x)
    value, states, _, _ = forward_backward(chain)
    _, _, bulk, p0 = forward_backward(few)
    counts = bulk.double() * few.bulk.double()
    start = p0.double() * few.p0.double()
    v, c = few.x.shape[-2:]
    steps = v * (c + 8 + 2 * _depth(few, truth.states)) * 2**-24
    value_bound = float(np.spacing(np.float32(np.abs(truth.log_norm).max()))) + steps
    bound = 2 * steps + c * 2**-26
    pairs = [
        ("log-partition (nats)", value[:n], truth.log_norm, value_bound),
        ("d/dx: state posteriors", states[:n], truth.states, bound),
        ("d/dlog bulk: transition counts", counts, truth.transitions.sum(0, keepdims=True), n * bound),
        ("d/dlog p0: first posteriors", start, truth.states[..., 0, :].sum(0, keepdims=True), n * bound),
    ]
    return [
        (
            name,
            f"{ours.flatten()[0].item():.6g}",
            f"{theirs.flat[0]:.6g}",
            f"{np.abs(ours.double().numpy() - theirs).max():.1e}",
            f"{promised:.1e}",
        )
        for name, ours, theirs, promised in pairs
    ]


def _depth(chain: Chain, states: reference.Array) -> float:
    """How many nats the states that matter lie below the largest entries of their messages and of x."""
    messages, matters = reference.forward_backward(*chain), states > 1e-3
    below = (array.max(-1, keepdims=True) - array for array in (messages.forward, messages.backward, chain.x.numpy()))
    return max(float(part[matters].max()) for part in below)


def _cost(chain: Chain) -> list[tuple[str, ...]]:
    n, _, v, c = chain.x.shape
    ours: dict[str, Callable[[], Sequence[Tensor]]] = {
        "forward": lambda: forward(chain),
        "forward and backward": lambda: forward_backward(chain),
    }
    floors = {f"{v - 1} GEMMs": gemms(chain), f"{3 * (v - 1)} GEMMs": gemms(chain, backward=True)}
    seconds = median_seconds({**ours, **floors})
    rows: list[tuple[str, ...]] = []
    for (name, call), floor in zip(ours.items(), floors, strict=True):
        ratio = seconds[name] / seconds[floor]
        rows.append((name, _milliseconds(seconds[name]), f"{ratio:.2f} x", _megabytes(peak_bytes(call))))
        rows.append((floor, _milliseconds(seconds[floor]), "1.00 x", ""))
    return [*rows, ("one message tensor [n, 1, v, c]", "", "", _megabytes(4 * n * v * c))]


def _baseline(chain: Chain, few: Chain) -> list[tuple[str, ...]]:
    """The forum's code on its own small example, and on a slice of the case at hand."""
    small = dense_chain(10, 6, 40)
    rows: list[tuple[str, ...]] = []
    for whole, part, mark in ((small, small, ""), (chain, few, " *")):
        n, _, v, c = whole.x.shape
        calls = {"ours": partial(forward, whole), "theirs": partial(forward, part, _forum.product)}
        seconds = median_seconds(calls, rounds=3)
        share = n / len(part.x)
        truth, ours, theirs = reference.product(*part), forward(part)[0], _forum.product(*part)
        rows.append(
            (
                f"n={n} v={v} c={c}{mark}",
                f"{truth.flat[0]:.4f}",
                f"{ours.flatten()[0].item():.4f}",
                f"{theirs.flatten()[0].item():.4f}",
                f"{np.abs(theirs.double().numpy() - truth).max():.2f}",
                f"{seconds['theirs'] * share / seconds['ours']:.0f} x logchain's",
                _megabytes(round(peak_bytes(calls["theirs"]) * share)),
            )
        )
    return rows


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in (header, *rows)]
    return "\n".join("  " + line.rstrip() for line in lines)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
