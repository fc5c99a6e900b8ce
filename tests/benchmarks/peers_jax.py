"""The chain by packages on XLA, compiled beforehand: Python is not in their times."""

from collections.abc import Callable
from functools import partial

from tests.benchmarks.cases import EACH, FULL, ONE, STEP, Case, Chain, Stack
from tests.benchmarks.peers import STATES, Provider, Run
from tests.benchmarks.results import FORWARD, GRADIENTS


def arrays(case: Case):
    """Operands on the device: x [n, v, c], bulk [n or none, v-1 or none, c, c], p0 [c]; of a stack x alone."""
    import jax

    if isinstance(case, Stack):
        return [jax.device_put(case.x.numpy())]
    bulk = case.bulk[0] if len(case.bulk) == 1 else case.bulk
    bulk = bulk[..., 0, :, :] if case.bulk.shape[1] == 1 and case.x.shape[1] > 2 else bulk
    return [jax.device_put(tensor.numpy()) for tensor in (case.x, bulk, case.p0)]


def compiled(function: Callable, case: Case) -> Run:
    import jax

    run, operands = jax.jit(function), arrays(case)
    return lambda: jax.block_until_ready(run(*operands))


def differentiated(chain: Callable, full: Callable | None, case: Case, mode: str) -> Run:
    """Values, then the gradients of their sum for all operands, by JAX's autodiff."""
    import jax

    product = full if isinstance(case, Stack) else chain

    def summed(*operands):
        values = product(*operands)
        return values.sum(), values

    if mode == FORWARD:
        return compiled(lambda *operands: (product(*operands), None), case)
    run = compiled(jax.value_and_grad(summed, argnums=tuple(range(len(case))), has_aux=True), case)

    def both():
        (_, values), gradients = run()
        return values, gradients[0]

    return both


def scanned(step: Callable, x, bulk, message, total):
    """`step(message, total, matrix, potentials)` over the steps, with one matrix or with each step's."""
    import jax

    potentials = x[:, 1:].swapaxes(0, 1)
    if bulk.ndim == 2:
        return jax.lax.scan(lambda carry, now: (step(*carry, bulk, now), None), (message, total), potentials)[0]
    matrices = bulk if bulk.ndim == 3 else bulk.swapaxes(0, 1)
    return jax.lax.scan(lambda carry, now: (step(*carry, *now), None), (message, total), (matrices, potentials))[0]


def xla(x, bulk, p0):
    """The scaled recursion as one writes it by hand."""
    import jax.numpy as jnp
    from jax.lax import stop_gradient

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
    import jax
    import jax.numpy as jnp
    from jax.lax import stop_gradient

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
    """Logarithms of sums of exponentials with one shift a row and one a column (arXiv 2510.03426, log-matmul-exp)."""
    import jax.numpy as jnp
    from jax.lax import stop_gradient

    rows, columns = stop_gradient(a.max(-1, keepdims=True)), stop_gradient(b.max(-2, keepdims=True))
    return jnp.log(jnp.exp(a - rows) @ jnp.exp(b - columns)) + rows + columns


def goom_product(stack):
    import jax

    first, rest = stack[:, 0], stack[:, 1:].swapaxes(0, 1)
    return jax.lax.scan(lambda product, matrix: (log_matmul(product, matrix), None), first, rest)[0]


def goom(x, bulk, p0):
    import jax.numpy as jnp

    def step(message, total, matrix, now):
        if matrix.ndim == 2:
            return log_matmul(message, matrix) + now, total
        return log_matmul(message[:, None], matrix)[:, 0] + now, total

    message, _ = scanned(step, x, jnp.log(bulk), jnp.log(p0) + x[:, 0], 0.0)
    return jnp.logaddexp.reduce(message, -1)


def dynamax(case: Chain, mode: str) -> Run:
    from dynamax.hidden_markov_model import hmm_filter, hmm_smoother

    def smoother(p0, bulk, x):
        # past its own compilation, in which the choice would be a traced number
        return hmm_smoother.__wrapped__(p0, bulk, x, compute_trans_probs=mode == GRADIENTS)

    return mapped(hmm_filter, smoother, case, mode)


def dynamax_parallel(case: Chain, mode: str) -> Run:
    """An associative scan over matrices, whose posteriors are gradients."""
    from dynamax.hidden_markov_model import parallel_inference as parallel

    return mapped(parallel.hmm_filter, parallel.hmm_smoother, case, mode)


def mapped(forward: Callable, smoother: Callable, case: Chain, mode: str) -> Run:
    """Each sequence by itself."""
    import jax

    def one(x, bulk, p0):
        if mode == FORWARD:
            return forward(p0, bulk, x).marginal_loglik, None
        found = smoother(p0, bulk, x)
        return found.marginal_loglik, found.smoothed_probs, found.trans_probs

    over = 0 if len(case.bulk) > 1 else None
    run = compiled(jax.vmap(one, (0, over, None)), case)
    return lambda: run()[:2]


def numpyro(x, bulk, p0):
    """A model whose states are summed out by `numpyro.contrib.funsor`, each sequence by itself, mapped."""
    import jax
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

    over = 0 if bulk.ndim == 4 else None
    counted = enum(config_enumerate(model), first_available_dim=-1)
    return jax.vmap(lambda *operands: log_density(counted, operands, {}, {})[0], (0, over, None))(x, bulk, p0)


def by_autodiff(chain: Callable, full: Callable | None = None) -> Callable[[Case, str], Run]:
    return partial(differentiated, chain, full)


ALL = ONE, STEP, EACH, FULL
PROVIDERS = [
    Provider("XLA scan", by_autodiff(xla, xla_product), "jax", ALL, whole=True),
    Provider("dynamax", dynamax, "dynamax", modes=(FORWARD, STATES, GRADIENTS), whole=True),
    Provider("dynamax, parallel", dynamax_parallel, "dynamax", (ONE,)),
    Provider("numpyro", by_autodiff(numpyro), "numpyro"),
    Provider("GOOM's formula", by_autodiff(goom, goom_product), "jax", ALL, whole=True),
]
