"""What training a layer costs on the CPU, beside the packages that have one like it.

All ratios are of medians of wall time taken in turns in one process, on as many threads as there are cores: a user
waits for the layer, not for its arithmetic. A peer's answers are compared with the layer's first.
"""

import warnings
from collections.abc import Callable
from importlib import metadata

import torch
from torch import Tensor

from logchain.nn import LinearChainCRF
from tests.benchmarks import results
from tests.benchmarks.results import GRADIENTS, Row, machine
from tests.benchmarks.timing import median_seconds


def crf() -> list[Row]:
    """The loss of a linear-chain CRF and its best tags, beside pytorch-crf's."""
    import torchcrf

    n, v, c = 32, 128, 20
    generator = torch.Generator().manual_seed(0)
    layer, peer = LinearChainCRF(c, batch_first=True), torchcrf.CRF(c, batch_first=True)
    peer.load_state_dict(layer.state_dict())
    emissions = torch.randn(n, v, c, generator=generator).requires_grad_()
    tags = torch.randint(c, (n, v), generator=generator)
    ragged = torch.arange(v) < torch.randint(v // 4, v + 1, (n, 1), generator=generator)

    def loss(model: torch.nn.Module, mask: Tensor) -> Callable[[], object]:
        return lambda: model(emissions, tags, mask, reduction="mean").neg().backward()

    def decoded(model: LinearChainCRF | torchcrf.CRF, mask: Tensor) -> Callable[[], object]:
        return lambda: model.decode(emissions.detach(), mask)

    rows = []
    for name, mask in {"full mask": torch.ones_like(ragged), "ragged mask": ragged}.items():
        assert torch.allclose(layer(emissions, tags, mask, "none"), peer(emissions, tags, mask, "none"), rtol=1e-5)
        workload = f"CRF n={n} v={v} c={c}, {name}, {torch.get_num_threads()} threads"
        for mode, call, bar in (("loss, " + GRADIENTS, loss, ">= 3"), ("decode", decoded, "")):
            calls = {"logchain": call(layer, mask), "pytorch-crf": call(peer, mask)}
            rows += beside(workload, mode, median_seconds(calls, rounds=11), bar)
    return [row._replace(versions=f"pytorch-crf {metadata.version('pytorch-crf')}") for row in rows]


def beside(workload: str, mode: str, seconds: dict[str, float], bar: str) -> list[Row]:
    """Our time, and each peer's over it."""
    ours = seconds.pop("logchain")
    rows = [Row(workload, "logchain", mode, "time", ours * 1e3, "ms")]
    for name, theirs in seconds.items():
        rows.append(Row(workload, name, mode, f"{name}'s time over logchain's", theirs / ours, "x", bar))
    return rows


def main() -> None:
    """Measure, and write the results file; a few minutes."""
    from tests.benchmarks import layers_circuit, layers_hmm

    common = machine()
    rows = []
    for name, group in {"CRF": crf, "HMM": layers_hmm.fits, "circuits": layers_circuit.measure}.items():
        print(f"measuring: {name}", flush=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the peers'
            found = group()
        for row in found:
            versions = ", ".join(filter(None, (common["versions"], row.versions)))
            rows.append(row._replace(**{**common, "versions": versions}))
    results.write(rows, results.LAYERS)
