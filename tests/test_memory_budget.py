"""A memory budget is kept to the byte, or refused, by values, gradients and operands in a file."""

import io
import re
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import logchain
from logchain.memory import peak_bytes
from tests.backends import run_python
from tests.contract import assert_contract
from tests.families import FAMILIES

# variables of a few states that no smallest budget holds, with the scratch of the widest vectors
LONG = 480


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


def smallest(leaves, log_params=False):
    with pytest.raises(ValueError, match="^memory_budget: expected at least [0-9]+ bytes to go with x ") as error:
        logchain.product(*leaves, log_params=log_params, memory_budget=0)
    return int(re.search("[0-9]+", str(error.value))[0])


def peak_of(leaves, budget, **options):
    def run():
        out = logchain.product(*leaves, memory_budget=budget, **options)
        return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]

    return peak_bytes(run)


@pytest.mark.parametrize("case", [{}, {"dtype": torch.float64}, {"c": 1, "n": 50}, {"c": 3}, {"own": True}], ids=str)
def test_the_smallest_budget_is_kept_and_one_byte_less_refused(case):
    leaves = leaves_of(800, **({"c": 8, "n": 20} | case))
    budget = smallest(leaves)
    with pytest.raises(ValueError, match=f"at least {budget} bytes"):
        logchain.product(*leaves, memory_budget=budget - 1)
    assert budget < leaves[0].nbytes
    for enough in (budget, budget + 1000, 2 * budget):
        assert peak_of(leaves, enough) <= enough
    operands = [leaf.detach() for leaf in leaves]
    least = smallest(operands)
    assert least <= budget
    for enough in (least, least + 1000):
        assert peak_bytes(lambda enough=enough: [logchain.product(*operands, memory_budget=enough)]) <= enough


@pytest.mark.parametrize("name", ["peaked", "banded", "abyss"])
def test_chains_that_are_recomputed_keep_the_budget(name):
    chain = FAMILIES[name](dtype=torch.float32, n=30, t=1, v=200, c=8)
    leaves = [operand.detach().requires_grad_() for operand in (chain.x, chain.bulk[..., :1, :, :], chain.p0)]
    least = smallest(leaves, chain.log_params)
    assert peak_of(leaves, least, log_params=chain.log_params) <= least


def test_the_smallest_budget_grows_with_the_root_of_the_chain():
    budgets = []
    for v in (10**6, 10**8):
        x = torch.zeros(1, 1, 1).expand(1, v, 16).requires_grad_()
        budgets.append(smallest([x, torch.ones(1, 16, 16), torch.ones(16)]))
    assert budgets[1] < 12 * budgets[0]
    assert budgets[0] < 10**6 * 16 * 4 / 30


def test_an_empty_batch_needs_nothing():
    x = torch.zeros(0, 5, 2, requires_grad=True)
    assert logchain.product(x, torch.ones(1, 2, 2), torch.ones(2), memory_budget=0).shape == (0,)


def test_a_budget_that_holds_all_messages_changes_nothing():
    leaves = leaves_of(50, n=3)
    assert torch.equal(logchain.product(*leaves, memory_budget=3 * 50 * 17 * 4), logchain.product(*leaves))
    assert logchain.plan(*leaves, memory_budget=3 * 50 * 17 * 4).checkpoint_every is None


def budgeted(chain, **options):
    """The value of `product` with the smallest budget."""
    least = smallest(chain[:3], chain.log_params)
    return logchain.product(*chain[:3], log_params=chain.log_params, memory_budget=least, **options)


def test_weights_of_sequences_scale_their_gradients():
    chain = FAMILIES["dense"](v=LONG)
    x = chain.x.requires_grad_()
    weight = torch.tensor([[0.0, 1.0], [-2.0, 0.0], [1e-100, 1e100]], dtype=torch.float64)
    (budgeted(chain) * weight).sum().backward()
    torch.testing.assert_close(x.grad.sum(-1), weight[..., None].expand(3, 2, LONG), rtol=1e-12, atol=0)


def test_a_recomputed_sequence_counts_once():
    chain = FAMILIES["abyss"](dtype=torch.float32, v=LONG)  # checkpoints are computed in float64
    for operand in chain[:3]:
        operand.requires_grad_()
    with logchain.rescues() as seen:
        budgeted(chain).sum().backward()
    assert seen.sequences == 6


@pytest.mark.parametrize("name", ["sharp", "impossible", "one_dead"])
def test_segments_of_any_length_keep_the_contract(name):
    chain = FAMILIES[name](torch.float32, each=True, v=2 * LONG, c=3)
    leaves = [operand.detach().requires_grad_() for operand in chain[:3]]
    least = smallest(leaves, chain.log_params)
    assert logchain.plan(*leaves, log_params=chain.log_params, memory_budget=least).checkpoint_every > 1
    for enough in (least, least + 500, 2 * least):
        for lengths in (None, torch.tensor([[1, 5], [900, 2], [11, 159]])):
            assert_contract(chain, lengths, memory_budget=enough)


def test_a_second_derivative_is_refused():
    chain = FAMILIES["dense"](v=LONG)
    (first,) = torch.autograd.grad(
        budgeted(chain._replace(x=chain.x.requires_grad_())).sum(), chain.x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="^memory_budget: expected one derivative"):
        first.sum().backward()


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


def test_a_bar_passes_over_the_segments_forward_and_then_backward(bars):
    chain = FAMILIES["dense"](v=LONG)
    chain.x.requires_grad_()
    expected = budgeted(chain)
    assert not bars
    out = budgeted(chain, progress=True)
    count = bars[0].total
    assert [(bar.desc, bar.total, bar.n) for bar in bars] == [("forward", count, count)] and count > 2
    out.sum().backward()
    assert [(bar.desc, bar.total, bar.n) for bar in bars] == [("forward", count, count), ("backward", count, count)]
    assert f"{count}/{count}" in bars[1].text.getvalue() and "segments" in bars[1].text.getvalue()
    assert torch.equal(out, expected)


def test_a_bar_needs_tqdm_and_several_segments(bars, monkeypatch):
    leaves, options = FAMILIES["dense"]()[:3], {"memory_budget": 10**6, "progress": True}
    logchain.product(*leaves, **options)
    assert not bars
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="^progress: expected tqdm to be installed, see `pip install tqdm`"):
        logchain.product(*leaves, **options)
    logchain.product(*leaves, memory_budget=10**6)


MB = 1_000_000


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
    torch.testing.assert_close([value[:4], *found], [expected[0], *expected], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory")
@pytest.mark.parametrize("which", ["x", "bulk"])
def test_a_memory_map_larger_than_the_memory_is_read_in_segments(which, tmp_path):
    code = f"from tests.test_memory_budget import *; read_within_a_limit({str(tmp_path / which)!r}, {which!r})"
    # what is freed is given back, whatever its size
    found = run_python(code, tmp_path, OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="65536")
    assert found.returncode == 0, found.stderr
