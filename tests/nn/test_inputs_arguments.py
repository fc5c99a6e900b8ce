"""What the input layers refuse, by name."""

import pytest
import torch

from logchain.nn import Bernoulli, Binomial, Categorical, Distribution, Gaussian, Mixture, Poisson
from tests.nn.input_layers import gamma


@pytest.mark.parametrize(
    ("make", "data", "error", "text"),
    [
        (lambda: Poisson(2), torch.tensor([-1]), ValueError, "expected counts, got -1"),
        (lambda: Poisson(2), torch.tensor([0.5]), ValueError, "expected counts, got 0.5"),
        (lambda: Poisson(2), torch.tensor([torch.inf]), ValueError, "expected counts, got inf"),
        (lambda: Bernoulli(2), torch.tensor([2]), ValueError, "integers from 0 to 1, got 2"),
        (lambda: Categorical(2, 3), torch.tensor([0.5]), ValueError, "integers from 0 to 2, got 0.5"),
        (lambda: Gaussian((3, 2)), torch.zeros(5, 4), ValueError, r"expected shape \[..., 3\], got \[5, 4\]"),
        (lambda: Gaussian(2, 3), torch.zeros(5, 4), ValueError, r"expected shape \[..., 3\], got \[5, 4\]"),
        (lambda: Gaussian(2), [1.0], TypeError, "expected a torch.Tensor, got list"),
        (lambda: Gaussian(2), torch.zeros(2, dtype=torch.complex64), TypeError, "complex64"),
        (lambda: gamma((2,)), torch.tensor([-1.0]), ValueError, "GreaterThan"),
        (lambda: Gaussian(0), None, ValueError, "units: expected a positive integer"),
        (lambda: Gaussian("two"), None, TypeError, "units: expected a positive integer, got 'two'"),
        (lambda: Gaussian((3, 2.0)), None, TypeError, "units: expected a positive integer, got 2.0"),
        (lambda: Gaussian(()), None, ValueError, "units: expected a positive integer or several, got none"),
        (lambda: Gaussian(2, 3, "tied"), None, ValueError, "covariance: expected 'diagonal' or 'full', got 'tied'"),
        (lambda: Gaussian(2, covariance="full"), None, ValueError, "num_features: expected an integer"),
        (lambda: Gaussian(2, 0), None, ValueError, "num_features: expected a positive integer, got 0"),
        (lambda: Gaussian(2, prior_scatter=-1.0), None, ValueError, "prior_scatter: expected a number from 0 on"),
        (lambda: Gaussian(2, prior_count=None), None, TypeError, "prior_count: expected a number, got None"),
        (lambda: Binomial(2, -1), None, ValueError, "total_count: expected a non-negative integer, got -1"),
        (lambda: Binomial(2, 1.5), None, TypeError, "total_count: expected a non-negative integer, got 1.5"),
        (lambda: Categorical(2, 0), None, ValueError, "num_categories: expected a positive integer, got 0"),
        (lambda: Mixture(Poisson(2)), None, ValueError, "layer: expected units"),
        (lambda: Mixture("poisson"), None, TypeError, "layer: expected an InputLayer"),
        (lambda: Distribution(torch.distributions.Gamma, 2, concentration=-1.0, rate=1.0), None, ValueError, "conc"),
        (
            lambda: Distribution(
                torch.distributions.Normal,
                2,
                limits={"loc": torch.distributions.constraints.dependent},
                loc=0.0,
                scale=1.0,
            ),
            None,
            ValueError,
            "limits: expected what loc has to satisfy by itself",
        ),
        (lambda: gamma((2,), family=3), None, TypeError, "family: expected a class or a function, got int"),
        (lambda: gamma((2,), spread="much"), None, TypeError, "spread: expected a number, got 'much'"),
        (lambda: gamma((2,), spread=torch.nan), None, ValueError, "spread: expected a number from 0 on, got nan"),
        (lambda: gamma((2,), rate=torch.ones(3)), None, ValueError, r"rate: expected what .* \[2\], got \[3\]"),
        (
            lambda: gamma((2,), limits={"rates": 1}),
            None,
            ValueError,
            "limits: expected .* concentration, rate, got rates",
        ),
        (lambda: Poisson(1).set(torch.tensor([-1.0])), None, ValueError, "rates: expected"),
        (lambda: Bernoulli(1).set(torch.tensor([1.5])), None, ValueError, "probabilities: expected"),
        (lambda: Gaussian(1).set(torch.zeros(1), torch.zeros(1)), None, ValueError, "covariance: expected positive"),
        (
            lambda: Gaussian(3).set(torch.zeros(2), torch.ones(3)),
            None,
            ValueError,
            r"means: expected .* \[3\], got \[2\]",
        ),
        (lambda: Gaussian(3).set(0.0, torch.ones(3)), None, TypeError, "means: expected a torch.Tensor, got float"),
        (lambda: Gaussian(1).set(torch.tensor([torch.nan]), torch.ones(1)), None, ValueError, "means: expected finite"),
        (lambda: Gaussian(1)(torch.tensor([torch.inf])), None, ValueError, "data: expected finite numbers"),
        (lambda: Gaussian(1).initialise(torch.full((3,), torch.nan)), None, ValueError, "at least one observation"),
        (lambda: Gaussian(1).initialise(torch.ones(3)), None, ValueError, "two different observations"),
    ],
)
def test_what_is_refused(make, data, error, text):
    with pytest.raises(error, match=text):
        make()(data)


@pytest.mark.parametrize("observed", [torch.ones(7), torch.ones(6, dtype=torch.bool), "all"])
def test_masks_that_do_not_go_with_the_data(observed):
    with pytest.raises((TypeError, ValueError), match="observed: expected"):
        Poisson(2)(torch.ones(7), observed)
