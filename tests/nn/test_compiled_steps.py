"""A training step of a model is one compiled graph, which is compiled once, and gives the gradients of eager steps."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from logchain import nn

ENDS = torch.tensor([6, 1, 3, 6, 2])
MASK = torch.arange(6) < ENDS[:, None]


def draw(shape, *, high=0):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(high, shape, generator=generator) if high else torch.randn(shape, generator=generator)


def of_hmm(*args, missing=False, lengths=False, high=0, **options):
    """A model, and its loss of a batch of data and lengths."""
    data = draw((5, 6), high=high)
    data = torch.where(draw((5, 6)) > 1.0, torch.nan, data.float()) if missing else data
    ends = ENDS if lengths else None
    hmm = nn.HMM(3, *args, **options)
    return hmm, lambda model, size: -model.log_prob(data[:size], lengths=ends if ends is None else ends[:size]).mean()


def of_crf(reduction, *, masked=True):
    emissions, tags = draw((5, 6, 4)), draw((5, 6), high=4)

    def loss(model, size):
        return -model(emissions[:size], tags[:size], MASK[:size] if masked else None, reduction).sum()

    return nn.LinearChainCRF(4, batch_first=True), loss


def of_circuit(**options):
    data = draw((5, 6), high=0 if "input" in options else 4)
    return nn.ChainCircuit(6, 3, 2, **options), lambda model, size: -model(data[:size]).mean()


MODELS = {
    "categorical": lambda: of_hmm("categorical", num_categories=4, high=4),
    "gaussian": lambda: of_hmm("gaussian", missing=True, lengths=True),
    "poisson": lambda: of_hmm("poisson", lengths=True, high=4),
    "stationary": lambda: of_hmm("categorical", num_categories=4, initial="stationary", high=4),
    "crf, sum": lambda: of_crf("sum", masked=False),
    "crf, mean": lambda: of_crf("mean"),
    "crf, token_mean": lambda: of_crf("token_mean"),
    "crf, none": lambda: of_crf("none"),
    "circuit": lambda: of_circuit(num_categories=4),
    "circuit of numbers": lambda: of_circuit(input="gaussian"),
}


def trained(model, loss, sizes):
    """The parameters after a step for each batch size."""
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for size in sizes:
        optimiser.zero_grad()
        loss(model, size).backward()
        optimiser.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(name, (5, 5, 5)) for name in MODELS] + [(name, (5, 4, 3)) for name in ("gaussian", "crf, mean", "circuit")],
)
def test_steps_are_compiled_once(name, sizes):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, loss = MODELS[name]()
    expected = trained(copy.deepcopy(model), loss, sizes)
    counter = CompileCounterWithBackend("aot_eager")
    dynamic = len(set(sizes)) > 1
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend=counter)
    for found, wanted in zip(trained(model, compiled, sizes), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert counter.frame_count == 1


def test_the_gradient_is_in_the_graph_too():
    """By `torch.func`."""
    torch._dynamo.reset()
    data = draw((5, 6), high=4)
    model = nn.HMM(3, "categorical", num_categories=4)

    def loss(parameters):
        return -torch.func.functional_call(model, parameters, (data,)).mean()

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    compiled = torch.compile(torch.func.grad_and_value(loss), fullgraph=True, backend="aot_eager")
    found, expected = compiled(parameters), torch.func.grad_and_value(loss)(parameters)
    torch.testing.assert_close(found, expected)


# between graphs Dynamo looks at gradients, of which torch warns
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_step_with_a_loss_between_graphs_traces_nothing_backward():
    """A compiled function calls `backward` of a loss that it leaves out: torch traced loops and raised."""
    torch._dynamo.reset()
    model, loss = MODELS["crf, sum"]()
    steps = []
    for compiled in (False, True):
        trained_model = copy.deepcopy(model)
        left_out = torch.compiler.disable(loss)

        def step(trained_model=trained_model, left_out=left_out):
            left_out(trained_model, 5).backward()

        (torch.compile(step, backend="aot_eager") if compiled else step)()
        steps.append([parameter.grad for parameter in trained_model.parameters()])
    torch.testing.assert_close(*steps, rtol=0, atol=0)
