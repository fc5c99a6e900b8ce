"""State paths by the kernels: the rooms agree, whatever the sizes, layouts, levels and threads."""

import importlib

import pytest
import torch

from logchain.autograd.paths import log_weight
from logchain.kernels import messages_of
from logchain.kernels.chain import Chain
from logchain.kernels.cpu import arguments, team
from logchain.kernels.message import Kept
from logchain.kernels.plain import sample as sample_plainly
from logchain.kernels.plain import viterbi
from logchain.kernels.plain.forward import forward as plain_forward
from logchain.operands import chain_of
from tests.contract import poisoned_memory
from tests.families import FAMILIES

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")
QUESTIONS = pytest.mark.parametrize("question", ["viterbi", "topk_paths", "sample"])
LENGTHS = [12, 1, 7, 2, 12, 3]


def room(name, question):
    return importlib.import_module(f"logchain.kernels.{name}.{'dense' if name == 'cpu' else question}")


def arranged(chain, lengths=None):
    """A chain of the tests as kernels take it; lengths are those of the first batch axis."""
    ends = None if lengths is None else torch.tensor(lengths)[:, None].expand(chain.x.shape[:-2])
    return chain_of(*chain[:3], ends, chain.log_params)[1]


def numbers_for(chain, steps, count=3):
    """What `count` draws of each sequence are made of."""
    return torch.rand(count, chain.g, chain.m, steps, dtype=F64, generator=torch.Generator().manual_seed(0))


def answer(where, question, chain, steps, count=3, numbers=None):
    """The states that a room finds, and which sequences have none because of a NaN or +inf."""
    paths = room(where, question)
    if question == "viterbi":
        return paths.paths(chain, steps)
    if question == "topk_paths":
        return paths.paths(chain, steps, count)
    kept = room("cpu", "forward").forward(chain, keep=messages_of(chain, chain.v))[0]
    states = (numbers_for(chain, steps, count) if numbers is None else numbers).clone().view(torch.int64)
    paths.draw(chain, kept, states)
    return states, ~(kept.log_norm < INF)


def assert_same(found, expected):
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@QUESTIONS
@pytest.mark.parametrize("c", [1, 3, 8, 17, 64])
def test_rooms_agree_exactly(c, question):
    for seed, (dtype, each, log, lengths) in enumerate(
        [(F64, True, False, None), (F64, False, True, LENGTHS), (F32, False, False, LENGTHS), (F32, True, True, None)]
    ):
        if question == "sample" and dtype == F32:  # sums are rounded in another order
            continue
        chain = FAMILIES["dense"](dtype, seed, each=each, c=c, v=12, n=6, t=1)
        chain = chain._replace(bulk=chain.bulk[..., :1, :, :]) if c % 2 else chain
        chain.x[3, 0, 1, c // 2] = (NAN, INF, -INF, NAN)[seed]
        problem = arranged(chain.logs() if log else chain, lengths)
        for count in {"viterbi": [1], "topk_paths": [1, 3 if c > 8 else 40], "sample": [1, 40]}[question]:
            found = answer("cpu", question, problem, 13, count)
            assert_same(found, answer("plain", question, problem, 13, count))
            assert (found[0][..., 12:] == -1).all()


@QUESTIONS
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_threads_groups_and_blocks_change_nothing(question, each, monkeypatch):
    """More sequences than walk together, more draws than go back together, and memory that holds NaN before."""
    chain = FAMILIES["sparse"](F32, each=each, v=6, n=110, t=1, c=5)
    lengths = [1 + i * i % 6 for i in range(110)]
    one = chain._replace(x=chain.x[:1], bulk=chain.bulk[:1], p0=chain.p0[:1])
    problem, few = arranged(chain, lengths), arranged(one)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    whole, draws = answer("cpu", question, problem, 6), answer("cpu", question, few, 6, 30 if each else 1100)
    monkeypatch.setattr(arguments, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for _ in range(2):
        with poisoned_memory():
            assert_same(answer("cpu", question, problem, 6), whole)
        assert_same(answer("cpu", question, few, 6, 30 if each else 1100), draws)
        monkeypatch.setattr(team, "_parallel", lambda: None)  # Python's threads
    for module, name in ((sample_plainly, "_WEIGHTS"), (viterbi, "_TERMS")):
        monkeypatch.setattr(module, name, 200)
    exact = arranged(chain.to(F64), lengths)
    assert_same(answer("plain", question, exact, 6), answer("cpu", question, exact, 6))


@QUESTIONS
def test_levels_agree(question, level):
    for c in (3, 17):
        problem = arranged(FAMILIES["dense"](F64, c=c, each=True))
        assert_same(answer("cpu", question, problem, 17), answer("plain", question, problem, 17))


@pytest.mark.parametrize("where", ["plain", "cpu"])
@pytest.mark.parametrize("number", [0.0, 2.0**-53, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval(number, where):
    """No state of weight zero is drawn."""
    for name in ("sparse", "bakis_jump", "tiny_transitions", "log_far"):
        for dtype in (F32, F64):
            chain = FAMILIES[name](dtype)
            problem = arranged(chain)
            numbers = torch.full((3, problem.g, problem.m, problem.v), number, dtype=F64)
            states = answer(where, "sample", problem, problem.v, numbers=numbers)[0].view(3, *chain.x.shape[:-1])
            weight = log_weight(*chain[:3], states, None, chain.log_params)
            assert ((weight > -INF) == (states[..., 0] >= 0)).all() and (weight > -INF).any()


@pytest.mark.parametrize("where", ["plain", "cpu"])
def test_a_threshold_below_all_numbers(where):
    """(1 - u) times the total is no float32: still no state of weight zero is drawn."""
    _, chain = chain_of(torch.zeros(2, 1, 3), torch.ones(1, 3, 3), torch.ones(3), None, False)
    messages = torch.tensor([[[0.0, 2.0**-100, 0.0], [0.0, 0.0, 1.0]]])[:, None]
    states = torch.full((4, 1, 2, 1), 1 - 2.0**-53, dtype=F64).view(torch.int64)
    kept = Kept(torch.zeros(1, 2, dtype=F64), messages, torch.zeros(1, 2, dtype=torch.bool))
    room(where, "sample").draw(chain, kept, states)
    assert states.view(4, 2).tolist() == [[1, 2]] * 4


@pytest.mark.parametrize("where", ["plain", "cpu"])
@pytest.mark.parametrize("name", ["dense", "left_to_right"])
def test_messages_that_are_logarithms_all_of_them(name, where):
    """As those of sequences that were recomputed are."""
    draw = room(where, "sample").draw
    for given in (FAMILIES[name](F64), FAMILIES[name](F64).logs()):
        chain = arranged(given, [5, 1, 3])
        kept = plain_forward(chain, keep=messages_of(chain, chain.v))[0]
        logs = torch.where(kept.recomputed[..., None], kept.messages, kept.messages.log())
        one, other = (numbers_for(chain, 17, 50).view(torch.int64) for _ in range(2))
        draw(chain, kept, one)
        draw(chain, Kept(kept.log_norm, logs, torch.ones_like(kept.recomputed)), other)
        assert torch.equal(one, other) and (one >= 0).any()


@pytest.mark.parametrize(("one_matrix", "ended"), [(True, False), (False, False), (False, True)])
def test_rooms_agree_on_the_messages_of_a_stretch(one_matrix, ended):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, 5, 4, generator=generator, dtype=F64).round()  # (v, m, c), with ties
    bulk = torch.rand(1 if one_matrix else 9, 4, 4, generator=generator, dtype=F64)
    bulk = torch.where(bulk < 0.2, 0.0, bulk)
    x[4, 1] = -INF
    x[7, 2, 0] = NAN
    ends = torch.tensor([9, 9, 6, 0, 3])[:, None][None] if ended else None
    entering = torch.randn(1, 5, 4, generator=generator, dtype=F64)
    entering -= entering.amax(-1, keepdim=True)
    stretch = Chain(x, bulk, torch.ones(1, 4, dtype=F64), ends, False, F64)
    plain, cpu = (room(name, "viterbi").Messages(stretch, entering) for name in ("plain", "cpu"))
    known = ~cpu.unknown
    assert torch.equal(plain.unknown, cpu.unknown)
    torch.testing.assert_close(plain.leaving[known], cpu.leaving[known], rtol=1e-13, atol=1e-13)
    for given in (-1, 2):
        found = torch.full((2, 1, 5, 10), given)
        plain.follow(found[0])
        cpu.follow(found[1])
        assert torch.equal(*found)
        if given >= 0 and not ended:
            assert (found[0][0, 0, -1] == given) and (found[0][0, 1] == -1).all()


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_draws_go_back_from_states_that_are_given(lengths):
    chain = arranged(FAMILIES["dense"](n=6, v=12, c=5, dtype=F64), lengths)
    numbers, last = numbers_for(chain, 12, 40), torch.arange(40) % 5
    numbers[..., -1] = -1.0 - last[:, None, None]
    plain, cpu = (answer(name, "sample", chain, 12, numbers=numbers)[0] for name in ("plain", "cpu"))
    assert torch.equal(plain, cpu)
    whole = torch.ones(chain.g, chain.m, dtype=torch.bool) if lengths is None else chain.ends[..., 0] == 12
    expected = last[:, None, None].expand(40, chain.g, chain.m)
    assert torch.equal(plain[..., -1], torch.where(whole, expected, -1))
