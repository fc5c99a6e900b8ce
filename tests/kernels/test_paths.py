"""State paths by loops in C and by torch operations agree, whatever the sizes, layouts, levels and threads."""

import importlib

import pytest
import torch

import logchain
from logchain.autograd.paths import log_weight
from logchain.kernels import messages_of
from logchain.kernels.chain import Chain
from logchain.kernels.cpu import arguments, team
from logchain.kernels.cpu.dense import forward
from logchain.kernels.message import Residuals
from logchain.kernels.plain import sample as sample_plainly
from logchain.kernels.plain import viterbi
from tests.backends import on
from tests.contract import poisoned_memory
from tests.families import F32, F64, FAMILIES, INF
from tests.seeded import seeded

QUERIES = pytest.mark.parametrize("query", ["viterbi", "topk_paths", "sample"])
BACKENDS = pytest.mark.parametrize("backend", ["plain", "cpu"])


def paths(backend, query, chain, count=3, lengths=None):
    options = {"log_params": chain.log_params, "lengths": lengths}
    with on(backend):
        if query == "viterbi":
            return logchain.viterbi(*chain[:3], **options).states
        if query == "topk_paths":
            return logchain.topk_paths(*chain[:3], count, **options).states
        return logchain.sample(*chain[:3], count, generator=seeded(), **options)


@QUERIES
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_threads_groups_and_blocks_change_nothing(query, each, monkeypatch):
    """More sequences and more draws than loops take at a time, and memory that holds NaN before."""
    chain = FAMILIES["sparse"](F32, each=each, v=6, n=110, t=1, c=5)
    lengths, many = [1 + i * i % 6 for i in range(110)], 30 if each else 1100
    one = chain._replace(x=chain.x[:1], bulk=chain.bulk[:1], p0=chain.p0[:1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    whole, draws = paths("cpu", query, chain, lengths=lengths), paths("cpu", query, one, many)
    monkeypatch.setattr(arguments, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for _ in range(2):
        with poisoned_memory():
            assert torch.equal(paths("cpu", query, chain, lengths=lengths), whole)
        assert torch.equal(paths("cpu", query, one, many), draws)
        monkeypatch.setattr(team, "_parallel", lambda: None)  # Python's threads
    for module, name in ((sample_plainly, "_WEIGHTS"), (viterbi, "_TERMS")):
        monkeypatch.setattr(module, name, 200)
    exact = chain.to(F64)
    assert torch.equal(*(paths(backend, query, exact, lengths=lengths) for backend in ("cpu", "plain")))


@QUERIES
def test_levels_agree(query, level):
    for c in (1, 3, 8, 17, 64):
        chain = FAMILIES["dense"](F64, c=c, each=c < 64)
        assert torch.equal(paths("cpu", query, chain), paths("plain", query, chain))


def draw(backend, chain, kept, numbers):
    """The states that are drawn by uniform numbers [draws, g, m, v]."""
    states = numbers.clone().view(torch.int64)
    importlib.import_module(f"logchain.kernels.{'cpu.dense' if backend == 'cpu' else 'plain.sample'}").draw(
        chain, kept, states
    )
    return states


@BACKENDS
@pytest.mark.parametrize("number", [0.0, 2.0**-53, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval(number, backend):
    """No state of weight zero is drawn."""
    for name in ("sparse", "bakis_jump", "tiny_transitions", "log_far"):
        for dtype in (F32, F64):
            chain = FAMILIES[name](dtype)
            problem = Chain.of(*chain[:3], None, chain.log_params)
            kept = forward(problem, keep=messages_of(problem, problem.v))[0]
            numbers = torch.full((3, problem.g, problem.m, problem.v), number, dtype=F64)
            states = draw(backend, problem, kept, numbers).view(3, *chain.x.shape[:-1])
            weight = log_weight(*chain[:3], states, None, chain.log_params)
            assert ((weight > -INF) == (states[..., 0] >= 0)).all() and (weight > -INF).any()


@BACKENDS
def test_a_threshold_below_all_numbers(backend):
    """(1 - u) times the total is no float32: still no state of weight zero is drawn."""
    chain = Chain.of(torch.zeros(2, 1, 3), torch.ones(1, 3, 3), torch.ones(3), None, False)
    messages = torch.tensor([[[0.0, 2.0**-100, 0.0], [0.0, 0.0, 1.0]]])[:, None]
    kept = Residuals(torch.zeros(1, 2, dtype=F64), messages, torch.zeros(1, 2, dtype=torch.bool))
    states = draw(backend, chain, kept, torch.full((4, 1, 2, 1), 1 - 2.0**-53, dtype=F64))
    assert states.view(4, 2).tolist() == [[1, 2]] * 4
