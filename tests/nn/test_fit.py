"""`fit`: starts, batches, mini-batches and gradients; data on which a likelihood has no maximum."""

import copy
import warnings
from functools import partial

import numpy as np
import pytest
import torch

from logchain.nn import (
    HMM,
    Categorical,
    ChainCircuit,
    DegenerateError,
    DegenerateWarning,
    Gaussian,
    LogWeights,
    NormalInverseWishart,
    fit,
)
from tests.nn.hmms import F64, MODELS, V, array, categories, close, network, random_hmm, trained
from tests.seeded import seeded

COVARIANCES = {"diag": {}} | {kind: {"num_features": 2, "covariance": kind} for kind in ("spherical", "full", "tied")}


def normal(kind, *shape, seed=0, dtype=F64):
    """Data for a Gaussian emission."""
    event = () if kind == "diag" else (2,)
    return torch.randn(*shape, *event, generator=seeded(seed), dtype=dtype)


def fitted(model, data, **options):
    """The report, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = model.fit(data, **options)
    return report, [str(warning.message) for warning in caught if warning.category is DegenerateWarning]


def test_em_step_takes_expected_counts_of_the_enumeration_whatever_the_batches():
    hmm, data, observed = random_hmm(), categories(5, V), torch.rand(5, V, generator=seeded()) < 0.7
    truth = MODELS["categories"].truth(hmm, data, observed=observed)
    starts, moves = truth.states[:, 0].sum(0), truth.transitions.sum((0, 1))
    seen = np.stack([truth.states[((data == k) & observed).numpy()].sum(0) for k in range(4)])  # (K, c)
    for batch_size in (None, 2):
        model = copy.deepcopy(hmm)
        report = model.fit(data, observed=observed, max_iterations=1, restarts=0, batch_size=batch_size)
        assert report.history[0] == pytest.approx(truth.log_norm.sum(), abs=1e-10)
        close(model.initial().exp(), starts / starts.sum())
        close(model.transition().exp()[0], moves / moves.sum(-1, keepdims=True))
        close(model.emission.weights().exp(), seen / seen.sum(0))


def numbers(**options):
    """A model of numbers, data of which some are missing, and lengths."""
    data, lengths = normal("diag", 20, 6), torch.randint(1, 7, (20,), generator=seeded())
    data[3, 2] = torch.nan
    return random_hmm(Gaussian(3, generator=seeded()), **options), data, {"lengths": lengths}


def forbidding_circuit():
    circuit = ChainCircuit(3, 3, 2, num_categories=4, generator=seeded(4)).double()
    circuit.bulk.set(torch.ones(3, 3).triu() / torch.tensor([[3.0], [2.0], [1.0]]))
    return circuit, categories(30, 3), {"observed": torch.rand(30, 3, generator=seeded(1)) < 0.7}


def structured_circuit(kind):
    transition = trained(kind, seeded(1), lead=(2, V - 1))
    circuit = ChainCircuit(V, 4, 2, num_categories=4, transition=transition, generator=seeded())
    return circuit.double(), categories(12, V), {}


TRANSITIONS = ["banded", "sparse", "low rank and diagonal", "monarch"]
FITTED = {
    "numbers": numbers,
    "matrix per step": partial(numbers, transition=LogWeights(5, 3, 3, generator=seeded())),
    "forbidding circuit": forbidding_circuit,
    **{f"circuit, {kind}": partial(structured_circuit, kind) for kind in TRANSITIONS},
}
BY_GRADIENT = ["numbers", "forbidding circuit", "circuit, low rank and diagonal"]


def matrices(model):
    transition = (model.transition if isinstance(model, HMM) else model.bulk)()
    return array((transition if isinstance(transition, torch.Tensor) else transition.to_dense(log_params=True)).exp())


@pytest.mark.parametrize(
    ("name", "method"), [(name, "em") for name in FITTED] + [(name, "gradient") for name in BY_GRADIENT]
)
def test_fit_never_lowers_the_likelihood_and_zeros_stay(name, method):
    model, data, conditions = FITTED[name]()
    before = matrices(model)
    count = 15 if method == "em" else 2
    report = model.fit(data, method=method, max_iterations=count, restarts=0, tolerance=-torch.inf, **conditions)
    assert report.iterations == count and not report.converged
    assert (np.diff(report.history) > -1e-9).all()
    assert report.log_likelihood > report.history[0] + 1e-3
    assert report.log_likelihood == pytest.approx(model.log_prob(data, **conditions).sum().item(), abs=1e-9)
    after = matrices(model)
    assert np.abs(after - before).max() > 1e-3 and (after[before == 0] == 0).all()
    np.testing.assert_allclose(after.sum(-1), 1, rtol=0, atol=1e-12)


def test_gradients_and_em_stop_at_the_same_maximum():
    hmm, data = random_hmm(Categorical(3, 3, generator=seeded(1))), torch.randint(3, (30, 12), generator=seeded())
    by_gradient = hmm.fit(data, restarts=0, method="gradient", tolerance=1e-9, max_iterations=200)
    assert by_gradient.converged
    assert by_gradient.log_likelihood > by_gradient.history[0] + 1
    by_em = hmm.fit(data, restarts=0, max_iterations=3, tolerance=-torch.inf)
    assert abs(by_em.log_likelihood - by_gradient.log_likelihood) < 1e-6


@pytest.mark.parametrize("options", [{"method": "em", "step": lambda k: (k + 2) ** -0.6}, {"method": "gradient"}])
def test_mini_batches_raise_the_likelihood(options):
    hmm, data = random_hmm(), categories(40, 8)
    before = hmm.log_prob(data).sum().item()
    report = hmm.fit(data, batch_size=8, restarts=0, max_iterations=20, generator=seeded(), **options)
    assert report.iterations == 20
    assert report.log_likelihood > before + 10


@pytest.mark.parametrize(
    "make", [random_hmm, lambda seed=0: ChainCircuit(8, 3, 2, num_categories=4, generator=seeded(seed)).double()]
)
def test_best_of_several_starts_is_kept_and_seeds_repeat(make):
    model, data = make(), categories(20, 8)
    report = model.fit(data, restarts=4, max_iterations=10, generator=seeded())
    assert len(report.starts) == 4 and len(set(report.starts)) == 4
    assert report.log_likelihood == max(report.starts)
    assert model.log_prob(data).sum().item() == pytest.approx(max(report.starts), abs=1e-10)
    assert "best of 4 starts" in str(report)
    assert make(seed=9).fit(data, restarts=4, max_iterations=10, generator=seeded()) == report
    first, again, other = (make(seed=seed).log_prob(data) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_fit_takes_any_module_with_a_log_prob():
    class Mixture(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shares, self.coins = LogWeights(2, generator=seeded()), Categorical(2, 2, generator=seeded(1))

        def log_prob(self, data):
            return (self.shares() + self.coins(data).sum(-2)).logsumexp(-1)

    data = (torch.rand(50, 5, generator=seeded()) < torch.tensor([0.9, 0.2])[torch.arange(50) % 2, None]).long()
    report = fit(Mixture().double(), data, tolerance=1e-8)
    assert report.converged and report.log_likelihood > report.history[0]
    with pytest.raises(TypeError, match="restarts: expected 0 for Mixture, which has no `initialize`"):
        fit(Mixture(), data, restarts=2)
    with pytest.raises(ValueError, match="observed: expected 50 along the first axis, .* got 3"):
        fit(Mixture(), data, conditions={"observed": torch.ones(3)}, batch_size=10)
    with pytest.raises(ValueError, match="data: expected at least one sequence"):
        fit(Mixture(), data[:0])


def test_progress_is_shown_without_gradients_outside(capsys):
    pytest.importorskip("tqdm")
    with torch.no_grad():
        report = random_hmm().fit(categories(5, V), progress=True)
    assert report.iterations > 2 and "iterations" in capsys.readouterr().err


def test_degenerate_starts_are_skipped():
    """Of four states for twenty numbers; none with a prior."""
    hmm, data = HMM(4, "gaussian", generator=seeded(9)), normal("diag", 20, seed=9, dtype=torch.float32)
    options = {"restarts": 3, "max_iterations": 100}
    report, messages = fitted(hmm, data, generator=seeded(9), **options)
    assert report.set_aside and report.set_aside + len(report.starts) == 3
    assert report.log_likelihood == max(report.starts)
    assert hmm.log_prob(data).item() == pytest.approx(report.log_likelihood, abs=1e-3), "the best is kept"
    (message,) = messages
    assert message.count("got 0 for unit [") == report.set_aside
    for dtype in (torch.bfloat16, torch.float32, F64):
        model = HMM(4, Gaussian(4, prior=NormalInverseWishart(0.01, -2.0))).to(dtype)
        assert fitted(model, data.to(dtype), generator=seeded(9), **options)[1] == []


def test_first_error_is_raised_where_every_start_is_degenerate():
    data = torch.tensor([0.0, 1.0, 5.0])
    hmm = HMM(5, "gaussian", generator=seeded())
    with pytest.raises(DegenerateError, match=r"got 0 for unit \[\d\], .* prior=.* 1 of 4, all"):
        hmm.fit(data, restarts=4, generator=seeded())
    with pytest.raises(ValueError, match=r"got 0 for unit \[\d\].*fewer units$"):
        hmm.fit(data, generator=seeded())


@pytest.mark.parametrize("kind", COVARIANCES)
def test_constant_and_missing_data_are_fitted_with_a_prior(kind):
    data = torch.full_like(normal(kind, 9), 3.0).float()
    with pytest.raises(ValueError, match="expected at least two different observations .*, or a prior, got one"):
        HMM(2, Gaussian(2, **COVARIANCES[kind])).fit(data, restarts=3)
    hmm = HMM(2, Gaussian(2, prior=NormalInverseWishart(0.9, 3.0), **COVARIANCES[kind]))
    report = hmm.fit(data, restarts=3, generator=seeded())
    assert report.set_aside == 0 and hmm.emission.covariances.isfinite().all()
    data = normal(kind, 40)
    data[5:15] = torch.nan
    if kind == "spherical":
        data[20, 0] = torch.nan
    hmm = HMM(2, Gaussian(2, prior=NormalInverseWishart(0.1, 3.0), **COVARIANCES[kind])).double()
    report = hmm.fit(data, restarts=2, generator=seeded(), tolerance=-torch.inf, max_iterations=8)
    assert all(parameter.isfinite().all() for parameter in hmm.parameters())
    assert report.log_likelihood > report.history[0]


@pytest.mark.parametrize(("kind", "scale"), [("diag", 1e-25), ("spherical", 1e25), ("full", 1e-25), ("tied", 1e25)])
def test_data_whose_squares_float32_cannot_hold_are_fitted(kind, scale):
    data = normal(kind, 60, dtype=torch.float32)
    hmms = [HMM(2, Gaussian(2, **COVARIANCES[kind])) for _ in range(2)]
    for hmm, of in zip(hmms, (1.0, scale), strict=True):
        hmm.fit(data * of, generator=seeded(), tolerance=-torch.inf, max_iterations=5, step=0.5)
    torch.testing.assert_close(hmms[1].emission.means / scale, hmms[0].emission.means, rtol=1e-4, atol=1e-4)


def test_starts_whose_gradients_overflow_are_skipped():
    leaps = iter([1e20, 1e-3, 1e-3])
    hmm, data = HMM(2, "gaussian", generator=seeded()), normal("diag", 60, dtype=torch.float32)
    options = {"method": "gradient", "max_iterations": 3, "generator": seeded()}
    report, messages = fitted(hmm, data, restarts=3, optimizer=lambda p: torch.optim.SGD(p, lr=next(leaps)), **options)
    assert report.set_aside == 1 and "start 1: data: expected a finite log-likelihood, got" in messages[0]
    with pytest.raises(DegenerateError, match="expected a finite log-likelihood"):
        hmm.fit(data, optimizer=lambda p: torch.optim.SGD(p, lr=1e20), **options)


def test_other_errors_end_the_fit_at_the_first_start():
    hmm, calls = random_hmm(network()), []
    hmm.emission.register_forward_pre_hook(lambda *_: calls.append(None))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        hmm.fit(torch.zeros(3, 4, 5, dtype=F64), method="gradient", restarts=5)
    assert len(calls) == 1
