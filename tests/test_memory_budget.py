"""Checkpointed messages: the accuracy contract whatever the segments, and the bytes that were asked for."""

import re
from functools import partial

import pytest
import torch

import logchain
from logchain import _checkpoints
from logchain._measure import peak_bytes
from logchain._rescues import rescues
from tests.contract import Truth, assert_contract, poisoned_memory
from tests.families import FAMILIES, Chain

LENGTHS = torch.tensor([[1, 5], [17, 2], [11, 6]])


@pytest.fixture
def segments(monkeypatch):
    """Have every segment so many steps, and count how often that was asked for."""

    def of(every):
        calls = []
        monkeypatch.setattr(_checkpoints, "every_within", lambda *args: calls.append(args) or every)
        return calls

    return of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_keeps_the_contract(name, each, dtype, segments):
    chain = FAMILIES[name](dtype=dtype, each=each)
    truth = Truth(chain)
    for every in (1, 2, 5):
        calls = segments(every)
        assert_contract(chain, truth=truth, memory_budget=1)
        assert calls


@pytest.mark.parametrize("name", ["dense", "sharp", "banded", "sparse", "detour_linear", "impossible"])
def test_logarithms_keep_the_contract(name, segments):
    chain = FAMILIES[name]().logs()
    truth = Truth(chain)
    for every in (1, 5):
        segments(every)
        assert_contract(chain, truth=truth, memory_budget=1)


@pytest.mark.parametrize("name", ["dense", "sharp", "sparse", "left_to_right", "detour"])
def test_lengths_that_end_anywhere_in_a_segment(name, segments):
    chain = FAMILIES[name]()
    truth = Truth(chain, LENGTHS)
    for every in (1, 2, 4, 5, 16):
        segments(every)
        assert_contract(chain, lengths=LENGTHS, truth=truth, memory_budget=1)


def test_what_lies_behind_the_ends_has_no_influence(segments):
    chain = FAMILIES["dense"](each=True)
    truth = Truth(chain, LENGTHS)
    for i, length in enumerate(LENGTHS.flatten().tolist()):
        chain.x.flatten(0, 1)[i, length:] = torch.nan
        chain.bulk.flatten(0, 1)[i, length - 1 :] = torch.nan
    for every in (1, 2, 5):
        segments(every)
        leaves = [operand.clone().requires_grad_() for operand in chain[:3]]
        out = logchain.product(*leaves, lengths=LENGTHS, memory_budget=1)
        out.sum().backward()
        torch.testing.assert_close(out, torch.from_numpy(truth.log_norm))
        torch.testing.assert_close(leaves[0].grad, torch.from_numpy(truth.states))
        assert leaves[1].grad.isfinite().all()


def test_no_sequence_need_be_as_long_as_x(segments):
    segments(2)
    for lengths in (1, 4, 5, 6):
        assert_contract(FAMILIES["dense"](), lengths=torch.full((3, 2), lengths), memory_budget=1)


@pytest.mark.parametrize("wanted", ["x", "bulk", "p0", "x p0"])
def test_gradients_that_are_not_wanted_are_left_out(wanted, segments):
    segments(2)
    assert_contract(FAMILIES["sharp"](), wanted=wanted, memory_budget=1)


@pytest.mark.parametrize("log_params", [False, True])
def test_one_matrix_for_all_steps(log_params, segments):
    chain = FAMILIES["dense"](dtype=torch.float32)
    chain = chain._replace(bulk=chain.bulk[..., :1, :, :], p0=chain.p0[0, 0])
    segments(3)
    assert_contract(chain.logs() if log_params else chain, memory_budget=1)
    own = FAMILIES["dense"](each=True)
    assert_contract(own._replace(bulk=own.bulk[:1, :, :1]), memory_budget=1)


def test_strange_strides_and_no_batch_axes(segments):
    chain = FAMILIES["sharp"]()
    segments(5)
    assert_contract(chain._replace(x=chain.x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)), memory_budget=1)
    alone = Chain(chain.x[0, 0], chain.bulk[0, 0], chain.p0[0, 0])
    with poisoned_memory():
        assert_contract(alone, memory_budget=1)


def test_halves_are_computed_wider(segments):
    chain = FAMILIES["dense"](dtype=torch.bfloat16)
    segments(5)
    assert_contract(chain, memory_budget=1)


def test_a_nan_stays_in_its_sequence(segments):
    segments(4)
    chain = FAMILIES["sharp"](each=True)
    chain.x[1, 0, 9, 2] = torch.nan
    x = chain.x.clone().requires_grad_()
    out = logchain.product(x, *chain[1:3], memory_budget=1)
    out.sum().backward()
    sick = torch.zeros(3, 2, dtype=torch.bool)
    sick[1, 0] = True
    assert (out.isnan() == sick).all()
    assert (x.grad.isnan().any(-1).any(-1) == sick).all()


def test_a_sequence_without_a_weight_has_no_gradient(segments):
    segments(4)
    chain = FAMILIES["dense"]()
    x = chain.x.requires_grad_()
    weight = torch.tensor([[0.0, 1.0], [-2.0, 0.0], [1e-100, 1e100]], dtype=torch.float64)
    (logchain.product(x, *chain[1:3], memory_budget=1) * weight).sum().backward()
    torch.testing.assert_close(x.grad.sum(-1), weight[..., None].expand(3, 2, 17), rtol=1e-12, atol=0)


def test_a_rescued_sequence_counts_once(segments):
    segments(5)
    chain = FAMILIES["detour"](dtype=torch.float32)
    leaves = [operand.requires_grad_() for operand in chain[:3]]
    with rescues() as seen:
        logchain.product(*leaves, log_params=True, memory_budget=1).sum().backward()
    assert seen.sequences == 6


def test_lengths_out_of_range_are_refused(segments):
    segments(5)
    chain = FAMILIES["dense"]()
    with pytest.raises(ValueError, match="^lengths: "):
        logchain.product(chain.x.requires_grad_(), *chain[1:3], lengths=LENGTHS + 1, memory_budget=1)


def test_a_second_derivative_is_refused(segments):
    segments(5)
    x, bulk, p0, _ = FAMILIES["dense"]()
    out = logchain.product(x.requires_grad_(), bulk, p0, memory_budget=1)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="^memory_budget: expected one derivative"):
        first.sum().backward()


def leaves_of(v, n=1, c=16, dtype=torch.float32, own=False):
    generator = torch.Generator().manual_seed(v)
    bulk = torch.rand((n, v - 1, c, c) if own else (1, c, c), generator=generator, dtype=dtype)
    p0 = torch.rand(c, generator=generator, dtype=dtype)
    x = torch.randn(n, v, c, generator=generator, dtype=dtype)
    return [operand.requires_grad_() for operand in (x, bulk / bulk.sum(-1, keepdim=True), p0)]


def smallest(leaves):
    with pytest.raises(ValueError, match="^memory_budget: expected at least [0-9]+ bytes to go with x ") as error:
        logchain.product(*leaves, memory_budget=0)
    return int(re.search("[0-9]+", str(error.value))[0])


def run_with(leaves, every, lengths=None, log_params=False):
    out = _checkpoints.log_norm(*leaves, lengths, log_params, every)
    return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]


def peak_of(leaves, budget):
    def run():
        out = logchain.product(*leaves, memory_budget=budget)
        return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]

    return peak_bytes(run)


@pytest.mark.parametrize("case", [{}, {"dtype": torch.float64}, {"c": 1, "n": 50}, {"c": 3}])
def test_the_smallest_budget_is_kept_and_one_byte_less_refused(case):
    leaves = leaves_of(800, **({"c": 8, "n": 20} | case))
    budget = smallest(leaves)
    with pytest.raises(ValueError, match=f"at least {budget} bytes"):
        logchain.product(*leaves, memory_budget=budget - 1)
    assert budget < _checkpoints.Sizes.of(*leaves).all_messages
    assert peak_of(leaves, budget) <= budget
    assert peak_of(leaves, budget + 1000) <= budget + 1000


def test_a_matrix_of_its_own_for_every_step_counts():
    leaves = leaves_of(120, n=2, c=30, own=True)
    budget = _checkpoints.Sizes.of(*leaves).checkpointed(9)
    assert peak_bytes(lambda: run_with(leaves, 9)) <= budget
    assert budget < peak_bytes(lambda: run_with(leaves, 40))  # which says something


@pytest.mark.parametrize("lengths", [None, torch.tensor([40, 7, 23])])
@pytest.mark.parametrize("name", ["peaked", "banded", "abyss"])
def test_chains_that_are_redone_in_log_space_keep_the_budget(name, lengths):
    chain = FAMILIES[name](dtype=torch.float32, n=3, t=1, v=40, c=8)
    operands = chain.x[:, 0], chain.bulk[0, 0, :1], chain.p0[0, 0]
    for every in (4, 39):
        leaves = [operand.detach().requires_grad_() for operand in operands]
        budget = _checkpoints.Sizes.of(*leaves).checkpointed(every)
        assert peak_bytes(partial(run_with, leaves, every, lengths, chain.log_params)) <= budget


def test_the_smallest_budget_grows_with_the_root_of_the_chain():
    budgets = []
    for v in (10**6, 10**8):
        x = torch.zeros(1, 1, 1).expand(1, v, 16).requires_grad_()
        budgets.append(smallest([x, torch.ones(1, 16, 16), torch.ones(16)]))
    assert budgets[1] < 12 * budgets[0]
    assert budgets[0] < 10**6 * 16 * 4 / 30


@pytest.mark.parametrize("v", [1000, 20_000, 10**7])
def test_the_segments_are_the_longest_that_the_budget_holds_up_to_a_thousand_steps(v):
    x = torch.zeros(1, 1, 1).expand(7, v, 16).requires_grad_()
    operands = x, torch.ones(1, 16, 16), torch.ones(16)
    size, least = _checkpoints.Sizes.of(*operands), smallest(operands)
    for budget in range(least, size.all_messages, (size.all_messages - least) // 5 + 1):
        every = _checkpoints.every_within(budget, *operands)
        assert size.checkpointed(every) <= budget
        assert every >= 1024 or size.checkpointed(2 * every) > budget


def test_a_budget_that_holds_all_messages_changes_nothing(monkeypatch):
    leaves = leaves_of(50, n=3)
    monkeypatch.setattr(_checkpoints, "log_norm", None)
    enough = 3 * 50 * 17 * 4
    out = logchain.product(*leaves, memory_budget=enough)
    assert torch.equal(out, logchain.product(*leaves))
    with pytest.raises(TypeError, match="NoneType"):
        logchain.product(*leaves_of(5000, n=3), memory_budget=3 * 5000 * 17 * 4 - 1)


def test_without_gradients_it_has_no_effect():
    leaves = leaves_of(50)
    with torch.no_grad():
        out = logchain.product(*leaves, memory_budget=0)
    assert torch.equal(out, logchain.product(*(operand.detach() for operand in leaves), memory_budget=0))


@pytest.mark.parametrize("budget", [True, 1.5, "64 MB", torch.tensor(3)])
def test_what_is_no_number_of_bytes_is_refused(budget):
    with pytest.raises(TypeError, match="^memory_budget: expected a number of bytes or None, got"):
        logchain.product(*leaves_of(5), memory_budget=budget)


def test_where_there_are_no_checkpoints_it_is_refused():
    x, bulk, p0 = leaves_of(5)
    with pytest.raises(ValueError, match="^memory_budget: expected None"):
        logchain.product(x, bulk, p0, semiring=logchain.semirings.MAX, memory_budget=10**9)
    with pytest.raises(ValueError, match="^memory_budget: expected None"):
        logchain.product(x[0], bulk, p0, cu_seqlens=torch.tensor([0, 2, 5]), memory_budget=10**9)


def test_an_empty_batch_needs_nothing():
    x = torch.zeros(0, 5, 2, requires_grad=True)
    assert logchain.product(x, torch.ones(1, 2, 2), torch.ones(2), memory_budget=0).shape == (0,)
