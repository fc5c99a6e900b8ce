"""`logchain.adapters` refuses wrong arguments by name, whether or not the packages are there."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from logchain import adapters


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: adapters.from_torch_struct(None), TypeError, "crf: expected a torch.Tensor, got NoneType"),
        (lambda: adapters.from_torch_struct(torch.zeros(2, 3)), ValueError, "crf: expected at least 3 axes"),
        (lambda: adapters.from_torch_struct(torch.zeros(5, 3, 2)), ValueError, r"crf: expected .* got \[5, 3, 2\]"),
        (
            lambda: adapters.from_pyro(object(), torch.zeros(3)),
            TypeError,
            "hmm: expected a pyro DiscreteHMM, got object",
        ),
        (lambda: adapters.from_pyro(bernoulli(4), [1.0]), TypeError, "value: expected a torch.Tensor, got list"),
        (
            lambda: adapters.from_pyro(bernoulli(4), torch.tensor(1.0)),
            ValueError,
            r"value: expected observations \[..., v\]",
        ),
        (lambda: adapters.from_pyro(bernoulli(4), torch.zeros(5)), ValueError, "value: expected 4 steps.* got 5"),
        (lambda: adapters.from_hmmlearn(object(), [[1]]), TypeError, "model: expected a fitted model.* startprob_"),
        (lambda: adapters.from_hmmlearn(Flat(), [1, 2]), ValueError, r"X: expected \[samples, features\], got \[2\]"),
        (lambda: adapters.from_hmmlearn(Flat(), [[1], [2]], [1]), ValueError, "lengths: .* 2 samples"),
        (lambda: adapters.from_hmmlearn(Flat(), [[1], [2]], [1.5, 1.5]), TypeError, "lengths: expected integers"),
        (lambda: adapters.from_hmmlearn(Flat(), [[1], [2]], 2), TypeError, "lengths: expected integers, one .* got 2"),
        (lambda: adapters.from_hmmlearn(Flat(), [[1], [2]], [2, 0]), ValueError, "lengths: .*positive"),
        (lambda: adapters.from_pytorch_crf(None, torch.zeros(1, 2, 2)), TypeError, "crf: expected a torchcrf CRF"),
        (lambda: adapters.from_pytorch_crf(layer(), [0]), TypeError, "emissions: expected a torch.Tensor"),
        (lambda: adapters.from_pytorch_crf(layer(), torch.zeros(1, 2, 3)), ValueError, r"emissions: .*\[n, v, 2\]"),
        (
            lambda: adapters.from_pytorch_crf(layer(), torch.zeros(1, 2, 2), [1]),
            TypeError,
            "mask: expected a torch.Tensor",
        ),
        (lambda: crf_mask([[True]]), ValueError, r"mask: expected shape \[1, 3\], got \[1, 1\]"),
        (lambda: crf_mask([[True, False, True]]), ValueError, "mask: .* hole"),
        (lambda: crf_mask([[False, False, False]]), ValueError, "mask: .* at least one"),
        (lambda: adapters.from_statsmodels(1), TypeError, "results: .*without order, regime_transition"),
    ],
)
def test_wrong_arguments_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


def bernoulli(steps):
    emission = torch.distributions.Bernoulli(torch.full((2,), 0.5))
    return SimpleNamespace(
        initial_logits=torch.zeros(2), transition_logits=torch.zeros(steps, 2, 2), observation_dist=emission
    )


def layer():
    zeros = torch.zeros(2)
    return SimpleNamespace(
        start_transitions=zeros, end_transitions=zeros, transitions=torch.zeros(2, 2), batch_first=True
    )


def crf_mask(mask):
    return adapters.from_pytorch_crf(layer(), torch.zeros(1, 3, 2), torch.tensor(mask))


class Flat:
    startprob_, transmat_ = [1.0], [[1.0]]

    def _compute_log_likelihood(self, samples):
        return np.zeros((len(samples), 1))
