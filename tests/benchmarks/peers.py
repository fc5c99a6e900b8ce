"""The same chain by other packages, by formulas, and by the least that any way needs; each is a function.

`make(case, mode)` prepares a call without being timed. The call returns values, [n] or [n, c, c], and with gradients
those of the sum of values for x; a floor returns nothing. A package is imported where it is used.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import logchain
from tests.benchmarks.cases import EACH, FORWARD, GRADIENTS, MATRICES, ONE, STEP, Case, Chain, Stack

Run = Callable[[], Any]


class Peer(NamedTuple):
    """How to prepare a call, the package that must be installed, and the matrices that are possible."""

    make: Callable[[Any, str], Run]
    package: str
    matrices: tuple[str, ...] = (ONE, STEP, EACH)
    # runs on the whole case: each new shape would be compiled
    whole: bool = False
    floor: bool = False


# torch


def by_autograd(chain: Callable[..., Tensor], full: Callable[..., Tensor] | None = None) -> Callable[[Case, str], Run]:
    """Gradients of all operands by torch's autograd, of a chain or of a product of stacks [n, v, c, c]."""

    def make(case: Case, mode: str) -> Run:
        function = full if isinstance(case, Stack) else chain
        leaves = [operand.clone().requires_grad_(mode == GRADIENTS) for operand in case]

        def run():
            values = function(*leaves)
            if mode == FORWARD:
                return values.detach(), None
            return values.detach(), torch.autograd.grad(values.sum(), leaves)[0]

        return run

    return make


def stacked(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """Logarithms of matrices [n, v-1, c, c], the first variable in the first of them."""
    logs = bulk.log() + x[:, 1:, None, :]
    first = (p0.log() + x[:, 0])[:, None, :, None]
    return torch.cat([logs[:, :1] + first, logs[:, 1:]], 1)


def of_stack(product: Callable[[Tensor], Tensor]) -> Callable[[Case, str], Run]:
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
    for matrix in others:
        first = step(first, matrix[:, None], nothing)
    return first


@lru_cache(maxsize=1)
def compiled_step(mode: str) -> Callable[..., Tensor]:
    """One for all sizes: a loop that is compiled as a whole would be unrolled."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # otherwise it continues without being compiled
    torch.compiler.reset()
    return torch.compile(step, dynamic=True)


def compiled_loop(case: Case, mode: str) -> Run:
    step = compiled_step(mode)
    return by_autograd(partial(loop, step), partial(loop_product, step))(case, mode)


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
    time = funsor.Variable("time", inputs["time"])
    chain = funsor.tensor.Tensor(stack, inputs)
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

    crf = CRF(x.shape[-1])
    for name in ("start_transitions", "end_transitions", "transitions"):
        delattr(crf, name)
    crf.start_transitions, crf.transitions, crf.end_transitions = p0.log(), bulk[0, 0].log(), torch.zeros_like(p0)
    return crf._compute_normalizer(x.transpose(0, 1), torch.ones(x.shape[1::-1], dtype=torch.bool))


# hidden Markov models in their own compiled code or layout


def pomegranate(case: Chain, mode: str) -> Run:
    from pomegranate.distributions import Categorical
    from pomegranate.hmm import DenseHMM

    c = len(case.p0)
    silent = [Categorical([[1.0]]) for _ in range(c)]
    model = DenseHMM(silent, edges=case.bulk[0, 0], starts=case.p0, ends=torch.ones(c))
    with torch.no_grad():
        model.ends.zero_()

    @torch.no_grad()
    def run():
        if mode == FORWARD:
            return model.forward(emissions=case.x)[:, -1].logsumexp(-1), None
        results = model.forward_backward(emissions=case.x)
        return results[4], results[1].exp()

    return run


def hmmlearn(case: Chain, mode: str, *, scaling: bool) -> Run:
    """The compiled functions themselves; exponentials of potentials, which it does not do, are prepared."""
    from hmmlearn import _hmmc

    start, matrix, x = case.p0.double().numpy(), case.bulk[0, 0].double().numpy(), case.x.double()
    top = x.amax(-1, keepdim=True)
    frames, offset = ((x - top).exp(), top.sum((1, 2)).numpy()) if scaling else (x, 0.0)

    def one(frame: np.ndarray):
        value, forward, *scales = (_hmmc.forward_scaling if scaling else _hmmc.forward_log)(start, matrix, frame)
        if mode == FORWARD:
            return value, None
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

    def run():
        values, states = zip(*map(one, frames.numpy()), strict=True)
        return np.array(values) + offset, None if mode == FORWARD else states

    return run


def statsmodels(case: Chain, mode: str) -> Run:
    """The filter and the smoother of a Markov-switching regression; its first transition gives p0 from anywhere."""
    from statsmodels.tsa.regime_switching import markov_switching

    x, bulk, p0 = (operand.double().numpy() for operand in case)
    (_, v, c), steps = x.shape, np.broadcast_to(bulk[0], (x.shape[1] - 1, x.shape[2], x.shape[2]))
    matrices = np.concatenate([np.broadcast_to(p0, (1, c, c)), steps]).transpose(2, 1, 0).copy()
    potentials = [np.broadcast_to(sequence.T[:, None], (c, c, v)).copy() for sequence in x]

    def one(logs: np.ndarray):
        filtered = markov_switching.cy_hamilton_filter_log(p0, matrices, logs, 0)
        if mode == FORWARD:
            return filtered[2].sum(), None
        return filtered[2].sum(), markov_switching.cy_kim_smoother_log(matrices, filtered[4], filtered[5])[1].T

    def run():
        values, states = zip(*map(one, potentials), strict=True)
        return np.array(values), None if mode == FORWARD else states

    return run


def cirkit(case: Chain, mode: str) -> Run:
    """A compiled circuit; logits of input units are x, with a category for each sequence."""
    if (v := case.x.shape[1]) > 8192:
        raise NotImplementedError(f"a circuit of {v} variables takes minutes to compile")
    from cirkit.backend.torch.layers import TorchCategoricalLayer
    from cirkit.pipeline import PipelineContext
    from cirkit.symbolic.circuit import Circuit
    from cirkit.symbolic.initializers import ConstantTensorInitializer
    from cirkit.symbolic.layers import CategoricalLayer, HadamardLayer, SumLayer
    from cirkit.symbolic.parameters import Parameter, TensorParameter
    from cirkit.utils.scope import Scope

    def learned(table: Tensor) -> Parameter:
        initializer = ConstantTensorInitializer(table.numpy())
        return Parameter.from_input(TensorParameter(*table.shape, initializer=initializer))

    n, _, c = case.x.shape
    logits = case.x.expand(max(n, 2), v, c)  # it takes no single category
    steps = [learned(matrix) for matrix in case.bulk[0]]
    first, layers, inputs, below = steps[0], [], {}, []
    for i in reversed(range(v)):
        leaf = CategoricalLayer(Scope([i]), c, num_categories=len(logits), logits=learned(logits[:, i].T))
        layers.append(leaf)
        if below:
            layers.append(HadamardLayer(c))
            inputs[layers[-1]] = [*below, leaf]
        weight = learned(case.p0[None]) if i == 0 else steps.pop() if steps else first.ref()
        below = [SumLayer(c, weight.shape[0], weight=weight)]
        inputs[below[0]] = layers[-1:]
        layers += below
    # it cannot fold layers that share a parameter
    context = PipelineContext("torch", semiring="lse-sum", fold=len(case.bulk[0]) > 1, optimize=True)
    model = context.compile(Circuit(layers, inputs, below))
    data = torch.arange(n)[:, None].expand(n, v).contiguous()
    if mode == FORWARD:
        return torch.no_grad()(lambda: (model(data)[:, 0, 0], None))
    leaves = [layer for layer in model.layers if isinstance(layer, TorchCategoricalLayer)]
    tables = [table for leaf in leaves for table in leaf.logits.parameters()]
    order = torch.cat([leaf.scope_idx[:, 0] for leaf in leaves]).argsort()
    wanted = list(dict.fromkeys([*tables, *model.parameters()]))

    def run():
        values = model(data)[:, 0, 0]
        gradients = torch.autograd.grad(values.sum(), wanted)[: len(tables)]
        return values.detach(), torch.cat(gradients)[order].permute(2, 0, 1)[:n]

    return run


def on_xla(name: str) -> Callable[[Case, str], Run]:
    def make(case: Case, mode: str) -> Run:
        from tests.benchmarks import peers_jax

        return peers_jax.MAKERS[name](case, mode)

    return make


# floors


def tree_gemms(n: int, v: int, c: int, times: int) -> Run:
    """All products of a level at once."""
    sizes = []
    while v > 1:
        sizes, v = [*sizes, n * (v // 2)], v - v // 2
    pairs = [torch.rand(2, size, c, c) for size in sizes * times]

    def run():
        for left, out in pairs:
            torch.bmm(left, left, out=out)

    return run


def gemms(case: Case, mode: str) -> Run:
    """One product of messages and a matrix per step, two more for gradients; of a stack, those of a tree."""
    n, v, c = case.x.shape[:3]
    if isinstance(case, Stack):
        return tree_gemms(n, v, c, 3 if mode == GRADIENTS else 1)
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
            if mode == GRADIENTS:
                multiply(other, matrix.mT, out=moved)
                multiply(message.mT, other, out=counts)

    return run


def copies(case: Case, mode: str) -> Run:
    """A copy of as many bytes as the inputs have; for gradients, inputs twice and gradients."""
    moved = sum(operand.numel() for operand in case) * (3 if mode == GRADIENTS else 1)
    source = torch.ones(moved // 2)
    target = torch.empty_like(source)
    return lambda: target.copy_(source) is None


PEERS = {
    "logchain": Peer(by_autograd(logchain.product, logchain.matrix_product), "logchain", MATRICES),
    "GEMMs alone": Peer(gemms, "torch", MATRICES, floor=True),
    "bytes copied": Peer(copies, "torch", MATRICES, floor=True),
    "pytorch-crf": Peer(by_autograd(pytorch_crf), "pytorch-crf", (ONE,)),
    "torch-struct": Peer(by_autograd(torch_struct), "torch-struct"),
    "torch-semiring-einsum": Peer(by_autograd(semiring_einsum), "torch-semiring-einsum"),
    "pyro": Peer(of_stack(pyro), "pyro-ppl", MATRICES),
    "funsor": Peer(of_stack(funsor), "funsor", MATRICES),
    "XLA scan": Peer(on_xla("XLA scan"), "jax", MATRICES, whole=True),
    "dynamax": Peer(on_xla("dynamax"), "dynamax", whole=True),
    "dynamax, parallel": Peer(on_xla("dynamax, parallel"), "dynamax", (ONE,)),
    "numpyro": Peer(on_xla("numpyro"), "numpyro"),
    "GOOM's formula": Peer(on_xla("GOOM's formula"), "jax", MATRICES, whole=True),
    "hmmlearn, scaling": Peer(partial(hmmlearn, scaling=True), "hmmlearn", (ONE,)),
    "hmmlearn, log": Peer(partial(hmmlearn, scaling=False), "hmmlearn", (ONE,)),
    "pomegranate": Peer(pomegranate, "pomegranate", (ONE,)),
    "statsmodels": Peer(statsmodels, "statsmodels", (ONE, STEP)),
    "cirkit": Peer(cirkit, "libcirkit", (ONE, STEP)),
    "torch loop": Peer(by_autograd(partial(loop, step), partial(loop_product, step)), "torch", MATRICES),
    "torch.compile, step by step": Peer(compiled_loop, "torch", MATRICES),
}
FLOORS = [name for name, peer in PEERS.items() if peer.floor]
