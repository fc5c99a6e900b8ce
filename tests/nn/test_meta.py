"""Models are made without values, for deferred initialisation, and train on the shapes of data alone."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from logchain import nn

MODELS = {
    "categorical": (lambda: nn.HMM(3, "categorical", num_categories=4), ()),
    "gaussian": (lambda: nn.HMM(3, "gaussian"), ()),
    "full": (lambda: nn.HMM(3, "gaussian", num_features=2, covariance="full"), (2,)),
    "poisson": (lambda: nn.HMM(3, "poisson", num_steps=6), ()),
    "stationary": (lambda: nn.HMM(3, "poisson", initial="stationary"), ()),
    "bernoulli": (lambda: nn.HMM(3, nn.Bernoulli((2, 3))), (2,)),
    "binomial": (lambda: nn.HMM(3, nn.Binomial(3, 10)), ()),
    "chain": (lambda: nn.ChainCircuit(6, 3, 2, num_categories=4), ()),
    "chain of numbers": (lambda: nn.ChainCircuit(6, 3, 2, input="gaussian"), ()),
    "tree": (lambda: nn.TreeCircuit(6, 3, 2, num_categories=4), ()),
    "tucker": (lambda: nn.TreeCircuit(6, 3, layer="tucker", num_categories=4), ()),
    "crf": (lambda: nn.LinearChainCRF(4, batch_first=True), (4,)),
}


@pytest.fixture(params=MODELS)
def asked(request):
    """A function that makes a model, and data."""
    make, event = MODELS[request.param]
    generator = torch.Generator().manual_seed(0)
    whole = request.param not in ("gaussian", "full", "chain of numbers", "crf")
    high = 2 if request.param == "bernoulli" else 4
    if whole:
        return make, torch.randint(high, (5, 6, *event), generator=generator)
    return make, torch.randn(5, 6, *event, generator=generator)


def train(model, data):
    """The loss, with gradients of all parameters."""
    crf = isinstance(model, nn.LinearChainCRF)
    tags = data.new_zeros(data.shape[:2], dtype=torch.int64)
    loss = -(model(data, tags, tags == 0) if crf else model(data).sum())
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad.shape == parameter.shape and parameter.grad.device == parameter.device
    return loss.detach()


def test_made_on_the_meta_device(asked):
    make, data = asked
    with torch.device("meta"):
        model = make()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert train(model, data.to("meta")).is_meta
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    if isinstance(model, nn.LinearChainCRF):
        model.reset_parameters()
    else:
        model.initialise(data)
    model.zero_grad()
    assert train(model, data).isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_fake_training(asked):
    make, data = asked
    mode = FakeTensorMode()
    fake = mode.from_tensor(data)
    with mode:
        assert train(make(), fake).shape == ()


def test_answers_of_an_hmm():
    with torch.device("meta"):
        hmm = nn.HMM(3, "gaussian")
        data = torch.zeros(5, 6)
        observed = torch.ones(5, 6, dtype=torch.bool)
    lengths = [6, 1, 2, 3, 4]
    assert hmm.posterior(data, observed=observed, lengths=lengths).states.shape == (5, 6, 3)
    assert hmm.decode(data, lengths=lengths).states.is_meta
    assert hmm.sample_posterior(data, 7).shape == (7, 5, 6)
    assert hmm.sample(7, 6).data.shape == (7, 6)


def test_what_needs_values_is_refused():
    asked = "expected a device that holds values, got meta$"
    with torch.device("meta"):
        crf = nn.LinearChainCRF(4)
        assert crf.viterbi(torch.zeros(6, 5, 4)).states.shape == (6, 5)
        with pytest.raises(ValueError, match=f"^emissions: {asked}"):
            crf.decode(torch.zeros(6, 5, 4))
        for method in (
            nn.HMM(3, "gaussian").initialise,
            nn.HMM(3, "gaussian").fit,
            nn.ChainCircuit(6, 3, 2, input="gaussian").fit,
        ):
            with pytest.raises(ValueError, match=f"^data: {asked}"):
                method(torch.zeros(5, 6))
        with pytest.raises(ValueError, match=f"^offsets: {asked}"):
            nn.transitions.Banded(3, [0, 1])
        with pytest.raises(ValueError, match=f"^indices: {asked}"):
            nn.transitions.Sparse(torch.tensor([[0, 1], [1, 0]], device="cpu"))
        with pytest.raises(ValueError, match=f"^rate: {asked}"):
            nn.Distribution(torch.distributions.Poisson, 2, rate=1.0)
