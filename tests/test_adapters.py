"""`logchain.adapters` gives each package's own answers: log-partitions, posteriors, best paths and gradients."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import logchain
from logchain import adapters

F32, F64 = torch.float32, torch.float64
# What two float64 recursions of some hundred steps may differ by, in nats and in probabilities.
NATS, SHARE = 1e-9, 1e-10


def peer(name):
    return pytest.importorskip(name, exc_type=ImportError)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, dtype=F64, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def answers(arguments):
    """Log-partition and state posteriors."""
    x = arguments.x.detach().clone().requires_grad_()
    log_norm = logchain.product(**arguments._replace(x=x)._asdict())
    return log_norm.detach(), torch.autograd.grad(log_norm.sum(), x)[0]


def log_weight(arguments, states):
    """The log-weight of given paths [n, v]: the chain with every other state forbidden."""
    chosen = torch.nn.functional.one_hot(states, arguments.x.shape[-1]).bool()
    return logchain.product(**arguments._replace(x=arguments.x.masked_fill(~chosen, -torch.inf))._asdict())


def gradients(leaves, ours, theirs):
    """Pairs of gradients of what may share a part of its graph."""
    both = (torch.autograd.grad(out.sum(), leaves, retain_graph=True) for out in (ours, theirs))
    return zip(*both, strict=True)


def distance(out, truth):
    """The largest difference of values, whatever their dtypes."""
    out, truth = (value.detach() if isinstance(value, torch.Tensor) else value for value in (out, truth))
    out, truth = np.asarray(out, np.float64), np.asarray(truth, np.float64)
    assert out.shape == truth.shape
    return np.abs(out - truth).max()


# torch-struct

TORCH_STRUCT = pytest.mark.filterwarnings("ignore:.*does not define `arg_constraints`")


@TORCH_STRUCT
@pytest.mark.parametrize("lengths", [None, [7, 2, 5]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "nats", "share"), [(F32, 2e-5, 1e-5), (F64, NATS, SHARE)], ids=["float32", "float64"]
)
def test_torch_struct(dtype, nats, share, lengths):
    torch_struct = peer("torch_struct")
    edges = (2 * normal(3, 6, 4, 4, dtype=dtype)).requires_grad_()
    ends = None if lengths is None else torch.tensor(lengths)
    crf = torch_struct.LinearChainCRF(edges, lengths=ends)
    arguments = adapters.from_torch_struct(crf)
    log_norm = logchain.product(**arguments._asdict())
    assert distance(log_norm, crf.partition) <= nats
    log_norm.sum().backward()
    assert distance(edges.grad, crf.marginals) <= share


@TORCH_STRUCT
def test_torch_struct_takes_the_log_potentials_alone():
    torch_struct = peer("torch_struct")
    edges = normal(2, 8, 3, 3)
    assert distance(answers(adapters.from_torch_struct(edges))[0], torch_struct.LinearChainCRF(edges).partition) <= NATS


@TORCH_STRUCT
@pytest.mark.parametrize("lengths", [None, [7, 2, 5]], ids=str)
def test_torch_struct_best_path(lengths):
    torch_struct = peer("torch_struct")
    ends = None if lengths is None else torch.tensor(lengths)
    crf = torch_struct.LinearChainCRF(2 * normal(3, 6, 4, 4), lengths=ends)
    best = logchain.viterbi(**adapters.from_torch_struct(crf)._asdict())
    assert distance(best.score, crf.max) <= NATS
    theirs, _ = crf.from_event(crf.argmax)
    for sequence, end in enumerate(lengths or [7, 7, 7]):
        assert best.states[sequence, :end].tolist() == theirs[sequence, :end].tolist()


# pyro


def pyro_hmm(case):
    """A DiscreteHMM whose leaves ask for gradients, observations, and the leaves."""
    distributions = peer("pyro.distributions")
    v, c = 9, 3
    initial, transitions, location = {
        "one matrix": ((c,), (c, c), (c,)),
        "one step axis": ((c,), (1, c, c), (1, c)),
        "matrix of every step": ((c,), (v, c, c), (v, c)),
        "batch of starts": ((2, c), (c, c), (v, c)),
        "batch of transitions": ((c,), (2, 1, c, c), (c,)),
        "batch of emissions": ((2, c), (v, c, c), (2, v, c)),
        "vectors": ((c,), (v, c, c), (c, 4)),
    }[case]
    leaves = [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate((initial, transitions, location))]
    emission = distributions.Normal(leaves[2], 0.5)
    emission = emission.to_event(1) if case == "vectors" else emission
    hmm = distributions.DiscreteHMM(leaves[0], leaves[1], emission)
    return hmm, normal(*hmm.batch_shape, v, *emission.event_shape, seed=7), leaves


PYRO = [
    "one matrix",
    "one step axis",
    "matrix of every step",
    "batch of starts",
    "batch of transitions",
    "batch of emissions",
    "vectors",
]


@pytest.mark.parametrize("case", PYRO)
def test_pyro(case):
    hmm, value, leaves = pyro_hmm(case)
    arguments = adapters.from_pyro(hmm, value)
    ours, theirs = logchain.product(**arguments._asdict()), hmm.log_prob(value)
    assert ours.shape == theirs.shape
    assert distance(ours, theirs) <= NATS
    for mine, peers in gradients(leaves, ours, theirs):
        assert distance(mine, peers) <= NATS
    assert distance(answers(arguments)[1][..., -1, :], hmm.filter(value).probs.detach()) <= SHARE


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        ("one matrix", (1,)),
        ("one matrix", (5, 1)),
        ("one matrix", (5, 4)),
        ("batch of starts", (9,)),
        ("batch of transitions", (4, 1, 9)),
    ],
    ids=str,
)
def test_pyro_observations_of_other_shapes(case, shape):
    hmm, _, _ = pyro_hmm(case)
    value = normal(*shape, seed=7)
    ours, theirs = logchain.product(**adapters.from_pyro(hmm, value)._asdict()), hmm.log_prob(value)
    assert ours.shape == theirs.shape
    assert distance(ours, theirs) <= NATS


def test_pyro_unreachable_states():
    distributions = peer("pyro.distributions")
    initial = torch.tensor([0.0, -torch.inf, -torch.inf], dtype=F64, requires_grad=True)
    matrix = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.5, 0.5]], dtype=F64)
    transitions, location = matrix.log().requires_grad_(), normal(3).requires_grad_()
    hmm = distributions.DiscreteHMM(initial, transitions, distributions.Normal(location, 1.0))
    value = normal(6, seed=1)
    arguments = adapters.from_pyro(hmm, value)
    assert arguments.p0[2] == -torch.inf
    out = logchain.product(**arguments._asdict())
    assert distance(out, hmm.log_prob(value)) <= NATS
    out.backward()
    assert location.grad[:2].ne(0).all() and location.grad[2] == 0
    assert initial.grad.eq(0).all()  # one start: nothing to choose
    assert transitions.grad.isfinite().all() and transitions.grad[matrix == 0].eq(0).all()


# hmmlearn


def hmmlearn_model(kind):
    """A model with chosen parameters, and samples of it."""
    hmm = peer("hmmlearn.hmm")
    generator = np.random.default_rng(3)
    draw = generator.dirichlet
    if kind == "gaussian":
        model = hmm.GaussianHMM(3, "full")
        model.means_ = generator.normal(size=(3, 2))
        model.covars_ = np.stack([np.eye(2) * (1 + i) + 0.3 for i in range(3)])
    elif kind == "categorical":
        model = hmm.CategoricalHMM(3)
        model.emissionprob_ = draw(np.ones(5), 3)
        model.emissionprob_[0, 0], model.emissionprob_[0, 1] = 0.0, model.emissionprob_[0, :2].sum()
    elif kind == "poisson":
        model = hmm.PoissonHMM(3)
        model.lambdas_ = np.array([[1.0], [4.0], [12.0]])
    else:
        model = hmm.GMMHMM(3, n_mix=2, covariance_type="diag")
        model.weights_ = draw(np.ones(2), 3)
        model.means_ = generator.normal(size=(3, 2, 2))
        model.covars_ = generator.uniform(0.5, 2.0, size=(3, 2, 2))
    model.startprob_ = np.array([0.0, 0.5, 0.5]) if kind == "poisson" else draw(np.ones(3))
    model.transmat_ = draw(np.ones(3), 3)
    if kind == "gaussian":
        model.n_features = 2
    samples, _ = model.sample(120, random_state=0)
    return model, samples


KINDS = pytest.mark.parametrize("kind", ["gaussian", "categorical", "poisson", "gmm"])


@KINDS
def test_hmmlearn(kind):
    model, samples = hmmlearn_model(kind)
    arguments = adapters.from_hmmlearn(model, samples)
    log_norm, posteriors = answers(arguments)
    score, theirs = model.score_samples(samples)
    assert log_norm.shape == ()
    assert distance(log_norm, score) <= NATS
    assert distance(posteriors, theirs) <= SHARE


@KINDS
def test_hmmlearn_sequences_side_by_side(kind):
    model, samples = hmmlearn_model(kind)
    lengths = [50, 1, 69]
    arguments = adapters.from_hmmlearn(model, samples, lengths)
    log_norm, posteriors = answers(arguments)
    score, theirs = model.score_samples(samples, lengths)
    assert distance(log_norm.sum(), score) <= NATS
    assert distance(torch.cat([posteriors[i, :end] for i, end in enumerate(lengths)]), theirs) <= SHARE
    assert arguments.lengths.tolist() == lengths and posteriors[1, 1:].eq(0).all()


@KINDS
def test_hmmlearn_best_path(kind):
    model, samples = hmmlearn_model(kind)
    best = logchain.viterbi(**adapters.from_hmmlearn(model, samples)._asdict())
    score, states = model.decode(samples)
    assert distance(best.score, score) <= NATS
    assert best.states.tolist() == states.tolist()


def test_hmmlearn_model_is_left_alone():
    model, samples = hmmlearn_model("poisson")
    arguments = adapters.from_hmmlearn(model, samples)
    before = model.transmat_.copy()
    arguments.bulk.zero_()
    arguments.p0.zero_()
    assert (model.transmat_ == before).all() and model.startprob_.sum() == 1


# pytorch-crf

TORCHCRF = pytest.mark.filterwarnings("ignore:where received a uint8 condition tensor")


def crf_layer(batch_first, dtype=F64):
    torchcrf = peer("torchcrf")
    crf = torchcrf.CRF(4, batch_first=batch_first).to(dtype)
    for seed, parameter in enumerate(crf.parameters()):
        with torch.no_grad():
            parameter.copy_(normal(*parameter.shape, seed=seed))
    emissions = (2 * normal(3, 6, 4, dtype=dtype, seed=8)).requires_grad_()
    tags = torch.randint(4, (3, 6), generator=seeded())
    mask = torch.arange(6) < torch.tensor([[6], [1], [4]])
    return crf, emissions, tags, mask


@TORCHCRF
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["steps first", "batch first"])
def test_pytorch_crf(batch_first, masked):
    crf, emissions, tags, mask = crf_layer(batch_first)
    turn = (lambda tensor: tensor) if batch_first else (lambda tensor: tensor.transpose(0, 1))
    given = turn(mask) if masked else None
    arguments = adapters.from_pytorch_crf(crf, turn(emissions), given)
    ours = log_weight(arguments, tags) - logchain.product(**arguments._asdict())
    theirs = crf(turn(emissions), turn(tags), given, reduction="none")
    assert distance(ours, theirs) <= NATS
    leaves = [emissions, *crf.parameters()]
    for mine, peers in gradients(leaves, ours, theirs):
        assert distance(mine, peers) <= NATS


@TORCHCRF
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_pytorch_crf_best_path(masked):
    crf, emissions, _, mask = crf_layer(True)
    given = mask if masked else None
    best = logchain.viterbi(**adapters.from_pytorch_crf(crf, emissions.detach(), given)._asdict())
    for states, theirs in zip(best.states, crf.decode(emissions, given), strict=True):
        assert states[: len(theirs)].tolist() == theirs


def test_pytorch_crf_in_float32_and_with_a_mask_of_bytes():
    crf, emissions, tags, mask = crf_layer(True, F32)
    arguments = adapters.from_pytorch_crf(crf, emissions, mask.to(torch.uint8))
    ours = log_weight(arguments, tags) - logchain.product(**arguments._asdict())
    assert distance(ours, crf(emissions, tags, mask, reduction="none")) <= 1e-5


# statsmodels


def growth():
    """Quarterly growth of the real gross domestic product of the United States, 1959 to 2009, in per cent."""
    data = peer("statsmodels.datasets").macrodata.load_pandas().data
    return 100 * np.diff(np.log(data["realgdp"].to_numpy()))


def switching(case):
    """Smoothed results at chosen parameters: nothing is fitted."""
    api = peer("statsmodels.tsa.api")
    y = growth()
    stay = [0.85, 0.1]
    if case == "regression":
        return api.MarkovRegression(y, 2, switching_variance=True).smooth([*stay, 0.0, 1.0, 1.2, 0.3])
    if case == "three regimes":
        staying = [0.8, 0.1, 0.1, 0.1, 0.8, 0.2]
        return api.MarkovRegression(y, 3).smooth([*staying, -0.5, 0.7, 1.5, 0.4])
    if case == "known start":
        model = api.MarkovRegression(y, 2)
        model.initialize_known([1.0, 0.0])
        return model.smooth([*stay, 0.0, 1.0, 0.5])
    if case == "varying transitions":
        leading = np.column_stack([np.ones(len(y)), np.sin(np.arange(len(y)))])
        model = api.MarkovRegression(y, 2, exog_tvtp=leading)
        model.initialize_known([0.5, 0.5])
        return model.smooth([1.5, -1.5, 0.7, 0.2, 0.0, 1.0, 0.5])
    order = {"first order": 1, "fourth order": 4, "varying transitions, second order": 2}[case]
    if "varying" in case:
        leading = np.column_stack([np.ones(len(y)), np.sin(np.arange(len(y)))])
        model = api.MarkovAutoregression(y, 2, order, switching_ar=False, exog_tvtp=leading)
        model.initialize_known([0.5, 0.5])
        return model.smooth([1.5, -1.5, 0.7, 0.2, 0.0, 1.0, 0.5, *[0.1] * order])
    model = api.MarkovAutoregression(y, 2, order, switching_ar=False)
    return model.smooth([*stay, 0.0, 1.0, 0.5, *[0.1] * order])


SWITCHING = pytest.mark.parametrize(
    "case",
    [
        "regression",
        "three regimes",
        "known start",
        "varying transitions",
        "first order",
        "fourth order",
        "varying transitions, second order",
    ],
)


@SWITCHING
def test_statsmodels(case):
    results = switching(case)
    arguments = adapters.from_statsmodels(results)
    log_norm, posteriors = answers(arguments)
    assert distance(log_norm, results.llf) <= NATS
    if results.order:
        assert distance(posteriors.T, results.smoothed_joint_probabilities.reshape(-1, len(posteriors))) <= SHARE
    regimes = posteriors.unflatten(-1, (results.k_regimes, -1)).sum(-1)
    assert distance(regimes, results.smoothed_marginal_probabilities) <= SHARE


def test_statsmodels_published_numbers():
    """Filardo's industrial production with a leading indicator: Kim and Nelson's table 4.2 says -586.5718."""
    api, package = peer("statsmodels.tsa.api"), Path(peer("statsmodels").__file__).parent
    path = package / "tsa/regime_switching/tests/results/mar_filardo.csv"
    series = peer("pandas").read_csv(path)
    leading = np.column_stack([np.ones(len(series) - 1), series["dmdlleading"].to_numpy()[:-1]])
    model = api.MarkovAutoregression(series["dlip"].to_numpy()[1:], 2, 4, switching_ar=False, exog_tvtp=leading)
    transition = [4.35941747, -1.6493936, 1.7702123, 0.9945672]
    others = [0.517298, -0.865888, np.exp(-0.362469) ** 2, 0.189474, 0.079344, 0.110944, 0.122251]
    log_norm, posteriors = answers(adapters.from_statsmodels(model.filter(np.array(transition + others))))
    assert distance(log_norm, -586.5718) <= 5e-5
    assert distance(posteriors.unflatten(-1, (2, 16)).sum(-1)[:, 0], series["smoothed_0"].to_numpy()[5:]) <= 1e-5


# what is refused


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
