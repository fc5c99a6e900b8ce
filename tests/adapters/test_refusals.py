"""What `logchain.adapters` refuses, whether or not the packages are there, and that the argument is named."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from logchain import adapters


def bernoulli(steps):
    emission = torch.distributions.Bernoulli(torch.full((2,), 0.5))
    return SimpleNamespace(
        initial_logits=torch.zeros(2), transition_logits=torch.zeros(steps, 2, 2), observation_dist=emission
    )


def pytorch_crf(emissions, mask=None):
    zeros = torch.zeros(2)
    parameters = {"start_transitions": zeros, "end_transitions": zeros, "transitions": torch.zeros(2, 2)}
    return adapters.from_pytorch_crf(SimpleNamespace(**parameters, batch_first=True), emissions, mask)


def crf_mask(mask):
    return pytorch_crf(torch.zeros(1, 3, 2), torch.tensor(mask))


def ctc(**others):
    usual = {"log_probs": torch.zeros(5, 2, 4), "targets": torch.ones(2, 3, dtype=torch.int64)}
    return adapters.from_ctc(**{**usual, "input_lengths": (5, 5), "target_lengths": (3, 1), **others})


def labels(states):
    return adapters.ctc_labels(torch.tensor(states), torch.ones(2, 3, dtype=torch.int64), (3, 1))


def arcs(rows, *others):
    return adapters.from_arcs(torch.zeros(5, 4), torch.tensor(rows), torch.zeros(len(rows)), *others)


class Flat:
    startprob_, transmat_ = [1.0], [[1.0]]

    def _compute_log_likelihood(self, samples):
        return np.zeros((len(samples), 1))


PACKAGES = [
    (lambda: adapters.from_torch_struct(torch.zeros(5, 3, 2)), ValueError, r"crf: expected .* got \[5, 3, 2\]"),
    (lambda: adapters.from_pyro(object(), torch.zeros(3)), TypeError, "hmm: expected a pyro DiscreteHMM, got object"),
    (lambda: adapters.from_pyro(bernoulli(4), torch.tensor(1.0)), ValueError, r"value: expected observations \[..., v"),
    (lambda: adapters.from_pyro(bernoulli(4), torch.zeros(5)), ValueError, "value: expected 4 steps.* got 5"),
    (lambda: adapters.from_hmmlearn(object(), [[1]]), TypeError, "model: expected a fitted model.* startprob_"),
    (lambda: adapters.from_hmmlearn(Flat(), [1, 2]), ValueError, r"X: expected \[samples, features\], got \[2\]"),
    (lambda: adapters.from_hmmlearn(Flat(), [[1], [2]], [1]), ValueError, "lengths: .* 2 samples"),
    (lambda: adapters.from_hmmlearn(Flat(), [[1], [2]], 2), TypeError, "lengths: expected integers, one .* got 2"),
    (lambda: adapters.from_pytorch_crf(None, torch.zeros(1, 2, 2)), TypeError, "crf: expected a torchcrf CRF"),
    (lambda: pytorch_crf(torch.zeros(1, 2, 3)), ValueError, r"emissions: .*\[n, v, 2\]"),
    (lambda: crf_mask([[True, False, True]]), ValueError, "mask: .* hole"),
    (lambda: crf_mask([[False, False, False]]), ValueError, "mask: .* at least one"),
    (lambda: adapters.from_statsmodels(1), TypeError, "results: .*without order, regime_transition"),
]
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
    (lambda: labels([[1], [1], [1]]), ValueError, r"states: expected \[..., 2, T\] .* got \[3, 1\]"),
]
ARCS = [
    (lambda: arcs([[0, 1, 4]]), ValueError, r"arcs: .* to C - 1 = 3, got \[0, 1, 4\] as arc 0"),
    (lambda: arcs([[0, 1, 2], [0, 1, -1]], torch.zeros(2)), ValueError, r"arcs: .* got \[0, 1, -1\] as arc 1"),
    (lambda: arcs([[0, 1, 2]]), ValueError, "final: expected final log-weights where no arc has label -1, got None"),
    (lambda: arcs([[0, 1, -1]]), ValueError, "arcs: expected a label from 0 on, got -1 on every arc"),
    (lambda: arcs([0, 1, 2]), ValueError, r"arcs: expected \[arcs, 3\], at least one, got \[3\]"),
    (lambda: arcs([[0, 3, 2]], torch.zeros(3)), ValueError, r"final: expected \[states\], at least 4, got \[3\]"),
    (lambda: arcs([[0, 1, 2]], torch.zeros(2), "0"), TypeError, "start: expected an integer, got '0'"),
    (lambda: adapters.openfst_arcs("0 1 2 0.5\n0 1 0"), ValueError, "text: expected no epsilon arc .* got '0 1 0'"),
    (lambda: adapters.openfst_arcs("0 1 2 3 0.5"), ValueError, "text: expected lines .* got '0 1 2 3 0.5'"),
    (lambda: adapters.openfst_arcs("0 1 a 0.5"), ValueError, "text: expected lines .* got '0 1 a 0.5'"),
    (lambda: adapters.openfst_arcs("0 1 -1"), ValueError, "text: expected lines .* got '0 1 -1'"),
    (lambda: adapters.openfst_arcs(" \n0"), ValueError, "text: expected at least one arc"),
]


@pytest.mark.parametrize(("call", "error", "message"), PACKAGES + CTC + ARCS)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
