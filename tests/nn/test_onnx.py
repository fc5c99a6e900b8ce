"""Models that are exported to ONNX give torch's results in onnxruntime, for any number of sequences and steps."""

import math

import pytest
import torch

import logchain
from logchain.nn import HMM, Gaussian, LinearChainCRF

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

# of the exporter itself
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
INF, NAN = math.inf, math.nan
OPERANDS = [
    torch.tensor([[[0.0, -300.0], [0.0, 3.0], [1.0, -INF]]]),
    torch.tensor([[[0.0, -200.0], [-INF, -200.0]]]),
    torch.tensor([[-INF, 0.0]]),
]


class Call(torch.nn.Module):
    """A function of tensors as a module, with the parameters of another module."""

    def __init__(self, function, module=None):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args):
        return self.function(*args)


def exported(function, args, axes=2, module=None):
    """The function in onnxruntime, with any sizes of the first axes of the arguments."""
    dynamic = tuple({axis: torch.export.Dim.DYNAMIC for axis in range(min(axes, arg.dim()))} for arg in args)
    program = torch.onnx.export(
        Call(function, module).eval(),
        tuple(args),
        dynamo=True,
        dynamic_shapes=(dynamic,),
        custom_translation_table=logchain.onnx.translations(),
        verbose=False,
    )
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [each.name for each in session.get_inputs()]

    def run(*args):
        inputs = {name: arg.numpy() for name, arg in zip(names, args, strict=True)}
        return [torch.from_numpy(result) for result in session.run(None, inputs)]

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_crf_tags_and_scores_with_any_mask_equal_torch(dtype):
    crf = LinearChainCRF(4, batch_first=True, strict_mask=False).to(dtype)
    with torch.no_grad():
        crf.transitions[1, 2] = -INF
    generator = torch.Generator().manual_seed(0)

    def batch(n, v):
        return torch.randn(n, v, 4, dtype=dtype, generator=generator), torch.rand(n, v, generator=generator) < 0.6

    run = exported(crf.viterbi, batch(3, 5), module=crf)
    for n, v in ((3, 5), (2, 1), (1, 7), (4, 300)):
        emissions, mask = batch(n, v)
        emissions[~mask] = NAN
        tags, score = run(emissions, mask)
        expected = crf.viterbi(emissions, mask)
        assert torch.equal(tags, expected.states)
        torch.testing.assert_close(score, expected.score.detach(), rtol=torch.finfo(dtype).eps, atol=0)


def test_crf_tags_of_impossible_and_unknown_sequences_are_negative():
    crf = LinearChainCRF(2, batch_first=True)
    emissions = torch.zeros(5, 4, 2)
    emissions[0, 1], emissions[1, 2, 0], emissions[2, 3, 1], emissions[3, 0, 1] = -INF, NAN, INF, -INF
    tags, score = exported(crf.viterbi, [emissions[:2]], module=crf)(emissions)
    expected = crf.viterbi(emissions)
    assert torch.equal(tags, expected.states) and (tags[:3] == -1).all() and (tags[3:] >= 0).all()
    torch.testing.assert_close(score, expected.score.detach(), equal_nan=True)


@pytest.mark.parametrize("options", [{}, {"initial": "stationary"}])
def test_hmm_log_likelihood_of_any_data_and_lengths_equals_torch(options):
    hmm = HMM(3, Gaussian(3, 2), **options)
    data, lengths = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([5, 1, 3])

    def function(data, lengths):
        return hmm.log_prob(data, lengths=lengths)

    run = exported(function, [data, lengths], module=hmm)
    long = 3 * torch.randn(4, 400, 2, generator=torch.Generator().manual_seed(1))
    long[1, 7] = NAN
    for each, ends in ((data, lengths), (long, torch.tensor([400, 9, 1, 250])), (data[:1, :1], lengths[1:2])):
        expected = function(each, ends).detach()
        torch.testing.assert_close(run(each, ends)[0], expected, rtol=4e-7, atol=1e-6)


def test_log_partition_has_no_underflow_and_exact_zeros():
    def function(x, bulk, p0):
        return logchain.product(x, bulk, p0, log_params=True)

    run = exported(function, OPERANDS, axes=0)
    x, bulk, p0 = OPERANDS
    expected = function(*OPERANDS)
    assert expected == -INF and torch.equal(run(*OPERANDS)[0], expected)
    bulk = torch.tensor([[[0.0, -200.0], [-700.0, 0.0]]])
    torch.testing.assert_close(run(x, bulk, p0)[0], function(x, bulk, p0), rtol=1e-7, atol=0)
    assert run(torch.full_like(x, NAN), bulk, p0)[0].isnan()


def test_matrices_of_each_step_and_lengths_out_of_range():
    generator = torch.Generator().manual_seed(0)
    x, p0 = torch.randn(2, 4, 3, generator=generator), torch.rand(3, generator=generator)
    bulk, lengths = torch.rand(3, 3, 3, generator=generator), torch.tensor([4, 2])

    def function(x, bulk, p0, lengths):
        best = logchain.viterbi(x, bulk, p0, lengths=lengths)
        return logchain.product(x, bulk, p0, lengths=lengths), best.states, best.score

    run = exported(function, [x, bulk, p0, lengths], axes=0)
    for found, expected in zip(run(x, bulk, p0, lengths), function(x, bulk, p0, lengths), strict=True):
        torch.testing.assert_close(found, expected)
    log_norm, states, score = run(x, bulk, p0, torch.tensor([5, 0]))
    assert log_norm.isnan().all() and (states == -1).all() and score.isnan().all()


def test_several_best_paths_are_refused():
    with pytest.raises(Exception, match="topk_paths: expected viterbi in an export to ONNX, got k = 2"):
        exported(lambda *chain: logchain.topk_paths(*chain, k=2, log_params=True).scores, OPERANDS, axes=0)
