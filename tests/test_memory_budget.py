"""Checkpointed messages: the accuracy contract whatever the segments, and the bytes that were asked for."""

import io
import os
import re
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import logchain
from logchain import _arguments, _budget, _checkpoints, _device
from logchain._measure import peak_bytes
from logchain._rescues import rescues
from tests.contract import Truth, assert_contract, assert_values, poisoned_memory
from tests.families import FAMILIES, Chain

LENGTHS = torch.tensor([[1, 5], [17, 2], [11, 6]])


@pytest.fixture
def segments(monkeypatch):
    """Have every segment so many steps, and count how often that was asked for."""

    def of(every):
        calls = []
        monkeypatch.setattr(_budget, "every_within", lambda *args: calls.append(args) or every)
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
    assert budget < _budget.Sizes.of(*leaves).all_messages
    assert peak_of(leaves, budget) <= budget
    assert peak_of(leaves, budget + 1000) <= budget + 1000


def test_a_matrix_of_its_own_for_every_step_counts():
    leaves = leaves_of(120, n=2, c=30, own=True)
    budget = _budget.Sizes.of(*leaves).checkpointed(9)
    assert peak_bytes(lambda: run_with(leaves, 9)) <= budget
    assert budget < peak_bytes(lambda: run_with(leaves, 40))  # which says something


@pytest.mark.parametrize("lengths", [None, torch.tensor([40, 7, 23])])
@pytest.mark.parametrize("name", ["peaked", "banded", "abyss"])
def test_chains_that_are_redone_in_log_space_keep_the_budget(name, lengths):
    chain = FAMILIES[name](dtype=torch.float32, n=3, t=1, v=40, c=8)
    operands = chain.x[:, 0], chain.bulk[0, 0, :1], chain.p0[0, 0]
    for every in (4, 39):
        leaves = [operand.detach().requires_grad_() for operand in operands]
        budget = _budget.Sizes.of(*leaves).checkpointed(every)
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
    size, least = _budget.Sizes.of(*operands), smallest(operands)
    for budget in range(least, size.all_messages, (size.all_messages - least) // 5 + 1):
        every = _budget.every_within(budget, *operands)
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


@pytest.mark.parametrize("case", [{}, {"dtype": torch.float64}, {"c": 1, "n": 50}, {"c": 3}])
def test_without_gradients_a_smaller_budget_will_do(case):
    leaves = leaves_of(800, **({"c": 8, "n": 20} | case))
    operands = [operand.detach() for operand in leaves]
    budget = smallest(operands)
    assert budget <= smallest(leaves)
    for enough in (budget, budget + 1000):
        assert peak_bytes(lambda enough=enough: [logchain.product(*operands, memory_budget=enough)]) <= enough


@pytest.mark.parametrize("name", ["dense", "sharp", "left_to_right", "sparse"])
def test_without_gradients_the_contract_holds(name, segments):
    chain = FAMILIES[name](dtype=torch.float32)
    for lengths in (None, LENGTHS):
        truth = Truth(chain, lengths)
        for every in (1, 5):
            segments(every)
            out = logchain.product(*chain[:3], log_params=chain.log_params, lengths=lengths, memory_budget=1)
            assert_values(out, truth.log_norm, truth.value_bound())


def test_without_gradients_one_checkpoint_is_held():
    operands = [operand.detach() for operand in leaves_of(400, n=20, c=8)]
    peaks = [peak_bytes(lambda k=k: [_checkpoints.log_norm(*operands, None, False, 1, k)]) for k in (True, False)]
    assert peaks[0] - peaks[1] >= 397 * 20 * 8 * 8


def test_without_gradients_scales_alone_may_fit_where_messages_do_not():
    operands = [operand.detach() for operand in leaves_of(2000, n=400, c=32)]
    budget = _budget.Sizes.of(*operands, False).whole
    assert budget < _budget.Sizes.of(*operands, False).all_messages
    assert _budget.every_within(budget, *operands, False) is None
    assert peak_bytes(lambda: [logchain.product(*operands)]) <= budget


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


@pytest.fixture
def kernels(device, monkeypatch):
    """The device whose tensors the Triton kernels compute for."""
    monkeypatch.setattr(_device, "on_gpu", lambda tensor: True)
    return device


SMALL = {"n": 2, "t": 1, "v": 7}


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", ["dense", "left_to_right", "detour", "one_dead"])
def test_on_a_device_every_family_keeps_the_contract(name, each, kernels, segments):
    chain = FAMILIES[name](torch.float32, each=each, **SMALL)
    for every in (1, 4) if name == "dense" else (3,):
        segments(every)
        assert_contract(chain.logs() if each and not chain.log_params else chain, device=kernels, memory_budget=1)


@pytest.mark.parametrize("lengths", [[7, 3], [1, 4]], ids=str)
def test_on_a_device_lengths_are_not_looked_at(lengths, kernels, segments, monkeypatch):
    monkeypatch.setattr(_checkpoints, "check_lengths", None)
    chain = FAMILIES["dense"](torch.float32, each=True, **SMALL)
    for every in (2, 3):
        segments(every)
        assert_contract(chain, lengths, device=kernels, memory_budget=1)
    x, bulk, p0 = (operand.to(kernels) for operand in chain[:3])
    wrong = torch.tensor([8, 0], device=kernels)
    assert logchain.product(x.requires_grad_(), bulk, p0, lengths=wrong, memory_budget=1).isnan().all()


@pytest.mark.parametrize("case", [{"n": 100, "c": 16}, {"own": True}, {"n": 40, "c": 1}], ids=str)
def test_on_a_device_the_budget_is_kept(case, kernels):
    leaves = [operand.detach().to(kernels).requires_grad_() for operand in leaves_of(**({"v": 13, "c": 8} | case))]
    budget = _budget.Sizes.of(*leaves).checkpointed(4)
    if kernels == "cpu":
        assert peak_bytes(partial(run_with, leaves, 4)) <= budget
        return
    report = logchain.memory_report(lambda *leaves: _checkpoints.log_norm(*leaves, None, False, 4), *leaves)
    # a device's allocator rounds each up
    assert report.forward.peak - report.before.allocated <= budget + 2**16
    gradients = sum(operand.nbytes for operand in leaves)
    assert report.backward.peak - report.before.allocated <= budget + gradients + 2**16


MB = 1_000_000
ROOT = Path(__file__).parents[1]


def mapped(path, shape):
    """A tensor over a file that holds the same random numbers again and again."""
    entries = int(np.prod(shape))
    block = np.random.default_rng(0).random(2**20, dtype=np.float32)
    with open(path, "wb") as file:
        for _ in range(entries // len(block)):
            block.tofile(file)
        block[: entries % len(block)].tofile(file)
    return torch.from_numpy(np.memmap(path, np.float32, "r+", shape=shape))


def anonymous_bytes():
    return 1024 * int(re.search(r"VmData:\s+([0-9]+)", Path("/proc/self/status").read_text())[1])


def read_within_a_limit(path, which):
    """In a process of its own: forward and backward over 256 MB, or 128 MB, with 32 MB and what torch itself takes."""
    if which == "x":
        x, bulk = mapped(path, (256, 8192, 32)), torch.rand(1, 32, 32)
    else:
        x, bulk = torch.randn(4, 2049, 128), mapped(path, (2048, 128, 128))
    few = [x[:4] if len(x) > 4 else x, bulk, torch.rand(x.shape[-1])]
    weight = (torch.arange(len(x)) < 4).float()
    wanted = [2, 1] if which == "x" else [2, 0]
    for i in wanted:
        few[i].requires_grad_()

    def step(x, bulk, p0, weight, **options):
        out = logchain.product(x, bulk, p0, validate=True, **options)
        return [out[:4].detach(), *torch.autograd.grad((out * weight).sum(), [few[i] for i in wanted])]

    def both():
        found = step(*operands, weight, memory_budget=32 * MB)
        with torch.no_grad():
            return logchain.product(*operands, memory_budget=20 * MB), found

    operands = x, bulk, few[2]
    expected = step(*few, weight[:4])
    both()  # compiling takes memory too, and what is compiled depends on the sizes
    limit = anonymous_bytes() + 64 * MB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match="allocate"):
        torch.empty(256 * MB // 4)
    value, found = both()
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for one, other in zip([value[:4], *found], [expected[0], *expected], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory")
@pytest.mark.parametrize("which", ["x", "bulk"])
def test_a_memory_map_larger_than_the_memory_is_read_in_segments(which, tmp_path):
    code = f"from tests.test_memory_budget import *; read_within_a_limit({str(tmp_path / which)!r}, {which!r})"
    # what is freed is given back, whatever its size
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


@pytest.fixture
def bars(monkeypatch):
    """Every bar that was shown: its title, how many items it had, and how many were passed."""
    module = pytest.importorskip("tqdm.auto")
    seen = []

    class Bar(module.tqdm):
        def __init__(self, *args, **options):
            self.text = io.StringIO()
            super().__init__(*args, file=self.text, **options)
            seen.append(self)

    monkeypatch.setattr(module, "tqdm", Bar)
    return seen


def test_a_bar_passes_over_the_segments_forward_and_then_backward(bars, segments):
    segments(5)
    x, bulk, p0, _ = FAMILIES["dense"]()
    expected = logchain.product(x.requires_grad_(), bulk, p0, memory_budget=1)
    assert not bars
    out = logchain.product(x, bulk, p0, memory_budget=1, progress=True)
    assert [(bar.desc, bar.total, bar.n) for bar in bars] == [("forward", 4, 4)]
    out.sum().backward()
    assert [(bar.desc, bar.total, bar.n) for bar in bars] == [("forward", 4, 4), ("backward", 4, 4)]
    assert "4/4" in bars[1].text.getvalue() and "segments" in bars[1].text.getvalue()
    assert torch.equal(out, expected)


def test_no_bar_where_all_messages_fit(bars):
    logchain.product(*leaves_of(50), memory_budget=10**6, progress=True).sum().backward()
    assert not bars


def test_a_bar_goes_with_a_budget_and_with_tqdm(monkeypatch):
    leaves = leaves_of(5)
    with pytest.raises(ValueError, match="^progress: expected a memory_budget with it"):
        logchain.product(*leaves, progress=True)
    with pytest.raises(TypeError, match="^progress: expected True or False, got 1"):
        logchain.product(*leaves, memory_budget=10**6, progress=1)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="^progress: expected tqdm to be installed, see `pip install tqdm`"):
        logchain.product(*leaves, memory_budget=10**6, progress=True)
    logchain.product(*leaves, memory_budget=10**6)


@pytest.mark.parametrize("entries", [1, 7, 20])
def test_values_are_checked_some_steps_at_a_time(entries, monkeypatch):
    monkeypatch.setattr(_arguments, "_CHECKED", entries)
    x, bulk, p0, _ = FAMILIES["dense"](each=True)
    assert logchain.product(x, bulk, p0, lengths=LENGTHS, validate=True).isfinite().all()
    for i, length in enumerate(LENGTHS.flatten().tolist()):
        x.flatten(0, 1)[i, length:], bulk.flatten(0, 1)[i, length - 1 :] = torch.nan, torch.inf
    assert logchain.product(x, bulk, p0, lengths=LENGTHS, validate=True).isfinite().all()
    for broken, message in ((x, "x: expected no NaN, got 4"), (bulk, "bulk: expected non-negative values, got -3")):
        places = broken.flatten(0, 1)[2] if broken is x else broken.flatten(0, 1)[2, :, 0]
        kept = places.clone()
        places[1:16:4, 1] = torch.nan if broken is x else torch.tensor([-1.0, -3.0, -2.0, -1.0])
        with pytest.raises(ValueError, match=f"^{message}"):
            logchain.product(x, bulk, p0, lengths=LENGTHS, validate=True)
        places.copy_(kept)
