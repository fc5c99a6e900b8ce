"""What training a circuit costs on the CPU, beside the product that it calls.

Times are taken in turns in one process: a step of the circuit, and `logchain.product` forward and backward on what the
circuit's input layer and weights gave, all of it requiring gradients. One thread's times are its CPU time.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

import logchain
from logchain import nn
from tests.benchmarks.results import Row
from tests.benchmarks.timing import median_seconds, on_threads

BAR = "<= 1.3"


def medians(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each call."""
    return median_seconds(
        calls, rounds=11, clock=time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    )


def step(circuit: nn.ChainCircuit, data: torch.Tensor, optimiser: torch.optim.Optimizer | None = None) -> None:
    """The loss, its gradients, and the optimiser's change if there is one."""
    circuit.zero_grad(set_to_none=True)
    (-circuit.log_prob(data).mean()).backward()
    if optimiser is not None:
        optimiser.step()


def chain_circuit(num_categories: int, n: int = 500, v: int = 40, c: int = 200) -> list[Row]:
    """A step of training beside the product it makes."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(num_categories, (n, v), generator=generator)
    circuit = nn.ChainCircuit(v, c, num_categories=num_categories, generator=generator)
    trained = nn.ChainCircuit(v, c, num_categories=num_categories, generator=generator)
    adam = torch.optim.Adam(trained.parameters(), lr=1e-4, fused=True)
    operands = circuit.input(data[:, None]), circuit.bulk().exp(), circuit.p0().exp()
    operands = tuple(operand.detach().requires_grad_() for operand in operands)

    def product() -> None:
        torch.autograd.grad(logchain.product(*operands).sum(), operands)

    calls = {
        "product": product,
        "step": partial(step, circuit, data),
        "step with Adam": partial(step, trained, data, adam),
    }
    workload = f"ChainCircuit n={n} v={v} c={c}, {num_categories} categories, {torch.get_num_threads()} threads"
    seconds = medians(calls)
    rows = [Row(workload, "logchain", "product, forward and backward", "time", seconds.pop("product") * 1e3, "ms")]
    before = rows[0].value / 1e3
    for name, taken in seconds.items():
        ratio = taken / before
        rows.append(Row(workload, "logchain", name, "time over product's", ratio, "x", BAR if name == "step" else ""))
    return rows


def sum_layer(n: int = 500, f: int = 40, c: int = 64) -> list[Row]:
    """A layer forward and backward beside the matrix products that it takes."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.SumLayer(c, c, (f,), generator=generator)
    x = torch.randn(n, f, c, generator=generator).requires_grad_()
    left, right = x.detach().transpose(0, 1).contiguous(), layer.weights().detach()

    def gemms() -> None:
        out = left @ right
        _ = left.mT @ out, out @ right.mT

    def ours() -> None:
        torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])

    seconds = medians({"ours": ours, "gemms": gemms})
    workload = f"SumLayer n={n} f={f} c={c}, {torch.get_num_threads()} threads"
    ratio = seconds["ours"] / seconds["gemms"]
    return [
        Row(workload, "logchain", "forward and backward", "time", seconds["ours"] * 1e3, "ms"),
        Row(workload, "logchain", "forward and backward", "time over its matrix products' alone", ratio, "x"),
    ]


def measure() -> list[Row]:
    """Every row, with one thread and with two."""
    rows = []
    for threads in (1, 2):
        with on_threads(threads):
            for num_categories in (2, 17):
                rows += chain_circuit(num_categories)
            rows += sum_layer()
    return rows
