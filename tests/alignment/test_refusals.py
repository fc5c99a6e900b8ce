"""What `logchain.alignment` refuses, and that the argument is named."""

import pytest
import torch

from logchain import alignment
from logchain.alignment import Acceptor

ZERO = torch.zeros(1)


def ctc(**others):
    usual = {"log_probs": torch.zeros(5, 2, 4), "targets": torch.ones(2, 3, dtype=torch.int64)}
    return alignment.from_ctc(**{**usual, "input_lengths": (5, 5), "target_lengths": (3, 1), **others})


def labels(states, dim=None):
    return alignment.ctc_labels(torch.as_tensor(states), torch.ones(2, 3, dtype=torch.int64), (3, 1), dim=dim)


def loss(**options):
    return alignment.ctc_loss(torch.zeros(5, 2, 4), torch.ones(2, 3, dtype=torch.int64), (5, 5), (3, 1), **options)


def acceptors(*labels, batch=2, frames=5, **options):
    graphs = [Acceptor(torch.tensor([[0, 0, label]]), ZERO, ZERO) for label in labels]
    return alignment.from_arcs(torch.zeros(batch, frames, 4), graphs, **options)


def lattice(text):
    return alignment.lattice_total(*alignment.openfst_arcs(text))


def arcs(rows, *others):
    return alignment.from_arcs(torch.zeros(5, 4), torch.tensor(rows), torch.zeros(len(rows)), *others)


CTC = [
    (lambda: ctc(log_probs=torch.zeros(2, 3, 4, 5)), ValueError, r"log_probs: expected \[T, N, C\] .* got \[2, 3, 4"),
    (lambda: ctc(targets=torch.ones(1, 2, 3).long()), ValueError, r"targets: expected \[N, S\] .* got \[1, 2, 3\]"),
    (lambda: ctc(targets=torch.tensor([[1, 4, 0], [1, 1, 1]])), ValueError, "targets: .* C - 1 = 3, got 0 to 4"),
    (lambda: ctc(targets=torch.ones(5).long()), ValueError, "target_lengths: expected a sum of 5 labels, got 4"),
    (lambda: ctc(target_lengths=(1, 4)), ValueError, "target_lengths: expected numbers from 0 to 3, got 1 to 4"),
    (lambda: ctc(targets=torch.ones(1, 3).long(), target_lengths=1), ValueError, "target_lengths: expected 2 .* got 1"),
    (lambda: ctc(input_lengths=(5, 0)), ValueError, "input_lengths: expected numbers from 1 to 5, got 0 to 5"),
    (lambda: ctc(input_lengths=(5,)), ValueError, r"input_lengths: expected 2 to go with .*\[5, 2, 4\], got 1"),
    (lambda: ctc(input_lengths=[[5, 5]]), ValueError, r"input_lengths: .* each sequence, got shape \[1, 2\]"),
    (lambda: ctc(input_lengths="55"), TypeError, "input_lengths: expected integers, got '55'"),
    (lambda: ctc(blank=4), ValueError, "blank: expected a class from 0 to C - 1 = 3, got 4"),
    (lambda: ctc(star=1), TypeError, "star: expected True or False, got 1"),
    (lambda: ctc(targets=torch.full((2, 3), 5), star=True), ValueError, "targets: .* from 0 to C = 4, got 0 to 5"),
    (lambda: loss(reduction="average"), ValueError, "reduction: expected one of 'none', 'mean', 'sum', got 'average'"),
    (lambda: loss(zero_infinity=0), TypeError, "zero_infinity: expected True or False, got 0"),
    (lambda: labels(torch.ones(2, 2, 5).long()), ValueError, r"dim: .* \[2, 2, 5\], got None; pass 0 .* topk_paths"),
    (lambda: labels(torch.ones(2, 3, 5).long(), -2), ValueError, r"dim: .* in states \[2, 3, 5\], got -2"),
    (lambda: labels(torch.ones(3, 2, 2).long(), 2), ValueError, r"dim: .* in states \[3, 2, 2\], got 2"),
    (lambda: labels([[1], [1], [1]]), ValueError, r"dim: .* of 2 sequences in states \[3, 1\], got None"),
]
ARCS = [
    (lambda: arcs([[0, 1, 4]]), ValueError, r"arcs: .* to C - 1 = 3, got \[0, 1, 4\] as arc 0"),
    (lambda: arcs([[0, 1, 2], [0, 1, -1]], torch.zeros(2)), ValueError, r"arcs: .* got \[0, 1, -1\] as arc 1"),
    (lambda: arcs([[0, 1, 2]]), ValueError, "final: expected final log-weights where no arc has label -1, got None"),
    (lambda: arcs([[0, 1, -1]]), ValueError, "arcs: expected a label from 0 on, got -1 on every arc"),
    (lambda: arcs([0, 1, 2]), ValueError, r"arcs: expected \[arcs, 3\], at least one, got \[3\]"),
    (lambda: arcs([[0, 3, 2]], torch.zeros(3)), ValueError, r"final: expected \[states\], at least 4, got \[3\]"),
    (lambda: arcs([[0, 1, 2]], torch.zeros(2), "0"), TypeError, "start: expected an integer, got '0'"),
    (lambda: arcs([[0, 1, 2]], torch.zeros(2), -1), ValueError, "start: expected 0 or more, got -1"),
    (lambda: arcs([[0, 1, 2]], torch.zeros(3), 3), ValueError, "start: expected a state from 0 to 2, got 3"),
    (lambda: acceptors(1, frames=0), ValueError, r"log_probs: expected \[..., T, C\], T at least 1, got \[2, 0, 4\]"),
    (lambda: acceptors(1, 4), ValueError, r"arcs\[1\]: .* to C - 1 = 3, got \[0, 0, 4\] as arc 0"),
    (lambda: acceptors(1, 2, 3), ValueError, r"arcs: expected an acceptor for each sequence of batch \[2\], got 3"),
    (lambda: acceptors(batch=0), ValueError, r"arcs: expected an acceptor for each sequence of batch \[0\], got 0"),
    (lambda: acceptors(1, 2, start=1), ValueError, "arcs: expected a tensor to go with scores, final and start"),
    (lambda: alignment.from_arcs(torch.zeros(1, 5, 4), [0]), TypeError, r"arcs\[0\]: expected an Acceptor, got int"),
    (lambda: alignment.from_arcs(torch.zeros(5, 4), torch.zeros(1, 3)), TypeError, "scores: .* with arcs, got None"),
    (lambda: lattice("0 1 2\n1 2 3\n2 1 4\n2"), ValueError, "arcs: expected no cycle, got one"),
    (lambda: lattice("0 1 7 7\n1 1 3 3\n1"), ValueError, "text: .* got an output .* '0 1 7 7'; .*fstproject"),
    (lambda: lattice("0 1 2 0.5\n0 1 0"), ValueError, "text: expected no epsilon arc .* got '0 1 0'"),
    (lambda: lattice("0 1 2 3 0.5"), ValueError, "text: expected lines .* got '0 1 2 3 0.5'"),
    (lambda: lattice("0 1 a 0.5"), ValueError, "text: expected lines .* got '0 1 a 0.5'"),
    (lambda: lattice("0 1 -1"), ValueError, "text: expected lines .* got '0 1 -1'"),
    (lambda: lattice(" \n0"), ValueError, "text: expected at least one arc"),
    (lambda: alignment.lattice_total(torch.tensor([[0, 1, -2]]), ZERO), ValueError, "arcs: .* labels from -1, got"),
]


@pytest.mark.parametrize(("call", "error", "message"), CTC + ARCS)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
