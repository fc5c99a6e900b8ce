"""The plain formula as one writes it oneself: a loop, the forum's pairs, torch.compile."""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from tests.benchmarks import forum
from tests.benchmarks.cases import EACH, FULL, STEP, Case
from tests.benchmarks.peers import Provider, Run
from tests.benchmarks.peers_torch import ALL, by_autograd, pairwise


def step(message: Tensor, logs: Tensor, now: Tensor) -> Tensor:
    return (message[..., None] + logs).logsumexp(-2) + now


@lru_cache(maxsize=1)
def compiled_step(kind: type[Case], mode: str) -> Callable[..., Tensor]:
    """One for all sizes, forgotten when something else is asked for: dynamo keeps eight, and then compiles no more.

    A loop that is compiled as a whole would be unrolled.
    """
    torch.compiler.reset()
    return torch.compile(step, dynamic=True)


def chain(step: Callable[..., Tensor], x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    logs, potentials = bulk.log().unbind(-3), x.unbind(-2)
    message = p0.log() + potentials[0]
    for i in range(1, len(potentials)):
        message = step(message, logs[min(i, len(logs)) - 1], potentials[i])
    return message.logsumexp(-1)


def product(step: Callable[..., Tensor], stack: Tensor) -> Tensor:
    found, nothing = stack[:, 0], stack.new_zeros(())
    for matrix in stack.unbind(1)[1:]:
        found = step(found, matrix[:, None], nothing)
    return found


loop = partial(chain, step)


def compiled(case: Case, mode: str) -> Run:
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # it would go on without being compiled
    step = compiled_step(type(case), mode)
    return by_autograd(partial(chain, step), partial(product, step))(case, mode)


def forum_product(stack: Tensor) -> Tensor:
    """With its padding, log-zeros for an odd matrix's neighbour."""
    while stack.shape[1] > 1:
        stack = torch.cat((stack, torch.zeros_like(stack[:, :1])), 1) if stack.shape[1] % 2 else stack
        stack = forum.matmul(stack[:, 0::2], stack[:, 1::2])
    return stack[:, 0]


def forum_mended(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """The forum's code without padding; the clamp stays."""
    joined = pairwise(forum.matmul, x[:, :-1, :, None] + bulk.log())
    return (p0.log()[:, None] + joined + x[:, -1, None, :]).logsumexp((-2, -1))


PROVIDERS = [
    Provider("torch loop", by_autograd(loop, partial(product, step)), "torch", ALL),
    Provider("forum", by_autograd(forum.product, forum_product), "torch", (STEP, EACH, FULL)),
    Provider(
        "forum, padding mended",
        by_autograd(forum_mended, partial(pairwise, forum.matmul)),
        "torch",
        (STEP, EACH, FULL),
    ),
    Provider("torch.compile, step by step", compiled, "torch", ALL),
]
