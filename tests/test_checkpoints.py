"""Checkpointed messages keep the accuracy contract, however long the segments, on any device, and show a bar."""

import io
import sys

import pytest
import torch

import logchain
from logchain.rescues import rescues
from logchain.schedules import budget, checkpoints
from tests.contract import assert_contract
from tests.families import FAMILIES

LENGTHS = torch.tensor([[1, 5], [17, 2], [11, 6]])


@pytest.fixture
def segments(monkeypatch):
    """Have every segment so many steps, and count how often that was asked for."""

    def of(every):
        calls = []
        monkeypatch.setattr(budget, "every_within", lambda *args: calls.append(args) or every)
        return calls

    return of


def test_no_sequence_need_be_as_long_as_x(segments):
    segments(2)
    for lengths in (1, 4, 5, 6):
        assert_contract(FAMILIES["dense"](), lengths=torch.full((3, 2), lengths), memory_budget=1)


def test_a_sequence_without_a_weight_has_no_gradient(segments):
    segments(4)
    chain = FAMILIES["dense"]()
    x = chain.x.requires_grad_()
    weight = torch.tensor([[0.0, 1.0], [-2.0, 0.0], [1e-100, 1e100]], dtype=torch.float64)
    (logchain.product(x, *chain[1:3], memory_budget=1) * weight).sum().backward()
    torch.testing.assert_close(x.grad.sum(-1), weight[..., None].expand(3, 2, 17), rtol=1e-12, atol=0)


def test_a_rescued_sequence_counts_once(segments):
    segments(5)
    chain = FAMILIES["abyss"](dtype=torch.float32)  # checkpoints are computed in float64
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


SMALL = {"n": 2, "t": 1, "v": 7}


@pytest.mark.parametrize("lengths", [[7, 3], [1, 4]], ids=str)
def test_on_a_device_lengths_are_not_looked_at(lengths, kernels, segments, monkeypatch):
    monkeypatch.setattr(checkpoints, "check_lengths", None)
    chain = FAMILIES["dense"](torch.float32, each=True, **SMALL)
    for every in (2, 3):
        segments(every)
        assert_contract(chain, lengths, device=kernels, memory_budget=1)
    x, bulk, p0 = (operand.to(kernels) for operand in chain[:3])
    wrong = torch.tensor([8, 0], device=kernels)
    assert logchain.product(x.requires_grad_(), bulk, p0, lengths=wrong, memory_budget=1).isnan().all()


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
    logchain.product(*FAMILIES["dense"]()[:3], memory_budget=10**6, progress=True)
    assert not bars


def test_a_bar_goes_with_a_budget_and_with_tqdm(monkeypatch):
    leaves = FAMILIES["dense"]()[:3]
    with pytest.raises(ValueError, match="^progress: expected a memory_budget with it"):
        logchain.product(*leaves, progress=True)
    with pytest.raises(TypeError, match="^progress: expected True or False, got 1"):
        logchain.product(*leaves, memory_budget=10**6, progress=1)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="^progress: expected tqdm to be installed, see `pip install tqdm`"):
        logchain.product(*leaves, memory_budget=10**6, progress=True)
    logchain.product(*leaves, memory_budget=10**6)
