"""What fitting a hidden Markov model costs on the CPU, beside hmmlearn and pomegranate, from equal parameters."""

import copy
import importlib.util
import math
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

import logchain
from logchain.nn import HMM
from tests.benchmarks.layers import beside
from tests.benchmarks.results import GRADIENTS, Row
from tests.benchmarks.timing import median_seconds

ITERATIONS = 50


def fits(n: int = 200, v: int = 50, c: int = 50, iterations: int = ITERATIONS) -> list[Row]:
    """Expectation maximisation of Gaussian emissions, one number a step, and what its chain alone costs."""
    generator = torch.Generator().manual_seed(0)
    data = HMM(c, "gaussian", generator=generator).sample(n, v, generator=generator).data
    start = HMM(c, "gaussian", generator=generator)
    start.initialise(data, generator=generator)
    calls = {
        "logchain": lambda: ours(start, data, iterations)[-1],
        "hmmlearn": lambda: hmmlearn(start, data, iterations),
    }
    reached = {name: call() for name, call in calls.items()}
    # float32 beside float64, after all iterations
    assert abs(reached["logchain"] - reached["hmmlearn"]) <= 1e-5 * abs(reached["hmmlearn"]), reached
    if importlib.util.find_spec("pomegranate"):
        peer = pomegranate(start)
        assert torch.allclose(peer.log_probability(data[..., None]), start.log_prob(data), rtol=1e-4)
        calls["pomegranate"] = lambda: fitted(pomegranate(start), data, iterations)
    workload = f"HMM n={n} v={v} c={c}, Gaussian, {torch.get_num_threads()} threads"
    rows = beside(workload, f"EM, {iterations} iterations", median_seconds(calls, rounds=3), ">= 1")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in calls if name != "logchain")
    return [row._replace(versions=versions) for row in rows] + one_iteration(workload, start, data)


def one_iteration(workload: str, model: HMM, data: Tensor) -> list[Row]:
    """Beside `logchain.product` and its gradients, of the same chain."""
    chain = model.arguments(data)
    leaves = [operand.detach().requires_grad_() for operand in chain[:3]]
    model = copy.deepcopy(model)

    def product() -> object:
        return torch.autograd.grad(logchain.product(*leaves, log_params=True).sum(), leaves)

    calls: dict[str, Callable[[], object]] = {"logchain": lambda: ours(model, data, 1), "product": product}
    seconds = median_seconds(calls, rounds=21)
    ratio = seconds["logchain"] / seconds["product"]
    mode = "EM, 1 iteration and the last log-likelihood"
    return [
        Row(workload, "logchain", mode, "time", seconds["logchain"] * 1e3, "ms"),
        Row(workload, "logchain", mode, f"time over that of product, {GRADIENTS}", ratio, "x"),
    ]


def ours(start: HMM, data: Tensor, iterations: int) -> tuple[float, ...]:
    """The log-likelihoods before each iteration."""
    model = copy.deepcopy(start)
    return model.fit(data, restarts=0, max_iterations=iterations, tolerance=-math.inf).history[:-1]


def hmmlearn(start: HMM, data: Tensor, iterations: int) -> float:
    """With the faster of its two implementations, and without priors; the log-likelihood before the last iteration."""
    model = start.to_hmmlearn()
    options = {"covars_prior": 0, "covars_weight": 1, "min_covar": 0, "init_params": "", "implementation": "scaling"}
    model.set_params(n_iter=iterations, **options)
    model.monitor_.n_iter, model.monitor_.tol = iterations, -math.inf
    n, v = data.shape
    model.fit(data.double().view(-1, 1).numpy(), [v] * n)
    found: float = model.monitor_.history[-1]
    return found


def pomegranate(start: HMM) -> Any:
    """It has probabilities of ending, which are 1 at first, and fits them."""
    from pomegranate.distributions import Normal
    from pomegranate.hmm import DenseHMM

    emission: Any = start.emission
    with torch.no_grad():
        moments = zip(emission.means[:, None], emission.covariance()[:, None], strict=True)
        states = [Normal(means, variances, covariance_type="diag") for means, variances in moments]
        starts, edges = start.initial().exp(), start.transition()[0].exp()
        return DenseHMM(states, edges=edges, starts=starts, ends=torch.ones(start.num_states))


def fitted(model: Any, data: Tensor, iterations: int) -> object:
    """Whatever it gains."""
    model.max_iter, model.tol = iterations, -math.inf
    return model.fit(data[..., None])
