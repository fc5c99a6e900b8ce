"""A chain that is walked from both of its ends at once keeps the contract, and is taken where threads are idle."""

from functools import partial

import pytest
import torch

import logchain
from logchain import demo
from logchain.kernels.cpu import team
from logchain.memory import peak_bytes
from logchain.schedules import choose, meeting
from logchain.schedules.choose import Where
from logchain.schedules.cost_counts import MEETING, Size
from tests.benchmarks.timing import on_threads
from tests.contract import Truth, assert_contract, assert_nan_stays
from tests.families import Chain, Draw, dense
from tests.test_memory import allocations, variants

F32, F64 = torch.float32, torch.float64

meets = {"strategy": "meeting"}


@pytest.fixture(autouse=True)
def two_threads():
    with on_threads(2):
        yield


@pytest.mark.parametrize("c", [1, 2, 17])
@pytest.mark.parametrize("v", [1, 2, 3, 4, 5, 70])
def test_every_size(v, c):
    for n, t, each, one_matrix in [(1, 1, True, False), (1, 1, False, True), (3, 2, False, False), (3, 2, True, True)]:
        draw = Draw(0, n, t, v, c, each)
        chain = Chain(draw.x(), draw.bulk()[..., : 1 if one_matrix else v, :, :], draw.p0())
        assert_contract(chain.to(F32), **meets)
        assert_contract(chain.logs(), **meets)


def apart(*x: list[float]) -> Chain:
    """Two states that never meet."""
    return Chain(torch.tensor(x)[None, None], torch.eye(2).expand(1, 1, len(x) - 1, 2, 2).clone(), torch.ones(1, 1, 2))


DEEP = 800.0

# a state falls far below the other and is the last one left, in the left half, in the right, or where both meet
UNDERFLOWS = {
    "left": apart([0, 0], [0, -DEEP], [-2 * DEEP, 0], [0, 0], [0, 0], [0, 0], [0, 0]),
    "right": apart([0, 0], [0, 0], [0, 0], [0, 0], [-2 * DEEP, 0], [0, -DEEP], [0, 0]),
    "boundary": apart([0, 0], [0, 0], [0, -DEEP], [-2 * DEEP, 0], [0, 0], [0, 0]),
}


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
@pytest.mark.parametrize("where", UNDERFLOWS)
def test_what_underflows_is_found(where, log, dtype):
    chain = UNDERFLOWS[where].to(dtype)
    with logchain.rescues() as seen:
        assert_contract(chain.logs() if log else chain, **meets)
    assert seen.sequences == 1


@pytest.mark.parametrize("each", [False, True], ids=["one", "each"])
@pytest.mark.parametrize("forbidden", [[2], [6], [2, 6]], ids=["left", "right", "both"])
def test_the_impossible_is_exactly_so(forbidden, each):
    """Beside sequences that are possible."""
    chain = dense(F32, v=9)
    chain = chain if each else chain._replace(bulk=chain.bulk[..., :1, :, :].clone())
    chain.x[0, 0, forbidden] = -torch.inf
    assert_contract(chain, **meets)


def test_halves_that_do_not_meet():
    """Both are possible: the left half ends in a state that the right cannot begin with."""
    out = -torch.inf
    chain = apart([0, out], [0, 0], [0, 0], [0, 0], [0, 0], [out, 0])
    truth = Truth(chain)
    assert truth.log_norm == -torch.inf
    assert_contract(chain, truth=truth, **meets)


@pytest.mark.parametrize("operand, step", [("x", 0), ("x", -1), ("p0", 0), *(("bulk", i) for i in (0, 7, 8, 15))])
def test_nan_stays(operand, step):
    assert_nan_stays("dense", operand, step, **meets)


def test_scales_of_the_halves_may_cancel():
    """Each is far larger than their sum, whose digits it would take in float64."""
    draw = Draw(0, 1, 1, 40, 3, True)
    far = torch.full((40, 1), 1e4, dtype=F64)
    far[20:] *= -1
    assert_contract(Chain(draw.x() + far, draw.bulk(), draw.p0()), **meets)


def test_scales_of_the_halves_keep_their_digits():
    """Log-potentials are multiples of 2^-10: far from 0 they are exact in float64, and cancel."""
    draw = Draw(0, 1, 1, 40, 3, True)
    x, bulk, p0 = draw.x().mul(2**10).round() / 2**10, draw.bulk(), draw.p0()
    far = torch.full((40, 1), 2.0**30, dtype=F64)
    far[20:] *= -1
    found, expected = (logchain.product(one, bulk, p0, **meets) for one in (x + far, x))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_scale_that_the_states_where_halves_meet_cancel_keeps_its_digits():
    """The left half's weight is all in a state that the right one cannot begin with; 0.1 is added to it and remains."""
    chain = apart([2.0**30, 0], [0, 0], [0, 0.1], [-torch.inf, 0]).to(F64)
    torch.testing.assert_close(logchain.product(*chain[:3], **meets), chain.x[:, :, 2, 1], rtol=0, atol=1e-15)


def test_it_takes_two_messages():
    x, bulk, p0 = torch.randn(80001, 16), torch.rand(1, 16, 16), torch.rand(16)
    peak = peak_bytes(lambda: demo.forward_backward((x, bulk, p0), partial(logchain.product, **meets)))
    assert peak <= 1.1 * x.numel() * x.itemsize  # the messages alone
    assert peak_bytes(lambda: [logchain.product(x, bulk, p0, **meets)]) <= 2**16


@pytest.mark.parametrize("name", variants(3, F32))
def test_allocations_do_not_grow_with_v(name):
    short, long = (variants(v, F32)[name] for v in (21, 81))
    assert allocations(short, **meets) == allocations(long, **meets)


def test_both_halves_are_calls_of_one_team(monkeypatch):
    counts, calls = [], team.calls

    def counted(function, arguments):
        counts.append(len(arguments))
        return calls(function, arguments)

    monkeypatch.setattr(team, "calls", counted)
    chain = dense(F32, n=1, t=1, v=100)
    x = chain.x.requires_grad_()
    logchain.product(*chain[:3], **meets).sum().backward()
    assert x.grad is not None and counts == [2, 2]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_threads_do_not_matter(threads):
    chain = dense(F32, n=2, t=1, v=200)
    with on_threads(threads):
        assert_contract(chain, **meets)


def test_lengths_are_walked_from_the_first_step(monkeypatch):
    monkeypatch.setattr(meeting, "forward", None)
    chain = dense(F32, n=2, t=1, v=9)
    assert_contract(chain, lengths=torch.tensor([[9], [4]]), **meets)


def size(n=1, v=100_000, c=16, lengths=False, gradients=True, one_matrix=True, gpu=False):
    return Size(v, 1, n, c, one_matrix, 4, False, lengths, gradients, gpu)


class TestChoice:
    @pytest.mark.parametrize("gradients", [False, True])
    @pytest.mark.parametrize("strategy", ["auto", choose.POSTERIORS])
    def test_it_is_taken_where_a_thread_is_idle(self, strategy, gradients):
        assert choose.choose(size(gradients=gradients), Where("cpu", 2), strategy) == MEETING
        assert choose.choose(size(gradients=gradients), Where("cpu", 1), strategy) != MEETING
        for other in (size(n=2), size(lengths=True), size(v=1000), size(one_matrix=False)):
            assert choose.choose(other._replace(gradients=gradients), Where("cpu", 2), strategy) != MEETING

    def test_messages_in_order_do_not_take_it(self):
        assert choose.choose(size(), Where("cpu", 2), choose.WALKS) != MEETING

    def test_segments_are_preferred_where_they_are_predicted_faster(self):
        wide = size(v=4000, c=1024)
        place = Where("cpu", 2)
        assert choose.meeting(wide, place) and choose.choose(wide, place, "auto").name == "overlapped"

    def test_a_gpu_has_none(self):
        on_gpu = size(gpu=True)
        assert choose.meeting(on_gpu, Where("cuda", 1)) == []
        assert choose.choose(on_gpu, Where("cuda", 1), "meeting") == choose.SEQUENTIAL

    def test_the_plan_shows_it_where_it_applies(self):
        shapes = (100_000, 16), (1, 16, 16), (16,)
        plan = logchain.plan(*shapes, gradients=True)
        assert (plan.schedule, plan.segments, plan.segment_size) == ("meeting", 2, 49_999)
        named = {n: {e.schedule for e in self.on(n, shapes)} for n in (1, 2)}
        assert "meeting" in named[2] and "meeting" not in named[1]

    @staticmethod
    def on(threads, shapes):
        with on_threads(threads):
            plan = logchain.plan(*shapes, gradients=True)
        return plan, *plan.alternatives

    @pytest.mark.parametrize("threads", [1, 2])
    def test_product_and_marginals_do_what_is_planned(self, threads, monkeypatch):
        calls, forward = [], meeting.forward
        monkeypatch.setattr(meeting, "forward", lambda *args, **options: calls.append(1) or forward(*args, **options))
        x, bulk, p0 = torch.randn(100_000, 16), torch.rand(1, 16, 16), torch.rand(16)
        with on_threads(threads):
            found = logchain.product(x, bulk, p0), logchain.marginals(x, bulk, p0).log_norm
        assert len(calls) == 2 * (threads == 2)
        expected = logchain.product(x, bulk, p0, strategy="sequential")
        for one in found:
            torch.testing.assert_close(one, expected, rtol=1e-6, atol=0)

    def test_a_packed_sequence_meets(self, monkeypatch):
        calls, forward = [], meeting.forward
        monkeypatch.setattr(meeting, "forward", lambda *args, **options: calls.append(1) or forward(*args, **options))
        x, bulk, p0 = torch.randn(100_000, 16), torch.rand(1, 16, 16), torch.rand(16)
        found = logchain.product(x, bulk, p0, cu_seqlens=torch.tensor([0, 100_000]))
        assert calls
        torch.testing.assert_close(found[0], logchain.product(x, bulk, p0, strategy="sequential"), rtol=1e-6, atol=0)
