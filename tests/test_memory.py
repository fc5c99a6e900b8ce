"""Peak memory against the memory contract."""

from functools import partial

import pytest
import torch

import logchain
from logchain import demo
from logchain.memory import peak_bytes
from tests.families import FAMILIES

SLACK = 10_000_000


def message_bytes(x):
    return x.numel() * 4


@pytest.mark.parametrize("mode", [demo.forward, demo.forward_backward])
def test_the_forums_case_takes_two_messages(mode):
    chain = demo.dense_chain(500, 40, 200)
    assert peak_bytes(lambda: mode(chain)) <= 2 * message_bytes(chain.x) + SLACK


def test_a_slice_of_messages_is_all_that_is_kept_without_gradients():
    chain = demo.dense_chain(100, 400, 64)
    assert peak_bytes(lambda: demo.forward(chain)) <= message_bytes(chain.x) / 2


@pytest.mark.parametrize("transitions", [None, "sum"])
def test_posteriors_and_expected_counts_take_two_messages(transitions):
    """The results, the messages, and counts in the shape of `bulk`: no matrix for each sequence."""
    chain = demo.dense_chain(100, 400, 64)
    counts = chain.bulk.numel() * 4 if transitions else 0

    def question():
        return [value for value in logchain.marginals(*chain, transitions=transitions) if value is not None]

    assert peak_bytes(question) <= 2 * message_bytes(chain.x) + counts + SLACK


@pytest.mark.parametrize("name", ["left_to_right", "banded", "peaked", "sparse"])
def test_hard_chains_take_two_messages(name):
    chain = FAMILIES[name](dtype=torch.float32, n=64, t=1, v=100, c=100)
    assert peak_bytes(lambda: demo.forward_backward(demo.Chain(*chain[:3]))) <= 2 * message_bytes(chain.x) + SLACK


def test_a_broadcast_operand_is_never_expanded():
    x = torch.randn(200, 1, 20, 100)
    expanded = 200 * 19 * 100 * 100 * 4
    for bulk in (torch.rand(1, 1, 19, 100, 100), torch.rand(1, 1, 1, 100, 100)):
        chain = demo.Chain(x, bulk, torch.rand(1, 1, 100))
        assert peak_bytes(lambda chain=chain: demo.forward_backward(chain)) < expanded / 20


@pytest.mark.parametrize(
    ("strategy", "sizes", "messages"), [("segments:16:20", (1, 80_001, 16), 2), ("segments:4", (4, 20_000, 32), 2)]
)
def test_schedules_take_two_messages(strategy, sizes, messages):
    c = sizes[-1]
    chain = torch.randn(sizes), torch.rand(1, c, c), torch.ones(c)
    product = partial(logchain.product, strategy=strategy)
    assert peak_bytes(lambda: demo.forward_backward(chain, product)) <= messages * message_bytes(chain[0])
