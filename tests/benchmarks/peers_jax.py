"""The chain by packages on XLA, compiled beforehand: Python is not in their times."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from tests.benchmarks.cases import FORWARD, Case, Chain, Stack
from tests.benchmarks.peers import Run


def compiled(function: Callable, case: Case) -> Run:
    """On x [n, v, c], bulk [n or none, v-1 or none, c, c] and p0 [c], or on a stack."""
    operands = list(case)
    if isinstance(case, Chain):
        bulk = case.bulk[0] if len(case.bulk) == 1 else case.bulk
        operands[1] = bulk[..., 0, :, :] if case.bulk.shape[1] == 1 and case.x.shape[1] > 2 else bulk
    run, operands = jax.jit(function), [jax.device_put(operand.numpy()) for operand in operands]
    return lambda: jax.block_until_ready(run(*operands))


def by_autodiff(chain: Callable, full: Callable | None = None) -> Callable[[Case, str], Run]:
    """Gradients of all operands by JAX's autodiff."""

    def make(case: Case, mode: str) -> Run:
        function = full if isinstance(case, Stack) else chain

        def summed(*operands):
            values = function(*operands)
            return values.sum(), values

        if mode == FORWARD:
            return compiled(lambda *operands: (function(*operands), None), case)
        run = compiled(jax.value_and_grad(summed, argnums=tuple(range(len(case))), has_aux=True), case)

        def both():
            (_, values), gradients = run()
            return values, gradients[0]

        return both

    return make


def scanned(step: Callable, x, bulk, message, total):
    """`step(message, total, matrix, potentials)` over the steps, with one matrix or with each step's."""
    potentials = x[:, 1:].swapaxes(0, 1)
    if bulk.ndim == 2:
        return jax.lax.scan(lambda carry, now: (step(*carry, bulk, now), None), (message, total), potentials)[0]
    matrices = bulk if bulk.ndim == 3 else bulk.swapaxes(0, 1)
    return jax.lax.scan(lambda carry, now: (step(*carry, *now), None), (message, total), (matrices, potentials))[0]


def xla(x, bulk, p0):
    """The scaled recursion as one writes it by hand."""

    def scaled(weights, now):
        top = stop_gradient(now.max(-1, keepdims=True))
        weights = weights * jnp.exp(now - top)
        norm = weights.sum(-1, keepdims=True)
        return weights / norm, (jnp.log(norm) + top)[:, 0]

    def step(message, total, matrix, now):
        moved = message @ matrix if matrix.ndim == 2 else jnp.einsum("ni,nij->nj", message, matrix)
        message, scale = scaled(moved, now)
        return message, total + scale

    return scanned(step, x, bulk, *scaled(p0, x[:, 0]))[1]


def xla_product(stack):
    """The same with matrices for messages."""

    def step(carry, matrix):
        product, total = carry
        top = stop_gradient(matrix.max((-2, -1), keepdims=True))
        product = product @ jnp.exp(matrix - top)
        scale = stop_gradient(product.max((-2, -1), keepdims=True))
        return (product / scale, total + top + jnp.log(scale)), None

    tops = stack[:, 0].max((-2, -1), keepdims=True)
    (product, total), _ = jax.lax.scan(step, (jnp.exp(stack[:, 0] - tops), tops), stack[:, 1:].swapaxes(0, 1))
    return jnp.log(product) + total


def log_matmul(a, b):
    """Logarithms of sums of exponentials with one shift per row and per column (arXiv 2510.03426, log-matmul-exp)."""
    rows, columns = stop_gradient(a.max(-1, keepdims=True)), stop_gradient(b.max(-2, keepdims=True))
    return jnp.log(jnp.exp(a - rows) @ jnp.exp(b - columns)) + rows + columns


def goom(x, bulk, p0):
    def step(message, total, matrix, now):
        if matrix.ndim == 2:
            return log_matmul(message, matrix) + now, total
        return log_matmul(message[:, None], matrix)[:, 0] + now, total

    return jnp.logaddexp.reduce(scanned(step, x, jnp.log(bulk), jnp.log(p0) + x[:, 0], 0.0)[0], -1)


def goom_product(stack):
    first, rest = stack[:, 0], stack[:, 1:].swapaxes(0, 1)
    return jax.lax.scan(lambda product, matrix: (log_matmul(product, matrix), None), first, rest)[0]


def dynamax(case: Chain, mode: str, *, parallel: bool = False) -> Run:
    """The filter and the smoother, mapped over sequences; or those by an associative scan over matrices."""
    from dynamax.hidden_markov_model import hmm_filter, hmm_smoother, parallel_inference

    def one(x, bulk, p0):
        if mode == FORWARD:
            return (parallel_inference.hmm_filter if parallel else hmm_filter)(p0, bulk, x).marginal_loglik, None, None
        # past its own compilation, in which the option would be a traced number
        serial = partial(hmm_smoother.__wrapped__, compute_trans_probs=True)
        results = (parallel_inference.hmm_smoother if parallel else serial)(p0, bulk, x)
        return results.marginal_loglik, results.smoothed_probs, results.trans_probs

    run = compiled(jax.vmap(one, (0, 0 if len(case.bulk) > 1 else None, None)), case)
    return lambda: run()[:2]


def numpyro(x, bulk, p0):
    """A model whose states are summed out by `numpyro.contrib.funsor`, mapped over sequences."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.contrib.control_flow import scan
    from numpyro.contrib.funsor import config_enumerate, enum, log_density

    def observed(name, potentials):
        numpyro.sample(name, dist.Delta(0 * potentials, potentials), obs=0.0)

    def model(x, bulk, p0):
        def step(before, now):
            matrix, potentials = (bulk, now) if bulk.ndim == 2 else now
            state = numpyro.sample("state", dist.Categorical(matrix[before]))
            observed("evidence", potentials[state])
            return state, None

        first = numpyro.sample("first", dist.Categorical(p0))
        observed("evidence of the first", x[0][first])
        scan(step, first, x[1:] if bulk.ndim == 2 else (bulk, x[1:]))

    axis = 0 if bulk.ndim == 4 else None
    counted = enum(config_enumerate(model), first_available_dim=-1)
    return jax.vmap(lambda *operands: log_density(counted, operands, {}, {})[0], (0, axis, None))(x, bulk, p0)


MAKERS: dict[str, Callable[..., Run]] = {
    "XLA scan": by_autodiff(xla, xla_product),
    "GOOM's formula": by_autodiff(goom, goom_product),
    "dynamax": dynamax,
    "dynamax, parallel": partial(dynamax, parallel=True),
    "numpyro": by_autodiff(numpyro),
}
