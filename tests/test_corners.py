"""Corners in which numbers once went wrong: denormal and infinite matrices, the lowest float, negative views."""

import numpy as np
import pytest
import torch

import logchain
from logchain import reference
from tests.contract import Truth, assert_contract, assert_values
from tests.families import F32, F64, Chain, dense
from tests.subjects import SUBJECTS


def assert_true(x, bulk, p0, **options):
    truth = Truth(Chain(x, bulk, p0, **options))
    assert_values(logchain.product(x, bulk, p0, **options), truth.log_norm, truth.value_bound())


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 1e-20, 1e20, 1e38])
def test_matrices_of_any_size(size):
    x, p0 = torch.zeros(2, 3, 3), torch.ones(3)
    assert_true(x, torch.full((2, 3, 3), size), p0)
    leaf = torch.full((2, 3, 3), max(size, 1e-37), requires_grad=True)
    logchain.product(x, leaf, p0).sum().backward()
    torch.testing.assert_close((leaf.grad * leaf).sum(), torch.tensor(4.0))  # two transitions in each of two sequences
    assert (logchain.product(x, torch.full((2, 3, 3), size), p0 * 0) == -torch.inf).all()


def test_infinity_elsewhere_does_not_hide_the_size_of_the_others():
    bulk = torch.full((2, 2, 4, 4), 1e38)
    bulk[1, 1] = torch.inf
    out = logchain.product(torch.zeros(2, 3, 4), bulk, torch.ones(4), lengths=[3, 2])
    sizes = torch.tensor([2.0, 1.0], dtype=torch.float64)
    truth = sizes * torch.tensor(1e38, dtype=torch.float64).log() + (sizes + 1) * torch.tensor(4.0).double().log()
    torch.testing.assert_close(out.double(), truth, rtol=2.0**-22, atol=0)


def test_the_lowest_float_is_no_minus_infinity():
    x = torch.tensor([[[0.0, -200.0], [0.0, 0.0]]])
    x[0, 1] = torch.finfo(torch.float32).min
    out = logchain.product(x, torch.ones(1, 2, 2), torch.tensor([0.0, 1.0]))
    assert out.item() == torch.finfo(torch.float32).min


@pytest.mark.parametrize("far", [20.0, 40.0, 60.0, 200.0])
def test_a_start_far_below_the_largest_emission(far):
    x = torch.tensor([[[far * 1.01, 0.3], [0.0, -1.0], [0.0, 0.0]]])
    assert_true(x, torch.full((1, 2, 2), 0.5), torch.tensor([0.0, 1.0]))
    assert_true(x, torch.full((1, 2, 2), 0.5), torch.tensor([1e-30, 1.0]))


def test_entries_far_below_their_matrix_maximum_do_not_drift():
    d, never = 20.3, -torch.inf
    bulk, p0 = torch.tensor([[[-d, never], [0.0, never]]]), torch.tensor([0.0, never])
    assert_true(torch.full((1, 1000, 2), d), bulk, p0, log_params=True)


@pytest.mark.parametrize("c", [3, 20, 40])
@pytest.mark.parametrize("dtype, far", [(F32, 200.0), (F64, 1000.0)])
def test_filtered_posteriors_of_low_emissions_before_an_impossible_step_are_exact(c, dtype, far):
    bulk, x, p0 = torch.zeros(1, c, c, dtype=dtype), torch.zeros(2, 4, c, dtype=dtype), torch.eye(c, dtype=dtype)[0]
    bulk[0, 0, 1:3] = 0.5  # no path leads on from states 1 and 2
    x[:, 1, 1:3] = torch.tensor([-far, -far - 1.0])
    for n in (1, 2):
        posteriors = logchain.filtered(x[:n], bulk, p0).states[0, :, 1:3]
        expected = torch.tensor([[0.0, 0.0], torch.tensor([0.0, -1.0]).softmax(0).tolist(), [0.0, 0.0], [0.0, 0.0]])
        torch.testing.assert_close(posteriors, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_a_path_in_half_precision_are_rounded_once(dtype):
    x, matrix, p0 = torch.zeros(1000, 2, dtype=dtype), torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.ones(2)
    gradients = []
    for kind in (dtype, F32):
        logs = matrix.log().to(dtype).to(kind).requires_grad_()
        states = torch.arange(1000) // 400 % 2
        logchain.log_prob(x.to(kind), logs, p0.log().to(kind), states, log_params=True).backward()
        gradients.append(logs.grad)
    torch.testing.assert_close(*gradients, check_dtype=False, rtol=torch.finfo(dtype).eps, atol=0.0)


negative = torch._neg_view


WEIGHTS = torch.full((1, 3, 3), 0.5), torch.ones(3)
OF_VIEWS = {
    "product": lambda x: logchain.product(x, *WEIGHTS),
    "lengths": lambda x: logchain.product(x, *WEIGHTS, lengths=[2, 5]),
    "packed": lambda x: logchain.product(x[0], *WEIGHTS, cu_seqlens=torch.tensor([0, 2, 5])),
    "matrix_product": lambda x: logchain.matrix_product(x[..., None].expand(2, 5, 3, 3)),
}


@pytest.mark.parametrize("function", OF_VIEWS)
def test_negative_views_may_be_gradients_that_come_in(function):
    x = torch.randn(2, 5, 3, dtype=F64, requires_grad=True)  # of the dtype of weights in C, which is not converted
    out = OF_VIEWS[function](x)
    torch.testing.assert_close(OF_VIEWS[function](negative(-x)), out)
    weight = torch.linspace(-2.0, 0.5, out.numel(), dtype=F64).view(out.shape)
    found, expected = (torch.autograd.grad(out, x, w, retain_graph=True)[0] for w in (negative(-weight), weight))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"lengths": [2, 5]}, {"cu_seqlens": torch.tensor([0, 2, 5])}], ids=str)
def test_what_lies_on_the_cpu_is_computed_there_whatever_the_default_device(options):
    x, bulk, p0 = torch.randn(2, 5, 3, requires_grad=True), torch.rand(1, 3, 3), torch.ones(3)
    operands = x[0] if "cu_seqlens" in options else x, bulk, p0

    def found():
        out = logchain.product(*operands, **options)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        states = logchain.marginals(*operands, **options).states
        stack = logchain.matrix_product(x[..., None].expand(2, 5, 3, 3))
        return gradient, states, logchain.viterbi(*operands, **options).score, stack

    expected = found()
    with torch.device("meta"):
        torch.testing.assert_close(found(), expected)


def test_lengths_of_unbroadcast_chains_and_of_int32():
    chain = dense(F32, v=5, n=4, t=1)
    chain = Chain(chain.x[:, 0], chain.bulk[0, 0], chain.p0[0, 0])
    assert_contract(chain, torch.tensor([2, 5, 1, 3], dtype=torch.int32))


@pytest.mark.parametrize("subject", ["product", "segments:3:2", "tree", "packed"])
@pytest.mark.parametrize("lengths", [None, [20, 18, 7]], ids=["whole", "lengths"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize(
    "weights", [(1e4, -1.0, 0.0), (-1e6, -1e5, -1e3), (1e7, 1e-3, 1.0), (1e-7, -1e-6, 0.0)], ids=str
)
def test_gradients_take_weights_of_any_size(weights, each, lengths, subject):
    chain = dense(F32, each=each, n=3, t=1, v=20, c=3)
    chain.x[0, :, 3, 1] -= 20.0  # a posterior of 1e-9
    chain.x[1, :, 2, 0] = -torch.inf
    chain = chain._replace(bulk=1e-30 * chain.bulk, p0=1e-30 * chain.p0.expand(3, 1, 3))
    operands = [operand.clone().requires_grad_() for operand in chain[:3]]
    out = SUBJECTS[subject](*operands, lengths=lengths)["log_norm"]
    found = torch.autograd.grad(out, operands, torch.tensor(weights)[:, None])
    x, bulk, p0 = (operand.double().numpy() for operand in chain[:3])
    truth = reference.marginals(x, bulk, p0, lengths=None if lengths is None else np.array(lengths)[:, None])
    over, states, transitions = torch.tensor(weights, dtype=F64)[:, None], *map(torch.from_numpy, truth[:2])
    counts = over[..., None, None, None] * transitions
    counts = counts if each else counts.sum((0, 1), keepdim=True)
    expected = over[..., None, None] * states, counts / chain.bulk, over[..., None] * states[:, :, 0] / chain.p0
    torch.testing.assert_close(found, tuple(value.float() for value in expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("at", [3, 400, 498, 499, 500, 998])
@pytest.mark.parametrize("schedule", ["segments:4:10"])
def test_infinite_weights_in_segments(schedule, at, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 1000, 4, generator=generator, dtype=dtype).requires_grad_()
    bulk = torch.rand(2, 999, 4, 4, generator=generator, dtype=dtype)
    bulk[0, at, 1, 2] = torch.inf
    found = [logchain.product(x, bulk, torch.ones(2, 4, dtype=dtype), strategy=s) for s in (schedule, "sequential")]
    assert found[1][0] == torch.inf and found[1][1].isfinite()
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*(torch.autograd.grad(one.sum(), x)[0] for one in found), equal_nan=True)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("v", [1, 2])
def test_a_single_variable_far_below_an_impossible_state_has_no_entropy(v, dtype):
    x, bulk, p0 = torch.zeros(3, v, 2, dtype=dtype), torch.ones(1, 2, 2, dtype=dtype), torch.tensor([0.0, 1.0])
    x[:, 0, 0] = 3000.0
    assert (logchain.entropy(x, bulk, p0, lengths=[1, 1, 1]) == 0).all()
    assert (logchain.kl_divergence((x, bulk, p0), (x * 0, bulk, p0), lengths=[1, 1, 1]) == 0).all()
