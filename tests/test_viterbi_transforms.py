"""`logchain.viterbi` and `logchain.topk_paths` are compiled into one graph, exported and mapped."""

import pytest
import torch

from logchain.viterbi import viterbi
from tests.best_paths import BOTH, CHAINS, IDS, ranked, run
from tests.families import Chain, dense

F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize(("name", "chain", "lengths"), CHAINS, ids=IDS)
def test_opcheck(name, chain, lengths):
    for k in (None, 2):
        arguments = (*chain[:3], lengths, chain.log_params, k)
        torch.library.opcheck(torch.ops.logchain.best_paths.default, arguments)


@pytest.mark.parametrize(
    ("question", "case", "dynamic"),
    [(run, case, False) for case in CHAINS]
    + [(run, CHAINS[1], True), (run, CHAINS[2], True), (ranked, CHAINS[2], True)],
    ids=[*IDS, "each, dynamic", "lengths, dynamic", "topk_paths, lengths, dynamic"],
)
def test_compiles_into_one_graph(question, case, dynamic):
    _, chain, lengths = case

    def function(x, bulk, p0):
        states, score = question(Chain(x + 1, bulk * 2, p0), lengths)
        return states, score * 2

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    results = []
    for call in (compiled, function):
        operands = [operand.clone().requires_grad_() for operand in chain[:3]]
        states, score = call(*operands)
        results.append((states, score.detach(), *torch.autograd.grad(score.sum(), operands)))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_is_exported():
    class Decoder(torch.nn.Module):
        def forward(self, x, bulk, p0):
            return viterbi(x, bulk, p0)

    chain = dense(F32, v=4, c=3)
    program = torch.export.export(Decoder(), chain[:3])
    assert any("logchain.best_paths" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(*chain[:3]).states, run(chain).states)


@BOTH
@pytest.mark.parametrize(
    "in_dims", [(0, None, None), (0, 0, 0), (None, 0, None), (None, None, 0), (1, None, 1)], ids=str
)
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_vmap_is_a_loop(in_dims, each, question):
    chain = dense(F64, v=4, c=3, each=each)
    scale = torch.linspace(0.5, 2.0, 5, dtype=F64)
    stacked = [
        operand if dim is None else (operand[None] * scale.view(-1, *(1,) * operand.dim())).movedim(0, dim)
        for operand, dim in zip(chain[:3], in_dims, strict=True)
    ]

    def paths(*operands):
        return tuple(question(Chain(*operands)))

    def gradient(*operands):
        return torch.func.grad(lambda *o: paths(*o)[1].sum(), argnums=(0, 1, 2))(*operands)

    found, slopes = torch.vmap(paths, in_dims=in_dims)(*stacked), torch.vmap(gradient, in_dims=in_dims)(*stacked)
    for i in range(5):
        one = [t if dim is None else t.select(dim, i) for t, dim in zip(stacked, in_dims, strict=True)]
        for value, expected in zip(found, paths(*one), strict=True):
            assert torch.equal(value[i], expected)
        for slope, other in zip(slopes, gradient(*one), strict=True):
            torch.testing.assert_close(slope[i], other)


def test_vmap_over_lengths():
    chain = dense(F64, v=4, c=3)
    lengths = torch.tensor([[4, 1, 2], [3, 4, 1]])
    found = torch.vmap(lambda ends: viterbi(*chain[:3], lengths=ends))(lengths)
    for i, ends in enumerate(lengths):
        assert torch.equal(found.states[i], run(chain, ends).states)
        assert torch.equal(found.score[i], run(chain, ends).score)
