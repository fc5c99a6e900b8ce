"""A chain in segments that begin early: what it forgets is verified, and what it does not is computed again."""

import itertools
import math
from pathlib import Path

import pytest
import torch

import logchain
from logchain import demo
from logchain.kernels.chain import FEW_STATES
from logchain.kernels.chain import Chain as Steps
from logchain.memory import peak_bytes
from logchain.schedules import choose, cost, overlapped
from logchain.schedules.cost_counts import first_warm_up
from tests.contract import Truth, assert_contract
from tests.families import Chain, Draw
from tests.test_memory import allocations

F32, F64 = torch.float32, torch.float64


@pytest.fixture
def cut(monkeypatch):
    """Makes `product` walk its chains in so many segments side by side."""

    def into(count):
        monkeypatch.setattr(choose, "of", lambda *_: choose.Schedule("overlapped", count))

    into(4)
    return into


def evidence(v: int, c: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(v, c, generator=torch.Generator().manual_seed(v))


def dense(c: int) -> torch.Tensor:
    return torch.randn(c, c, generator=torch.Generator().manual_seed(c)).softmax(-1)


def sticky(c: int, stay: float) -> torch.Tensor:
    return stay * torch.eye(c) + (1 - stay) / c


def chain_of(x: torch.Tensor, bulk: torch.Tensor) -> Chain:
    """One sequence, from a start that is far from uniform."""
    start = torch.arange(1.0, x.shape[-1] + 1).pow(3)
    return Chain(x[None, None], bulk.expand(1, 1, *bulk.shape[-3:]), start[None, None])


def steps_to_forget(x: torch.Tensor, bulk: torch.Tensor) -> int:
    steps = Steps(x[:, None], bulk[None], torch.ones(1, x.shape[-1]), None, False, F32)
    return overlapped.steps_to_forget(steps, len(x), overlapped.through, overlapped.unlike)


class TestDistance:
    def test_a_factor_does_not_count(self):
        message = torch.tensor([0.0, -3.0, -math.inf, -900.0], dtype=F64)
        assert overlapped.distance(message, message + 7.0) == 0

    def test_it_is_the_range_of_the_logarithms_of_ratios(self):
        a, b = torch.tensor([1.0, 2.0, 5.0], dtype=F64), torch.tensor([2.0, 1.0, 5.0], dtype=F64)
        assert overlapped.distance(a.log(), b.log()).item() == pytest.approx(math.log(4))

    def test_other_zeros_are_refused(self):
        chain = Steps(torch.zeros(1, 1, 3), torch.ones(1, 3, 3), torch.ones(3), None, False, F32)
        some, none = torch.tensor([0.0, -math.inf, 0.0], dtype=F64), torch.full((3,), -math.inf, dtype=F64)
        full, broken = torch.zeros(3, dtype=F64), torch.full((3,), math.nan, dtype=F64)
        for a, b in [(some, full), (full, some), (none, full), (full, none), (full, broken), (broken, broken)]:
            assert overlapped.unlike(chain, a, b), (a, b)
        for same in (some, none, full):
            assert not overlapped.unlike(chain, same, same)

    @pytest.mark.parametrize("zeros", [0.0, 0.5])
    def test_no_step_makes_it_larger(self, zeros):
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.rand(500, 1, 6, generator=generator, dtype=F64) + 1e-3 for _ in range(2))
        matrices = torch.rand(500, 6, 6, generator=generator, dtype=F64)
        matrices *= torch.rand(matrices.shape, generator=generator) >= zeros
        before = overlapped.distance(a.log(), b.log())
        after = overlapped.distance((a @ matrices).log(), (b @ matrices).log())
        assert (after <= before + 1e-14).all()


@pytest.mark.parametrize(
    ("bulk", "scale"),
    [
        (torch.eye(6), 1.0),
        (torch.eye(6).roll(1, 1), 1.0),
        (torch.eye(6).roll(1, 1), 0.0),
        (torch.ones(6, 6).triu(), 1.0),
        (sticky(6, 0.999), 0.01),
        (sticky(6, 0.999), 0.0),
        (torch.block_diag(dense(3), dense(3)), 0.0),
    ],
    ids=["identity", "permutation", "silent permutation", "left to right", "sticky", "silent sticky", "blocks"],
)
def test_what_does_not_forget_is_walked_as_one(bulk, scale, cut):
    """Without a boundary that is refused: it is found out before."""
    x = evidence(4001, 6, scale)
    assert steps_to_forget(x, bulk[None]) == 0
    chain = chain_of(x[:401], bulk[None])
    with logchain.rescues() as seen:
        assert_contract(chain)
    assert seen.boundaries == 0


@pytest.mark.parametrize(("bulk", "most"), [(dense(16), 16), (dense(256), 16), (sticky(16, 0.9), 64)])
def test_steps_to_forget(bulk, most):
    assert 0 < steps_to_forget(evidence(8001, len(bulk)), bulk[None]) <= most


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("each", [False, True], ids=["one", "each"])
def test_a_chain_that_forgets_needs_no_second_walk(each, dtype, cut):
    draw = Draw(0, 2, 1, 601, 5, each)
    chain = Chain(draw.x(), draw.bulk(), draw.p0()).to(dtype)
    with logchain.rescues() as seen:
        assert_contract(chain)
    assert (seen.sequences, seen.boundaries) == (0, 0)


def memories(v: int, c: int, *spans: tuple[int, int]) -> Chain:
    """A chain that forgets but in some spans of steps, where states stay what they are."""
    matrices = dense(c).expand(v - 1, c, c).clone()
    for start, stop in spans:
        matrices[start:stop] = torch.eye(c)
    return chain_of(evidence(v, c), matrices)


@pytest.mark.parametrize("span", [(300, 700), (100, 700), (600, 900), (0, 1200)], ids=str)
def test_a_boundary_that_is_remembered_is_refused(span, cut, monkeypatch):
    monkeypatch.setattr(overlapped, "steps_to_forget", lambda *_: 32)
    chain = memories(1201, 4, span)
    with logchain.rescues() as seen:
        assert_contract(chain)
    assert seen.boundaries > 0


def test_some_states_alone_merge_late(cut, monkeypatch):
    """Two parts of the states that hardly meet: inside each part everything is forgotten at once."""
    monkeypatch.setattr(overlapped, "steps_to_forget", lambda *_: 32)
    rare = 1e-7
    bulk = torch.block_diag(dense(3), dense(3)) + rare
    chain = chain_of(evidence(1201, 6, 0.1), bulk[None])
    with logchain.rescues() as seen:
        assert_contract(chain)
    assert seen.boundaries > 0


def test_every_sequence_counts(cut, monkeypatch):
    """The mended ones leave the others as they are."""
    monkeypatch.setattr(overlapped, "steps_to_forget", lambda *_: 32)
    one, other = memories(601, 4), memories(601, 4, (100, 400))
    chain = Chain(*(torch.cat([a, b]) for a, b in zip(one[:3], other[:3], strict=True)))
    assert_contract(chain)
    assert_contract(chain, lengths=torch.tensor([[601], [203]]))


def test_an_impossible_chain(cut):
    chain = memories(401, 4)
    chain.bulk[0, 0, 150] = 0
    assert_contract(chain)


def test_marginals_take_it(cut):
    operands = [tensor[0, 0] for tensor in memories(401, 4)[:3]]
    found = logchain.marginals(*(tensor.requires_grad_() for tensor in operands), transitions="sum")
    expected = Truth(Chain(*(tensor.detach()[None, None] for tensor in operands)))
    torch.testing.assert_close(
        found.states.double().detach(), torch.from_numpy(expected.states[0, 0]), rtol=0, atol=1e-5
    )


def test_a_wide_chain_takes_it_by_itself():
    for gradients in (False, True):
        plans = [logchain.plan((v, 1024), (1, 1024, 1024), (1024,), gradients=gradients) for v in (1000, 20)]
        assert [plan.schedule for plan in plans] == ["overlapped", "sequential"]


def test_allocations_do_not_grow_with_v(cut):
    short, long = (memories(v, 4) for v in (6401, 12801))
    assert allocations(short) == allocations(long)


def test_it_takes_two_messages(cut):
    x, bulk, p0 = evidence(80001, 16), dense(16)[None], torch.ones(16)
    assert peak_bytes(lambda: demo.forward_backward((x, bulk, p0))) <= 2 * x.numel() * x.itemsize


@pytest.mark.parametrize("each", [False, True], ids=["one", "each"])
def test_paths_are_drawn_from_its_messages(each, cut, monkeypatch):
    """The same ones, by the same numbers, as from the messages of a sequential walk."""
    monkeypatch.setattr(overlapped, "steps_to_forget", lambda *_: 25)
    draw = Draw(0, 2, 2, 301, 20, each)
    chain = Chain(draw.x(), draw.bulk(), draw.p0()).to(F32)
    chain.bulk[..., 150, :, :] = torch.eye(20) + 1e-25  # a sequence that is computed again in log space
    chain.x[1, 0, 150, 1:] -= 300.0
    chain.x[1, 0, 151, 0] -= 300.0

    def paths():
        return logchain.sample(*chain[:3], 20, generator=torch.Generator().manual_seed(3))

    with logchain.rescues() as seen:
        side_by_side = paths()
    monkeypatch.setattr(choose, "of", lambda *_: choose.SEQUENTIAL)
    in_turn = paths()
    assert seen.sequences == 1 and (side_by_side >= 0).all()
    assert (side_by_side != in_turn).double().mean() < 1e-3


def test_what_is_chosen_can_be_overlapped_within_the_memory():
    """Segments are long enough for the first warm-up, and so few that comparing their messages takes little memory."""
    place = choose.Where("cpu", 64)
    for v, c in itertools.product((100, 500, 3000, 73730), (4, 20, 256, 1024)):
        size = choose.Size(v, 1, 1, c, True, 4, False, False, True)
        for schedule in choose.overlapped(size, place):
            assert (v - 1) // schedule.segments // 3 >= first_warm_up(v, size.item)
            assert choose.within_contract(size, schedule)
    assert choose.overlapped(choose.Size(73730, 1, 1, 256, True, 4, False, False, True), place)


def test_every_machine_has_constants_for_every_schedule():
    for entry in cost.read():
        assert set(entry.seconds) == set(choose.STRATEGIES[1:]) - {"meeting"}  # which has those of sequential


def test_the_plan_knows_what_the_loops_keep_in_registers():
    """The same number as in the C sources."""
    header = (Path(__file__).parents[1] / "kernels" / "cpu" / "c" / "few.h").read_text()
    assert f"enum {{ FEW = {FEW_STATES} }};" in header
