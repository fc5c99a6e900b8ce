"""What `logchain.nn.HMM` refuses, by name."""

import pytest
import torch

from logchain.nn import HMM, Categorical
from tests.nn.hmms import F64, Network, V, categories, random_hmm


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: HMM(0, "poisson"), ValueError, "num_states: expected a positive integer, got 0"),
        (lambda: HMM(2.0, "poisson"), TypeError, "num_states: expected a positive integer, got 2.0"),
        (lambda: HMM(2, "normal"), ValueError, "emission: expected 'categorical' or"),
        (lambda: HMM(2, 3), TypeError, "emission: expected a name or a torch.nn.Module, got int"),
        (lambda: HMM(2, "categorical"), ValueError, "num_categories: expected an integer with emission 'categorical'"),
        (lambda: HMM(2, Categorical(3, 4)), ValueError, r"emission: expected units \(2,\) or \(d, 2\), got \(3,\)"),
        (lambda: HMM(2, "poisson", initial="uniform"), ValueError, "initial: expected 'free' or 'stationary'"),
        (lambda: HMM(2, "poisson", initial="stationary", num_steps=3), ValueError, "initial: expected 'free' where"),
        (
            lambda: random_hmm(initial="stationary").fit(categories(5, V)),
            ValueError,
            "method: expected 'gradient' with a stationary initial distribution, got 'em'",
        ),
        (
            lambda: random_hmm(Network(2)).fit(torch.zeros(5, V, 2, dtype=F64)),
            ValueError,
            "method: expected 'gradient' for parameters without a maximum .*, got 'em' with emission.weight",
        ),
        (
            lambda: random_hmm(Network(2)).sample(1, 2),
            TypeError,
            "emission: expected an InputLayer to sample from, got Network",
        ),
        (
            lambda: random_hmm().log_prob(categories(5, V), covariates=torch.zeros(1)),
            ValueError,
            "covariates: expected None without a transition module",
        ),
        (
            lambda: random_hmm().log_prob(categories(5, V), lengths=[1, 2]),
            ValueError,
            r"lengths: expected shape \[5\]",
        ),
        (
            lambda: random_hmm().log_prob(categories(5, V), observed=torch.ones(5, dtype=torch.bool)),
            ValueError,
            r"observed: expected shape \[5, 4\], got \[5\]",
        ),
        (lambda: random_hmm().log_prob(torch.tensor(1)), ValueError, r"data: expected shape \[..., v\], got \[\]"),
        (
            lambda: random_hmm(Network(2)).log_prob(
                torch.zeros(5, V, 2, dtype=F64), observed=torch.ones(5, V, 2, dtype=torch.bool)
            ),
            ValueError,
            r"observed: expected shape \[5, 4\], the steps that the emission module makes of the data, got \[5, 4, 2\]",
        ),
        (
            lambda: random_hmm(Network(2)).log_prob(
                torch.zeros(5, V, 2, dtype=F64), observed=torch.ones(4, dtype=torch.bool)
            ),
            ValueError,
            r"observed: expected shape \[5\] or \[5, 4\] or \[5, 4, 2\], got \[4\]",
        ),
        (lambda: HMM(2, "gaussian", num_features=0), ValueError, "num_features: expected a positive integer, got 0"),
        (
            lambda: HMM(2, Categorical(2, 3), covariance="full"),
            ValueError,
            "covariance: expected 'diagonal' with an emission",
        ),
        (lambda: HMM(2, "poisson", transition=1), TypeError, "transition: expected a torch.nn.Module, got int"),
        (lambda: random_hmm().sample(1, -1), ValueError, "num_steps: expected a positive integer, got -1"),
        (lambda: random_hmm().fit([[0, 1]]), TypeError, "data: expected a torch.Tensor, got list"),
        (lambda: random_hmm().fit(categories(5, V), step=1.5), ValueError, "step: expected a number from 0 to 1"),
        (lambda: random_hmm().fit(categories(5, V), step="x"), TypeError, "step: expected a number, got 'x'"),
        (lambda: random_hmm().fit(categories(5, V), tolerance="x"), TypeError, "tolerance: expected a number, got 'x'"),
        (lambda: random_hmm().fit(categories(5, V), progress=1), TypeError, "progress: expected True or False, got 1"),
        (
            lambda: random_hmm().fit(categories(5, V), method="gradient", optimiser=1),
            TypeError,
            "optimiser: expected a function of the parameters, got 1",
        ),
        (
            lambda: random_hmm().fit(categories(5, V), batch_size=0),
            ValueError,
            "batch_size: expected a positive integer",
        ),
        (
            lambda: random_hmm().fit(categories(5, V), method="newton"),
            ValueError,
            "method: expected 'em' or 'gradient'",
        ),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
