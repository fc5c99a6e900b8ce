"""What `logchain.nn` refuses, and that the argument is named."""

import pytest
import torch
from torch.distributions import constraints

from logchain import nn
from logchain.nn import (
    HMM,
    Binomial,
    Categorical,
    Gaussian,
    LinearChainCRF,
    Mixture,
    Poisson,
    SemiMarkovCRF,
    transitions,
)
from tests.nn.emissions import distribution
from tests.nn.hmms import ARCS, V, categories, network, normal, random_hmm

DATA, VECTORS = categories(5, V), normal(5, V, 2)
MASK = torch.ones(5, V, dtype=torch.bool)
META = torch.ones(5, 6, device="meta")
SPREADS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
BANDED, PER_STEP = transitions.Banded(3, [0]), transitions.Banded(3, [0], lead=(V - 1,))
TAGGER = LinearChainCRF(5, batch_first=True)
EMISSIONS, TAGS = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
LASTING = transitions.Durations(3, 4)
PLANE = Gaussian((2, 3, 2), 2)


def likelihood(emissions=EMISSIONS, tags=TAGS, **options):
    return TAGGER(emissions, tags, **options)


def segmented(begins):
    return SemiMarkovCRF(5, 4, batch_first=True)(EMISSIONS, TAGS, begins=begins)


def neural():
    return random_hmm(network())


def moved_by(transition, **options):
    return random_hmm(transition=transition, **options)


def returned(transitions):
    """The log-probability under a model whose transition module returns something."""
    module = torch.nn.Identity()
    module.forward = lambda _: transitions
    return moved_by(module).log_prob(DATA)


def gradient(optimizer=None, model=random_hmm):
    return model().fit(DATA, method="gradient", optimizer=optimizer)


def circuit(**options):
    return nn.ChainCircuit(3, 2, 2, **(options or {"num_categories": 3}))


def prior(scale):
    return nn.NormalInverseWishart(scale, 3.0)


def regressed(covariates):
    return nn.LinearGaussian(2, 3)(torch.ones(4), covariates=covariates)


CALLS = [
    (lambda: likelihood(emissions=torch.zeros(2, 3, 4)), ValueError, r"emissions: .*\[n, v, 5\], got \[2, 3, 4\]"),
    (lambda: likelihood(emissions=torch.zeros(2, 0, 5)), ValueError, r"emissions: .*at least one step.*\[2, 0, 5\]"),
    (lambda: likelihood(tags=torch.zeros(2, 3)), TypeError, "tags: expected integers, got float32"),
    (lambda: likelihood(tags=torch.zeros(3, 2).long()), ValueError, r"tags: expected shape \[2, 3\], got \[3, 2\]"),
    (lambda: likelihood(tags=torch.full((2, 3), 5)), ValueError, "tags: expected values from 0 to 4, got 5 to 5"),
    (lambda: likelihood(mask=torch.ones(3, 2).bool()), ValueError, r"mask: expected shape \[2, 3\], got \[3, 2\]"),
    (lambda: likelihood(mask=torch.ones(2, 3)), TypeError, "mask: expected bool or integers, got float32"),
    (lambda: likelihood(reduction="max"), ValueError, "reduction: expected 'none' or .*, got 'max'"),
    (lambda: torch.jit.script(TAGGER), NotImplementedError, r"expected .* got torch\.jit\.script"),
    (lambda: torch.jit.trace(TAGGER, (EMISSIONS, TAGS)), NotImplementedError, r"expected .* got torch\.jit\.trace"),
    (lambda: SemiMarkovCRF(5, 0), ValueError, "max_duration: expected a positive integer, got 0"),
    (lambda: segmented(torch.zeros(2, 3)), TypeError, "begins: expected bool or integers, got float32"),
    (lambda: segmented(torch.zeros(3, 2).bool()), ValueError, r"begins: expected shape \[2, 3\], got \[3, 2\]"),
    (lambda: torch.jit.script(SemiMarkovCRF(2, 2)), NotImplementedError, "^SemiMarkovCRF: expected torch.compile"),
    (lambda: HMM(0, "poisson"), ValueError, "num_states: expected a positive integer, got 0"),
    (lambda: HMM(2, "normal"), ValueError, "emission: expected 'gaussian' or"),
    (lambda: HMM(2, Categorical(3, 4)), ValueError, r"emission: expected units \(2,\) or \(d, 2\), got \(3,\)"),
    (lambda: HMM(2, 1), TypeError, "emission: expected a name or a torch.nn.Module, got int"),
    (lambda: HMM(2, "poisson", initial="stationary", num_steps=3), ValueError, "initial: expected 'free' where"),
    (lambda: HMM(2, "poisson", transition=1), TypeError, "transition: expected a torch.nn.Module, got int"),
    (lambda: random_hmm().log_prob([[0, 1]]), TypeError, "data: expected a torch.Tensor, got list"),
    (lambda: random_hmm().log_prob(DATA[:, :0]), ValueError, r"^data: expected at least one step .* got \[5, 0\]$"),
    (lambda: random_hmm().log_prob(DATA.to_sparse()), TypeError, "^data: expected a dense tensor, got .*sparse_coo$"),
    (lambda: random_hmm(num_steps=2).log_prob(DATA), ValueError, "data: expected at most 2 steps, got 4"),
    (lambda: random_hmm().log_prob(DATA, observed=MASK[:, 0]), ValueError, r"observed: .*\[5, 4\] or \[4\], got \[5\]"),
    (lambda: neural().log_prob(VECTORS, observed=VECTORS > 0), ValueError, r"observed: .* got \[5, 4, 2\]"),
    (lambda: random_hmm().log_prob(DATA, lengths=[1, 2]), ValueError, r"^lengths: .*\[5\] .* got \[2\]$"),
    (lambda: neural().log_prob(VECTORS, lengths=3), ValueError, r"^lengths: expected those of \[5, 4\], the steps"),
    (lambda: random_hmm(torch.nn.Identity()).log_prob(VECTORS * 1j), TypeError, "^emission: .* got complex128$"),
    (lambda: returned(torch.zeros(3, 3)), ValueError, "^transition: expected at least 3 axes"),
    (lambda: returned(torch.zeros(5, 4, 3, 3)), ValueError, r"^transition: .*\[5, 3, 3, 3\]"),
    (lambda: neural().sample(1, 2), TypeError, "emission: expected an Emission to sample from, got Sequential"),
    (lambda: HMM.from_hmmlearn(1), TypeError, "model: expected hmmlearn's .*, got int"),
    (lambda: random_hmm(initial="stationary").fit(DATA), ValueError, "method: expected 'gradient' with a stationary"),
    (lambda: neural().fit(VECTORS), ValueError, "method: expected 'gradient' .* got 'em' with emission.0.weight"),
    (lambda: random_hmm().fit(DATA, step=1.5), ValueError, "step: expected a number from 0 to 1"),
    (lambda: gradient(1), TypeError, "optimizer: expected a function of"),
    (lambda: gradient(model=lambda: random_hmm().half()), ValueError, "^optimizer: .* float16, .* got None$"),
    (lambda: gradient(model=lambda: random_hmm().requires_grad_(False)), ValueError, "^model: expected trained param"),
    (lambda: torch.inference_mode()(random_hmm().fit)(DATA), RuntimeError, "^fit: expected a call outside"),
    (lambda: nn.em_step(random_hmm(), []), ValueError, "at least one batch"),
    (lambda: HMM(3, "gaussian").to("meta").initialize(META), ValueError, "^data: .* got meta$"),
    (lambda: Poisson(2)(torch.tensor([-1])), ValueError, "expected counts, got -1"),
    (lambda: Categorical(2, 3)(torch.tensor([0.5])), ValueError, "integers from 0 to 2, got 0.5"),
    (lambda: Gaussian((3, 2))(torch.zeros(5, 4)), ValueError, r"expected shape \[..., 3\], got \[5, 4\]"),
    (lambda: Gaussian(2)(torch.zeros(2, dtype=torch.complex64)), TypeError, "complex64"),
    (lambda: Gaussian(1)(torch.tensor([torch.inf])), ValueError, "data: expected finite numbers"),
    (lambda: distribution((2,))(torch.tensor([-1.0])), ValueError, "GreaterThan"),
    (lambda: Poisson(2)(META), ValueError, "^data: expected device cpu, got meta$"),
    (lambda: Poisson(2)(torch.ones(7), torch.ones(7)), TypeError, "observed: expected"),
    (lambda: Gaussian(()), ValueError, "units: expected a positive integer or several, got none"),
    (lambda: Gaussian(2, covariance="full"), ValueError, "num_features: expected an integer"),
    (lambda: Gaussian(2, prior=prior(torch.ones(3))), ValueError, r"prior.scale: expected what .* \[2\], got \[3\]"),
    (lambda: Poisson(2, prior=nn.Gamma(torch.ones(3))), ValueError, r"prior.concentration: .* \[2\], got \[3\]"),
    (lambda: Categorical(2, 3, prior=nn.Dirichlet(torch.ones(3))), ValueError, r"prior.concentration: .* got \[3\]"),
    (lambda: nn.Multinomial(2, 3)(torch.tensor([[0.5, 1.0, 1.0]])), ValueError, "data: expected counts, got .0.5"),
    (lambda: nn.Product(Poisson(2), Poisson(3)), ValueError, r"^families: .* the same units, got \[\(2,\), \(3,\)\]"),
    (lambda: nn.Product(Poisson(2), 1), TypeError, "^families: expected emissions, got int"),
    (lambda: nn.Product(Poisson(2)).distribution(), TypeError, "^distribution: expected one of the families"),
    (lambda: nn.Distribution("Student", 2), ValueError, "^family: expected the name of a class .*, got 'Student'"),
    (lambda: nn.Distribution("Dirichlet", 2), ValueError, "^concentration: expected an initial value"),
    (lambda: nn.LinearGaussian(2, 3)(torch.ones(4)), TypeError, "^covariates: expected a torch.Tensor, got NoneType"),
    (lambda: regressed(torch.ones(4, 2)), ValueError, r"^covariates: expected shape \[..., 3\], got \[4, 2\]"),
    (lambda: Binomial(2, -1), ValueError, "total_count: expected a non-negative integer, got -1"),
    (lambda: Mixture(Poisson(2)), ValueError, "layer: expected units"),
    (lambda: distribution((2,), concentration=-1.0), ValueError, "concentration: expected"),
    (lambda: distribution((2,), rate=torch.ones(3)), ValueError, r"rate: expected what .* \[2\], got \[3\]"),
    (lambda: distribution((2,), limits={"rate": constraints.dependent}), ValueError, "limits: expected what rate has"),
    (lambda: Poisson(1).set(torch.tensor([-1.0])), ValueError, "rates: expected"),
    (lambda: Gaussian(1).set(torch.zeros(1), torch.zeros(1)), ValueError, "covariance: expected positive"),
    (lambda: Gaussian(1, 2, "full").set(torch.zeros(2), torch.inf * torch.eye(2)), ValueError, "covariance: .* finite"),
    (lambda: Gaussian(2, 2, "tied").set(torch.zeros(2), SPREADS.diag_embed()), ValueError, "covariance: .* all units"),
    (lambda: Gaussian(1).initialize(torch.full((3,), torch.nan)), ValueError, "at least one observation"),
    (lambda: Gaussian(1).initialize(torch.ones(3)), ValueError, "two different observations"),
    (lambda: nn.LogWeights(3).set(torch.tensor([-1.0, 1.0, 1.0])), ValueError, "probabilities: expected non-negative"),
    (lambda: nn.LogWeights(2, 3, dim="rows"), ValueError, r"^dim: expected an axis of \[2, 3\] .*, got 'rows'$"),
    (lambda: transitions.Banded(3, [3]), ValueError, "offsets: expected different integers from -2 to 2"),
    (lambda: transitions.Sparse(ARCS, 5), ValueError, "indices: .* lead out of every state, got none out of 4"),
    (lambda: transitions.Sparse(ARCS[:, [0, 1, 1]]), ValueError, "indices: expected each pair of states once"),
    (lambda: transitions.LowRank(3, 1).set(*[torch.ones(3, 1)] * 2, torch.ones(3)), ValueError, "diagonal: expected N"),
    (lambda: transitions.Kronecker(2), ValueError, "sizes: expected two or more, got 1"),
    (lambda: transitions.Monarch(2, 2, 3), ValueError, "middle: expected a divisor of 4 states, got 3"),
    (lambda: transitions.Durations(3, 4, "geometric"), ValueError, "durations: expected 'free' or .*, got 'geometric'"),
    (lambda: transitions.Durations(2, 4, distribution((3,))), ValueError, r"^durations: .*\(2,\), got \(3,\)$"),
    (lambda: transitions.Durations(2, 4).set(torch.eye(2), torch.ones(2, 4)), ValueError, "^matrix: .*diagonal of 0"),
    (lambda: transitions.Durations(2, 4).set(torch.eye(2)), ValueError, "^parameters: expected 2, got 1$"),
    (lambda: moved_by(LASTING, initial="stationary").log_prob(DATA), ValueError, "^initial: .* with durations"),
    (lambda: moved_by(transitions.Durations(4, 2)).log_prob(DATA), ValueError, r"^transition: .*\[5, 3, 3, 3\]"),
    (lambda: transitions.Monarch(2, 2, lead=5), TypeError, "^lead: expected a tuple of positive integers, got 5$"),
    (lambda: moved_by(BANDED).log_prob(DATA, covariates=DATA), ValueError, "covariates: expected None"),
    (lambda: moved_by(PER_STEP, initial="stationary").log_prob(DATA), ValueError, "initial: .*3 transition matrices"),
    (lambda: circuit().log_prob(DATA), ValueError, r"^data: expected shape \[..., 3\], got \[5, 4\]$"),
    (lambda: circuit(input="poisson"), ValueError, "^input: .* got 'poisson'$"),
    (lambda: circuit(input=Poisson((2, 3, 2))).conditionals(DATA[:, 1:]), TypeError, "^input: .* got Poisson$"),
    (lambda: circuit(input=PLANE).mpe(VECTORS[:, 1:], VECTORS[:, 1:] > 0), ValueError, "^data: .* whole"),
]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
