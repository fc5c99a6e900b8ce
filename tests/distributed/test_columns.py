"""Chains of one matrix whose columns lie on several ranks: each question has the answer of the dense matrix."""

import pytest
import torch
import torch.distributed as dist

import logchain
from logchain.distributed import Columns
from tests.transitions.structures import numbers

V, C, BATCH = 5, 12, (2, 3)
LENGTHS = torch.tensor([[5, 3, 1], [2, 5, 4]])
SIZES = [(5, 7), (12, 0), (4, 0, 8)]
SPLITS = pytest.mark.parametrize("sizes", SIZES, ids=str)


class Problem:
    """Operands x [2, 3, v, c] with impossible states, the columns of a rank, p0, and all columns."""

    def __init__(self, rank, sizes, *, lead=(), log=False, dtype=torch.float64, spread=1.0, scale=1.0):
        rand = numbers(3)
        dense, p0 = rand(*lead, C, C) * scale, rand(C)
        generator = torch.Generator().manual_seed(4)
        x = torch.randn(*BATCH, V, C, generator=generator, dtype=torch.float64) * spread
        x[0, 0, 2, 5] = -torch.inf
        if log:
            dense, p0 = dense.log(), p0.log()
        self.start = sum(sizes[:rank])
        self.mine = slice(self.start, self.start + sizes[rank])
        self.x, self.dense, self.p0 = (one.to(dtype).requires_grad_() for one in (x, dense, p0))
        self.columns = self.dense[..., self.mine].detach().clone().requires_grad_()
        self.structure = Columns(self.columns)
        self.bulk = self.dense if lead else self.dense[None]
        self.options = {"log_params": log}

    def both(self, question, *args, **options):
        options = {**self.options, **options}
        return [question(self.x, bulk, self.p0, *args, **options) for bulk in (self.structure, self.bulk)]

    def zero(self, leaf):
        return -torch.inf if leaf is self.x or self.options["log_params"] else 0.0

    def same_gradients(self, ours, dense, **close):
        weight = torch.rand(ours.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        pairs = [torch.where(value.isfinite(), value, 0.0).mul(weight).sum() for value in (ours, dense)]
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        x, p0, columns = torch.autograd.grad(pairs[0], [self.x, self.p0, self.columns], **options)
        expected = torch.autograd.grad(pairs[1], [self.x, self.p0, self.dense], **options)
        expected = [
            one.masked_fill(leaf == self.zero(leaf), 0.0)
            for one, leaf in zip(expected, (self.x, self.p0, self.dense), strict=True)
        ]
        same(x, expected[0], **close)
        same(p0, expected[1], **close)
        same(columns, expected[2][..., self.mine], **close)
        assert columns.shape == self.columns.shape


def same(ours, dense, rtol=1e-10, atol=1e-11):
    torch.testing.assert_close(ours, dense, rtol=rtol, atol=atol)


def product(rank, sizes, lead, log, lengths):
    problem = Problem(rank, sizes, lead=lead, log=log)
    ours, dense = problem.both(logchain.product, lengths=lengths)
    same(ours, dense)
    problem.same_gradients(ours, dense)


@SPLITS
@pytest.mark.parametrize("lead", [(), (V - 1,), (2, 1, 1), (3, V - 1)], ids=str)
@pytest.mark.parametrize(("log", "lengths"), [(False, None), (True, LENGTHS)])
def test_product_and_its_gradients(teams, sizes, lead, log, lengths):
    teams(len(sizes)).values(product, sizes, lead, log, lengths)


def questions(rank, sizes, lead, log, lengths):
    problem = Problem(rank, sizes, lead=lead, log=log)
    options = {"lengths": lengths}
    ours, dense = problem.both(logchain.marginals, transitions="sum", **options)
    same(ours.states, dense.states), same(ours.log_norm, dense.log_norm)
    counts = ours.transitions.parameters[0]
    same(counts, dense.transitions[..., problem.mine].view(counts.shape))
    problem.same_gradients(ours.states, dense.states)
    for one, other in zip(*problem.both(logchain.forward_backward, **options), strict=True):
        same(one, other)
        problem.same_gradients(one, other)
    ours, dense = problem.both(logchain.entropy, **options)
    same(ours, dense)
    problem.same_gradients(ours, dense)
    for ours, dense in (problem.both(logchain.viterbi, **options), problem.both(logchain.topk_paths, 3, **options)):
        assert torch.equal(ours[0], dense[0])
        same(ours[1], dense[1])
        problem.same_gradients(ours[1], dense[1])
    paths = ours[0][..., 0, :]
    ours, dense = problem.both(logchain.log_prob, paths, **options)
    same(ours, dense)
    problem.same_gradients(ours, dense)


@SPLITS
@pytest.mark.parametrize(("lead", "log", "lengths"), [((), False, LENGTHS), ((3, V - 1), True, None)])
def test_other_questions(teams, sizes, lead, log, lengths):
    teams(len(sizes)).values(questions, sizes, lead, log, lengths)
