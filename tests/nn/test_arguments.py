"""What the modules of `logchain.nn` refuse, by name."""

import pytest
import torch

from logchain import nn
from logchain.nn import HMM, Bernoulli, Binomial, Categorical, Distribution, Gaussian, LinearChainCRF, Mixture, Poisson
from tests.nn.hmms import F64, Network, V, categories, random_hmm
from tests.nn.input_layers import gamma
from tests.nn.test_circuit import KINDS
from tests.nn.test_circuit import made as circuit_of

DATA = torch.tensor([[0, 1, 2]])


def likelihood(**changed):
    arguments = {"emissions": torch.zeros(2, 3, 5), "tags": torch.zeros(2, 3, dtype=torch.int64), "mask": None}
    return LinearChainCRF(5, batch_first=True)(**{**arguments, **changed})


def moved_by(function):
    """The log-probability under a model whose transitions are what a function returns."""
    transition = torch.nn.Identity()
    transition.forward = function
    return HMM(3, "poisson", transition=transition).log_prob(torch.zeros(5, V))


def circuit(kind):
    """What a circuit of each kind refuses."""

    def made(*sizes, **options):
        return circuit_of(kind, *sizes, **options)

    return [
        (lambda: made(3).log_prob([0, 1, 2]), TypeError, r"^data: expected a torch.Tensor, got list$"),
        (
            lambda: made(3).log_prob(DATA.to_sparse()),
            TypeError,
            r"^data: expected a dense tensor, got torch.sparse_coo$",
        ),
        (lambda: made(3).fit(torch.tensor(1)), ValueError, r"^data: expected shape \[n, ...\], got \[\]$"),
        (lambda: made(3).log_prob(DATA[:, :1]), ValueError, r"^data: expected shape \[..., 3\], got \[1, 1\]$"),
        (
            lambda: made(3).log_prob(DATA, torch.ones(2, dtype=torch.bool)),
            ValueError,
            r"^observed: expected shape \[1, 3\] or \[3\], got \[2\]$",
        ),
        (
            lambda: made(3).log_prob(DATA, DATA),
            TypeError,
            r"^observed: expected a bool tensor, got a tensor of torch.int64$",
        ),
        (lambda: made(3).sample(0), ValueError, r"^num_samples: expected a positive integer, got 0$"),
        (lambda: made(3).sample(True), TypeError, r"^num_samples: expected a positive integer, got True$"),
        (lambda: made(3, 0), ValueError, r"^num_states: expected a positive integer, got 0$"),
        (
            lambda: made(3, input="poisson"),
            ValueError,
            r"^input: expected 'categorical' or .*, or an input layer, got 'poisson'$",
        ),
        (lambda: made(3, input=3), TypeError, r"^input: expected a name or a logchain.nn.InputLayer, got int$"),
        (
            lambda: made(3, input="categorical"),
            ValueError,
            r"^num_categories: expected an integer with input='categorical', got None$",
        ),
        (
            lambda: made(3, input="gaussian", total_count=4),
            ValueError,
            r"^total_count: expected None with input='gaussian', got 4$",
        ),
        (lambda: made(3, input=nn.Gaussian((3, 2))), ValueError, r"^input: expected units \[2, 3, 2\], got \[3, 2\]$"),
    ]


CRFS = [
    (lambda: LinearChainCRF(0), ValueError, "num_tags: expected a positive integer, got 0"),
    (lambda: LinearChainCRF(2.0), TypeError, "num_tags: expected a positive integer, got 2.0"),
    (lambda: LinearChainCRF(2, batch_first=1), TypeError, "batch_first: expected True or False, got 1"),
    (lambda: likelihood(emissions=[0]), TypeError, "emissions: expected a torch.Tensor, got list"),
    (lambda: likelihood(emissions=torch.zeros(2, 3, 4)), ValueError, r"emissions: .*\[n, v, 5\], got \[2, 3, 4\]"),
    (lambda: likelihood(emissions=torch.zeros(2, 0, 5)), ValueError, r"emissions: .*at least one step.*\[2, 0, 5\]"),
    (lambda: likelihood(tags=[0]), TypeError, "tags: expected a torch.Tensor, got list"),
    (lambda: likelihood(tags=torch.zeros(2, 3)), TypeError, "tags: expected integers, got float32"),
    (lambda: likelihood(tags=torch.zeros(3, 2).long()), ValueError, r"tags: expected shape \[2, 3\], got \[3, 2\]"),
    (lambda: likelihood(tags=torch.full((2, 3), 5)), ValueError, "tags: expected values from 0 to 4, got 5 to 5"),
    (lambda: likelihood(tags=torch.full((2, 3), -1)), ValueError, "tags: expected values from 0 to 4, got -1 to -1"),
    (lambda: likelihood(mask=[[1]]), TypeError, "mask: expected a torch.Tensor, got list"),
    (lambda: likelihood(mask=torch.ones(3, 2).bool()), ValueError, r"mask: expected shape \[2, 3\], got \[3, 2\]"),
    (lambda: likelihood(mask=torch.ones(2, 3)), TypeError, "mask: expected bool or integers, got float32"),
    (
        lambda: likelihood(mask=torch.ones(2, 3, device="meta").bool()),
        ValueError,
        "mask: expected device cpu, got meta",
    ),
    (lambda: likelihood(tags=torch.ones(2, 3, device="meta").int()), ValueError, "tags: expected device cpu, got meta"),
    (
        lambda: likelihood(emissions=torch.ones(2, 3, 5, device="meta")),
        ValueError,
        "emissions: expected device cpu, got meta",
    ),
    (lambda: likelihood(reduction="max"), ValueError, "reduction: expected 'none' or .*, got 'max'"),
]
HMMS = [
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
        r"^lengths: expected shape \[5\] to go with data \[5, 4\], got \[2\]$",
    ),
    (lambda: random_hmm().fit(categories(5, V), lengths="ab"), TypeError, "^lengths: expected integers, got 'ab'$"),
    (
        lambda: random_hmm(Network(2)).log_prob(torch.zeros(5, V, 2, dtype=F64), lengths=[[1, 2], [2]]),
        TypeError,
        r"^lengths: expected integers, got \[\[1, 2\], \[2\]\]$",
    ),
    (
        lambda: random_hmm(Network(2)).log_prob(torch.zeros(5, V, 2, dtype=F64), lengths=3),
        ValueError,
        r"^lengths: expected those of \[5, 4\], the steps that the emission module makes",
    ),
    (
        lambda: random_hmm().log_prob(categories(5, V)[:, :0]),
        ValueError,
        r"^data: expected at least one step \[\*B, v, ...\], got \[5, 0\]$",
    ),
    (
        lambda: random_hmm(Network(2)).log_prob(torch.zeros(5, 0, 2, dtype=F64)),
        ValueError,
        r"^data: expected at least one step \[\*B, v, ...\], got \[5, 0, 2\]$",
    ),
    (
        lambda: random_hmm().log_prob(categories(5, V).to_sparse()),
        TypeError,
        "^data: expected a dense tensor, got torch.sparse_coo$",
    ),
    (lambda: random_hmm().fit(torch.tensor(1)), ValueError, r"^data: expected shape \[n, ...\], got \[\]$"),
    (
        lambda: random_hmm(torch.nn.Identity()).log_prob(torch.zeros(5, V, 3, dtype=torch.complex64)),
        TypeError,
        "^emission: expected float32, float64, bfloat16 or float16, got complex64$",
    ),
    (lambda: moved_by(lambda _: None), TypeError, "^transition: expected a torch.Tensor, got NoneType$"),
    (lambda: moved_by(lambda _: torch.zeros(1, 3, 3, dtype=torch.int64)), TypeError, "^transition: expected float32"),
    (lambda: moved_by(lambda _: torch.zeros(3, 3)), ValueError, "^transition: expected at least 3 axes"),
    *(
        (lambda shape=shape: moved_by(lambda _: torch.zeros(shape)), ValueError, f"^transition: {expected}")
        for expected in [r"expected shape \[5, 3, 3, 3\], or 1 in the place of batch and steps, got \["]
        for shape in [(5, 4, 3, 3), (4, 3, 3, 3), (5, 3, 2, 2), (5, 5, 3, 3, 3)]
    ),
    (
        lambda: random_hmm().log_prob(categories(5, V), observed=torch.ones(5, dtype=torch.bool)),
        ValueError,
        r"observed: expected shape \[5, 4\] or \[4\], got \[5\]",
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
    (lambda: random_hmm(num_steps=2).sample(1, 3), ValueError, "^num_steps: expected at most 2 steps, got 3$"),
    (
        lambda: random_hmm().fit(categories(1, V)[0], lengths=[1, 2]),
        ValueError,
        rf"^lengths: expected shape \[\] to go with data \[{V}\], got \[2\]$",
    ),
    (
        lambda: random_hmm().requires_grad_(False).fit(categories(5, V), method="gradient"),
        ValueError,
        "^model: expected trained parameters with method 'gradient', got none$",
    ),
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
        lambda: random_hmm().fit(categories(5, V), method="gradient", optimiser=lambda parameters: None),
        TypeError,
        "^optimiser: expected a function that returns an optimiser, got one that returns None$",
    ),
    (
        lambda: random_hmm().half().fit(categories(5, V), method="gradient"),
        ValueError,
        "^optimiser: expected one for parameters in float16, in which L-BFGS overflows, got None$",
    ),
    (lambda: random_hmm().fit(categories(5, V), batch_size=0), ValueError, "batch_size: expected a positive integer"),
    (lambda: random_hmm().fit(categories(5, V), method="newton"), ValueError, "method: expected 'em' or 'gradient'"),
]
INPUTS = [
    (lambda: Poisson(2)(torch.tensor([-1])), ValueError, "expected counts, got -1"),
    (lambda: Poisson(2)(torch.tensor([0.5])), ValueError, "expected counts, got 0.5"),
    (lambda: Poisson(2)(torch.tensor([torch.inf])), ValueError, "expected counts, got inf"),
    (lambda: Bernoulli(2)(torch.tensor([2])), ValueError, "integers from 0 to 1, got 2"),
    (lambda: Categorical(2, 3)(torch.tensor([0.5])), ValueError, "integers from 0 to 2, got 0.5"),
    (lambda: Gaussian((3, 2))(torch.zeros(5, 4)), ValueError, r"expected shape \[..., 3\], got \[5, 4\]"),
    (lambda: Gaussian(2, 3)(torch.zeros(5, 4)), ValueError, r"expected shape \[..., 3\], got \[5, 4\]"),
    (lambda: Gaussian(2)([1.0]), TypeError, "expected a torch.Tensor, got list"),
    (lambda: Gaussian(2)(torch.zeros(2, dtype=torch.complex64)), TypeError, "complex64"),
    (lambda: gamma((2,))(torch.tensor([-1.0])), ValueError, "GreaterThan"),
    (lambda: Gaussian(0), ValueError, "units: expected a positive integer"),
    (lambda: Gaussian("two"), TypeError, "units: expected a positive integer, got 'two'"),
    (lambda: Gaussian((3, 2.0)), TypeError, "units: expected a positive integer, got 2.0"),
    (lambda: Gaussian(()), ValueError, "units: expected a positive integer or several, got none"),
    (
        lambda: Gaussian(2, 3, "banded"),
        ValueError,
        "covariance: expected 'diagonal' or 'spherical' or 'full' or 'tied', got",
    ),
    (lambda: Gaussian(2, covariance="full"), ValueError, "num_features: expected an integer"),
    (lambda: Gaussian(2, 0), ValueError, "num_features: expected a positive integer, got 0"),
    (lambda: Gaussian(2, prior_scatter=-1.0), ValueError, "prior_scatter: expected a number from 0 on"),
    (lambda: Gaussian(2, prior_count=None), TypeError, "prior_count: expected a number, got None"),
    (lambda: Binomial(2, -1), ValueError, "total_count: expected a non-negative integer, got -1"),
    (lambda: Binomial(2, 1.5), TypeError, "total_count: expected a non-negative integer, got 1.5"),
    (lambda: Categorical(2, 0), ValueError, "num_categories: expected a positive integer, got 0"),
    (lambda: Mixture(Poisson(2)), ValueError, "layer: expected units"),
    (lambda: Mixture("poisson"), TypeError, "layer: expected an InputLayer"),
    (lambda: Distribution(torch.distributions.Gamma, 2, concentration=-1.0, rate=1.0), ValueError, "conc"),
    (
        lambda: Distribution(
            torch.distributions.Normal,
            2,
            limits={"loc": torch.distributions.constraints.dependent},
            loc=0.0,
            scale=1.0,
        ),
        ValueError,
        "limits: expected what loc has to satisfy by itself",
    ),
    (lambda: gamma((2,), family=3), TypeError, "family: expected a class or a function, got int"),
    (lambda: gamma((2,), spread="much"), TypeError, "spread: expected a number, got 'much'"),
    (lambda: gamma((2,), spread=torch.nan), ValueError, "spread: expected a number from 0 on, got nan"),
    (lambda: gamma((2,), rate=torch.ones(3)), ValueError, r"rate: expected what .* \[2\], got \[3\]"),
    (lambda: gamma((2,), limits={"rates": 1}), ValueError, "limits: expected .* concentration, rate, got rates"),
    (lambda: Poisson(1).set(torch.tensor([-1.0])), ValueError, "rates: expected"),
    (lambda: Bernoulli(1).set(torch.tensor([1.5])), ValueError, "probabilities: expected"),
    (lambda: Gaussian(1).set(torch.zeros(1), torch.zeros(1)), ValueError, "covariance: expected positive"),
    (lambda: Gaussian(3).set(torch.zeros(2), torch.ones(3)), ValueError, r"means: expected .* \[3\], got \[2\]"),
    (lambda: Gaussian(1).set(torch.zeros(1), torch.tensor([torch.nan])), ValueError, "positive, finite variances"),
    (
        lambda: Gaussian(1, 2, "full").set(torch.zeros(2), torch.eye(2) * torch.inf),
        ValueError,
        "covariance: expected finite numbers",
    ),
    *(
        (lambda make=make: make()(torch.ones(3, 1, device="meta")), ValueError, "^data: expected device cpu, got meta$")
        for make in (
            lambda: Gaussian(2),
            lambda: Poisson(2),
            lambda: Bernoulli(2),
            lambda: Categorical(2, 3),
            lambda: Mixture(Poisson((2, 2))),
            lambda: gamma((2,)),
        )
    ),
    (lambda: Gaussian(3).set(0.0, torch.ones(3)), TypeError, "means: expected a torch.Tensor, got float"),
    (lambda: Gaussian(1).set(torch.tensor([torch.nan]), torch.ones(1)), ValueError, "means: expected finite"),
    (lambda: Gaussian(1)(torch.tensor([torch.inf])), ValueError, "data: expected finite numbers"),
    (lambda: Gaussian(1).initialise(torch.full((3,), torch.nan)), ValueError, "at least one observation"),
    (lambda: Gaussian(1).initialise(torch.ones(3)), ValueError, "two different observations"),
    (lambda: Poisson(2)(torch.ones(7), torch.ones(7)), TypeError, "observed: expected"),
    (lambda: Poisson(2)(torch.ones(7), torch.ones(6, dtype=torch.bool)), ValueError, "observed: expected"),
    (lambda: Poisson(2)(torch.ones(7), "all"), TypeError, "observed: expected"),
]
LAYERS = [
    (lambda: nn.SumLayer(4, 3, (5,))([1.0]), TypeError, r"^x: expected a torch.Tensor, got list$"),
    (
        lambda: nn.SumLayer(4, 3, (5,))(torch.zeros(2, 5, 3)),
        ValueError,
        r"^x: expected shape \[..., 5, 4\], got \[2, 5, 3\]$",
    ),
    (lambda: nn.SumLayer(4, 3, (5,))(torch.zeros(4)), ValueError, r"^x: expected shape \[..., 5, 4\], got \[4\]$"),
    (
        lambda: nn.TuckerLayer(3, 4, 2)(torch.zeros(2, 1, 4)),
        ValueError,
        r"^x: expected shape \[..., 3, 4\], got \[2, 1, 4\]$",
    ),
    (lambda: nn.ProductLayer()(torch.zeros(4)), ValueError, r"^x: expected at least 2 axes, got shape \[4\]$"),
    (lambda: nn.ProductLayer(0), ValueError, r"^arity: expected a positive integer, got 0$"),
    (lambda: nn.SumLayer(4, 0), ValueError, r"^out_units: expected a positive integer, got 0$"),
    (lambda: nn.SumLayer(4, 3, (5, 2.0)), TypeError, r"^lead: expected a positive integer, got 2.0$"),
    (lambda: nn.SumLayer(4, 3, 5), TypeError, r"^lead: expected a tuple of positive integers, got 5$"),
    (lambda: nn.CPLayer(2, 4, 4, lead=5), TypeError, r"^lead: expected a tuple of positive integers, got 5$"),
    (lambda: nn.TuckerLayer(2, 4, 4, lead=5), TypeError, r"^lead: expected a tuple of positive integers, got 5$"),
    *(
        (lambda make=make: make(2, [0] * 2, lead=5), TypeError, r"^lead: expected a tuple of positive integers, got 5$")
        for make in (
            nn.transitions.Banded,
            lambda c, _, lead: nn.transitions.Sparse(torch.tensor([[0, 1], [1, 0]]), c, lead=lead),
            lambda c, _, lead: nn.transitions.LowRank(c, c, lead=lead),
            lambda c, _, lead: nn.transitions.BlockDiagonal(c, c, lead=lead),
            lambda c, _, lead: nn.transitions.Kronecker(c, c, lead=lead),
            lambda c, _, lead: nn.transitions.Monarch(c, c, lead=lead),
        )
    ),
    (lambda: nn.transitions.Banded(3, 1), TypeError, r"^offsets: expected a sequence of integers, got 1$"),
    (lambda: nn.transitions.Banded(3, []), ValueError, r"^offsets: expected one or more, got none$"),
    (lambda: nn.LogWeights((2, 3)), TypeError, r"^shape: expected a non-negative integer, got \(2, 3\)$"),
    (lambda: nn.LogWeights(2, 3, dim="rows"), ValueError, r"^dim: expected an axis of \[2, 3\] .*, got 'rows'$"),
    (lambda: nn.CPLayer(0, 4, 4), ValueError, r"^num_inputs: expected a positive integer, got 0$"),
]
CIRCUITS = [call for kind in KINDS for call in circuit(kind)]


@pytest.mark.parametrize(("call", "error", "message"), CRFS + HMMS + INPUTS + LAYERS + CIRCUITS)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
