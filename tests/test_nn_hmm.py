"""`logchain.nn.HMM`: likelihoods are sums over all paths, expectation maximisation counts them, modules behave."""

import copy
import io
import itertools

import numpy as np
import pytest
import scipy.stats
import torch

import logchain
from logchain.nn import HMM, Categorical, LogWeights, fit
from logchain.nn.stationary import stationary
from tests import oracle

F64 = torch.float64
V, C = 4, 3


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random_hmm(emission="categorical", seed=0, **options):
    if emission == "categorical":
        options.setdefault("num_categories", 4)
    return HMM(C, emission, generator=seeded(seed), **options).double()


def categories(*shape, seed=1):
    return torch.randint(4, shape, generator=seeded(seed))


class Driven(torch.nn.Module):
    """Logits of transitions, linear in covariates [..., k]."""

    def __init__(self, k):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(k, C * C, generator=seeded(5)))

    def forward(self, covariates):
        return (covariates @ self.weight).unflatten(-1, (C, C))


class Network(torch.nn.Module):
    """Log-potentials of data [..., d]."""

    def __init__(self, d):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(d, C, generator=seeded(6)))

    def forward(self, data):
        return torch.cos(data @ self.weight)


def array(tensor):
    return tensor.detach().double().numpy()


def probabilities(weights):
    return np.exp(array(weights()))


def parameters(hmm):
    return probabilities(hmm.initial), probabilities(hmm.transition)


def all_paths(x, bulk, p0, lengths=None):
    return oracle.all_paths(x, bulk, p0, lengths=None if lengths is None else np.array(lengths))


def close(found, truth, atol=1e-10):
    np.testing.assert_allclose(array(found), truth, rtol=0, atol=atol)


# what is observed, as scipy has it


def test_categories():
    hmm, data = random_hmm(), categories(5, V)
    p0, bulk = parameters(hmm)
    table = array(hmm.emission.weights())  # (K, c)
    truth = all_paths(table[data.numpy()], bulk, p0)
    close(hmm.log_prob(data), truth.log_norm)
    found = hmm.posterior(data, transitions="full")
    close(found.states, truth.states)
    close(found.transitions, truth.transitions)


def test_counts_of_several_features():
    """Independent given the state; a part of a step may be missing."""
    hmm = random_hmm("poisson", num_features=2)
    data = torch.tensor([[0, 3], [2, 1], [1, 1], [4, 0]], dtype=F64)
    rates = np.exp(array(hmm.emission.log_rates))
    terms = scipy.stats.poisson.logpmf(data.numpy()[:, :, None], rates)  # (v, d, c)
    p0, bulk = parameters(hmm)
    close(hmm.log_prob(data), all_paths(terms.sum(1), bulk, p0).log_norm)
    observed = torch.tensor([[True, True], [False, True], [False, False], [True, False]])
    truth = all_paths((terms * observed.numpy()[..., None]).sum(1), bulk, p0).log_norm
    close(hmm.log_prob(data, observed=observed), truth)
    close(hmm.log_prob(data.masked_fill(~observed, torch.nan)), truth)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_vectors(covariance):
    hmm = random_hmm("gaussian", num_features=2, covariance=covariance)
    data = torch.randn(5, V, 2, generator=seeded(), dtype=F64)
    hmm.initialise(data, generator=seeded())
    means, covariances = array(hmm.emission.means), array(hmm.emission.covariance())
    logpdf = scipy.stats.multivariate_normal.logpdf
    x = np.stack([logpdf(data.numpy(), means[j], covariances[j]) for j in range(C)], -1)
    p0, bulk = parameters(hmm)
    close(hmm.log_prob(data), all_paths(x, bulk, p0).log_norm)


def test_a_single_sequence():
    hmm, data = random_hmm(), categories(V)
    found = hmm.log_prob(data)
    assert found.shape == ()
    assert found == hmm.log_prob(data[None])[0]


def test_log_potentials_of_a_network():
    hmm = random_hmm(Network(2))
    data = torch.randn(5, V, 2, generator=seeded(), dtype=F64)
    p0, bulk = parameters(hmm)
    x = array(hmm.emission(data))
    close(hmm.log_prob(data), all_paths(x, bulk, p0).log_norm)
    observed = torch.rand(5, V, generator=seeded()) < 0.5
    close(hmm.log_prob(data, observed=observed), all_paths(np.where(observed[..., None], x, 0), bulk, p0).log_norm)


# where a chain starts, and how it goes on


def test_a_matrix_per_step():
    hmm, data = random_hmm(num_steps=V), categories(5, V)
    p0, bulk = parameters(hmm)
    assert bulk.shape == (V - 1, C, C)
    x = array(hmm.emission.weights())[data.numpy()]
    close(hmm.log_prob(data), all_paths(x, bulk, p0).log_norm)
    close(hmm.log_prob(data[:, :2]), all_paths(x[:, :2], bulk[:1], p0).log_norm)
    close(hmm.log_prob(data[:, :1]), all_paths(x[:, :1], bulk[:0], p0).log_norm)
    with pytest.raises(ValueError, match="data: expected at most 4 steps, got 5"):
        hmm.log_prob(categories(5, V + 1))


@pytest.mark.parametrize("steps", [V - 1, 1])
def test_transitions_of_covariates(steps):
    hmm, data = random_hmm(transition=Driven(2)), categories(5, V)
    covariates = torch.randn(5, steps, 2, generator=seeded(), dtype=F64)
    logits = array(hmm.transition(covariates))
    bulk = scipy.special.softmax(logits, -1)
    x = array(hmm.emission.weights())[data.numpy()]
    close(hmm.log_prob(data, covariates=covariates), all_paths(x, bulk, probabilities(hmm.initial)).log_norm)


def test_a_stationary_start():
    hmm, data = random_hmm(initial="stationary"), categories(5, V)
    bulk = probabilities(hmm.transition)
    p0 = np.linalg.matrix_power(bulk[0], 1000)[0]
    x = array(hmm.emission.weights())[data.numpy()]
    close(hmm.log_prob(data), all_paths(x, bulk, p0).log_norm)
    torch.autograd.gradcheck(lambda *_: hmm.log_prob(data), tuple(hmm.parameters()))


def test_stationary_distributions():
    matrix = torch.softmax(3 * torch.randn(2, 6, 6, generator=seeded(), dtype=F64), -1)
    found = stationary(matrix)
    np.testing.assert_allclose((found[:, None] @ matrix)[:, 0], found, rtol=1e-14)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-14)
    # birth and death: p_{i+1} / p_i = 1e-12, far below where a linear solver's rounding is
    chain = torch.diag(torch.full((5,), 1e-13, dtype=F64), 1) + torch.diag(torch.full((5,), 0.1, dtype=F64), -1)
    chain = chain + torch.diag(1 - chain.sum(-1))
    np.testing.assert_allclose(stationary(chain)[1:] / stationary(chain)[:-1], 1e-12, rtol=1e-12)
    torch.autograd.gradcheck(lambda logits: stationary(logits.softmax(-1)), matrix[0].log().requires_grad_())
    with pytest.raises(ValueError, match="transition: expected every state to reach every other"):
        stationary(torch.eye(2))


# what is not observed


LENGTHS = [4, 1, 3, 2, 4]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -1.0])
@pytest.mark.parametrize("kind", ["gaussian", "network", "covariates"])
def test_what_lies_behind_the_end_has_no_influence(kind, poison):
    options = {"gaussian": {}, "network": {}, "covariates": {"transition": Driven(2)}}[kind]
    hmm = random_hmm(Network(2) if kind == "network" else "gaussian", **options)
    shape = (5, V, 2) if kind == "network" else (5, V)
    data = torch.randn(*shape, generator=seeded(), dtype=F64)
    behind = torch.arange(V) >= torch.tensor(LENGTHS)[:, None]
    given = {}
    if kind == "covariates":
        given["covariates"] = torch.randn(5, V - 1, 2, generator=seeded(2), dtype=F64)

    def answers(data, **given):
        hmm.zero_grad()
        found = hmm.log_prob(data, lengths=LENGTHS, **given)
        found.sum().backward()
        return [found.detach(), *(parameter.grad.clone() for parameter in hmm.parameters())]

    truth = answers(data, **given)
    for row, length in enumerate(LENGTHS):
        some = {name: value[row, : length - 1] for name, value in given.items()}
        close(truth[0][row], array(hmm.log_prob(data[row, :length], **some)))
    if kind == "covariates":
        given["covariates"] = given["covariates"].masked_fill(behind[:, 1:, None], poison)
    found = answers(data.masked_fill(behind[..., None] if kind == "network" else behind, poison), **given)
    for a, b in zip(found, truth, strict=True):
        assert torch.equal(a, b)


def test_categories_behind_the_end_may_be_none():
    hmm, data = random_hmm(), categories(5, V)
    behind = torch.arange(V) >= torch.tensor(LENGTHS)[:, None]
    padded = data.masked_fill(behind, -1)
    assert torch.equal(hmm.log_prob(padded, lengths=LENGTHS), hmm.log_prob(data, lengths=LENGTHS))
    with pytest.raises(ValueError, match="data: "):
        hmm.log_prob(padded)


def test_what_is_not_observed_is_summed_out():
    hmm, data = random_hmm(), categories(V)
    observed = torch.tensor([True, False, True, False])
    rows = [torch.tensor([data[0], a, data[2], b]) for a, b in itertools.product(range(4), repeat=2)]
    close(hmm.log_prob(data, observed=observed), array(hmm.log_prob(torch.stack(rows)).logsumexp(0)))
    close(hmm.log_prob(data, observed=torch.zeros(V, dtype=torch.bool)), 0.0)


# paths and draws


def test_the_best_path():
    hmm, data = random_hmm(), categories(5, V)
    p0, bulk = parameters(hmm)
    x = array(hmm.emission.weights())[data.numpy()]
    found = hmm.decode(data)
    for row in range(5):
        weights = oracle.paths(x[row], bulk, p0)
        best = max(weights, key=weights.get)
        assert tuple(found.states[row].tolist()) == best
        close(found.score[row], float(weights[best].ln()))


def test_draws_have_the_probabilities_of_the_model():
    """Each of 4^3 outcomes as often as the sum over paths says, within five standard deviations."""
    hmm = random_hmm(num_steps=3)
    count = 20_000
    states, data = hmm.sample(count, 3, generator=seeded())
    assert states.shape == data.shape == (count, 3)
    every = torch.cartesian_prod(*[torch.arange(4)] * 3)
    truth = array(hmm.log_prob(every).exp())
    codes = (data * torch.tensor([16, 4, 1])).sum(-1)
    found = torch.bincount(codes, minlength=64).numpy() / count
    assert (np.abs(found - truth) <= 5 * np.sqrt(truth / count)).all()
    p0, bulk = parameters(hmm)
    pairs = np.stack([torch.bincount(C * states[:, i] + states[:, i + 1], minlength=C * C).numpy() for i in range(2)])
    first = p0[:, None] * bulk[0]
    truth = np.stack([first, first.sum(0)[:, None] * bulk[1]]).reshape(2, -1)
    assert (np.abs(pairs / count - truth) <= 5 * np.sqrt(truth / count)).all()


def test_draws_of_states_given_the_data():
    hmm, data = random_hmm(), categories(2, V)
    drawn = hmm.sample_posterior(data, 20_000, generator=seeded())
    share = torch.nn.functional.one_hot(drawn, C).double().mean(0)
    truth = array(hmm.posterior(data).states)
    assert (np.abs(share.numpy() - truth) <= 5 * np.sqrt(truth / 20_000) + 1e-12).all()


def test_the_library_takes_the_arguments():
    hmm, data = random_hmm(), categories(2, V)
    found = logchain.entropy(**hmm.arguments(data, lengths=[4, 2])._asdict())
    assert found.shape == (2,) and (found > 0).all()


# fitting


def test_a_step_takes_the_expected_counts():
    """Of paths by enumeration, and of categories weighted by them; batches add up to the same."""
    hmm, data = random_hmm(), categories(5, V)
    p0, bulk = parameters(hmm)
    table = array(hmm.emission.weights())
    truth = all_paths(table[data.numpy()], bulk, p0)
    starts, moves = truth.states[:, 0].sum(0), truth.transitions.sum((0, 1))
    seen = np.stack([truth.states[(data == k).numpy()].sum(0) for k in range(4)])  # (K, c)
    other = copy.deepcopy(hmm)
    report = hmm.fit(data, max_iterations=1, restarts=0)
    assert report.history[0] == pytest.approx(truth.log_norm.sum(), abs=1e-10)
    close(hmm.initial().exp(), starts / starts.sum())
    close(hmm.transition().exp()[0], moves / moves.sum(-1, keepdims=True))
    close(hmm.emission.weights().exp(), seen / seen.sum(0))
    other.fit(data, max_iterations=1, restarts=0, batch_size=2)
    for a, b in zip(other.parameters(), hmm.parameters(), strict=True):
        close(a, array(b))
    with pytest.raises(ValueError, match="data: expected a finite log-likelihood, got -inf"):
        hmm.emission.weights.set(torch.tensor([[1.0], [1.0], [1.0], [0.0]]))
        hmm.fit(data, restarts=0)


@pytest.mark.parametrize("options", [{}, {"num_steps": 6}], ids=str)
def test_expectation_maximisation_never_falls(options):
    hmm = random_hmm("gaussian", **options)
    data = torch.randn(20, 6, generator=seeded(), dtype=F64)
    data[3, 2] = torch.nan
    lengths = torch.randint(1, 7, (20,), generator=seeded())
    report = hmm.fit(data, lengths=lengths, max_iterations=30, tolerance=-torch.inf, generator=seeded())
    assert report.iterations == 30 and not report.converged
    assert (np.diff(report.history) > -1e-9).all()
    assert report.log_likelihood == pytest.approx(hmm.log_prob(data, lengths=lengths).sum().item(), abs=1e-9)


def test_parameters_are_found_again():
    """From 400 sequences of 25 numbers, of a model whose states are far apart."""
    truth = HMM(2, "gaussian").double()
    truth.initial.set(torch.tensor([0.7, 0.3]))
    truth.transition.set(torch.tensor([[0.9, 0.1], [0.3, 0.7]]))
    truth.emission.set(torch.tensor([-2.0, 3.0]), torch.tensor([1.0, 0.25]))
    data = truth.sample(400, 25, generator=seeded()).data
    hmm = HMM(2, "gaussian", generator=seeded()).double()
    report = hmm.fit(data, generator=seeded(), tolerance=1e-6)
    assert report.converged
    order = array(hmm.emission.means).argsort()
    close(hmm.emission.means[order], [-2, 3], atol=0.05)
    close(hmm.transition().exp()[0][order][:, order], [[0.9, 0.1], [0.3, 0.7]], atol=0.02)
    close(hmm.initial().exp()[order], [0.7, 0.3], atol=0.1)
    assert report.log_likelihood > truth.log_prob(data).sum().item()


def test_gradients_and_expectation_maximisation_agree_where_to_stop():
    hmm, data = random_hmm(num_categories=3), torch.randint(3, (30, 12), generator=seeded())
    by_gradient = hmm.fit(data, restarts=0, method="gradient", tolerance=1e-9, max_iterations=200)
    assert by_gradient.converged
    assert by_gradient.log_likelihood > by_gradient.history[0] + 1
    by_em = hmm.fit(data, restarts=0, max_iterations=3, tolerance=-torch.inf)
    assert abs(by_em.log_likelihood - by_gradient.log_likelihood) < 1e-6


@pytest.mark.parametrize("options", [{"method": "em", "step": lambda k: (k + 2) ** -0.6}, {"method": "gradient"}])
def test_mini_batches(options):
    hmm, data = random_hmm(), categories(40, 8)
    before = hmm.log_prob(data).sum().item()
    report = hmm.fit(data, batch_size=8, restarts=0, max_iterations=20, generator=seeded(), **options)
    assert report.iterations == 20
    assert report.log_likelihood > before + 10


def test_of_several_starts_the_best_is_kept():
    hmm, data = random_hmm(), categories(20, 8)
    report = hmm.fit(data, restarts=4, max_iterations=10, generator=seeded())
    assert len(report.starts) == 4 and len(set(report.starts)) == 4
    assert report.log_likelihood == max(report.starts)
    assert hmm.log_prob(data).sum().item() == pytest.approx(max(report.starts), abs=1e-10)
    assert "best of 4 starts" in str(report)
    again = random_hmm(seed=9).fit(data, restarts=4, max_iterations=10, generator=seeded())
    assert again == report


def test_what_is_not_trained_stays():
    hmm, data = random_hmm(), categories(20, 8)
    hmm.transition.requires_grad_(False)
    before = hmm.transition.logits.clone()
    hmm.fit(data, max_iterations=3, generator=seeded())
    assert torch.equal(hmm.transition.logits, before)


def test_forbidden_transitions_stay_forbidden():
    """Left to right."""
    hmm, data = random_hmm(), categories(20, 8)
    hmm.transition.set(torch.ones(C, C).triu())
    for options in ({}, {"method": "gradient", "max_iterations": 3}):
        hmm.fit(data, restarts=0, **options)
        matrix = probabilities(hmm.transition)[0]
        assert (matrix[np.tril_indices(C, -1)] == 0).all() and np.isfinite(matrix).all()


def test_a_start_keeps_single_parameters_that_are_not_trained():
    hmm, data = HMM(2, "gaussian", generator=seeded()), torch.randn(5, V, generator=seeded())
    kept = [hmm.transition.logits, hmm.emission.log_scales]
    for parameter in kept:
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in kept]
    hmm.fit(data, method="gradient", max_iterations=1, generator=seeded())
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))


def test_a_model_of_ones_own():
    """`fit` takes any module with a `log_prob`."""

    class Mixture(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shares, self.coins = LogWeights(2, generator=seeded()), Categorical(2, 2, generator=seeded(1))

        def log_prob(self, data):
            return (self.shares() + self.coins(data).sum(-2)).logsumexp(-1)

    data = (torch.rand(50, 5, generator=seeded()) < torch.tensor([0.9, 0.2])[torch.arange(50) % 2, None]).long()
    report = fit(Mixture().double(), data, tolerance=1e-8)
    assert report.converged and report.log_likelihood > report.history[0]
    with pytest.raises(TypeError, match="restarts: expected 0 for Mixture, which has no `initialise`"):
        fit(Mixture(), data, restarts=2)
    with pytest.raises(ValueError, match="observed: expected 50 along the first axis, as the data, got 3"):
        fit(Mixture(), data, conditions={"observed": torch.ones(3)}, batch_size=10)
    with pytest.raises(ValueError, match="data: expected at least one sequence, got none"):
        fit(Mixture(), data[:0])


def test_progress(capsys):
    random_hmm().fit(categories(5, V), max_iterations=2, progress=True)
    assert "iterations" in capsys.readouterr().err


# modules behave


def test_state_and_copies():
    hmm, data = random_hmm(), categories(5, V)
    file = io.BytesIO()
    torch.save(hmm.state_dict(), file)
    file.seek(0)
    other = random_hmm(seed=7)
    assert not torch.equal(other.log_prob(data), hmm.log_prob(data))
    other.load_state_dict(torch.load(file))
    assert torch.equal(other.log_prob(data), hmm.log_prob(data))
    assert torch.equal(copy.deepcopy(hmm).log_prob(data), hmm.log_prob(data))
    assert torch.equal(random_hmm(seed=7).log_prob(data), random_hmm(seed=7).log_prob(data))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_parameters_are_computed_with_in_float32(dtype):
    hmm, data = random_hmm().to(dtype), categories(5, V)
    found = hmm.log_prob(data)
    assert found.dtype == torch.float32
    close(found, array(copy.deepcopy(hmm).double().log_prob(data)), atol=1e-4)
    found.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in hmm.parameters())


@pytest.mark.parametrize("options", [{}, {"initial": "stationary"}], ids=str)
def test_compiled_whole(options):
    hmm, data = random_hmm(**options), categories(5, V)
    ends = torch.tensor(LENGTHS)
    compiled = torch.compile(hmm.log_prob, fullgraph=True, backend="aot_eager")
    close(compiled(data, lengths=ends), array(hmm.log_prob(data, lengths=ends)))


def test_every_parameter_has_a_gradient():
    """Which data-parallel training asks for."""
    for hmm in (random_hmm(), random_hmm(initial="stationary"), random_hmm("gaussian", num_features=None)):
        data = categories(5, V) if isinstance(hmm.emission, Categorical) else torch.randn(5, V, dtype=F64)
        hmm(data).sum().backward()
        assert all(parameter.grad is not None for parameter in hmm.parameters())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: HMM(0, "poisson"), ValueError, "num_states: expected 1 or more, got 0"),
        (lambda: HMM(2.0, "poisson"), TypeError, "num_states: expected an int, got 2.0"),
        (lambda: HMM(2, "normal"), ValueError, "emission: expected 'categorical' or"),
        (lambda: HMM(2, 3), TypeError, "emission: expected a name or a torch.nn.Module, got int"),
        (lambda: HMM(2, "categorical"), ValueError, "num_categories: expected an int with emission 'categorical'"),
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
        (lambda: HMM(2, "gaussian", num_features=0), ValueError, "num_features: expected 1 or more, got 0"),
        (
            lambda: HMM(2, Categorical(2, 3), covariance="full"),
            ValueError,
            "covariance: expected 'diagonal' with an emission",
        ),
        (lambda: HMM(2, "poisson", transition=1), TypeError, "transition: expected a torch.nn.Module, got int"),
        (lambda: random_hmm().sample(1, -1), ValueError, "num_steps: expected 1 or more, got -1"),
        (lambda: random_hmm().fit([[0, 1]]), TypeError, "data: expected a torch.Tensor, got list"),
        (lambda: random_hmm().fit(categories(5, V), step=1.5), ValueError, "step: expected a number from 0 to 1"),
        (lambda: random_hmm().fit(categories(5, V), batch_size=0), ValueError, "batch_size: expected 1 or more"),
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


# hmmlearn


def hmmlearn_model(kind, covariance="diag", d=2):
    hmm = pytest.importorskip("hmmlearn.hmm", exc_type=ImportError)
    draw = np.random.default_rng(0)
    options = {"covariance_type": covariance} if kind in ("GaussianHMM", "GMMHMM") else {}
    model = hmm.GMMHMM(C, 2, **options) if kind == "GMMHMM" else getattr(hmm, kind)(C, **options)
    model.startprob_, model.transmat_ = draw.dirichlet(np.ones(C)), draw.dirichlet(np.ones(C), C)
    samples = draw.normal(size=(30, d))
    if kind == "CategoricalHMM":
        model.emissionprob_, samples = draw.dirichlet(np.ones(4), C), draw.integers(4, size=(30, 1))
    elif kind == "PoissonHMM":
        model.lambdas_, samples = draw.exponential(3, (C, d)), draw.poisson(3, (30, d))
    else:
        units = (C, 2) if kind == "GMMHMM" else (C,)
        model.means_ = draw.normal(size=(*units, d))
        root = draw.normal(size=(*units, d, d))
        full = root @ root.swapaxes(-1, -2) + 0.1 * np.eye(d)
        diagonal = np.diagonal(full, axis1=-2, axis2=-1)
        tied = full[:, 0] if kind == "GMMHMM" else full[0]
        model.n_features = d
        model.covars_ = {"full": full, "diag": diagonal, "spherical": diagonal[..., 0], "tied": tied}[covariance]
        if kind == "GMMHMM":
            model.weights_ = draw.dirichlet(np.ones(2), C)
    return model, samples


KINDS = [
    ("CategoricalHMM", "diag"),
    ("PoissonHMM", "diag"),
    *(("GaussianHMM", kind) for kind in ("diag", "full", "spherical", "tied")),
    *(("GMMHMM", kind) for kind in ("diag", "full", "spherical", "tied")),
]


@pytest.mark.parametrize(("kind", "covariance"), KINDS)
def test_models_of_hmmlearn_and_back(kind, covariance):
    model, samples = hmmlearn_model(kind, covariance)
    hmm = HMM.from_hmmlearn(model)
    data = torch.from_numpy(samples[:, 0] if kind == "CategoricalHMM" else samples)
    for theirs in (model, hmm.to_hmmlearn()):
        score, posteriors = theirs.score_samples(samples)
        close(hmm.log_prob(data), score, atol=1e-9)
        close(hmm.posterior(data).states, posteriors, atol=1e-9)


def test_numbers_are_samples_with_one_feature():
    pytest.importorskip("hmmlearn", exc_type=ImportError)
    hmm, data = random_hmm("gaussian"), torch.randn(30, generator=seeded(), dtype=F64)
    assert hmm.to_hmmlearn().score(data[:, None].numpy()) == pytest.approx(hmm.log_prob(data).item(), abs=1e-9)
    hmm, data = random_hmm("poisson"), torch.randint(5, (30,), generator=seeded())
    assert hmm.to_hmmlearn().score(data[:, None].numpy()) == pytest.approx(hmm.log_prob(data).item(), abs=1e-9)


def test_what_hmmlearn_does_not_have():
    pytest.importorskip("hmmlearn", exc_type=ImportError)
    with pytest.raises(TypeError, match="model: expected hmmlearn's GaussianHMM or GMMHMM .*, got int"):
        HMM.from_hmmlearn(1)
    with pytest.raises(ValueError, match="hmm: expected a free initial distribution and one transition matrix"):
        random_hmm(initial="stationary").to_hmmlearn()
    with pytest.raises(ValueError, match="hmm: expected an emission that hmmlearn has, got Network"):
        random_hmm(Network(2)).to_hmmlearn()
