"""Filtered posteriors: against chains that end at each variable, and against float64 where log Z is large."""

import numpy as np
import pytest
import torch

import logchain
from tests.contract import assert_values, depth, drawn, gradient_bound
from tests.families import FAMILIES, PAIRS
from tests.streams import messages_of, prefixes, reachable
from tests.test_marginals import assert_posteriors
from tests.transitions.structures import MAKE, C, numbers

F32, F64 = torch.float32, torch.float64
NAN = float("nan")


@PAIRS
@pytest.mark.parametrize("name", FAMILIES)
def test_of_every_family(name, dtype, each, log):
    chain, truth = drawn(name, dtype, each, log)
    found = logchain.filtered(*chain[:3], log_params=chain.log_params)
    assert found.states.dtype == found.log_norm.dtype == dtype
    assert_values(found.log_norm, truth.log_norm, truth.value_bound(dtype))
    exact = prefixes(chain, 0)
    # the reference is good to float64 at the size of its messages
    bound = truth.gradient_bound(exact) + 2.0**-50 * messages_of(chain)
    assert_posteriors(found.states, exact, prefixes(reachable(chain), 0), bound)


@pytest.mark.parametrize("each", [False, True], ids=["one matrix", "each"])
def test_a_filter_of_millions_of_nats(each):
    """Every tenth state is known, so that what follows depends on ten variables, whatever log Z is."""
    draw = torch.Generator().manual_seed(0)
    v, c = 20_000, 4
    x = torch.randn(v, c, generator=draw) + 400
    x[::10, 1:] = -torch.inf
    bulk = torch.softmax(torch.randn(v - 1 if each else 1, c, c, generator=draw), -1)
    found = logchain.filtered(x, bulk, torch.full((c,), 1 / c))
    weights = np.exp(x.double().numpy() - 400).reshape(-1, 10, c)
    matrices = bulk.double().expand(v - 1, c, c).numpy()
    matrices = np.concatenate([matrices, matrices[:1]]).reshape(-1, 10, c, c)
    exact = np.zeros_like(weights)
    exact[:, 0, 0] = 1.0
    for i in range(1, 10):
        ahead = np.einsum("nk,nkj->nj", exact[:, i - 1], matrices[:, i - 1]) * weights[:, i]
        exact[:, i] = ahead / ahead.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        deep = max(depth(np.log(levels), exact).max() for levels in (exact, weights))
    assert found.log_norm > 7e6
    assert_posteriors(found.states.view(-1, 10, c), exact, exact, gradient_bound(exact, 10, c, deep, dtype=F32))
    # which differences of messages miss
    messages = logchain.forward_backward(x, bulk, torch.full((c,), 1 / c)).forward.softmax(-1)
    assert np.abs(messages.view(-1, 10, c).double().numpy() - exact).max() > 0.05


@pytest.mark.parametrize("each", [False, True], ids=["one matrix", "each"])
def test_lengths_and_packed_rows_are_sequences_alone(each):
    draw = torch.Generator().manual_seed(0)
    ends, c = torch.tensor([5, 1, 3]), 3
    x, p0 = torch.randn(3, 5, c, generator=draw), torch.rand(3, c, generator=draw)
    bulk = torch.rand(3, 4, c, c, generator=draw) if each else torch.rand(1, c, c, generator=draw)
    alone = [
        logchain.filtered(x[i, :end], bulk[i, : end - 1] if each else bulk, p0[i])
        for i, end in enumerate(ends.tolist())
    ]
    outside = torch.arange(5) >= ends[:, None]
    padded = logchain.filtered(x.masked_fill(outside[..., None], NAN), bulk, p0, lengths=ends)
    assert (padded.states[outside] == 0).all()
    rows = x[~outside]
    into = torch.cat([bulk.new_full((3, 1, c, c), NAN), bulk], 1)[~outside] if each else bulk
    packed = logchain.filtered(rows, into, p0, cu_seqlens=torch.tensor([0, 5, 6, 9]))
    torch.testing.assert_close(padded.states[~outside], packed.states)
    torch.testing.assert_close(padded.log_norm, packed.log_norm)
    for i, (end, one) in enumerate(zip(ends.tolist(), alone, strict=True)):
        torch.testing.assert_close(padded.states[i, :end], one.states)
        torch.testing.assert_close(padded.log_norm[i], one.log_norm)


@pytest.mark.parametrize("lead", [(), (4,), (3, 4)], ids=str)
@pytest.mark.parametrize("kind", ["banded", "low_rank", "monarch"])
def test_structures_are_their_dense_matrices(kind, lead):
    rand = numbers(3)
    structure, x, p0 = MAKE[kind](rand, *lead), torch.randn(3, 5, C, dtype=F64), rand(C)
    dense = structure.to_dense() if lead else structure.to_dense()[None]
    lengths = torch.tensor([5, 1, 3])
    for options in ({}, {"lengths": lengths}):
        ours, expected = (logchain.filtered(x, bulk, p0, **options) for bulk in (structure, dense))
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)
    if len(lead) < 2:
        rows, into = x[0], MAKE[kind](numbers(3), *(lead and (5,)))
        ours, expected = (
            logchain.filtered(rows, bulk, p0, cu_seqlens=torch.tensor([0, 3, 5]))
            for bulk in (into, into.to_dense() if lead else into.to_dense()[None])
        )
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("steps", [1, 3])
def test_gradients(steps):
    draw = torch.Generator().manual_seed(0)
    operands = [torch.rand(*shape, generator=draw, dtype=F64) for shape in ((2, 4, 2), (steps, 2, 2), (2,))]
    leaves = [operand.requires_grad_() for operand in operands]
    question = lambda *chain: tuple(logchain.filtered(*chain, lengths=torch.tensor([4, 2])))  # noqa: E731
    assert torch.autograd.gradcheck(question, leaves)
    assert torch.autograd.gradgradcheck(question, leaves)
    for one, other in zip(question(*leaves), question(*(leaf.detach() for leaf in leaves)), strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=0, atol=1e-14)


def test_what_is_impossible():
    x, bulk = torch.zeros(2, 3, 2), torch.tensor([[[0.0, 1.0], [0.0, 1.0]]])
    x[0, 1, 1] = -torch.inf
    found = logchain.filtered(x, bulk, torch.tensor([0.5, 0.5]))
    assert found.log_norm[0] == -torch.inf and found.states[0].tolist() == [[0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]
    assert found.states[1].tolist() == [[0.5, 0.5], [0.0, 1.0], [0.0, 1.0]]


@pytest.mark.parametrize("matrices", [0, 1])
def test_one_variable(matrices):
    x, p0 = torch.tensor([[0.0, 1.0]]), torch.tensor([0.5, 0.25])
    found = logchain.filtered(x, torch.ones(matrices, 2, 2), p0)
    torch.testing.assert_close(found.states, torch.softmax(x + p0.log(), -1))
    torch.testing.assert_close(found.log_norm, torch.logsumexp(x + p0.log(), -1)[0])


def test_wrong_arguments_are_named():
    x, bulk, p0 = torch.zeros(2, 3, 2), torch.ones(1, 2, 2), torch.ones(2)
    for lengths in ([0, 3], torch.tensor([3, 4]), torch.tensor([0, 3])):
        with pytest.raises(ValueError, match="lengths: expected values from 1 to v = 3"):
            logchain.filtered(x, bulk, p0, lengths=lengths)
    with pytest.raises(ValueError, match=r"bulk: expected shape \[2 or 1, 2, 2\] to go with x \[2, 3, 2\]"):
        logchain.filtered(x, torch.ones(3, 2, 2), p0)
    with pytest.raises(TypeError, match="log_params: expected True or False"):
        logchain.filtered(x, bulk, p0, log_params=1)
    with pytest.raises(TypeError, match="x: expected a torch.Tensor"):
        logchain.filtered([[0.0]], bulk, p0)
    with pytest.raises(ValueError, match="lengths: expected None beside cu_seqlens"):
        logchain.filtered(x[0], bulk, p0, lengths=3, cu_seqlens=torch.tensor([0, 3]))
