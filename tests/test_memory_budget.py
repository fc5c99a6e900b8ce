"""A memory budget is kept to the byte, or refused: by messages, by their checkpoints, by operands in a file."""

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
from logchain.autograd.chain import log_norm_in_pieces
from logchain.memory import peak_bytes
from logchain.operands import Operands
from logchain.schedules import budget as budgets
from tests.families import FAMILIES


@pytest.fixture(autouse=True, scope="module")
def scratch_of_short_calls():
    """The megabyte that calls of short chains share, which the first of a process takes."""
    logchain.product(torch.zeros(1, 2, 2), torch.eye(2)[None], torch.ones(2))


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
    out = log_norm_in_pieces(Operands(*leaves, lengths, log_params), every)
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
    assert budget < budgets.Sizes.of(*leaves).all_messages
    assert peak_of(leaves, budget) <= budget
    assert peak_of(leaves, budget + 1000) <= budget + 1000


@pytest.mark.parametrize("own", [False, True], ids=["one matrix", "each step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_bytes_of_segments_are_those_that_are_measured(dtype, own):
    leaves = leaves_of(600, n=20, c=8, own=own, dtype=torch.float32)
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    for every in (16, 60, 300):
        peak = peak_bytes(partial(run_with, leaves, every))
        assert peak <= budgets.Sizes.of(*leaves).checkpointed(every) <= 1.5 * peak


def test_gradients_of_matrices_are_written_where_they_are_returned():
    leaves = leaves_of(120, n=2, c=30, own=True)
    for every in (9, 40):
        peak = peak_bytes(partial(run_with, leaves, every))
        assert peak <= min(budgets.Sizes.of(*leaves).checkpointed(every), leaves[1].nbytes / 10)


@pytest.mark.parametrize("lengths", [None, torch.tensor([40, 7, 23])])
@pytest.mark.parametrize("name", ["peaked", "banded", "abyss"])
def test_chains_that_are_redone_in_log_space_keep_the_budget(name, lengths):
    chain = FAMILIES[name](dtype=torch.float32, n=3, t=1, v=40, c=8)
    operands = chain.x[:, 0], chain.bulk[0, 0, :1], chain.p0[0, 0]
    for every in (4, 39):
        leaves = [operand.detach().requires_grad_() for operand in operands]
        budget = budgets.Sizes.of(*leaves).checkpointed(every)
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
    size, least = budgets.Sizes.of(*operands), smallest(operands)
    for budget in range(least, size.all_messages, (size.all_messages - least) // 5 + 1):
        every = budgets.every_within(budget, *operands)
        assert size.checkpointed(every) <= budget
        assert every >= 1024 or size.checkpointed(2 * every) > budget


def test_a_budget_that_holds_all_messages_changes_nothing(monkeypatch):
    leaves = leaves_of(50, n=3)
    monkeypatch.setattr(sys.modules["logchain.product"], "log_norm_in_pieces", None)
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


def test_without_gradients_one_checkpoint_is_held():
    operands = [operand.detach() for operand in leaves_of(400, n=20, c=8)]
    peaks = [
        peak_bytes(lambda k=k: [log_norm_in_pieces(Operands(*operands, None, False), 1, k)]) for k in (True, False)
    ]
    assert peaks[0] - peaks[1] >= 397 * 20 * 8 * 8


def test_without_gradients_scales_alone_may_fit_where_messages_do_not():
    operands = [operand.detach() for operand in leaves_of(2000, n=400, c=32)]
    budget = budgets.Sizes.of(*operands, False).whole
    assert budget < budgets.Sizes.of(*operands, False).all_messages
    assert budgets.every_within(budget, *operands, False) is None
    assert peak_bytes(lambda: [logchain.product(*operands)]) <= budget


@pytest.mark.parametrize("budget", [True, 1.5, "64 MB", torch.tensor(3)])
def test_what_is_no_number_of_bytes_is_refused(budget):
    with pytest.raises(TypeError, match="^memory_budget: expected a number of bytes or None, got"):
        logchain.product(*leaves_of(5), memory_budget=budget)


def test_where_there_are_no_checkpoints_it_is_refused():
    x, bulk, p0 = leaves_of(5)
    with pytest.raises(ValueError, match="^memory_budget: expected None"):
        logchain.product(x[0], bulk, p0, cu_seqlens=torch.tensor([0, 2, 5]), memory_budget=10**9)


def test_an_empty_batch_needs_nothing():
    x = torch.zeros(0, 5, 2, requires_grad=True)
    assert logchain.product(x, torch.ones(1, 2, 2), torch.ones(2), memory_budget=0).shape == (0,)


@pytest.mark.parametrize("every", [4, None])
@pytest.mark.parametrize("case", [{"n": 60}, {"own": True}, {"n": 40, "c": 1}, {"c": 32}], ids=str)
def test_on_a_device_the_budget_is_kept(case, every, kernels):
    leaves = [operand.detach().to(kernels).requires_grad_() for operand in leaves_of(**({"v": 13, "c": 8} | case))]
    sizes = budgets.Sizes.of(*leaves)
    budget = sizes.whole if every is None else sizes.checkpointed(every)
    if kernels == "cpu":
        run = partial(peak_of, leaves, budget) if every is None else partial(peak_bytes, partial(run_with, leaves, 4))
        assert run() <= budget
        return
    if every is None:
        report = logchain.memory.report(partial(logchain.product, memory_budget=budget), *leaves)
    else:
        report = logchain.memory.report(lambda *leaves: log_norm_in_pieces(Operands(*leaves, None, False), 4), *leaves)
    # a device's allocator rounds each up
    assert report.forward.peak - report.before.allocated <= budget + 2**16
    gradients = sum(operand.nbytes for operand in leaves)
    assert report.backward.peak - report.before.allocated <= budget + gradients + 2**16


MB = 1_000_000
ROOT = Path(__file__).parents[1]
# where the library lies that is tested here
LIBRARY = str(Path(logchain.__file__).parents[1])


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
    """In a process of its own: forward and backward over 128 MB with 32 MB and what torch itself takes."""
    if which == "x":
        x, bulk = mapped(path, (128, 8192, 32)), torch.rand(1, 32, 32)
    else:
        x, bulk = torch.randn(4, 2049, 128), mapped(path, (2048, 128, 128))
    few = [x[:4] if len(x) > 4 else x, bulk, torch.rand(x.shape[-1])]
    weight = (torch.arange(len(x)) < 4).float()
    wanted = [2, 1] if which == "x" else [2, 0]
    for i in wanted:
        few[i].requires_grad_()

    def step(x, bulk, p0, weight, **options):
        out = logchain.product(x, bulk, p0, **options)
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
        torch.empty(128 * MB // 4)
    value, found = both()
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for one, other in zip([value[:4], *found], [expected[0], *expected], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory")
@pytest.mark.parametrize("which", ["x", "bulk"])
def test_a_memory_map_larger_than_the_memory_is_read_in_segments(which, tmp_path):
    code = f"from tests.test_memory_budget import *; read_within_a_limit({str(tmp_path / which)!r}, {which!r})"
    code = f"import sys; sys.path.append({str(ROOT)!r}); {code}"
    # what is freed is given back, whatever its size
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": LIBRARY}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=False, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
