"""The plain formula as one writes it oneself: a loop, the forum's pairs, torch.compile."""

from functools import cache, partial

import torch
from torch import Tensor

from logchain import _forum
from tests.benchmarks import cpu
from tests.benchmarks.cases import EACH, FULL, STEP
from tests.benchmarks.peers import Provider
from tests.benchmarks.peers_torch import ALL, BOTH, by_autograd, pairwise


def loop(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    return cpu.loop(x, bulk.expand(-1, x.shape[1] - 1, -1, -1), p0)


def product_loop(stack: Tensor) -> Tensor:
    product = stack[:, 0]
    for i in range(1, stack.shape[1]):
        product = (product[..., None] + stack[:, i, None]).logsumexp(-2)
    return product


def forum_product(stack: Tensor) -> Tensor:
    """With its padding, log-zeros for an odd matrix's neighbour."""
    while stack.shape[1] > 1:
        stack = torch.cat((stack, torch.zeros_like(stack[:, :1])), 1) if stack.shape[1] % 2 else stack
        stack = _forum.matmul(stack[:, 0::2], stack[:, 1::2])
    return stack[:, 0]


def forum_mended(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """The forum's code without padding; the clamp stays."""
    joined = pairwise(_forum.matmul, x[:, :-1, :, None] + bulk.log())
    return (p0.log()[:, None] + joined + x[:, -1, None, :]).logsumexp((-2, -1))


@cache
def compiled_step():
    return torch.compile(lambda message, logs, now: (message[..., None] + logs).logsumexp(-2) + now, dynamic=True)


def compiled(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """Step by step: a loop that is compiled as a whole is unrolled."""
    logs, potentials, step = bulk.log().unbind(1), x.unbind(1), compiled_step()
    message = p0.log() + potentials[0]
    for i in range(1, len(potentials)):
        message = step(message, logs[min(i, len(logs)) - 1], potentials[i])
    return message.logsumexp(-1)


def compiled_product(stack: Tensor) -> Tensor:
    product, nothing, step = stack[:, 0], stack.new_zeros(()), compiled_step()
    for matrix in stack.unbind(1)[1:]:
        product = step(product, matrix[:, None], nothing)
    return product


PROVIDERS = [
    Provider("torch loop", by_autograd(loop, product_loop), "torch", ALL, devices=BOTH),
    Provider("forum", by_autograd(_forum.product, forum_product), "torch", (STEP, EACH, FULL), devices=BOTH),
    Provider(
        "forum, padding mended",
        by_autograd(forum_mended, partial(pairwise, _forum.matmul)),
        "torch",
        (STEP, EACH, FULL),
        devices=BOTH,
    ),
    Provider("torch.compile, step by step", by_autograd(compiled, compiled_product), "torch", ALL, devices=BOTH),
]
