"""Hidden Markov models of packages that compute on a CPU alone, in their own compiled code or in their own layout."""

from functools import partial

import numpy as np
import torch

from tests.benchmarks.cases import ONE, STEP, Chain
from tests.benchmarks.peers import STATES, Provider, Run
from tests.benchmarks.results import FORWARD, GRADIENTS


def pomegranate(case: Chain, mode: str) -> Run:
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


def hmmlearn(case: Chain, mode: str, *, scaling: bool) -> Run:
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


def statsmodels(case: Chain, mode: str) -> Run:
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


MODES = FORWARD, STATES, GRADIENTS
PROVIDERS = [
    Provider("hmmlearn, scaling", partial(hmmlearn, scaling=True), "hmmlearn", (ONE,), MODES),
    Provider("hmmlearn, log", partial(hmmlearn, scaling=False), "hmmlearn", (ONE,), MODES),
    Provider("pomegranate", pomegranate, "pomegranate", (ONE,)),
    Provider("statsmodels", statsmodels, "statsmodels", (ONE, STEP)),
]
