"""Likelihoods, posteriors, best paths and draws of hidden Markov models equal sums over all paths."""

import copy
from functools import partial

import numpy as np
import pytest
import torch

import logchain
from logchain import nn
from logchain.nn import HMM, Categorical, Gaussian
from logchain.nn.priors import Dirichlet, NormalInverseWishart
from logchain.transitions import Banded, BlockDiagonal, Sparse
from tests import oracle
from tests.nn import hmms
from tests.nn.hmms import F64, LENGTHS, MODELS, STRUCTURES, C, V, array, categories, close, normal, random_hmm, seeded

ALL = pytest.mark.parametrize("name", MODELS)


def drawn(name):
    """A row of the table, its model and data; a Gaussian's parameters suit the data."""
    model = MODELS[name] if name in MODELS else hmms.Model(partial(hmms.semi_markov, right_censored="end" not in name))
    hmm, data = model.make(), model.data()
    if "covariances" in name:
        hmm.initialize(data, generator=seeded())
    return model, hmm, data


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=str)
@ALL
def test_likelihoods_and_posteriors_equal_the_sums_over_paths(name, lengths):
    model, hmm, data = drawn(name)
    truth = model.truth(hmm, data, lengths)
    options = {"lengths": lengths, "covariates": model.covariates}
    close(hmm.log_prob(data, **options), truth.log_norm)
    found = hmm.posterior(data, transitions="full", **options)
    close(found.states, truth.states)
    assert (logchain.entropy(**hmm.arguments(data, **options)._asdict()) >= 0).all()
    moves = found.transitions
    if isinstance(moves, torch.Tensor | Banded | Sparse | BlockDiagonal):
        close(moves if isinstance(moves, torch.Tensor) else moves.to_dense(), truth.transitions)
    else:  # a path uses each factor once a step, and of a low rank's either the diagonal or both factors
        counts = [array(part).sum() for part in moves.parameters]
        used = sum(counts[:1] + counts[2:] if "rank" in name else counts[:1])
        assert used == pytest.approx(truth.transitions.sum())
    # steps that are not observed are summed out
    observed = torch.rand(5, V, generator=seeded()) < 0.5
    truth = model.truth(hmm, data, lengths, observed).log_norm
    close(hmm.log_prob(data, observed=observed, **options), truth)
    if isinstance(hmm.emission, nn.Emission):
        missing = data.double().masked_fill(~observed.view(5, V, *(1,) * (data.dim() - 2)), torch.nan)
        close(hmm.log_prob(missing, **options), truth)


@ALL
def test_best_path_has_the_largest_weight(name):
    model, hmm, data = drawn(name)
    if "rank" in name:  # whose entries are sums
        with pytest.raises(TypeError, match="bulk: expected a structure whose entries"):
            hmm.decode(data)
        return
    found = hmm.decode(data, covariates=model.covariates)
    x, bulk, p0 = model.potentials(hmm, data)
    for row in range(5):
        weights = oracle.paths(x[row], np.broadcast_to(bulk, (5, V - 1, *bulk.shape[-2:]))[row], p0)
        best = max(weights, key=weights.get)
        assert tuple(found.states[row].tolist()) == best
        close(found.score[row], float(weights[best].ln()))


@pytest.mark.parametrize(
    ("name", "poison"),
    [
        ("categories", -1),
        ("full covariances", torch.nan),
        ("full covariances", torch.inf),
        ("network", torch.nan),
        ("covariates per step", torch.inf),
        ("structure of covariates", -1.0),
    ],
)
def test_padding_has_no_influence(name, poison):
    model, hmm, data = drawn(name)
    padding = torch.arange(V) >= torch.tensor(LENGTHS)[:, None]

    def answers(data, covariates):
        hmm.zero_grad()
        found = hmm.log_prob(data, lengths=LENGTHS, covariates=covariates)
        found.sum().backward()
        return [found.detach(), *(parameter.grad.clone() for parameter in hmm.parameters())]

    covariates = model.covariates
    truth = answers(data, covariates)
    if covariates is not None:
        covariates = covariates.masked_fill(padding[..., None] | (torch.arange(V) == 0)[:, None], poison)
    if name == "categories":
        data = data.masked_fill(padding, poison)
        with pytest.raises(ValueError, match="data: "):
            hmm.log_prob(data)
    if data.is_floating_point():
        data = data.masked_fill(padding[..., None], poison)
    for one, other in zip(answers(data, covariates), truth, strict=True):
        assert torch.equal(one, other)


def test_masks_of_steps_and_of_features():
    mask, whole = torch.tensor([True, False, True, True]), torch.tensor([[True, False, True, True]]).expand(5, V)
    hmm, vectors = random_hmm(), random_hmm(Gaussian(C, 2))
    for model, data in ((hmm, categories(5, V)), (vectors, normal(5, V, 2))):
        for lengths in (None, LENGTHS):
            found, expected = (model.log_prob(data, observed=some, lengths=lengths) for some in (mask, whole))
            assert torch.equal(found, expected)
    some = torch.rand(5, V, 2, generator=seeded()) < 0.5  # of the features
    missing = data.masked_fill(~some, torch.nan)
    assert torch.equal(vectors.log_prob(data, observed=some), vectors.log_prob(missing))
    fits = [random_hmm().fit(categories(5, V), observed=some, batch_size=2, restarts=0) for some in (mask, whole)]
    assert fits[0] == fits[1]


def test_matrix_per_step_serves_shorter_data_and_single_sequences():
    hmm, data = MODELS["matrix per step"].make(), categories(5, V)
    for v in (1, 2):
        truth = MODELS["matrix per step"]._replace(bulk=lambda hmm, _, v=v: hmms.probabilities(hmm.transition)[: v - 1])
        close(hmm.log_prob(data[:, :v]), truth.truth(hmm, data[:, :v]).log_norm)
        assert hmm.log_prob(data[0, :v]) == hmm.log_prob(data[:1, :v])[0]


def test_stationary_start_of_rare_states_keeps_its_digits_and_has_gradients():
    """Birth and death: p_{i+1} / p_i = 1e-12, far below where a linear solver's rounding is."""
    hmm = HMM(6, Categorical(6, 2), initial="stationary").double()
    matrix = torch.diag(torch.full((5,), 1e-13, dtype=F64), 1) + torch.diag(torch.full((5,), 0.1, dtype=F64), -1)
    hmm.transition.set(matrix + torch.diag(1 - matrix.sum(-1)))
    nothing = torch.full((1,), torch.nan)
    start = hmm.posterior(nothing).states.detach()[0]
    np.testing.assert_allclose(start[1:] / start[:-1], 1e-12, rtol=1e-12)
    hmm.transition.set(torch.eye(6))
    with pytest.raises(ValueError, match="transition: expected every state to reach every other"):
        hmm.log_prob(nothing)
    hmm, data = random_hmm(initial="stationary"), categories(5, V)
    assert "initial='stationary'" in repr(hmm)
    assert torch.autograd.gradcheck(lambda *_: hmm.log_prob(data), tuple(hmm.parameters()))


@pytest.mark.parametrize("name", ["categories", *STRUCTURES])
def test_draws_have_their_probabilities(name):
    model, hmm, data = drawn(name)
    c, count = hmm.num_states, 4000
    x, bulk, p0 = model.potentials(hmm, data[:2])
    drawn_states = hmm.sample_posterior(data[:2], count, generator=seeded())
    states, values = hmm.sample(count, 3, generator=seeded())
    assert torch.equal(values, hmm.sample(count, 3, generator=seeded()).data)
    last = torch.nn.functional.one_hot(states[:, 2], c).double().mean(0)
    posterior = torch.nn.functional.one_hot(drawn_states, c).double().mean(0)
    # each of 4^3 outcomes as often as the sum over paths says, within five standard deviations
    outcomes = (values[:, None] == torch.cartesian_prod(*[torch.arange(4)] * 3)).all(-1).double().mean(0)
    of_outcomes = model.truth(hmm, torch.cartesian_prod(*[torch.arange(4)] * 3)).log_norm
    shares = (last, posterior, outcomes)
    truths = (p0 @ bulk[0] @ bulk[0], model.truth(hmm, data[:2]).states, np.exp(of_outcomes))
    for share, truth in zip(shares, truths, strict=True):
        assert (np.abs(share.numpy() - truth) <= 5 * np.sqrt(truth / count) + 1e-12).all()


def rows(values):
    """The rows of padded values that lie before the ends, one sequence after the other."""
    return torch.cat([value[:length] for value, length in zip(values, LENGTHS, strict=True)])


def of_list(values):
    return None if values is None else list(rows(values).split(LENGTHS))


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("name", [*MODELS, "durations", "durations that end"])
def test_lists_and_concatenated_sequences_equal_padded_ones(name, as_array):
    model, hmm, data = drawn(name)
    padded, covariates = {"lengths": LENGTHS, "covariates": model.covariates}, model.covariates
    if covariates is not None:  # where one row serves all steps, it is that of each; the first drives no transition
        covariates = covariates.expand(-1, V, -1).masked_fill((torch.arange(V) == 0)[:, None], torch.nan)
    inside = torch.arange(V) < torch.tensor(LENGTHS)[:, None]
    observed = torch.rand(5, V, generator=seeded()) < 0.7
    convert = np.asarray if as_array else torch.as_tensor
    lists = {"data": of_list(data), "observed": of_list(observed), "covariates": of_list(covariates)}
    lists = {key: [convert(part) for part in parts] for key, parts in lists.items() if parts is not None}
    packed = {key: convert(rows(value)) for key, value in {"data": data, "observed": observed}.items()}
    packed |= {} if covariates is None else {"covariates": convert(rows(covariates))}
    packed |= {"lengths": LENGTHS}
    layouts = [lists, packed] if isinstance(hmm.emission, nn.Emission) else [lists]

    truth = hmm.log_prob(data, observed, **padded)
    best = hmm.decode(data, observed, **padded) if "rank" not in name else None
    posterior, filtered = hmm.posterior(data, observed, **padded), hmm.filter(data, observed, **padded)
    for layout in layouts:
        chain = hmm.arguments(**layout)
        assert chain.x.shape[0] == sum(LENGTHS) and chain.lengths is None, "nothing is padded"
        log_prob = hmm.log_prob(**layout)
        close(log_prob, array(truth))
        gradients = torch.autograd.grad(log_prob.sum(), list(hmm.parameters()))
        assert all(gradient.isfinite().all() for gradient in gradients)
        found = [hmm.posterior(**layout).states, *hmm.filter(**layout)]
        if best is not None:
            found.append(hmm.decode(**layout).states)
        draws = hmm.sample_posterior(num_samples=2, **layout)
        if layout is lists:
            assert all([len(part) for part in parts] == LENGTHS for parts in found)
            assert [part.shape for part in draws] == [(2, length) for length in LENGTHS]
            found = [torch.cat(parts) for parts in found]
        else:
            assert draws.shape == (2, sum(LENGTHS))
        wanted = [posterior.states, *filtered] + ([] if best is None else [best.states])
        for one, other in zip(found, wanted, strict=True):
            close(one, array(other[inside]))
    if name in ("categories", "matrix per step", "banded per step"):
        moves = hmm.posterior(data, observed, transitions="full", **padded).transitions
        found = hmm.posterior(transitions="full", **lists).transitions
        for row, (part, length) in enumerate(zip(found, LENGTHS, strict=True)):
            every, part = (one if isinstance(one, torch.Tensor) else one.to_dense() for one in (moves, part))
            close(part, array(every[row, : length - 1]))


def test_arrays_have_the_dtype_of_modules_that_take_them():
    covariates, data = normal(5, V, 2), normal(5, V, 2)
    driven, neural = hmms.driven_hmm().float(), random_hmm(hmms.network()).float()
    found = driven.log_prob(categories(5, V).numpy(), covariates=covariates.numpy())
    assert torch.equal(found, driven.log_prob(categories(5, V), covariates=covariates.float()))
    assert torch.equal(neural.log_prob(data.numpy()), neural.log_prob(data.float()))


def test_fit_of_a_list_equals_that_of_padded_sequences():
    sequences, data = of_list(categories(5, V)), categories(5, V)
    observed = torch.rand(5, V, generator=seeded()) < 0.7
    options = {"restarts": 0, "max_iterations": 5, "tolerance": -np.inf}
    reports = [
        random_hmm().fit(data, observed=observed, lengths=LENGTHS, **options),
        random_hmm().fit(rows(data), observed=rows(observed), lengths=LENGTHS, **options),
        random_hmm().fit(sequences, observed=of_list(observed), **options),
        random_hmm().fit([part.numpy() for part in sequences], observed=of_list(observed), batch_size=2, **options),
    ]
    for report in reports[1:]:
        close(torch.tensor(report.history, dtype=F64), reports[0].history)
    fits = [random_hmm().fit(some, generator=seeded(), **(options | {"restarts": 2})) for some in (data[:1], data[0])]
    assert fits[0] == fits[1], "a single sequence needs no batch axis"
    mini = [random_hmm().fit(list(data), batch_size=2, step=0.5, generator=seeded(), **options) for _ in range(2)]
    assert mini[0] == mini[1] and mini[0].history[-1] > mini[0].history[0]


def test_concatenated_sequences_of_hmmlearn_and_one_sequence_of_one_feature():
    """Data `[samples, features]` with lengths, and series that look like many sequences of one step."""
    level = torch.where(torch.arange(300) // 50 % 2 == 1, 3.0, 0.0)
    series = level + torch.randn(300, generator=seeded())
    options = {"restarts": 5, "generator": seeded()}
    with pytest.warns(UserWarning, match="data: 300 sequences of one step each .* Gaussian"):
        HMM(2, "gaussian").fit(series[:, None], restarts=1, max_iterations=1, tolerance=-torch.inf)
    reports = [
        HMM(2, "gaussian").fit(series, restarts=5, generator=seeded()),
        HMM(2, Gaussian(2, 1)).fit(series[:, None].numpy(), restarts=5, generator=seeded()),
        HMM(2, Gaussian(2, 1)).fit(series[:, None], lengths=[300], **options),
    ]
    for report in reports:
        assert report.log_likelihood == pytest.approx(reports[0].log_likelihood, abs=1e-2)
    with pytest.warns(UserWarning, match="300 sequences of one step each"):
        HMM(2, "gaussian").fit(list(series[:, None]), restarts=1, max_iterations=1, tolerance=-torch.inf)


def test_known_states_leave_the_paths_through_them():
    model, hmm, data = drawn("categories")
    known = torch.where(torch.rand(5, V, generator=seeded(2)) < 0.5, torch.randint(C, (5, V), generator=seeded(3)), -1)
    x, bulk, p0 = model.potentials(hmm, data)
    agree = (known[..., None] == torch.arange(C)) | (known[..., None] == -1)
    truth = oracle.all_paths(np.where(agree, x, -np.inf), bulk, p0)
    close(hmm.log_prob(data, states=known), truth.log_norm)
    close(hmm.posterior(data, states=known).states, truth.states)
    # of all states one step of expectation maximization counts
    paths = torch.randint(C, (5, V), generator=seeded(3))
    hmm.fit(data, states=paths, max_iterations=1, restarts=0, tolerance=-torch.inf)
    counts = torch.zeros(C, C, dtype=F64).index_put_((paths[:, :-1], paths[:, 1:]), torch.ones((), dtype=F64), True)
    close(hmm.transition_matrix, array(counts / counts.sum(-1, keepdim=True)))
    lists = hmm.log_prob(of_list(data), states=of_list(known))
    close(lists, array(hmm.log_prob(data, states=known, lengths=LENGTHS)))


def test_covariates_reach_emissions_and_transitions():
    """The means of a regression are those of the data less its trend."""
    data, covariates = normal(5, V), normal(5, V, 2)
    plain, trend = random_hmm(Gaussian(C)), random_hmm(nn.LinearGaussian(C, 2))
    trend.initial, trend.transition = copy.deepcopy((plain.initial, plain.transition))
    means, variances = plain.emission.means.detach(), plain.emission.variances
    trend.emission.set(torch.ones(1, dtype=F64), means[:, None], variances)
    trend.emission.weights.requires_grad_(False)
    moved = data - covariates.sum(-1)
    close(trend.log_prob(data, covariates=covariates), array(plain.log_prob(moved)))
    poisoned = covariates.masked_fill((torch.arange(V) >= torch.tensor(LENGTHS)[:, None])[..., None], torch.nan)
    expected = array(plain.log_prob(moved, lengths=LENGTHS))
    close(trend.log_prob(data, covariates=poisoned, lengths=LENGTHS), expected)
    close(trend.log_prob(of_list(data), covariates=of_list(covariates)), expected)
    options = {"restarts": 0, "max_iterations": 9, "tolerance": -torch.inf}
    histories = [trend.fit(data, covariates=covariates, **options).history, plain.fit(moved, **options).history]
    np.testing.assert_allclose(*histories, rtol=0, atol=1e-10)
    drawn = [trend.sample(2, V, covariates=covariates, generator=seeded()).data, plain.sample(2, V).data]
    assert drawn[0].shape == (2, 5, V) and drawn[1].shape == (2, V)
    means, future = trend.emission.bias[:, 0], normal(5, 2, 2, seed=9)
    forecast = trend.forecast(data, 2, covariates=covariates, future_covariates=future)
    close(forecast.mean, array(forecast.states @ means + future.sum(-1)))
    holes = data.masked_fill(torch.arange(V) == 1, torch.nan)
    shares = trend.posterior(holes, covariates=covariates).states
    filled = torch.where(holes.isnan(), shares @ means + covariates.sum(-1), data)
    close(trend.impute(holes, covariates=covariates), array(filled))
    for hmm in (trend, plain):
        hmm.transition = hmms.driven_hmm().transition
    close(trend.log_prob(data, covariates=covariates), array(plain.log_prob(moved, covariates=covariates)))


def test_filtered_states_and_log_likelihoods_are_those_of_the_data_so_far():
    for name in ("categories", "full covariances", "stationary start"):
        model, hmm, data = drawn(name)
        filtered = hmm.filter(data, lengths=LENGTHS)
        ends = hmm.log_prob(data, lengths=LENGTHS)
        close(filtered.log_likelihoods.sum(-1), array(ends))
        for i in range(V):
            alive = torch.tensor(LENGTHS) > i
            close(filtered.states[alive, i], array(hmm.posterior(data[alive, : i + 1]).states[:, -1]))
            assert not filtered.states[~alive, i].any() and not filtered.log_likelihoods[~alive, i].any()
    hmm.emission.weights.set(torch.tensor([[1.0] * C] + [[0.0] * C] * 3))
    impossible = hmm.filter(torch.tensor([0, 0, 1, 0]))
    assert impossible.log_likelihoods.exp().tolist() == [1, 1, 0, 0] and not impossible.states[2:].any()


@pytest.mark.parametrize("name", ["categories", "full covariances", "covariates per step", "banded", "low rank"])
def test_forecasts_equal_posteriors_of_steps_that_are_not_observed(name):
    model, hmm, data = drawn(name)
    longer = torch.cat([data, torch.zeros_like(data[:, :2])], 1)
    observed = (torch.arange(V + 2) < V).expand(5, -1)
    covariates = model.covariates
    options, future = {}, {}
    if covariates is not None:
        future = {"covariates": covariates, "future_covariates": normal(5, 2, 2, seed=7)}
        options = {"covariates": torch.cat([covariates, future["future_covariates"]], 1)}
    expected = hmm.posterior(longer, observed, **options).states[:, V:]
    found = hmm.forecast(data, 2, **future)
    close(found.states, array(expected))
    if name == "full covariances":
        close(found.mean, array(expected @ hmm.emission.means))
    else:
        assert found.mean is None, "categories have no mean"
    alone = hmm.forecast(data[1], 2, **{key: value[1] for key, value in future.items()})
    close(alone.states, array(found.states[1]))
    if covariates is None:
        parts = hmm.forecast(of_list(data), 2).states
        close(parts, array(hmm.forecast(data, 2, lengths=LENGTHS).states))
        close(parts[4], array(found.states[4]))


def test_missing_data_are_imputed_by_expectations():
    data = normal(5, V, 2)
    missing = torch.rand(5, V, generator=seeded()) < 0.4
    holes = data.masked_fill(missing[..., None], torch.nan)
    hmm = random_hmm(Gaussian(C, 2, "full"))
    hmm.initialize(data, generator=seeded())
    found = hmm.impute(holes, lengths=LENGTHS)
    shares = hmm.posterior(holes, lengths=LENGTHS).states
    inside = torch.arange(V) < torch.tensor(LENGTHS)[:, None]
    close(found[inside & missing], array((shares @ hmm.emission.means)[inside & missing]))
    assert torch.equal(found[inside & ~missing], data[inside & ~missing])
    lists = hmm.impute(of_list(holes))
    close(torch.cat(lists), array(found[inside]))
    assert torch.equal(hmm.impute(data), data)
    counts = random_hmm()
    kinds = categories(5, V)
    found = counts.impute(kinds, observed=~missing)
    for i in range(V):
        here = torch.arange(V) == i
        with_value = [counts.log_prob(torch.where(here, k, kinds), ~missing | here) for k in range(4)]
        best = torch.stack(with_value).argmax(0)
        assert torch.equal(found[missing[:, i], i], best[missing[:, i]])


def test_part_of_a_vector_is_imputed_given_its_other_part():
    """The conditional mean of a normal distribution: of one state by its formula."""
    hmm = HMM(1, Gaussian(1, 2, "full")).double()
    hmm.emission.set(torch.tensor([1.0, -1.0]), torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
    close(hmm.impute(torch.tensor([[4.0, torch.nan]], dtype=F64)), [[4.0, -1 + 0.5 * (4 - 1)]])


SORTED = {
    "categories": lambda: random_hmm(Categorical(C, C, generator=seeded())),
    "counts of two features": MODELS["counts of two features"].make,
    "tied": lambda: random_hmm(Gaussian(C, 3, "tied")),
    "mixture of categories": lambda: random_hmm(nn.Mixture(Categorical((C, 3), 3, generator=seeded()))),
    "matrix per step": MODELS["matrix per step"].make,
    "stationary": MODELS["stationary start"].make,
    "durations": partial(hmms.semi_markov, longest=C),
    "durations of a family": partial(hmms.semi_markov, "poisson"),
}


@pytest.mark.parametrize("name", SORTED)
def test_sorted_states_are_the_same_model(name):
    hmm = SORTED[name]()
    if "tied" in name:
        data = normal(5, V, 3)
        hmm.initialize(data, generator=seeded())
    else:
        data = torch.randint(C, (5, V, 2) if "counts" in name else (5, V), generator=seeded())
    before, posterior = hmm.log_prob(data), hmm.posterior(data).states
    numbers = torch.tensor([0.5, -1.0, 0.2])
    hmm.sort_states(by=numbers)
    close(hmm.log_prob(data), array(before))
    close(hmm.posterior(data).states, array(posterior[..., [1, 2, 0]]))
    hmm.sort_states(by=lambda hmm: hmm.initial_probabilities)
    assert (hmm.initial_probabilities.diff() >= 0).all()


def test_priors_are_sorted_or_refused():
    hmm = random_hmm(Gaussian(C, 2, prior=NormalInverseWishart(1.0, 3.0)))
    hmm.transition.weights[0].prior = Dirichlet(torch.arange(1.0, C * C + 1).view(C, C))
    hmm.sort_states(by=[2.0, 1.0, 3.0])
    assert hmm.transition.weights[0].prior.concentration.tolist() == [[5, 4, 6], [2, 1, 3], [8, 7, 9]]
    wishart = NormalInverseWishart(torch.ones(C, C), torch.arange(1.0, C + 1))
    coins = HMM(2, nn.Bernoulli(2, prior=Dirichlet(torch.tensor([2.0, 5.0]))))
    lasting = hmms.semi_markov(prior=Dirichlet(torch.arange(1.0, C + 1)[:, None]))
    for hmm in (random_hmm(Gaussian(C, C, prior=wishart)), coins, lasting):
        before = copy.deepcopy(hmm.state_dict())
        with pytest.raises(ValueError, match="sort states before a prior with tensors is assigned$"):
            hmm.sort_states(by=np.array([2.0, 1.0, 3.0])[: hmm.num_states])
        assert all(torch.equal(value, before[name]) for name, value in hmm.state_dict().items())


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", ">i4", ">f4", ">f8", "longdouble"])
def test_arrays_of_other_dtypes_are_the_same_data(dtype):
    data = categories(5, V)
    close(random_hmm().log_prob(data.numpy().astype(dtype)), array(random_hmm().log_prob(data)))


def test_probabilities_are_read_without_gradients():
    hmm = random_hmm()
    close(hmm.transition_matrix, hmms.probabilities(hmm.transition)[0])
    close(hmm.initial_probabilities, hmms.probabilities(hmm.initial))
    assert hmm.transition_matrix.numpy().shape == (C, C)
    assert MODELS["matrix per step"].make().transition_matrix.shape == (V - 1, C, C)
    chain = MODELS["stationary start, banded"].make()
    close(chain.initial_probabilities @ chain.transition_matrix, array(chain.initial_probabilities))
    named = HMM(C, "bernoulli", initial=nn.LogWeights(C), transition=nn.Transitions(C))
    assert named.log_prob(torch.tensor([[0, 1, 1]])).shape == (1,) and named.transition_matrix.shape == (C, C)
