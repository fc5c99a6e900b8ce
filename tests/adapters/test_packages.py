"""Models of other packages become chains with their log-likelihoods, posteriors, best paths and gradients."""

from pathlib import Path

import numpy as np
import pytest
import torch

import logchain
from logchain import adapters
from tests.adapted import NATS, SHARE, answers, distance, gradients, normal, peer


@pytest.mark.filterwarnings("ignore:.*does not define `arg_constraints`")
@pytest.mark.parametrize("lengths", [None, [7, 2, 5]], ids=str)
def test_torch_struct(lengths):
    edges = (2 * normal(3, 6, 4, 4)).requires_grad_()
    ends = None if lengths is None else torch.tensor(lengths)
    crf = peer("torch_struct").LinearChainCRF(edges, lengths=ends)
    # log-potentials alone are a model, too
    arguments = adapters.from_torch_struct(edges if lengths is None else crf)._asdict()
    log_norm = logchain.product(**arguments)
    assert distance(log_norm, crf.partition) <= NATS
    (gradient,) = torch.autograd.grad(log_norm.sum(), edges)
    assert distance(gradient, crf.marginals) <= SHARE
    states, theirs = logchain.viterbi(**arguments).states, crf.from_event(crf.argmax)[0]
    for sequence, end in enumerate(lengths or [7, 7, 7]):
        assert states[sequence, :end].tolist() == theirs[sequence, :end].tolist()


# shapes of initial logits, transition logits, locations and values
PYRO = {
    "one matrix": ((3,), (3, 3), (3,), (9,)),
    "sequences of a batch": ((3,), (3, 3), (3,), (5, 4)),
    "matrix of every step": ((3,), (9, 3, 3), (9, 3), (9,)),
    "batch of transitions": ((3,), (2, 1, 3, 3), (3,), (4, 1, 9)),
    "batch of starts and emissions": ((2, 3), (9, 3, 3), (2, 9, 3), (2, 9)),
    "vectors": ((3,), (9, 3, 3), (3, 4), (9, 4)),
}


@pytest.mark.parametrize("case", PYRO)
def test_pyro(case):
    distributions = peer("pyro.distributions")
    *shapes, observed = PYRO[case]
    leaves = [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    emission = distributions.Normal(leaves[2], 0.5)
    emission = emission.to_event(1) if case == "vectors" else emission
    hmm, value = distributions.DiscreteHMM(leaves[0], leaves[1], emission), normal(*observed, seed=7)
    arguments = adapters.from_pyro(hmm, value)
    ours, theirs = logchain.product(**arguments._asdict()), hmm.log_prob(value)
    assert ours.shape == theirs.shape and distance(ours, theirs) <= NATS
    for mine, peers in gradients(leaves, ours, theirs):
        assert distance(mine, peers) <= NATS
    assert distance(answers(arguments)[1][..., -1, :], hmm.filter(value).probs.detach()) <= SHARE


@pytest.mark.filterwarnings("ignore:where received a uint8 condition tensor")
@pytest.mark.parametrize(("v", "c"), [(6, 4), (2, 3), (40, 17)])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["steps first", "batch first"])
def test_pytorch_crf(batch_first, masked, v, c):
    crf = peer("torchcrf").CRF(c, batch_first=batch_first).double()
    with torch.no_grad():
        for seed, parameter in enumerate(crf.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed))
    emissions = (2 * normal(3, v, c, seed=8)).requires_grad_()
    mask = torch.arange(v) < torch.tensor([[v], [1], [v // 2 + 1]]) if masked else torch.ones(3, v, dtype=torch.bool)
    inputs = [tensor if batch_first else tensor.transpose(0, 1) for tensor in (emissions, mask)]
    arguments = adapters.from_pytorch_crf(crf, inputs[0], inputs[1] if masked else None)._asdict()
    best = logchain.viterbi(**arguments)
    assert [row[inside].tolist() for row, inside in zip(best.states, mask, strict=True)] == crf.decode(*inputs)
    tags = best.states.clamp(min=0) if batch_first else best.states.clamp(min=0).T
    ours, theirs = best.score - logchain.product(**arguments), crf(inputs[0], tags, inputs[1], reduction="none")
    assert distance(ours, theirs) <= NATS
    assert distance(logchain.log_prob(**arguments, states=best.states), theirs) <= NATS
    for mine, peers in gradients([emissions, *crf.parameters()], ours, theirs):
        assert distance(mine, peers) <= NATS


@pytest.mark.parametrize("lengths", [None, [50, 1, 69]], ids=str)
@pytest.mark.parametrize("kind", ["GaussianHMM", "PoissonHMM"])
def test_hmmlearn(kind, lengths):
    model, generator = getattr(peer("hmmlearn.hmm"), kind)(3), np.random.default_rng(3)
    model.startprob_, model.transmat_ = np.array([0.0, 0.5, 0.5]), generator.dirichlet(np.ones(3), 3)
    if kind == "PoissonHMM":
        model.lambdas_ = np.array([[1.0], [4.0], [12.0]])
    else:
        model.n_features, model.means_, model.covars_ = 2, generator.normal(size=(3, 2)), np.ones((3, 2))
    samples, _ = model.sample(120, random_state=0)
    arguments = adapters.from_hmmlearn(model, samples, lengths)
    log_norm, posteriors = answers(arguments)
    score, shares = model.score_samples(samples, lengths)
    rows = posteriors if lengths is None else torch.cat([posteriors[i, :end] for i, end in enumerate(lengths)])
    assert distance(log_norm.sum(), score) <= NATS and distance(rows, shares) <= SHARE
    best, (score, states) = logchain.viterbi(**arguments._asdict()), model.decode(samples, lengths)
    assert distance(best.score.sum(), score) <= NATS and best.states[best.states >= 0].tolist() == states.tolist()


def switching(case):
    """Smoothed results of statsmodels at chosen parameters: nothing is fitted."""
    api, data = peer("statsmodels.tsa.api"), peer("statsmodels.datasets").macrodata.load_pandas().data
    # quarterly growth of the real gross domestic product of the United States, 1959 to 2009, in per cent
    y = 100 * np.diff(np.log(data["realgdp"].to_numpy()))
    if case == "three regimes":
        return api.MarkovRegression(y, 3).smooth([0.8, 0.1, 0.1, 0.1, 0.8, 0.2, -0.5, 0.7, 1.5, 0.4])
    if case == "fourth order":
        return api.MarkovAutoregression(y, 2, 4, switching_ar=False).smooth([0.85, 0.1, 0.0, 1.0, 0.5, *[0.1] * 4])
    leading = np.column_stack([np.ones(len(y)), np.sin(np.arange(len(y)))])
    model = api.MarkovAutoregression(y, 2, 2, switching_ar=False, exog_tvtp=leading)
    model.initialize_known([0.5, 0.5])
    return model.smooth([1.5, -1.5, 0.7, 0.2, 0.0, 1.0, 0.5, 0.1, 0.1])


@pytest.mark.parametrize("case", ["three regimes", "fourth order", "varying transitions"])
def test_statsmodels(case):
    results = switching(case)
    log_norm, posteriors = answers(adapters.from_statsmodels(results))
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
