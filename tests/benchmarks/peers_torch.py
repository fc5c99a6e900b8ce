"""The chain by packages on torch and numpy, each as its users would call it, or more kindly."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

import logchain
from logchain import _forum
from tests.benchmarks import cpu
from tests.benchmarks.peers import EACH, FORWARD, GRADIENTS, ONE, STATES, STEP, Case, Provider, Run


def differentiated(product: Callable[..., Tensor], case: Case, mode: str) -> Run:
    """Values, then the gradients of their sum for x, bulk and p0, or for x alone, by torch's autograd."""
    wanted = {FORWARD: (), STATES: (0,), GRADIENTS: (0, 1, 2)}[mode]
    leaves = [tensor.clone().requires_grad_(i in wanted) for i, tensor in enumerate(case)]

    def run():
        out = product(*leaves)
        if not wanted:
            return out.detach(), None  # torch-struct asks for gradients by itself
        return out.detach(), torch.autograd.grad(out.sum(), [leaves[i] for i in wanted])[0]

    return run


def by_autograd(product: Callable[..., Tensor]) -> Callable[[Case, str], Run]:
    return partial(differentiated, product)


def stack(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """Log matrices [n, v-1, from, to], the first variable in the first of them."""
    logs = bulk.log() + x[:, 1:, None, :]
    first = (p0.log() + x[:, 0])[:, None, :, None]
    return torch.cat([logs[:, :1] + first, logs[:, 1:]], 1)


def loop(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    return cpu.loop(x, bulk.expand(-1, x.shape[1] - 1, -1, -1), p0)


def pyro(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    from pyro.distributions.hmm import _sequential_logmatmulexp

    return _sequential_logmatmulexp(stack(x, bulk, p0)).logsumexp((-2, -1))


def torch_struct(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    from torch_struct import LinearChainCRF

    return LinearChainCRF(stack(x, bulk, p0).mT).partition


def funsor(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    import funsor
    from funsor import ops
    from funsor.sum_product import sequential_sum_product

    funsor.set_backend("torch")
    n, v, c = x.shape
    sizes = {"batch": n, "time": v - 1, "prev": c, "curr": c}
    inputs = {name: funsor.Bint[size] for name, size in sizes.items()}
    chain = funsor.tensor.Tensor(stack(x, bulk, p0), inputs)
    time = funsor.Variable("time", funsor.Bint[v - 1])
    joined = sequential_sum_product(ops.logaddexp, ops.add, chain, time, {"prev": "curr"})
    return joined.reduce(ops.logaddexp, {"prev", "curr"}).data


def semiring_einsum(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    from torch_semiring_einsum import compile_equation, log_einsum

    step = compile_equation("bi,bij->bj" if len(bulk) > 1 else "bi,ij->bj")
    logs = bulk.log().expand(-1, x.shape[1] - 1, -1, -1)
    logs = logs if len(bulk) > 1 else logs[0]
    message = p0.log() + x[:, 0]
    for i in range(1, x.shape[1]):
        message = log_einsum(step, message, logs[..., i - 1, :, :], block_size=64) + x[:, i]
    return message.logsumexp(-1)


def pytorch_crf(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    from torchcrf import CRF

    crf = CRF(x.shape[-1])
    for name in ("start_transitions", "end_transitions", "transitions"):
        delattr(crf, name)
    crf.start_transitions, crf.transitions, crf.end_transitions = p0.log(), bulk[0, 0].log(), torch.zeros_like(p0)
    # not with the weight of a path of tags, which a likelihood would need besides
    return crf._compute_normalizer(x.transpose(0, 1), torch.ones(x.shape[1], x.shape[0], dtype=torch.bool))


def pomegranate(case: Case, mode: str) -> Run:
    from pomegranate.distributions import Categorical
    from pomegranate.hmm import DenseHMM

    c = len(case.p0)
    silent = [Categorical([[1.0]]) for _ in range(c)]
    model = DenseHMM(silent, edges=case.bulk[0, 0], starts=case.p0, ends=torch.ones(c))
    with torch.no_grad():
        model.ends.zero_()
    if mode == FORWARD:
        return torch.no_grad()(lambda: (model.forward(emissions=case.x)[:, -1].logsumexp(-1), None))
    return torch.no_grad()(lambda: (lambda found: (found[4], found[1].exp()))(model.forward_backward(emissions=case.x)))


def hmmlearn(case: Case, mode: str, *, scaling: bool) -> Run:
    """The compiled functions themselves; exponentials of the potentials, which they do not take, are not timed."""
    from hmmlearn import _hmmc

    start, matrix = case.p0.double().numpy(), case.bulk[0, 0].double().numpy()
    tops = case.x.amax(-1).double().sum(-1).numpy()
    logs = [x.double().numpy() for x in case.x]
    frames = [(x - x.amax(-1, keepdim=True)).double().exp().numpy() for x in case.x]

    def by_scaling(frame):
        value, forward, scales = _hmmc.forward_scaling(start, matrix, frame)
        if mode == FORWARD:
            return value, None
        backward = _hmmc.backward_scaling(start, matrix, frame, scales)
        if mode == GRADIENTS:
            _hmmc.compute_scaling_xi_sum(forward, matrix, backward, frame)
        states = forward * backward
        return value, np.divide(states, states.sum(1, keepdims=True), out=states)

    def by_logs(frame):
        value, forward = _hmmc.forward_log(start, matrix, frame)
        if mode == FORWARD:
            return value, None
        backward = _hmmc.backward_log(start, matrix, frame)
        if mode == GRADIENTS:
            _hmmc.compute_log_xi_sum(forward, matrix, backward, frame)
        forward += backward
        forward -= value
        return value, np.exp(forward, out=forward)

    def run():
        values, states = zip(*(map(by_scaling, frames) if scaling else map(by_logs, logs)), strict=True)
        return np.array(values) + (tops if scaling else 0.0), None if mode == FORWARD else states

    return run


ALL_MODES = (FORWARD, STATES, GRADIENTS)
PROVIDERS = [
    Provider("logchain", by_autograd(logchain.product), "logchain", modes=ALL_MODES),
    Provider("hmmlearn, scaling", partial(hmmlearn, scaling=True), "hmmlearn", (ONE,), ALL_MODES),
    Provider("hmmlearn, log", partial(hmmlearn, scaling=False), "hmmlearn", (ONE,), ALL_MODES),
    Provider("pomegranate", pomegranate, "pomegranate", (ONE,)),
    Provider("pytorch-crf", by_autograd(pytorch_crf), "pytorch-crf", (ONE,)),
    Provider("torch-struct", by_autograd(torch_struct), "torch-struct"),
    Provider("torch-semiring-einsum", by_autograd(semiring_einsum), "torch-semiring-einsum"),
    Provider("pyro", by_autograd(pyro), "pyro-ppl"),
    Provider("funsor", by_autograd(funsor), "funsor"),
    Provider("torch loop", by_autograd(loop), "torch"),
    Provider("forum", by_autograd(_forum.product), "torch", (STEP, EACH)),
]
