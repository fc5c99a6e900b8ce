"""The count of what was computed again: nothing on dense chains, what needs it elsewhere, and the same answer."""

import pytest
import torch

import logchain
from logchain import demo, reference
from tests.contract import of_steps
from tests.families import FAMILIES, Chain


def count(chain, **options):
    with logchain.rescues() as seen:
        logchain.product(*chain[:3], log_params=chain.log_params, **options)
    return seen.sequences


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 20.0, 300.0])
@pytest.mark.parametrize("c", [1, 7, 20, 200])
def test_a_dense_chain_is_never_computed_again(c, scale, dtype):
    chain = demo.dense_chain(50, 40, c, scale=scale)
    assert c < 200 or chain.bulk.amin() < 2.0**-20
    assert count(Chain(*chain).to(dtype)) == 0


def test_only_the_sharp_sequences_of_a_chain_with_zeros_are():
    chain = FAMILIES["left_to_right"](dtype=torch.float32, n=6, t=1, v=40, c=12)
    assert count(chain) > 0
    for sharp in 0, 1:  # the zeros alone cost nothing
        assert count(chain._replace(x=chain.x * (torch.arange(6) < sharp).view(6, 1, 1, 1))) == sharp


def test_blocks_nest():
    a, b = torch.tensor([[0.0, -200.0]]), torch.tensor([[-200.0], [0.0]])
    with logchain.rescues() as outer:
        logchain.matmul(a, b)
        with logchain.rescues() as inner:
            logchain.matmul(a, b)
            logchain.matmul(a, a.T)
    assert (inner.outputs, outer.outputs) == (1, 2)
    logchain.matmul(a, b)
    assert outer.outputs == 2


@pytest.mark.parametrize("v", range(2, 9))
@pytest.mark.parametrize("each", [False, True])
def test_a_certified_chain_is_checked_to_its_last_step(v, each):
    """Flips that cost 55 nats a step underflow wherever the last scale was taken: also behind it."""
    x = torch.tensor([[0.0, -200.0], [-200.0, 0.0]] * 4)[:v].repeat(3, 1, 1)
    bulk, p0 = torch.tensor([[[1.0, 1e-24], [1e-24, 1.0]]]), torch.ones(2)
    for options in ({}, {"lengths": [v, v - 1, max(1, v - 2)]}):
        out = logchain.product(x, bulk.expand(3, 1, 2, 2) if each else bulk, p0, **options)
        truth = torch.from_numpy(reference.product(x, bulk, p0, **options))
        torch.testing.assert_close(out.double(), truth, rtol=2.0**-23, atol=of_steps(v, 2, dtype=torch.float32))


def test_what_lies_behind_an_end_does_not_hide_a_doubt():
    flips = [[0.0, -200.0], [-200.0, 0.0], [0.0, -200.0], [-200.0, 0.0]]
    x = torch.tensor([[*flips, [-torch.inf, -torch.inf]], [[0.0, 0.0]] * 5])
    bulk, p0, lengths = torch.tensor([[[1.0, 1e-18], [1e-18, 1.0]]]), torch.ones(2), [4, 5]
    truth = torch.from_numpy(reference.product(x, bulk, p0, lengths=lengths))
    torch.testing.assert_close(logchain.product(x, bulk, p0, lengths=lengths).double(), truth, rtol=2.0**-23, atol=1e-6)
