"""Every question of a chain on the Triton kernels: on a device, or in the interpreter."""

import numpy as np
import pytest
import torch

import logchain
from logchain import kernels as devices
from logchain.schedules import choose
from tests.contract import TENSOR_CORES as K
from tests.contract import Truth, assert_values
from tests.families import FAMILIES, dense

pytest.importorskip("triton")

from logchain.kernels.gpu import launch

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


def test_few_long_chains_are_cut_whatever_is_asked(device, monkeypatch):
    pytest.importorskip("triton")
    from logchain.schedules import chunked

    p, q = (FAMILIES["detour"](F64, seed, n=1, t=1, v=5, c=2) for seed in (0, 1))

    def answers(device, calls):
        (x, bulk, p0), other = on(device, p), on(device, q)
        states, options = p.x.argmax(-1).to(device), {"log_params": True}
        found = [logchain.log_prob(x.requires_grad_(), bulk, p0, states, **options)]
        found += torch.autograd.grad(found[0].sum(), [x])
        counted = [len(calls)]
        with torch.no_grad():
            found.append(logchain.entropy(x, bulk, p0, **options))
            counted.append(len(calls))
            found.append(logchain.kl_divergence((x, bulk, p0), tuple(other), **options))
        return [value.detach().cpu() for value in found], [*counted, len(calls)]

    expected, _ = answers("cpu", [])
    calls, forward = [], chunked.forward
    monkeypatch.setattr(chunked, "forward", lambda *args, **options: calls.append(1) or forward(*args, **options))
    monkeypatch.setattr(choose, "of", lambda *_: choose.Schedule("chunked", 2))
    monkeypatch.setattr(devices, "on_gpu", lambda tensor: True)
    found, counted = answers(device, calls)
    torch.testing.assert_close(found, expected)
    assert counted == [1, 2, 4]


def test_a_length_out_of_range_makes_its_sequence_nan(kernels):
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


@pytest.mark.parametrize(("m", "c"), [(3, 8), (5, 8), (1, 8), (3, 260)], ids=str)
def test_all_pointers_are_aligned_whatever_the_sizes(m, c, kernels, monkeypatch):
    """So nothing is compiled again for another number of steps or sequences, or for another pass."""
    odd, run = set(), launch.run

    def watched(kernel, grid, *arguments, **options):
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        odd.update(kernel.fn.__name__ for tensor in tensors if tensor.data_ptr() % 16)
        run(kernel, grid, *arguments, **options)

    monkeypatch.setattr(launch, "run", watched)
    for v in (4, 5):
        x = torch.randn(m, v, c, device=kernels).requires_grad_()
        bulk = torch.rand(1, v - 1, c, c, device=kernels).requires_grad_()
        logchain.product(x, bulk, torch.rand(c, device=kernels)).sum().backward()
    assert not odd
