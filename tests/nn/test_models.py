"""What a user of torch expects of every model: copies, precision, data-parallel training, shapes alone, compilation."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from logchain import nn
from logchain.transitions import Monarch
from tests.seeded import seeded

N, V = 5, 6
LENGTHS = torch.tensor([6, 1, 3, 6, 2])


def integers(*event):
    return torch.randint(4, (N, V, *event), generator=seeded())


def numbers(*event):
    return torch.randn(N, V, *event, generator=seeded())


def missing(data):
    return data.masked_fill(torch.rand(data.shape, generator=seeded(1)) < 0.2, torch.nan)


class Model(NamedTuple):
    """How a model is made, data for it, and whether sequences have lengths; the reduction of a CRF, and its mask."""

    make: Callable
    data: Callable = integers
    lengths: bool = False
    reduction: str | None = None

    def loss(self, model, data, lengths=LENGTHS):
        """Through `forward`, which is what wrappers call."""
        ends = lengths[: len(data)].to(data.device) if self.lengths else None
        if self.reduction:
            tags = (data[..., 0] > 0).long()
            mask = None if ends is None else torch.arange(V, device=data.device) < ends[:, None]
            return -model(data, tags, mask, self.reduction).sum()
        return -model(data, **({} if ends is None else {"lengths": ends})).sum()


def crf(reduction, lengths):
    return Model(lambda: nn.LinearChainCRF(4, batch_first=True), lambda: numbers(4), lengths, reduction)


def monarch():
    return nn.Transitions(Monarch(torch.ones(2, 2, 2), torch.ones(2, 2, 2)))


MODELS = {
    "categorical": Model(lambda: nn.HMM(3, nn.Categorical(3, 4))),
    "gaussian": Model(lambda: nn.HMM(3, "gaussian"), lambda: missing(numbers()), lengths=True),
    "full covariances": Model(lambda: nn.HMM(3, nn.Gaussian(3, 2, "full")), lambda: numbers(2)),
    "matrix per step": Model(lambda: nn.HMM(3, "poisson", transition=nn.Transitions(3, lead=(V - 1,))), lengths=True),
    "stationary": Model(lambda: nn.HMM(3, nn.Categorical(3, 4), initial="stationary")),
    "binomial": Model(lambda: nn.HMM(3, nn.Binomial((2, 3), 10)), lambda: integers(2)),
    "mixture": Model(lambda: nn.HMM(3, nn.Mixture(nn.Gaussian((3, 2), 2))), lambda: numbers(2)),
    "gamma": Model(
        lambda: nn.HMM(3, nn.Distribution(torch.distributions.Gamma, 3, concentration=2.0, rate=1.5)),
        lambda: numbers().exp(),
    ),
    "chain": Model(lambda: nn.ChainCircuit(V, 3, 2, nn.Categorical((2, V, 3), 4))),
    "chain of numbers": Model(lambda: nn.ChainCircuit(V, 3, 2, "gaussian"), lambda: missing(numbers())),
    "monarch": Model(lambda: nn.HMM(4, "gaussian", transition=monarch()), numbers),
    "durations": Model(lambda: nn.HMM(3, "gaussian", transition=nn.Durations(3, 4)), numbers, lengths=True),
    "crf, sum": crf("sum", lengths=False),
    "crf, token_mean": crf("token_mean", lengths=True),
    "semi-Markov crf": Model(
        lambda: nn.SemiMarkovCRF(4, V, batch_first=True), lambda: numbers(4), lengths=True, reduction="mean"
    ),
}
ALL = pytest.mark.parametrize("name", MODELS)
# the first parameters of a distribution are checked, which takes values
WITHOUT_VALUES = pytest.mark.parametrize("name", [name for name in MODELS if name != "gamma"])


def made(name):
    torch.manual_seed(0)
    row = MODELS[name]
    return row, row.make(), row.data()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@ALL
def test_copies_and_files_hold_the_same_model(name):
    row, model, data = made(name)
    other, loss = copy.deepcopy(model), row.loss(model, data)
    for same in (other, pickle.loads(pickle.dumps(model))):
        assert torch.equal(row.loss(same, data), loss)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(0.5)
    assert not torch.equal(row.loss(other, data), loss)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(row.loss(other, data), loss)
    # every parameter takes part: DistributedDataParallel waits for the gradients of all
    assert any(gradient.any() for gradient in gradients(model, loss))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["categorical", "chain", "crf, sum"])
def test_float64_is_computed_in_float64_and_half_in_float32(name, dtype):
    row, model, data = made(name)
    double = copy.deepcopy(model.to(dtype)).double()
    exact, found = row.loss(double, data), row.loss(model, data)
    assert (found.dtype, exact.dtype) == (torch.float32, torch.float64)
    assert abs(found - exact) < 2e-5
    for gradient, expected in zip(gradients(model, found), gradients(double, exact), strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(row.loss(model, data), found)


@WITHOUT_VALUES
def test_model_without_values_has_gradients_and_trains_once_it_has_them(name):
    row, _, data = made(name)
    with (mode := FakeTensorMode()):
        model = row.make()
        loss = row.loss(model, mode.from_tensor(data), mode.from_tensor(LENGTHS))
        for gradient, parameter in zip(gradients(model, loss), model.parameters(), strict=True):
            assert gradient.shape == parameter.shape
    with torch.device("meta"):
        model = row.make()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    loss = row.loss(model, data.to("meta"))
    assert loss.is_meta and all(gradient.is_meta for gradient in gradients(model, loss))
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    if row.reduction:
        model.reset_parameters()
    else:
        model.initialize(data)
    loss = row.loss(model, data)
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients(model, loss))


def test_results_on_the_meta_device_have_shapes():
    with torch.device("meta"):
        hmm, crf, data = nn.HMM(3, "gaussian"), nn.LinearChainCRF(4), torch.zeros(N, V)
        observed = torch.ones(N, V, dtype=torch.bool)
        assert crf.viterbi(torch.zeros(V, N, 4)).states.shape == (V, N)
    lengths = LENGTHS.tolist()
    assert hmm.posterior(data, observed=observed, lengths=lengths).states.shape == (N, V, 3)
    assert hmm.decode(data, lengths=lengths).states.is_meta
    assert hmm.sample_posterior(data, 7).shape == (7, N, V)
    assert hmm.sample(7, V).data.shape == (7, V)


def trained(model, loss, sizes):
    """The parameters after a step for each batch size."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for size in sizes:
        optimizer.zero_grad()
        loss(model, size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(name, (5, 5, 5)) for name in ("full covariances", "matrix per step", "mixture", "gamma", "crf, sum")]
    + [(name, (5, 4, 3)) for name in ("gaussian", "crf, token_mean", "chain")],
)
def test_training_step_compiles_once_as_one_graph(name, sizes):
    torch._dynamo.reset()
    row, model, data = made(name)

    def loss(model, size):
        return row.loss(model, data[:size]) / size

    expected = trained(copy.deepcopy(model), loss, sizes)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, dynamic=len(set(sizes)) > 1, backend=counter)
    for found, wanted in zip(trained(model, compiled, sizes), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert counter.frame_count == 1


# between graphs Dynamo looks at gradients, of which torch warns
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_step_with_a_loss_between_graphs_traces_nothing_backward():
    """A compiled function calls `backward` of a loss that it leaves out: torch traced loops and raised."""
    torch._dynamo.reset()
    row, model, data = made("crf, sum")
    left_out, found = torch.compiler.disable(row.loss), []
    for compiled in (False, True):
        other = copy.deepcopy(model)

        def step(other=other):
            left_out(other, data).backward()

        (torch.compile(step, backend="aot_eager") if compiled else step)()
        found.append([parameter.grad for parameter in other.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)
