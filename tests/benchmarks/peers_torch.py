"""Chains and products by packages on torch, each as its users would call it, or more kindly."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import logchain
from tests.benchmarks.cases import EACH, FULL, ONE, STEP, Case, Stack
from tests.benchmarks.peers import STATES, Provider, Run
from tests.benchmarks.results import FORWARD, GRADIENTS

ALL = ONE, STEP, EACH, FULL
Product = Callable[..., Tensor]


def differentiated(chain: Product, full: Product | None, case: Case, mode: str) -> Run:
    """Values, then the gradients of their sum for all operands, by torch's autograd."""
    product = full if isinstance(case, Stack) else chain
    leaves = [tensor.clone().requires_grad_(mode == GRADIENTS) for tensor in case]

    def run():
        out = product(*leaves)
        if mode == FORWARD:
            return out.detach(), None  # torch-struct asks for gradients by itself
        return out.detach(), torch.autograd.grad(out.sum(), leaves)[0]

    return run


def by_autograd(chain: Product, full: Product | None = None) -> Callable[[Case, str], Run]:
    """A way to compute chains, and one to multiply stacks [n, v, c, c] if it has one."""
    return partial(differentiated, chain, full)


def ours(case: Case, mode: str) -> Run:
    """Posteriors by the function that one asks for them; gradients as a model that is trained has them."""
    if mode != STATES:
        return differentiated(logchain.product, logchain.matrix_product, case, mode)

    def run():
        found = logchain.marginals(*case)
        return found.log_norm, found.states

    return run


def pairwise(matmul: Callable[[Tensor, Tensor], Tensor], stack: Tensor) -> Tensor:
    """The product of stacks by pairs; an odd matrix waits for the next level."""
    while (v := stack.shape[1]) > 1:
        paired = matmul(stack[:, : v - v % 2 : 2], stack[:, 1::2])
        stack = torch.cat([paired, stack[:, -1:]], 1) if v % 2 else paired
    return stack[:, 0]


def stack(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """Log matrices [n, v-1, from, to], the first variable in the first of them."""
    logs = bulk.log() + x[:, 1:, None, :]
    first = (p0.log() + x[:, 0])[:, None, :, None]
    return torch.cat([logs[:, :1] + first, logs[:, 1:]], 1)


def pyro(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    return pyro_product(stack(x, bulk, p0)).logsumexp((-2, -1))


def pyro_product(stack: Tensor) -> Tensor:
    from pyro.distributions.hmm import _sequential_logmatmulexp

    return _sequential_logmatmulexp(stack)


def torch_struct(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    from torch_struct import LinearChainCRF

    return LinearChainCRF(stack(x, bulk, p0).mT).partition


def torch_struct_product(stack: Tensor) -> Tensor:
    from torch_struct import LogSemiring

    return pairwise(LogSemiring.matmul, stack)


def funsor(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    return funsor_product(stack(x, bulk, p0)).logsumexp((-2, -1))


def funsor_product(stack: Tensor) -> Tensor:
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

    step = compile_equation("bi,bij->bj" if len(bulk) > 1 else "bi,ij->bj")
    logs = bulk.log().expand(-1, x.shape[1] - 1, -1, -1)
    logs = logs if len(bulk) > 1 else logs[0]
    message = p0.log() + x[:, 0]
    for i in range(1, x.shape[1]):
        message = log_einsum(step, message, logs[..., i - 1, :, :], block_size=64) + x[:, i]
    return message.logsumexp(-1)


def semiring_einsum_product(stack: Tensor) -> Tensor:
    from torch_semiring_einsum import compile_equation, log_einsum

    return pairwise(partial(log_einsum, compile_equation("bsij,bsjk->bsik"), block_size=64), stack)


def pytorch_crf(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    from torchcrf import CRF

    crf = CRF(x.shape[-1])
    for name in ("start_transitions", "end_transitions", "transitions"):
        delattr(crf, name)
    crf.start_transitions, crf.transitions, crf.end_transitions = p0.log(), bulk[0, 0].log(), torch.zeros_like(p0)
    # not with the weight of a path of tags, which a likelihood would need besides
    mask = torch.ones(x.shape[1], x.shape[0], dtype=torch.bool, device=x.device)
    return crf._compute_normalizer(x.transpose(0, 1), mask)


PROVIDERS = [
    Provider(
        "logchain",
        ours,
        "logchain",
        ALL,
        modes=(FORWARD, STATES, GRADIENTS),
    ),
    Provider("pytorch-crf", by_autograd(pytorch_crf), "pytorch-crf", (ONE,)),
    Provider("torch-struct", by_autograd(torch_struct, torch_struct_product), "torch-struct", ALL),
    Provider(
        "torch-semiring-einsum",
        by_autograd(semiring_einsum, semiring_einsum_product),
        "torch-semiring-einsum",
        ALL,
    ),
    Provider("pyro", by_autograd(pyro, pyro_product), "pyro-ppl", ALL),
    Provider("funsor", by_autograd(funsor, funsor_product), "funsor", ALL),
]
