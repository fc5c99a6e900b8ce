"""What `logchain.nn` refuses, and that the argument is named."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.distributions import constraints

from logchain import nn
from logchain.nn import (
    HMM,
    Categorical,
    Durations,
    Gaussian,
    LinearChainCRF,
    Mixture,
    Poisson,
    SemiMarkovCRF,
    Transitions,
)
from logchain.transitions import Banded, Monarch, Sparse
from tests.nn.emissions import distribution
from tests.nn.hmms import ARCS, V, categories, driven_hmm, network, normal, random_hmm

DATA, VECTORS = categories(5, V), normal(5, V, 2)
NUMBERS, TRIPLES = VECTORS[..., 0].float(), DATA[:, :3] % 2
MASK = torch.ones(5, V, dtype=torch.bool)
META = torch.ones(5, 6, device="meta")
SPREADS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
BANDED = Transitions(Banded(torch.ones(1, 3), [0]))
PER_STEP = Transitions(Banded(torch.ones(1, 3), [0]), lead=(V - 1,))
MONARCH = Monarch(torch.ones(2, 2, 2), torch.ones(2, 2, 2))
TAGGER = LinearChainCRF(5, batch_first=True)
EMISSIONS, TAGS = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
LASTING = Durations(3, 4)
PLANE, SLOPED = Gaussian((2, 3, 2), 2), Gaussian((2, 3, 2), 2, "full")
PART = VECTORS[:, 1:], VECTORS[:, 1:] > 0


def likelihood(emissions=EMISSIONS, tags=TAGS, **options):
    return TAGGER(emissions, tags, **options)


def segmented(begins):
    return SemiMarkovCRF(5, 4, batch_first=True)(EMISSIONS, TAGS, begins=begins)


def moved_by(transition, **options):
    return random_hmm(transition=transition, **options)


def returned(transitions):
    """The log-probability under a model whose transition module returns something."""
    module = torch.nn.Identity()
    module.forward = lambda _: transitions
    return moved_by(module).log_prob(DATA)


def gradient(optimizer=None, model=random_hmm):
    return model().fit(DATA, method="gradient", optimizer=optimizer)


def forecast(rows):
    return switching().forecast(NUMBERS, 2, covariates=VECTORS.float(), future_covariates=rows.float())


neural, switching = (lambda: random_hmm(network())), (lambda: HMM(2, nn.LinearGaussian(2, 2)))
circuit, prior = partial(nn.ChainCircuit, 3, 2, 2), partial(nn.NormalInverseWishart, dof=3.0)
CALLS = [
    (lambda: likelihood(emissions=torch.zeros(2, 3, 4)), ValueError, r"emissions: .*\[n, v, 5\], got \[2, 3, 4\]"),
    (lambda: likelihood(emissions=torch.zeros(2, 0, 5)), ValueError, r"emissions: .*at least one step.*\[2, 0, 5\]"),
    (lambda: likelihood(tags=torch.zeros(2, 3)), TypeError, "tags: expected integers, got float32"),
    (lambda: likelihood(tags=torch.zeros(3, 2).long()), ValueError, r"tags: expected shape \[2, 3\], got \[3, 2\]"),
    (lambda: likelihood(tags=torch.full((2, 3), 5)), ValueError, "tags: expected values from 0 to 4, got 5 to 5"),
    (lambda: likelihood(mask=torch.ones(3, 2).bool()), ValueError, r"mask: expected shape \[2, 3\], got \[3, 2\]"),
    (lambda: likelihood(mask=torch.ones(2, 3)), TypeError, "mask: expected bool or integers, got float32"),
    (lambda: likelihood(reduction="max"), ValueError, "reduction: expected one of 'none', .*, got 'max'"),
    (lambda: torch.jit.script(TAGGER), NotImplementedError, r"expected .* got torch\.jit\.script"),
    (lambda: torch.jit.trace(TAGGER, (EMISSIONS, TAGS)), NotImplementedError, r"expected .* got torch\.jit\.trace"),
    (lambda: SemiMarkovCRF(5, 0), ValueError, "max_duration: expected a positive integer, got 0"),
    (lambda: segmented(torch.zeros(2, 3)), TypeError, "begins: expected bool or integers, got float32"),
    (lambda: segmented(torch.zeros(3, 2).bool()), ValueError, r"begins: expected shape \[2, 3\], got \[3, 2\]"),
    (lambda: torch.jit.script(SemiMarkovCRF(2, 2)), NotImplementedError, "^SemiMarkovCRF: expected torch.compile"),
    (lambda: HMM(0, "poisson"), ValueError, "num_states: expected a positive integer, got 0"),
    (lambda: HMM(2, "normal"), ValueError, "emission: expected 'gaussian' or .* got 'normal'"),
    (lambda: HMM(2, 5), TypeError, "emission: expected 'gaussian' or .* or a torch.nn.Module, got int"),
    (lambda: HMM(2, "poisson", initial="uniform"), ValueError, "initial: expected 'free' or .*, got 'uniform'"),
    (lambda: HMM(2, Categorical(3, 4)), ValueError, r"emission: expected units \(2,\) or \(d, 2\), got \(3,\)"),
    (lambda: HMM(2, "poisson", transition=1), TypeError, "transition: expected .* a torch.nn.Module, got int"),
    (lambda: random_hmm().log_prob([[0, 1]]), TypeError, r"data\[0\]: expected a torch.Tensor, .* list; pass torch"),
    (lambda: random_hmm().log_prob(DATA[:, :0]), ValueError, r"^data: expected at least one step .* got \[5, 0\]$"),
    (lambda: random_hmm().log_prob(DATA.to_sparse()), TypeError, "^data: expected a dense tensor, got .*sparse_coo$"),
    (lambda: moved_by(Transitions(3, lead=(2,))).log_prob(DATA), ValueError, "data: expected at most 3 steps, got 4"),
    (lambda: random_hmm().log_prob(DATA, observed=MASK[:, 0]), ValueError, r"observed: .*\[5, 4\] or \[4\], got \[5\]"),
    (lambda: neural().log_prob(VECTORS, observed=VECTORS > 0), ValueError, r"observed: .* got \[5, 4, 2\]"),
    (lambda: random_hmm().log_prob(DATA, lengths=[1, 2]), ValueError, r"^lengths: .*\[5\] .* got \[2\]$"),
    (lambda: neural().log_prob(VECTORS, lengths=3), ValueError, r"^lengths: expected those of \[5, 4\], the steps"),
    (lambda: random_hmm(torch.nn.Identity()).log_prob(VECTORS * 1j), TypeError, "^emission: .* got complex128$"),
    (lambda: random_hmm().log_prob([]), ValueError, "^data: expected a list of sequences, .* got none$"),
    (lambda: random_hmm().log_prob([DATA, DATA]), ValueError, r"^data: expected sequences \[v\], got \[10, 4\]$"),
    (lambda: random_hmm().log_prob([DATA[0], DATA[0, :0]]), ValueError, r"^data\[1\]: .*at least one step, got \[0\]$"),
    (lambda: random_hmm().log_prob([DATA[0], DATA]), ValueError, r"^data\[1\]: expected shape \[v\], .* got \[5, 4\]$"),
    (lambda: random_hmm().log_prob([DATA[0]], lengths=[4]), ValueError, "^lengths: expected None with a list"),
    (lambda: random_hmm().log_prob([DATA[0]], MASK[0]), ValueError, "^observed: expected a list of seq.*got Tensor$"),
    (lambda: random_hmm().log_prob([DATA[0]], [MASK[0, :2]]), ValueError, "^observed: expected sequences as long as"),
    (lambda: random_hmm().log_prob(np.array(["a"])), TypeError, "^data: expected numbers, got an array of <U1$"),
    (lambda: random_hmm().log_prob(DATA[0], lengths=[1, 2]), ValueError, "^lengths: .*sum 4 .* with sum 3$"),
    (lambda: random_hmm().log_prob(DATA, states=MASK), TypeError, "^states: expected integers, got bool$"),
    (lambda: random_hmm().log_prob(DATA, states=DATA[0]), ValueError, r"^states: expected shape \[5, 4\], got \[4\]$"),
    (lambda: random_hmm().log_prob(DATA, states=DATA - 2), ValueError, "^states: .*from -1 to 2, got -2 to 1$"),
    (lambda: driven_hmm().log_prob(DATA, covariates=VECTORS[:, 1:]), ValueError, r"^covariates: .*\[5, 4, \.\.\.\]"),
    (lambda: moved_by(Transitions(3, lead=(3,))).forecast(DATA, 2), ValueError, "^transition: expected one matrix for"),
    (lambda: driven_hmm().forecast(DATA, 2, covariates=VECTORS), ValueError, "^future_covariates: .* 2 steps"),
    (lambda: forecast(VECTORS[:, :3]), ValueError, r"^future_covariates: .* \[5, 2, \.\.\.\].* got \[5, 3, 2\]$"),
    (lambda: switching().fit(NUMBERS, covariates=VECTORS[:, 1:]), ValueError, r"^covariates: .* got \[5, 3, 2\]$"),
    (lambda: HMM(2, "gaussian", transition=torch.eye(2)), TypeError, r"^transition: .*; pass Transitions\(matrix\)$"),
    (lambda: HMM(2, "gaussian", transition=np.eye(2)), TypeError, r"^transition: .*; pass Transitions\(matrix\)$"),
    (lambda: random_hmm().log_prob([1, 2, 3]), TypeError, r"^data\[0\]: .* pass torch.tensor\(data\)$"),
    (lambda: random_hmm().log_prob(np.full((5, 4), 2**64 - 1, "uint64")), ValueError, "^data: .* got 184467440737095"),
    (lambda: random_hmm().sort_states([0.0, 1.0, np.nan]), ValueError, "^by: expected numbers, got nan of state 2$"),
    (lambda: random_hmm().fit(DATA, tolerance=np.nan), ValueError, "^tolerance: expected a number, got nan$"),
    (lambda: random_hmm().fit(DATA, weights=["a"] * 5), TypeError, "^weights: expected numbers, got an array of <U1$"),
    (lambda: neural().impute(VECTORS), TypeError, "^emission: expected an Emission to impute from, got Sequential$"),
    (lambda: random_hmm().sort_states(torch.ones(2)), ValueError, r"^by: expected numbers \[3\], got shape \[2\]$"),
    (lambda: moved_by(BANDED).sort_states(torch.ones(3)), TypeError, "^transition: expected a dense matrix"),
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
    (lambda: Gaussian(2, prior=prior(torch.ones(3))), ValueError, r"prior.scale: expected a shape .* \[2\], got \[3\]"),
    (lambda: Poisson(2, prior=nn.Gamma(torch.ones(3))), ValueError, r"prior.concentration: .* \[2\], got \[3\]"),
    (lambda: Categorical(2, 3, prior=nn.Dirichlet(torch.ones(3))), ValueError, r"prior: .* got \[3\]"),
    (lambda: nn.Multinomial(2, 3)(torch.tensor([[0.5, 1.0, 1.0]])), ValueError, "data: expected counts, got .0.5"),
    (lambda: nn.Product(Poisson(2), Poisson(3)), ValueError, r"^families: .* the same units, got \[\(2,\), \(3,\)\]"),
    (lambda: nn.Product(Poisson(2), 1), TypeError, "^families: expected emissions, got int"),
    (lambda: nn.Product(Poisson(2)).distribution(), NotImplementedError, "^distribution: expected one of the families"),
    (lambda: nn.Distribution("Student", 2), ValueError, "^family: expected the name of a class .*, got 'Student'"),
    (lambda: nn.Distribution("Dirichlet", 2), ValueError, "^concentration: expected an initial value"),
    (lambda: switching().emission(torch.ones(4)), TypeError, "^covariates: expected a torch.Tensor, got NoneType"),
    (lambda: switching().emission(NUMBERS, covariates=NUMBERS), ValueError, r"^covariates: .*\[..., 2\], got \[5, 4"),
    (lambda: nn.Binomial(2, -1), ValueError, "total_count: expected a non-negative integer, got -1"),
    (lambda: Mixture(Poisson(2)), ValueError, "layer: expected units"),
    (lambda: distribution((2,), concentration=-1.0), ValueError, "concentration: expected"),
    (lambda: distribution((2,), rate=torch.ones(3)), ValueError, r"rate: expected a shape .* \[2\], got \[3\]"),
    (lambda: distribution((2,), limits={"rate": constraints.dependent}), ValueError, "limits: expected a constraint"),
    (lambda: Poisson(2).set(torch.tensor([1.0, -1.0])), ValueError, "^rates: expected finite, .* numbers, got -1$"),
    (lambda: nn.Binomial(1, 4).set(torch.tensor([2.0])), ValueError, "^probabilities: expected .* 0 to 1, got 2$"),
    (lambda: Poisson(2).set(torch.ones(3)), ValueError, r"^rates: expected a shape .* to \[2\], got \[3\]$"),
    (lambda: Gaussian(1).set(torch.zeros(1), torch.zeros(1)), ValueError, "covariance: expected positive"),
    (lambda: Gaussian(1, 2, "full").set(torch.zeros(2), torch.inf * torch.eye(2)), ValueError, "covariance: .* finite"),
    (lambda: Gaussian(2, 2, "tied").set(torch.zeros(2), SPREADS.diag_embed()), ValueError, "covariance: .* all units"),
    (lambda: Gaussian(1).initialize(torch.full((3,), torch.nan)), ValueError, "at least one observation"),
    (lambda: Gaussian(1).initialize(torch.ones(3)), ValueError, "two different observations"),
    (lambda: nn.LogWeights(3).set(torch.tensor([-1.0, 1.0, 1.0])), ValueError, "probabilities: expected non-negative"),
    (lambda: nn.LogWeights(2, 3, dim="rows"), ValueError, r"^dim: expected an axis of \[2, 3\] .*, got 'rows'$"),
    (lambda: nn.LogWeights(2).set(torch.ones(2)), ValueError, r"sums of 1, got 2; pass weights / weights.sum\(-1, k"),
    (lambda: nn.LogWeights(2, prior=0.5), TypeError, "^prior: expected a Dirichlet or None, got float$"),
    (lambda: Transitions("3"), TypeError, "^states: expected a number, a matrix or a structure .*, got str$"),
    (lambda: Transitions(torch.ones(2, 3)), ValueError, r"^states: expected a matrix \[..., c, c\], got \[2, 3\]"),
    (lambda: Transitions(torch.zeros(2, 2)), ValueError, "^states: expected non-negative weights with finite, positi"),
    (lambda: Transitions(Sparse(ARCS, torch.ones(7), 5)), ValueError, "^states: .* every state, got none out of 4"),
    (lambda: Transitions(MONARCH, sticky=1.0), ValueError, "^sticky: expected 0 with Monarch, got 1.0"),
    (lambda: Transitions(MONARCH, lead=5), TypeError, "^lead: expected a tuple of integers, got 5$"),
    (lambda: Transitions(MONARCH).set(torch.ones(2)), ValueError, "^parameters: expected 2, got 1$"),
    (lambda: Durations(3, 4, "geometric"), ValueError, "durations: expected one of 'free', .*, got 'geometric'"),
    (lambda: Durations(2, 4, distribution((3,))), ValueError, r"^durations: .*\(2,\), got \(3,\)$"),
    (lambda: Durations(2, 4).set(torch.eye(2), torch.ones(2, 4)), ValueError, "^probabilities: expected 0 for weights"),
    (lambda: moved_by(LASTING, initial="stationary").log_prob(DATA), ValueError, "^initial: .* with durations"),
    (lambda: moved_by(Durations(4, 2)).log_prob(DATA), ValueError, r"^transition: .*\[5, 3, 3, 3\]"),
    (lambda: moved_by(BANDED).log_prob(DATA, covariates=DATA), ValueError, "covariates: expected None"),
    (lambda: moved_by(PER_STEP, initial="stationary").log_prob(DATA), ValueError, "initial: .*3 transition matrices"),
    (lambda: circuit().log_prob(DATA), ValueError, r"^data: expected shape \[..., 3\], got \[5, 4\]$"),
    (lambda: circuit().fit(TRIPLES, states=TRIPLES), ValueError, "^states: expected None with a circuit"),
    (lambda: circuit().fit(TRIPLES, covariates=TRIPLES), ValueError, "^covariates: expected None with a circuit"),
    (lambda: circuit(emission="normal"), ValueError, "^emission: .* got 'normal'$"),
    (lambda: circuit(emission="poisson").conditionals(DATA[:, 1:]), TypeError, "^emission: .* got Poisson$"),
    (lambda: circuit(emission=PLANE).decode(*PART), ValueError, "^data: .* whole"),
    (lambda: circuit(emission=SLOPED).sample_conditional(*PART), ValueError, "^data: .* whole"),
]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
