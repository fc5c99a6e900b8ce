"""The chain by variations of the plain formula, and by packages that model something wider."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from logchain import _forum
from tests.benchmarks.peers import EACH, FORWARD, ONE, STEP, Case, Provider, Run
from tests.benchmarks.peers_torch import by_autograd


def forum_mended(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """The forum's code with an identity for its padding; the clamp stays."""
    stack = x[..., :-1, :, None] + bulk.log()
    identity = torch.eye(x.shape[-1]).log().expand(*stack.shape[:-3], 1, -1, -1)
    while stack.shape[-3] > 1:
        stack = torch.cat((stack, identity), -3) if stack.shape[-3] % 2 else stack
        stack = _forum.matmul(stack[..., 0::2, :, :], stack[..., 1::2, :, :])
    joint = p0.log()[..., :, None] + stack[..., 0, :, :] + x[..., -1, None, :]
    return joint.logsumexp((-2, -1))


@cache
def compiled_step():
    return torch.compile(lambda message, logs, now: (message[:, :, None] + logs).logsumexp(-2) + now, dynamic=True)


def compiled(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """Step by step: a loop that is compiled as a whole is unrolled."""
    logs, potentials, step = bulk.log().unbind(1), x.unbind(1), compiled_step()
    message = p0.log() + potentials[0]
    for i in range(1, len(potentials)):
        message = step(message, logs[min(i, len(logs)) - 1], potentials[i])
    return message.logsumexp(-1)


def statsmodels(case: Case, mode: str) -> Run:
    """The filter and the smoother of a Markov-switching regression; its first transition gives p0 from anywhere."""
    from statsmodels.tsa.regime_switching import markov_switching

    x, bulk, p0 = (tensor.double().numpy() for tensor in case)
    (_, v, c), steps = x.shape, np.broadcast_to(bulk[0], (x.shape[1] - 1, x.shape[2], x.shape[2]))
    matrices = np.concatenate([np.broadcast_to(p0, (1, c, c)), steps]).transpose(2, 1, 0).copy()
    potentials = [np.broadcast_to(one.T[:, None], (c, c, v)).copy() for one in x]

    def one(logs):
        found = markov_switching.cy_hamilton_filter_log(p0, matrices, logs, 0)
        states = None if mode == FORWARD else markov_switching.cy_kim_smoother_log(matrices, found[4], found[5])[1].T
        return found[2].sum(), states

    def run():
        values, states = zip(*map(one, potentials), strict=True)
        return np.array(values), None if mode == FORWARD else states

    return run


def gpu_only(case: Case, mode: str) -> Run:
    raise NotImplementedError("runs on a GPU only")


PROVIDERS = [
    Provider("forum, padding mended", by_autograd(forum_mended), "torch", (STEP, EACH)),
    Provider("torch.compile, step by step", by_autograd(compiled), "torch", (ONE, STEP, EACH)),
    Provider("statsmodels", statsmodels, "statsmodels", (ONE, STEP)),
    Provider("pyjuice", gpu_only, "pyjuice"),
]
