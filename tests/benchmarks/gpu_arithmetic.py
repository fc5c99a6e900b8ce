"""How a device rounds, before anything else is believed: `exp2`, products on tensor cores, and what long chains add up.

An error that has always the same sign grows with the length of a chain; tensor cores truncate their sums. Errors of
single operations are relative, in units of float32's rounding, 2^-24.
"""

from collections.abc import Iterator

import numpy as np
import torch
import triton
import triton.language as tl

import logchain
from tests.benchmarks.aside import Item
from tests.benchmarks.results import FORWARD, OnGpu
from tests.benchmarks.session import Session, precision_of

GROUP = "arithmetic"
UNIT = 2.0**-24
SIZE = 64


@triton.jit
def _exp2_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.exp2(tl.load(x_ptr + at)))


@triton.jit
def _product_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    """One product of a [SIZE, K] and b [K, SIZE] in each program."""
    i, k = tl.arange(0, SIZE), tl.arange(0, K)
    batch = tl.program_id(0)
    a = tl.load(a_ptr + batch * SIZE * K + i[:, None] * K + k[None, :])
    b = tl.load(b_ptr + batch * SIZE * K + k[:, None] * SIZE + i[None, :])
    out = tl.dot(a, b, input_precision=PRECISION)
    tl.store(out_ptr + batch * SIZE * SIZE + i[:, None] * SIZE + i[None, :], out)


def items(dry: bool) -> list[Item]:
    """The two numbers, then long chains."""
    names = ["exp2 of [-1, 0)", "product, K = 16", "product, K = 64"]
    sizes = ((50, 4), (50, 20)) if dry else ((10_000, 64), (10_000, 200))
    names += [f"chain v={v} c={c}, log Z near 0" for v, c in sizes]
    return [Item(name, "logchain", FORWARD) for name in names]


def measured(session: Session, item: Item) -> Iterator[OnGpu]:
    """The rows of an item."""
    kind, *numbers = item.workload.replace(",", "").replace("=", " ").split()
    if kind == "exp2":
        x = torch.rand(2**12 if session.dry else 2**22, generator=torch.Generator().manual_seed(0)) - 1
        yield from _errors(item, "", *exp2(x, session.device))
    elif kind == "product":
        for precision in ("tf32x3", "tf32", "ieee"):
            batch = 2 if session.dry else 256
            yield from _errors(item, precision, *product(int(numbers[-1]), precision, batch, session.device))
    else:
        v, c = int(numbers[1]), int(numbers[3])
        for precision in ("highest", "high"):
            with precision_of(precision):
                found, truth = chain(v, c, session.device)
            # of the contract, for sums that truncate (k = 4)
            promised = np.spacing(np.float32(abs(truth))) + v * (4 * c + 8) * UNIT if precision == "highest" else None
            yield OnGpu(GROUP, item.workload, item.provider, FORWARD, precision, "error", found - truth, "nats",
                        floor=promised, note=f"{(found - truth) / v / UNIT:.3g} u a step")  # fmt: skip


def _errors(item: Item, precision: str, found: np.ndarray, truth: np.ndarray) -> Iterator[OnGpu]:
    error = (found / truth - 1) / UNIT
    row = OnGpu(GROUP, item.workload, item.provider, FORWARD, precision, "mean signed error", error.mean(), "u")
    yield row._replace(lower=np.quantile(error, 0.25), upper=np.quantile(error, 0.75))
    yield row._replace(metric="largest error", value=np.abs(error).max())


def exp2(x: torch.Tensor, device: str) -> tuple[np.ndarray, np.ndarray]:
    """As the device has it, and in float64."""
    there = x.to(device)
    out = torch.empty_like(there)
    _exp2_kernel[(len(x) // 1024,)](there, out, BLOCK=1024)
    return out.double().cpu().numpy(), np.exp2(x.double().numpy())


def product(k: int, precision: str, batch: int, device: str) -> tuple[np.ndarray, np.ndarray]:
    """Products of positive matrices, summed over `k` terms in one `tl.dot`, and in float64."""
    generator = torch.Generator().manual_seed(k)
    a, b = torch.rand(batch, SIZE, k, generator=generator), torch.rand(batch, k, SIZE, generator=generator)
    out = torch.empty(batch, SIZE, SIZE, device=device)
    _product_kernel[(batch,)](a.to(device), b.to(device), out, SIZE=SIZE, K=k, PRECISION=precision)
    return out.double().cpu().numpy(), (a.double() @ b.double()).numpy()


def chain(v: int, c: int, device: str) -> tuple[float, float]:
    """The value of 16 equal sequences without evidence under a stochastic matrix, and that of float64 sums."""
    generator = torch.Generator().manual_seed(c)
    transition = torch.softmax(torch.randn(c, c, generator=generator), -1)
    p0 = torch.full((c,), 1 / c)
    with torch.no_grad():
        x = torch.zeros(1, 1, c, device=device).expand(16, v, c)
        found = logchain.product(x, transition[None].to(device), p0.to(device), strategy="sequential")
    message, scale, matrix = p0.double().numpy(), 0.0, transition.double().numpy()
    for _ in range(v - 1):
        message = message @ matrix
        total = message.sum()
        message, scale = message / total, scale + np.log(total)
    return found[0].item(), scale + np.log(message.sum())
