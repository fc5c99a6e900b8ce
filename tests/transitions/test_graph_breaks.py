"""Inside torch.compile a chain of structures is computed between graphs, with the same results and gradients."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import logchain
from logchain import nn
from logchain.transitions import Duration, LowRank
from tests.transitions.structures import MAKE, C, numbers

V = 5
QUERIES = {
    "product": logchain.product,
    "marginals": lambda *chain: logchain.marginals(*chain, transitions="sum").transitions.parameters,
    "viterbi": logchain.viterbi,
    "sample": lambda *chain: logchain.sample(*chain, 3, generator=torch.Generator().manual_seed(1)),
    "stream": lambda x, bulk, p0: logchain.Stream(bulk, p0).update(x).log_norm,
}

# between graphs Dynamo looks at gradients, of which torch warns
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def problem(kind):
    structure = MAKE[kind](numbers(3)).map(torch.Tensor.requires_grad_)
    x = torch.randn(2, V, C, generator=torch.Generator().manual_seed(4), dtype=torch.float64, requires_grad=True)
    return x, structure, numbers(5)(C).requires_grad_()


def gradients(value, leaves):
    finite = value.masked_fill(value == -torch.inf, 0.0)
    return torch.autograd.grad(finite.sum(), leaves, allow_unused=True, retain_graph=True)


@pytest.mark.parametrize(
    ("query", "kind"),
    [("product", "sparse"), ("product", "monarch"), *((query, "sparse") for query in list(QUERIES)[1:])],
)
def test_compiled_query_has_the_same_result(query, kind):
    x, structure, p0 = problem(kind)
    leaves = [x, p0, *structure.parameters]

    def call(x, p0, *parameters):
        result = QUERIES[query](2 * x, structure.with_parameters(*parameters), p0)
        return [result] if isinstance(result, torch.Tensor) else list(result)

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager")
    for found, expected in zip(compiled(*leaves), call(*leaves), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        if expected.requires_grad:
            torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves))


def test_no_step_is_traced():
    x, structure, p0 = problem("low_rank")
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x: logchain.product(2 * x, structure, p0) / 2, backend=counter)
    compiled(x)
    assert counter.op_count == 2


def test_one_graph_is_refused_with_the_reason():
    x, structure, p0 = problem("low_rank")
    compiled = torch.compile(logchain.product, fullgraph=True, backend="eager")
    with pytest.raises(
        torch._dynamo.exc.Unsupported,
        match=r"Message: a chain of structures is computed between graphs; bulk\.to_dense\(\)",
    ):
        compiled(x, structure, p0)


def test_a_negative_weight_is_named():
    x, structure, p0 = problem("banded")
    values = structure.parameters[0].detach().clone()
    values[1, 2] = -0.5
    compiled = torch.compile(logchain.product, backend="eager")
    with pytest.raises(ValueError, match=r"bulk\.values: expected non-negative weights, got -0\.5 at \[1, 2\]"):
        compiled(x.detach(), structure.with_parameters(values), p0.detach())


def test_a_training_step_of_a_structured_model():
    hmm = nn.HMM(C, nn.Categorical(C, 5), transition=nn.Transitions(LowRank(torch.rand(C, 3), torch.rand(C, 3))))
    data = torch.randint(5, (4, V), generator=torch.Generator().manual_seed(2))
    losses = []
    for log_prob in (hmm.log_prob, torch.compile(hmm.log_prob, backend="aot_eager")):
        hmm.zero_grad()
        (-log_prob(data).mean()).backward()
        losses.append([parameter.grad.clone() for parameter in hmm.parameters()])
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("kind", ["sparse", "low_rank"])
def test_compiled_training_step_traces_no_step_of_the_chain(kind):
    """Of a compiled function that calls `backward`: torch warned of the library's caches, and hit its limit."""
    x, structure, p0 = problem(kind)
    leaves = [x, p0, *structure.parameters]

    def step(weight):
        logchain.product(weight * x, structure, p0).sum().backward()

    torch.compiler.reset()
    grads = []
    counter = CompileCounterWithBackend("eager")
    for function in (step, torch.compile(step, backend=counter)):
        for leaf in leaves:
            leaf.grad = None
        function(torch.tensor(2.0))
        grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    assert counter.op_count <= 3


def test_an_export_is_refused():
    """Its graph returned memory without values."""
    hmm = nn.HMM(C, "gaussian", transition=nn.Transitions(LowRank(torch.rand(C, 3), torch.rand(C, 3))))
    with pytest.raises(NotImplementedError, match=r"^bulk: expected a tensor inside torch\.export, got a structure"):
        torch.export.export(hmm, (torch.zeros(4, V),))


def test_arguments_of_durations_are_one_graph():
    lengths, rand = torch.tensor([3, V]), numbers(6)
    x, p0, matrix, durations = torch.zeros(2, V, 2, dtype=torch.float64), rand(2), rand(2, 2), rand(2, 3)

    def call(x, matrix, durations):
        chain = Duration(matrix, durations).arguments(x, p0, lengths=lengths)
        return chain.x, chain.p0, *chain.bulk.parameters

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, matrix, durations), call(x, matrix, durations), rtol=0, atol=0)
