"""The functions of a chain on the Triton kernels: on a device, or in the interpreter."""

import numpy as np
import pytest
import torch

import logchain
from logchain import kernels as devices
from logchain.schedules import choose
from tests.best_paths import assert_best
from tests.contract import TENSOR_CORES as K
from tests.contract import Truth, assert_values
from tests.families import FAMILIES, dense

pytest.importorskip("triton")

F32, F64 = torch.float32, torch.float64


def on(device, chain):
    return [tensor.to(device) for tensor in chain[:3]]


@pytest.mark.parametrize("transitions", ["sum", "full"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", ["left_to_right", "detour", "one_dead"])
def test_marginals(name, each, transitions, kernels):
    chain = FAMILIES[name](F32, each=each, n=2, t=1, v=4, c=5)
    truth = Truth(chain)
    found = logchain.marginals(*on(kernels, chain), transitions=transitions, log_params=chain.log_params)
    assert_values(found.log_norm, truth.log_norm, truth.value_bound(k=K))
    assert (np.abs(found.states.double().cpu().numpy() - truth.states) <= truth.gradient_bound(truth.states, K)).all()
    counts, bound = truth.transitions, truth.gradient_bound(truth.transitions, K)
    if transitions == "sum" and not each:
        counts, bound = counts.sum((0, 1), keepdims=True), bound.sum((0, 1), keepdims=True)
    assert (np.abs(found.transitions.double().cpu().numpy() - counts) <= bound).all()


def test_counts_of_the_smallest_weights(kernels):
    """The gradient of such a weight would overflow; its logarithm's does not."""
    chain = dense(F32, n=2, t=1, v=4, c=3)
    bulk = chain.bulk * 1e-38
    found = logchain.marginals(*on(kernels, (chain.x, bulk, chain.p0)), transitions="sum")
    torch.testing.assert_close(found.transitions.sum((-1, -2)).cpu(), torch.full((1, 1, 3), 2.0))


@pytest.mark.parametrize(("name", "lengths"), [("dense", [3, 1]), ("detour", None)])
def test_messages_entropy_and_covariances_are_those_of_the_cpu(name, lengths, device, monkeypatch):
    chain = FAMILIES[name](F32, v=3, c=4, n=2, t=1)

    def answers(device):
        operands = [operand.requires_grad_() for operand in on(device, chain)]
        options = {"log_params": chain.log_params, "lengths": lengths}
        messages, entropy = logchain.forward_backward(*operands, **options), logchain.entropy(*operands, **options)
        total = entropy.sum() + torch.where(messages.backward == -torch.inf, 0.0, messages.backward).sum()
        return [t.detach().cpu() for t in (*messages, entropy, *torch.autograd.grad(total, operands))]

    expected = answers("cpu")
    monkeypatch.setattr(devices, "on_gpu", lambda tensor: True)
    for one, other in zip(answers(device), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_overlapped_means_chunked_on_a_gpu():
    place, size = choose.Where("cuda", 1), choose.Size.of((1, 10_000, 16), (1, 1, 16, 16), False, False, False, False)
    size = size._replace(gpu=True)
    assert choose.choose(size, place, "overlapped") == choose.choose(size, place, "chunked") != choose.SEQUENTIAL


def test_length_out_of_range_makes_its_sequence_nan(kernels):
    operands = on(kernels, dense(F32, v=5))
    lengths = torch.tensor([3, 9, 0], device=kernels)
    found = logchain.forward_backward(*operands, lengths=lengths)
    entropy, states = (
        logchain.entropy(*operands, lengths=lengths),
        logchain.marginals(*operands, lengths=lengths).states,
    )
    for value in (*found, entropy, states):
        assert value[1:].isnan().any() and not value[0].isnan().any()
    assert found.log_norm[1:].isnan().all() and entropy[1:].isnan().all()


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize(("name", "dtype"), [("dense", F32), ("sparse", F64), ("detour", F32), ("one_dead", F64)])
@pytest.mark.parametrize("log", [False, True])
def test_viterbi_keeps_the_contract(name, dtype, log, each, kernels):
    chain = FAMILIES[name](dtype, n=2, t=1, v=5, c=6, each=each)
    chain = chain.logs() if log else chain
    assert_best(chain, device=kernels)
    assert_best(chain, [3, 5], device=kernels)


def test_viterbi_takes_the_lowest_of_equal_states(kernels):
    states = logchain.viterbi(*(torch.ones(size, device=kernels) for size in ((2, 4, 5), (1, 5, 5), (5,)))).states
    assert (states == 0).all()


def test_viterbi_of_nan_has_no_path(kernels):
    x, bulk, p0 = on(kernels, dense(F32, n=3, t=1, v=4, c=3))
    x[1, 0, 2, 1] = torch.nan
    best = logchain.viterbi(x, bulk, p0)
    assert (best.states[1] == -1).all() and (best.states[[0, 2]] >= 0).all() and best.score[1].isnan()
