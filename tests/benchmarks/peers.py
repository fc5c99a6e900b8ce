"""The same chain by other packages, by formulas, and by the least that any way needs; each is a function.

`make(case)` prepares a call without being timed. The call returns values, [n] or [n, c, c], and the gradients of their
sum for x; a floor's results mean nothing. A package is imported where it is used.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial, reduce
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import logchain
from tests.benchmarks.cases import EACH, MATRICES, ONE, STEP, Call, Case, Chain, Stack, stacked


class Peer(NamedTuple):
    """How to prepare a call, the package that must be installed, and the matrices that are possible."""

    make: Callable[[Any], Call]
    package: str
    matrices: tuple[str, ...] = (ONE, STEP, EACH)
    floor: bool = False


def by_autograd(chain: Callable[..., Tensor], full: Callable[..., Tensor] | None = None) -> Callable[[Case], Call]:
    """Gradients of all operands by torch's autograd, of a chain or of a product of stacks [n, v, c, c]."""

    def make(case: Case) -> Call:
        function = full if isinstance(case, Stack) else chain
        leaves = [operand.clone().requires_grad_() for operand in case]

        def run():
            values = function(*leaves)
            return values.detach(), torch.autograd.grad(values.sum(), leaves)[0]

        return run

    return make


def of_stack(product: Callable[[Tensor], Tensor]) -> Callable[[Case], Call]:
    """A chain as the product of its matrices."""
    return by_autograd(lambda *chain: product(stacked(*chain)).logsumexp((-2, -1)), product)


def step(message: Tensor, logs: Tensor, now: Tensor) -> Tensor:
    return (message[..., None] + logs).logsumexp(-2) + now


def loop(step: Callable[..., Tensor], x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    logs, potentials = bulk.log().unbind(-3), x.unbind(-2)
    message = p0.log() + potentials[0]
    for i in range(1, len(potentials)):
        message = step(message, logs[min(i, len(logs)) - 1], potentials[i])
    return message.logsumexp(-1)


def loop_product(step: Callable[..., Tensor], stack: Tensor) -> Tensor:
    first, *others = stack.unbind(1)
    nothing = stack.new_zeros(())
    return reduce(lambda product, matrix: step(product, matrix[:, None], nothing), others, first)


def loops(step: Callable[..., Tensor]) -> Callable[[Case], Call]:
    return by_autograd(partial(loop, step), partial(loop_product, step))


@lru_cache(maxsize=1)
def compiled_loops() -> Callable[[Case], Call]:
    """With one step for all sizes: a loop that is compiled as a whole would be unrolled."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # otherwise it continues without being compiled
    torch.compiler.reset()
    return loops(torch.compile(step, dynamic=True))


def pyro(stack: Tensor) -> Tensor:
    from pyro.distributions.hmm import _sequential_logmatmulexp

    return _sequential_logmatmulexp(stack)


def torch_struct(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    from torch_struct import LinearChainCRF

    return LinearChainCRF(stacked(x, bulk, p0).mT).partition


def funsor(stack: Tensor) -> Tensor:
    import funsor
    from funsor import ops
    from funsor.sum_product import sequential_sum_product

    funsor.set_backend("torch")
    names = "batch", "time", "prev", "curr"
    inputs = {name: funsor.Bint[size] for name, size in zip(names, stack.shape, strict=True)}
    chain, time = funsor.tensor.Tensor(stack, inputs), funsor.Variable("time", inputs["time"])
    return sequential_sum_product(ops.logaddexp, ops.add, chain, time, {"prev": "curr"}).data


def semiring_einsum(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    from torch_semiring_einsum import compile_equation, log_einsum

    equation = compile_equation("bi,bij->bj" if len(bulk) > 1 else "bi,ij->bj")

    def step(message: Tensor, logs: Tensor, now: Tensor) -> Tensor:
        return log_einsum(equation, message, logs, block_size=64) + now

    return loop(step, x, bulk if len(bulk) > 1 else bulk[0], p0)


def pytorch_crf(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """The log-partition alone: its public likelihood includes the weight of a path."""
    from torchcrf import CRF

    parameters = {"start_transitions": p0.log(), "end_transitions": torch.zeros_like(p0)}
    crf = SimpleNamespace(num_tags=len(p0), transitions=bulk[0, 0].log(), **parameters)
    return CRF._compute_normalizer(crf, x.transpose(0, 1), torch.ones(x.shape[1::-1], dtype=torch.bool))


def one_by_one(one: Callable[[Any], tuple], sequences: Iterable[Any], offset: Any = 0.0) -> Call:
    """By compiled code for one sequence."""

    def run():
        values, states = zip(*map(one, sequences), strict=True)
        return np.array(values) + offset, states

    return run


def pomegranate(case: Chain) -> Call:
    from pomegranate.distributions import Categorical
    from pomegranate.hmm import DenseHMM

    c = len(case.p0)
    silent = [Categorical([[1.0]]) for _ in range(c)]
    model = DenseHMM(silent, edges=case.bulk[0, 0], starts=case.p0, ends=torch.ones(c))
    with torch.no_grad():
        model.ends.zero_()

    @torch.no_grad()
    def run():
        results = model.forward_backward(emissions=case.x)
        return results[4], results[1].exp()

    return run


def hmmlearn(case: Chain, *, scaling: bool) -> Call:
    """The compiled functions themselves; exponentials of potentials, which it does not do, are prepared."""
    from hmmlearn import _hmmc

    start, matrix, x = case.p0.double().numpy(), case.bulk[0, 0].double().numpy(), case.x.double()
    top = x.amax(-1, keepdim=True)
    frames, offset = ((x - top).exp(), top.sum((1, 2)).numpy()) if scaling else (x, 0.0)

    def one(frame: np.ndarray):
        value, forward, *scales = (_hmmc.forward_scaling if scaling else _hmmc.forward_log)(start, matrix, frame)
        if scaling:
            backward = _hmmc.backward_scaling(start, matrix, frame, *scales)
            _hmmc.compute_scaling_xi_sum(forward, matrix, backward, frame)
            states = forward * backward
            return value, np.divide(states, states.sum(1, keepdims=True), out=states)
        backward = _hmmc.backward_log(start, matrix, frame)
        _hmmc.compute_log_xi_sum(forward, matrix, backward, frame)
        forward += backward
        forward -= value
        return value, np.exp(forward, out=forward)

    return one_by_one(one, frames.numpy(), offset)


def statsmodels(case: Chain) -> Call:
    """The filter and the smoother of a Markov-switching regression; its first transition gives p0 from anywhere."""
    from statsmodels.tsa.regime_switching import markov_switching

    x, bulk, p0 = (operand.double().numpy() for operand in case)
    (_, v, c), steps = x.shape, np.broadcast_to(bulk[0], (x.shape[1] - 1, x.shape[2], x.shape[2]))
    matrices = np.concatenate([np.broadcast_to(p0, (1, c, c)), steps]).transpose(2, 1, 0).copy()
    potentials = [np.broadcast_to(sequence.T[:, None], (c, c, v)).copy() for sequence in x]

    def one(logs: np.ndarray):
        filtered = markov_switching.cy_hamilton_filter_log(p0, matrices, logs, 0)
        return filtered[2].sum(), markov_switching.cy_kim_smoother_log(matrices, filtered[4], filtered[5])[1].T

    return one_by_one(one, potentials)


def cirkit(case: Chain) -> Call:
    """A compiled circuit; logits of input units are x, with a category for each sequence."""
    if (v := case.x.shape[1]) > 8192:
        raise NotImplementedError(f"a circuit of {v} variables takes minutes to compile")
    from cirkit.backend.torch.layers import TorchCategoricalLayer
    from cirkit.pipeline import PipelineContext
    from cirkit.symbolic.initializers import ConstantTensorInitializer
    from cirkit.symbolic.layers import CategoricalLayer, SumLayer
    from cirkit.symbolic.parameters import Parameter, TensorParameter
    from cirkit.templates import pgms

    def learned(table: Tensor) -> Parameter:
        initializer = ConstantTensorInitializer(table.numpy())
        return Parameter.from_input(TensorParameter(*table.shape, initializer=initializer))

    n, _, c = case.x.shape
    logits = case.x.expand(max(n, 2), v, c)  # it takes no single category
    steps = [learned(matrix) for matrix in case.bulk[0]]
    first = steps[0]
    circuit = pgms.hmm(range(v), num_latent_states=c, input_layer_kwargs={"num_categories": len(logits)})
    leaves, sums = (
        [layer for layer in circuit.layers if isinstance(layer, kind)] for kind in (CategoricalLayer, SumLayer)
    )
    for i, leaf, layer in zip(reversed(range(v)), leaves, sums, strict=True):
        leaf.probs, leaf.logits = None, learned(logits[:, i].T)
        layer.weight = learned(case.p0[None]) if i == 0 else steps.pop() if steps else first.ref()
    # it cannot fold layers that share a parameter
    context = PipelineContext("torch", semiring="lse-sum", fold=len(case.bulk[0]) > 1, optimize=True)
    model = context.compile(circuit)
    data = torch.arange(n)[:, None].expand(n, v).contiguous()
    leaves = [layer for layer in model.layers if isinstance(layer, TorchCategoricalLayer)]
    tables = [table for leaf in leaves for table in leaf.logits.parameters()]
    order = torch.cat([leaf.scope_idx[:, 0] for leaf in leaves]).argsort()
    wanted = list(dict.fromkeys([*tables, *model.parameters()]))

    def run():
        values = model(data)[:, 0, 0]
        gradients = torch.autograd.grad(values.sum(), wanted)[: len(tables)]
        return values.detach(), torch.cat(gradients)[order].permute(2, 0, 1)[:n]

    return run


def compiled(function: Callable, case: Case) -> Call:
    """The first two results on x [n, v, c], bulk [n or none, v-1 or none, c, c] and p0 [c], or on a stack.

    XLA compiles beforehand: Python is not in its time.
    """
    import jax

    if isinstance(case, Chain):
        case = case._replace(bulk=case.bulk.squeeze((0, 1)))
    run, operands = jax.jit(function), [jax.device_put(operand.numpy()) for operand in case]
    return lambda: jax.block_until_ready(run(*operands))[:2]


def by_autodiff(chain: Callable, full: Callable | None = None) -> Callable[[Case], Call]:
    """Gradients of all operands by JAX's autodiff."""

    def make(case: Case) -> Call:
        import jax

        function = full if isinstance(case, Stack) else chain

        def both(*operands):
            values, gradients = jax.vjp(function, *operands)
            return values, *gradients(jax.numpy.ones_like(values))

        return compiled(both, case)

    return make


def scanned(step: Callable, carry, x, bulk):
    """The last of `carry = step(carry, matrix, potentials)`, with one matrix or with each step's."""
    import jax

    potentials = x[:, 1:, None].swapaxes(0, 1)  # (v-1, n, 1, c)
    if bulk.ndim == 2:
        return jax.lax.scan(lambda carry, now: (step(carry, bulk, now), None), carry, potentials)[0]
    matrices = bulk if bulk.ndim == 3 else bulk.swapaxes(0, 1)
    return jax.lax.scan(lambda carry, now: (step(carry, *now), None), carry, (matrices, potentials))[0]


def xla(x, bulk, p0):
    """The scaled recursion as one writes it by hand."""
    import jax

    def scaled(weights, now):
        top = jax.lax.stop_gradient(now.max(-1, keepdims=True))
        weights = weights * jax.numpy.exp(now - top)
        norm = weights.sum(-1, keepdims=True)
        return weights / norm, jax.numpy.log(norm) + top

    def step(carry, matrix, now):
        message, scale = scaled(carry[0] @ matrix, now)
        return message, carry[1] + scale

    return scanned(step, scaled(p0, x[:, :1]), x, bulk)[1][:, 0, 0]


def xla_product(stack):
    """The same with matrices for messages."""
    import jax

    def shifted(logs):
        top = jax.lax.stop_gradient(logs.max((-2, -1), keepdims=True))
        return jax.numpy.exp(logs - top), top

    def step(carry, logs):
        product, total = carry
        matrix, top = shifted(logs)
        product = product @ matrix
        scale = jax.lax.stop_gradient(product.max((-2, -1), keepdims=True))
        return (product / scale, total + top + jax.numpy.log(scale)), None

    (product, total), _ = jax.lax.scan(step, shifted(stack[:, 0]), stack[:, 1:].swapaxes(0, 1))
    return jax.numpy.log(product) + total


def log_matmul(a, b):
    """Logarithms of sums of exponentials with one shift per row and per column (arXiv 2510.03426, log-matmul-exp)."""
    from jax import lax, numpy

    rows, columns = lax.stop_gradient(a.max(-1, keepdims=True)), lax.stop_gradient(b.max(-2, keepdims=True))
    return numpy.log(numpy.exp(a - rows) @ numpy.exp(b - columns)) + rows + columns


def goom(x, bulk, p0):
    from jax import numpy

    first = numpy.log(p0) + x[:, :1]
    message = scanned(lambda message, matrix, now: log_matmul(message, matrix) + now, first, x, numpy.log(bulk))
    return numpy.logaddexp.reduce(message[:, 0], -1)


def goom_product(stack):
    import jax

    first, rest = stack[:, 0], stack[:, 1:].swapaxes(0, 1)
    return jax.lax.scan(lambda product, matrix: (log_matmul(product, matrix), None), first, rest)[0]


def dynamax(case: Chain, *, parallel: bool = False) -> Call:
    """The filter and the smoother, mapped over sequences; or those by an associative scan over matrices."""
    import jax
    from dynamax.hidden_markov_model import hmm_smoother, parallel_inference

    def one(x, bulk, p0):
        # past its own compilation, in which the option would be a traced number
        serial = partial(hmm_smoother.__wrapped__, compute_trans_probs=True)
        results = (parallel_inference.hmm_smoother if parallel else serial)(p0, bulk, x)
        return results.marginal_loglik, results.smoothed_probs, results.trans_probs

    return compiled(jax.vmap(one, (0, 0 if len(case.bulk) > 1 else None, None)), case)


def numpyro(x, bulk, p0):
    """A model whose states are summed out by `numpyro.contrib.funsor`, mapped over sequences."""
    import jax
    import numpyro
    from numpyro.contrib.control_flow import scan
    from numpyro.contrib.funsor import config_enumerate, enum, log_density
    from numpyro.distributions import Categorical, Delta

    def observed(name, potentials):  # `factor` would not be summed over
        numpyro.sample(name, Delta(0 * potentials, potentials), obs=0.0)

    def model(x, bulk, p0):
        def step(before, now):
            matrix, potentials = (bulk, now) if bulk.ndim == 2 else now
            state = numpyro.sample("state", Categorical(matrix[before]))
            observed("evidence", potentials[state])
            return state, None

        first = numpyro.sample("first", Categorical(p0))
        observed("evidence of the first", x[0][first])
        scan(step, first, x[1:] if bulk.ndim == 2 else (bulk, x[1:]))

    axis = 0 if bulk.ndim == 4 else None
    counted = enum(config_enumerate(model), first_available_dim=-1)
    return jax.vmap(lambda *operands: log_density(counted, operands, {}, {})[0], (0, axis, None))(x, bulk, p0)


def gemms(case: Case) -> Call:
    """Three products of messages and a matrix per step; of a stack, those of a tree's levels."""
    n, v, c = case.x.shape[:3]
    if isinstance(case, Stack):
        levels = []
        while v > 1:
            levels += [torch.rand(2, n * (v // 2), c, c)] * 3
            v -= v // 2
        return lambda: [torch.bmm(left, left, out=out) for left, out in levels]
    message, other, matrices = torch.rand(n, c), torch.rand(n, c), case.bulk.expand(-1, v - 1, -1, -1)
    multiply, matrices = torch.mm, matrices.transpose(0, 1)
    if len(case.bulk) == 1:
        matrices = matrices[:, 0]
    else:
        multiply, message, other = torch.bmm, message[:, None], other[:, None]
    moved, counts = torch.empty_like(message), torch.empty_like(matrices[0])

    def run():
        for matrix in matrices:
            multiply(message, matrix, out=moved)
            multiply(other, matrix.mT, out=moved)
            multiply(message.mT, other, out=counts)

    return run


def copies(case: Case) -> Call:
    """A copy of as many bytes as the inputs twice and their gradients have."""
    source = torch.ones(3 * sum(operand.numel() for operand in case) // 2)
    return partial(torch.empty_like(source).copy_, source)


PEERS = {
    "logchain": Peer(by_autograd(logchain.product, logchain.matrix_product), "logchain", MATRICES),
    "GEMMs alone": Peer(gemms, "torch", MATRICES, floor=True),
    "bytes copied": Peer(copies, "torch", MATRICES, floor=True),
    "pytorch-crf": Peer(by_autograd(pytorch_crf), "pytorch-crf", (ONE,)),
    "torch-struct": Peer(by_autograd(torch_struct), "torch-struct"),
    "torch-semiring-einsum": Peer(by_autograd(semiring_einsum), "torch-semiring-einsum"),
    "pyro": Peer(of_stack(pyro), "pyro-ppl", MATRICES),
    "funsor": Peer(of_stack(funsor), "funsor", MATRICES),
    "XLA scan": Peer(by_autodiff(xla, xla_product), "jax", MATRICES),
    "dynamax": Peer(dynamax, "dynamax"),
    "dynamax, parallel": Peer(partial(dynamax, parallel=True), "dynamax", (ONE,)),
    "numpyro": Peer(by_autodiff(numpyro), "numpyro"),
    "GOOM's formula": Peer(by_autodiff(goom, goom_product), "jax", MATRICES),
    "hmmlearn, scaling": Peer(partial(hmmlearn, scaling=True), "hmmlearn", (ONE,)),
    "hmmlearn, log": Peer(partial(hmmlearn, scaling=False), "hmmlearn", (ONE,)),
    "pomegranate": Peer(pomegranate, "pomegranate", (ONE,)),
    "statsmodels": Peer(statsmodels, "statsmodels", (ONE, STEP)),
    "cirkit": Peer(cirkit, "libcirkit", (ONE, STEP)),
    "torch loop": Peer(loops(step), "torch", MATRICES),
    "torch.compile, step by step": Peer(lambda case: compiled_loops()(case), "torch", MATRICES),
}
FLOORS = [name for name, peer in PEERS.items() if peer.floor]
