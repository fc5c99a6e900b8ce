"""Peak memory against the memory contract, and `logchain.memory.report` against allocations that are known."""

from functools import partial

import pytest
import torch

import logchain
from logchain import demo
from logchain.memory import Memory, peak_bytes, report
from tests.families import FAMILIES

SLACK = 10_000_000
KB = 1000 * 4
FEW = 100  # bytes of scalars


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


@pytest.mark.parametrize(("strategy", "sizes"), [("segments:16:20", (1, 80_001, 16)), ("segments:4", (4, 20_000, 32))])
def test_schedules_take_two_messages(strategy, sizes):
    c = sizes[-1]
    chain = torch.randn(sizes), torch.rand(1, c, c), torch.ones(c)
    product = partial(logchain.product, strategy=strategy)
    assert peak_bytes(lambda: demo.forward_backward(chain, product)) <= 2 * message_bytes(chain[0])


def exponentials(x):
    return x.exp().sin()


def test_each_phase_counts_what_is_held_at_its_end_and_at_its_peak():
    x = torch.zeros(1000, requires_grad=True)
    measured = report(exponentials, x)
    assert measured.before == (KB, KB)
    assert measured.forward == (3 * KB, 3 * KB)  # x, exp x for the backward pass, and the result
    assert measured.backward is not None
    assert 3 * KB <= measured.backward.allocated <= 3 * KB + FEW  # x, the result and the gradient
    assert 4 * KB <= measured.backward.peak <= 6 * KB


def test_a_temporary_is_in_the_peak_alone():
    measured = report(lambda x: x.exp().sin(), torch.zeros(1000))
    assert measured == (Memory(KB, KB), Memory(2 * KB, 3 * KB), None)


def test_gradients_are_taken_of_tensors_anywhere_and_left_nowhere():
    a, b, c = torch.zeros(1000, requires_grad=True), torch.zeros(500, requires_grad=True), torch.zeros(10)
    measured = report(lambda pair, c: {"sum": pair[0].exp(), "other": [pair[1].exp(), None, c]}, [a, b], c)
    assert measured.before.allocated == 6040
    assert measured.backward is not None and measured.backward.allocated >= 6040 + 6000 + 6000
    assert a.grad is None and b.grad is None


def test_views_of_one_storage_count_once_and_what_is_unused_has_no_gradient():
    x, unused = torch.zeros(1000, requires_grad=True), torch.zeros(1000, requires_grad=True)
    assert report(lambda *args: None, x, x[:10], x.view(10, 100)).before.allocated == KB
    measured = report(lambda x, unused: x.exp(), x, unused)
    assert measured.backward is not None and measured.backward.allocated < 5 * KB
    assert report(lambda x: x.detach() + 1, x).backward is None


def test_the_table_leaves_out_what_was_not_measured():
    lines = str(report(torch.exp, torch.zeros(1_000_000))).splitlines()
    assert [line.split() for line in lines] == [
        ["bytes", "allocated", "peak"],
        ["before", "4,000,000", "4,000,000"],
        ["forward", "8,000,000", "8,000,000"],
    ]
    assert len({len(line) for line in lines}) == 1


def test_it_agrees_with_the_peak_that_the_memory_contract_is_tested_by():
    chain = demo.dense_chain(20, 40, 50)
    operands = [operand.detach().requires_grad_() for operand in chain]
    logchain.product(*operands)  # the first call of a process takes buffers that stay
    measured = report(logchain.product, *operands)
    assert measured.backward is not None
    peak = max(measured.forward.peak, measured.backward.peak) - measured.before.allocated
    gradients = sum(operand.numel() * 4 for operand in operands)
    assert peak == pytest.approx(peak_bytes(lambda: demo.forward_backward(chain)) + gradients, rel=0.02)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="^fn: expected a function, got Tensor"):
        report(torch.zeros(3))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device")
def test_on_a_gpu_the_counters_are_torchs_own():
    x = torch.zeros(1 << 20, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    measured = report(exponentials, x)
    size = x.numel() * 4
    assert measured.before.allocated == before
    assert measured.forward.allocated == before + 2 * size
    assert measured.backward is not None and measured.backward.allocated >= before + 2 * size
    assert measured.backward.peak >= before + 3 * size
