"""Wrong arguments are raised before anything is computed, by name, with what was expected and what came."""

import math
import re
import warnings

import numpy as np
import pytest
import torch

import logchain
from logchain import transitions
from logchain.kernels import weights
from tests.contract import poisoned_memory
from tests.families import FAMILIES, INF, NAN
from tests.seeded import seeded
from tests.subjects import OTHERS, STRATEGIES, SUBJECTS

ones, zeros = torch.ones, torch.zeros


def chain(**changes):
    return {"x": zeros(10, 1, 6, 4), "bulk": ones(1, 1, 5, 4, 4), "p0": ones(1, 1, 4)} | changes


def short(**changes):
    return {"x": zeros(6, 4), "bulk": ones(1, 4, 4), "p0": ones(4)} | changes


def matrices(a=(2, 3), b=(3, 2), **options):
    return {"a": ones(a), "b": ones(b), **options}


STRATEGY = "strategy: expected one of 'auto', 'sequential', 'segments', 'tree',"

CHAIN = tuple(short().values())
product, check, matmul, divergence = logchain.product, logchain.check, logchain.matmul, logchain.kl_divergence
BULK = "bulk: expected shape [1 or 10, 1, 5 or 1, 4, 4] to go with x [10, 1, 6, 4], got "
DTYPES = "expected float32, float64, bfloat16 or float16"
NEGATIVE = "expected non-negative weights, got"
ERRORS = [
    (product, ValueError, BULK + "[1, 1, 6, 4, 4]", chain(bulk=ones(1, 1, 6, 4, 4))),
    (product, ValueError, BULK + "[3, 1, 5, 4, 4]", chain(bulk=ones(3, 1, 5, 4, 4))),
    (product, ValueError, BULK + "[2, 1, 1, 5, 4, 4]", chain(bulk=ones(2, 1, 1, 5, 4, 4))),
    (product, ValueError, "bulk: expected shape [5 or 1, 4, 4] to go with x [10, 1, 6,", chain(bulk=ones(5, 4, 3))),
    (product, ValueError, "bulk: expected at least 3 axes, got shape [4]", chain(bulk=ones(4))),
    (product, ValueError, "p0: expected shape [1 or 10, 1, 4] to go with x [10, 1, 6, 4]", chain(p0=ones(2, 1, 4))),
    (product, ValueError, "p0: expected at least 1 axes, got shape []", chain(p0=ones(()))),
    (product, ValueError, "x: expected at least 2 axes, got shape [4]", chain(x=zeros(4))),
    (product, ValueError, "x: expected at least one variable and one state [..., v, c], got", chain(x=zeros(0, 4))),
    (product, ValueError, "x: expected at least one variable and one state", chain(x=zeros(10, 6, 0))),
    (product, ValueError, "bulk: expected shape [1 or 0, 3, 3] to go with x [2, 1, 3], got [2, 3, 3]",
     {"x": zeros(2, 1, 3), "bulk": ones(2, 3, 3), "p0": ones(3)}),
    (product, ValueError, "lengths: expected values from 1 to v = 6, got 7 to 7", chain(lengths=[7] * 10)),
    (product, ValueError, "lengths: expected values from 1 to v = 6, got 0 to 0", chain(lengths=[0] * 10)),
    (product, ValueError, "lengths: expected shape [10] or [10, 1] to go with x [10, 1, 6, 4]", chain(lengths=[3, 4])),
    (product, ValueError, f"{STRATEGY} got 'parallel'", chain(strategy="parallel")),
    (product, ValueError, f"{STRATEGY} got 'segments:1'", chain(strategy="segments:1")),
    (product, ValueError, f"{STRATEGY} got 'tree:4'", chain(strategy="tree:4")),
    (product, TypeError, "x: expected a torch.Tensor, got ndarray; pass torch.from_numpy(x)", short(x=np.ones(4))),
    (product, TypeError, "bulk: expected a torch.Tensor, got NoneType", chain(bulk=None)),
    (product, TypeError, f"p0: {DTYPES}, got int64; pass p0.float()", chain(p0=ones(4, dtype=torch.int64))),
    (product, TypeError, f"x: {DTYPES}", chain(x=zeros(6, 4, dtype=torch.complex64))),
    (product, TypeError, "bulk: expected a dense tensor, got torch.sparse_coo", chain(bulk=ones(4, 4).to_sparse())),
    (product, TypeError, "lengths: expected integers, got float32", chain(lengths=[1.5] * 10)),
    (product, TypeError, "lengths: expected integers, got bool", chain(lengths=ones(10, dtype=torch.bool))),
    (product, TypeError, "lengths: expected integers, got [None", chain(lengths=[None] * 10)),
    (product, TypeError, "lengths: expected integers, got 'all'", chain(lengths="all")),
    (product, TypeError, "lengths: expected a dense tensor, got", chain(lengths=ones(10).long().to_sparse())),
    (product, TypeError, "log_params: expected True or False, got 'no'", chain(log_params="no")),
    (check, ValueError, "x: expected no NaN, got 24", short(x=torch.full((6, 4), NAN))),
    (check, ValueError, "x: expected no +inf, got 24", short(x=torch.full((6, 4), INF))),
    (check, ValueError, "bulk: expected no NaN, got 16", short(bulk=torch.full((1, 4, 4), NAN))),
    (check, ValueError, "p0: expected no +inf, got 1", short(p0=torch.tensor([1.0, INF, 0.0, 0.0]))),
    (product, ValueError, "bulk: expected shape [5 or 1, 4, 4] to go with x [3, 6, 4], got [3, 4, 4]; a matrix for "
     "each sequence is bulk[:, None]", short(x=zeros(3, 6, 4), bulk=ones(3, 4, 4))),
    (check, ValueError, "bulk: expected sums of 1, got 4 at [0, 0]", short(p0=ones(4) / 4, normalized=True)),
    (check, ValueError, "p0: expected sums of 1, got 4", short(normalized=True)),
    (check, TypeError, "normalized: expected True or False, got 1", short(normalized=1)),
    (matmul, ValueError, "b: expected [..., 3, n] to go with a [2, 3], got [4, 2]", matrices(b=(4, 2))),
    (matmul, ValueError, "a: expected at least 2 axes, got shape [3]", matrices(a=(3,))),
    (matmul, TypeError, "b: expected a torch.Tensor, got list; pass torch.tensor(b)", {"a": ones(2, 3), "b": [[1.0]]}),
    (matmul, ValueError, "b: expected leading axes that broadcast with those of a [2, 2, 3], got [3, 3, 2]",
     matrices((2, 2, 3), (3, 3, 2))),
    (matmul, ValueError, "out: expected float32 [2, 2], got float32 [2, 3]", matrices(out=ones(2, 3))),
    (matmul, ValueError, "out: expected float32 [2, 2], got float64 [2, 2]", matrices(out=ones(2, 2).double())),
    (matmul, ValueError, "out: expected operands that need no gradient",
     {"a": ones(2, 3, requires_grad=True), "b": ones(3, 2), "out": ones(2, 2)}),
    (logchain.marginals, ValueError, "transitions: expected one of None, 'sum', 'full', got 'all'",
     short(transitions="all")),
    (divergence, TypeError, "p: expected a tuple", {"p": zeros(6, 4), "q": CHAIN}),
    (divergence, TypeError, "q: expected a tuple (x, bulk, p0), got 2 of them", {"p": CHAIN, "q": CHAIN[:2]}),
    (divergence, ValueError, "q: expected x", {"p": CHAIN, "q": (zeros(5, 4), *CHAIN[1:])}),
    *((function, ValueError, "bulk: expected shape", short(bulk=ones(1, 4, 3)))
      for function in (logchain.forward_backward, logchain.entropy, logchain.marginals)),
    *((product, TypeError, "memory_budget: expected a number of bytes or None, got", short(memory_budget=budget))
      for budget in (True, 1.5, "64 MB", torch.tensor(3))),
    (product, ValueError, "memory_budget: expected None",
     short(cu_seqlens=torch.tensor([0, 2, 6]), memory_budget=10**9)),
    (product, ValueError, "progress: expected a memory_budget with it", short(progress=True)),
    (product, TypeError, "progress: expected True or False, got 1", short(memory_budget=10**6, progress=1)),
]  # fmt: skip


@pytest.mark.parametrize(("function", "error", "message", "arguments"), ERRORS, ids=[row[2][:50] for row in ERRORS])
def test_wrong_arguments_are_raised(function, error, message, arguments):
    with pytest.raises(error, match="^" + re.escape(message)):
        function(**arguments)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_single_variable_takes_no_matrix_or_an_unused_one(steps):
    bulk = ones(steps, 3, 3).requires_grad_()
    out = logchain.product(zeros(2, 1, 3), bulk, ones(3))
    torch.testing.assert_close(out, torch.full((2,), 3.0).log())
    with poisoned_memory():
        assert torch.equal(torch.autograd.grad(out.sum(), bulk)[0], zeros(steps, 3, 3))


def test_one_length_serves_all_sequences():
    x = torch.randn(5, 4, generator=seeded())
    expected = logchain.product(x[:3], ones(2, 4, 4), ones(4))
    for lengths in 3, torch.tensor(3):
        assert logchain.product(x, ones(4, 4, 4), ones(4), lengths=lengths) == expected


def test_negative_logarithms_and_zeros_are_valid():
    x = torch.tensor([[0.0, -INF], [-1.0, -2.0]])
    logchain.check(x, torch.full((1, 2, 2), -3.0), torch.tensor([0.0, -INF]), log_params=True)
    logchain.check(x, torch.eye(2)[None], torch.tensor([1.0, 0.0]))
    # and no sequence has no wrong values
    logchain.check(zeros(0, 5, 2), torch.full((4, 2, 2), -1.0), ones(2), lengths=zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("log", [False, True])
def test_normalized_matrices_pass_and_transposed_ones_are_named(log):
    rows = torch.rand(2, 2, 3, 3, generator=seeded()).double()
    rows /= rows.sum(-1, keepdim=True)
    start = torch.full((3,), 1 / 3).double()
    x, lengths = zeros(2, 3, 3), [3, 1]
    rows[1, 1] = 7.0  # past an end
    convert = torch.log if log else torch.clone
    options = {"log_params": log, "normalized": True}
    logchain.check(x, convert(rows), convert(start), lengths=lengths, **options)
    with pytest.raises(ValueError, match=r"^bulk: expected sums of 1, got 21 at \[1, 1, 0\]$"):
        logchain.check(x, convert(rows), convert(start), **options)
    columns = convert(rows[:1].mT)
    with pytest.raises(ValueError, match=r"^bulk: .*; columns do: pass bulk.mT, with rows \[from, to\]$"):
        logchain.check(x, columns, convert(start), **options)
    banded = transitions.Banded(torch.tensor([[0.9, 0.8, 1.0], [0.0, 0.1, 0.2]]), [0, 1])
    logchain.check(x, banded.map(convert), convert(start), **options)
    with pytest.raises(ValueError, match="^bulk: expected sums of 1"):
        logchain.check(x, transitions.Banded(convert(ones(2, 3)), [0, 1]), convert(start), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("log", [False, True])
def test_sums_in_half_precision_are_1_but_for_rounding_of_the_entries(dtype, log):
    rows = torch.rand(1, 300, 300, generator=seeded(), dtype=torch.float64)
    rows /= rows.sum(-1, keepdim=True)
    convert = torch.log if log else torch.clone
    x, start, options = zeros(3, 300), convert(rows[0, 0]).to(dtype), {"log_params": log, "normalized": True}
    logchain.check(x, convert(rows).to(dtype), start, **options)
    error = (10 if log else 1.4) * torch.finfo(dtype).eps
    with pytest.raises(ValueError, match=r"^bulk: expected sums of 1, got 1\.0"):
        logchain.check(x, convert(rows * (1 + error)).to(dtype), start, **options)


def test_sums_of_factors_in_half_precision_have_the_rounding_of_each():
    factor = torch.full((1, 3, 3), 1 / 3).bfloat16()  # rows sum to 1 + 0.25 eps
    kronecker = transitions.Kronecker(*[factor] * 6)
    start = torch.full((3**6,), 3.0**-6).bfloat16()
    logchain.check(zeros(2, 3**6), kronecker, start, normalized=True)


def test_likely_mistakes_are_warned_of():
    x, start = zeros(3, 4, 2), torch.tensor([0.5, 0.5])
    with pytest.warns(UserWarning, match="^bulk: .* looks like a matrix for each sequence"):
        logchain.check(x, ones(3, 2, 2), start)
    with pytest.warns(UserWarning, match="^p0: looks like probabilities"):
        logchain.check(x, zeros(1, 2, 2), start, log_params=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logchain.check(x, ones(1, 3, 2, 2), start)
        logchain.check(x[:2], ones(3, 2, 2), start)
        logchain.check(x, zeros(1, 2, 2), start.log(), log_params=True)


def test_values_past_the_end_are_not_checked():
    x, bulk, lengths = zeros(2, 3, 4), ones(2, 2, 4, 4), [3, 2]
    x[1, 2], bulk[1, 1] = NAN, -1.0
    logchain.check(x, bulk, ones(4), lengths=lengths)
    packed = torch.cat([x[0], x[1, :2]]), torch.cat([bulk[0, :1] * NAN, bulk[0], bulk[0, :1] * NAN, bulk[1, :1]])
    logchain.check(*packed, ones(4), cu_seqlens=torch.tensor([0, 3, 5]))
    with pytest.raises(ValueError, match="^x: expected no NaN, got 4"):
        logchain.check(x, bulk, ones(4), lengths=3)
    with pytest.raises(ValueError, match=f"^bulk: {NEGATIVE} -1 at "):
        logchain.check(x, bulk[1], ones(4), lengths=lengths)


@pytest.mark.parametrize("entries", [1, 7, 20])
def test_values_are_checked_some_steps_at_a_time(entries, monkeypatch):
    monkeypatch.setattr(weights, "_READ", entries)
    lengths = torch.tensor([[1, 5], [17, 2], [11, 6]])
    x, bulk, p0, _ = FAMILIES["dense"](each=True)
    for i, length in enumerate(lengths.flatten().tolist()):
        x.flatten(0, 1)[i, length:], bulk.flatten(0, 1)[i, length - 1 :] = NAN, INF
    logchain.check(x, bulk, p0, lengths=lengths)
    bulk.flatten(0, 1)[2, 1:16:4, 0, 1] = torch.tensor([-1.0, -3.0, -2.0, -1.0], dtype=bulk.dtype)
    with pytest.raises(ValueError, match=f"^bulk: {NEGATIVE} -"):
        logchain.check(x, bulk, p0, lengths=lengths)
    x.flatten(0, 1)[2, 1:16:4, 1] = NAN
    with pytest.raises(ValueError, match="^x: expected no NaN, got 4"):
        logchain.check(x, bulk, p0, lengths=lengths)


FUNCTIONS = {name: SUBJECTS[name] for name in ("product", *STRATEGIES, *OTHERS) if name not in ("divergence", "stream")}
FUNCTIONS |= {"sample": lambda *a, **o: logchain.sample(*a, 2, generator=seeded(), **o), "check": check}


def expect_negative(function, place, *operands, **options):
    message = f"^{re.escape(place)}; pass log_params=True for logarithms$"
    with pytest.raises(ValueError, match=message):
        FUNCTIONS.get(function, function)(*operands, **options)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("dtype", "gradients"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_a_negative_weight_is_raised_with_its_place(function, dtype, gradients):
    call = FUNCTIONS[function]
    x, one, p0 = zeros(2, 6, 3, dtype=dtype), ones(1, 3, 3, dtype=dtype), ones(3, dtype=dtype)
    each = one.expand(2, 5, 3, 3).clone()
    each[0, 3:], each[1, 1:] = -1.0, -1.0
    # neither -0.0 nor what no sequence reads is a negative weight, and logarithms may be negative
    call(x, each, p0, lengths=[4, 2])
    call(x[:, :1], -one, p0)
    call(x, one - 9, p0 - 2, log_params=True)
    one[0, 1, 2] = -0.0
    call(x, one, p0)
    one[0, 2, 1] = -(2.0**-30)  # which no sum shows
    one.requires_grad_(gradients)
    expect_negative(function, f"bulk: {NEGATIVE} -9.31323e-10 at [0, 2, 1]", x, one, p0)
    expect_negative(function, f"p0: {NEGATIVE} -1 at [0, 0]", x, one.abs(), -p0.expand(2, 3))
    if function == "check":
        expect_negative(function, f"bulk: {NEGATIVE} -1 at [1, 1, 0, 0]", x, each, p0, lengths=[4, 3])
    if function not in STRATEGIES:
        rows, into, options = zeros(9, 3, dtype=dtype), ones(9, 3, 3), {"cu_seqlens": torch.tensor([0, 4, 5, 9])}
        into[[0, 4, 5]] = -1.0  # no transitions lead into first rows
        call(rows, into, p0, **options)
        if function == "check":
            into[6, 1, 2] = -0.5
            expect_negative(function, f"bulk: {NEGATIVE} -0.5 at [6, 1, 2]", rows, into, p0, **options)
        expect_negative(function, f"bulk: {NEGATIVE} -9.31323e-10 at [0, 2, 1]", rows, one, p0, **options)


ARCS = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
STRUCTURES = {
    "values of bands": lambda wrong: transitions.Banded(wrong(2, 4), (0, 1)),
    "values of arcs": lambda wrong: transitions.Sparse(ARCS, wrong(4)),
    "right": lambda wrong: transitions.LowRank(torch.rand(4, 2), wrong(4, 2)),
    "diagonal": lambda wrong: transitions.LowRank(torch.rand(4, 2), torch.rand(4, 2), wrong(4)),
    "matrices[1]": lambda wrong: transitions.Kronecker(torch.rand(2, 2), wrong(2, 2)),
    "durations": lambda wrong: transitions.Duration(torch.rand(2, 2), wrong(2, 2)),
    "blocks": lambda wrong: transitions.BlockDiagonal(wrong(2, 2, 2)),
    "right of Monarch": lambda wrong: transitions.Monarch(torch.rand(2, 2, 2), wrong(2, 2, 2)),
}


@pytest.mark.parametrize("field", STRUCTURES)
@pytest.mark.parametrize("function", ["product", "sample", "check"])
def test_a_negative_weight_of_a_structure_is_raised_with_its_field(function, field):
    structure = STRUCTURES[field](lambda *shape: torch.linspace(-0.5, 1, math.prod(shape)).view(shape))
    with pytest.raises(ValueError, match=f"^bulk.{re.escape(field.split(' ')[0])}: {NEGATIVE} -0.5 at "):
        FUNCTIONS[function](zeros(2, 6, 4), structure, ones(4))
    FUNCTIONS[function](zeros(2, 1, 4), structure, ones(4))


def test_a_negative_weight_of_a_divergence_or_a_stream_is_raised_with_its_chain():
    x, bulk, p0 = zeros(2, 3, 3), ones(1, 3, 3), ones(3)
    wrong = bulk.clone()
    wrong[0, 1, 1] = -2
    of_a_divergence = lambda p, q: logchain.kl_divergence((x, p, p0), (x, q, p0))  # noqa: E731
    place = f"bulk: {NEGATIVE} -2 at [0, 1, 1]"
    expect_negative(of_a_divergence, f"q: {place}", bulk, wrong)
    expect_negative(of_a_divergence, f"p: {place}", wrong, bulk)
    for options in {}, {"lag": 1}, {"viterbi": True}:
        expect_negative(logchain.Stream(wrong, p0, **options).update, place, x)
        expect_negative(logchain.Stream(None, p0, **options).update, f"bulk_piece: {place[6:]}", x, wrong)


def test_a_negative_sum_in_transforms_makes_its_sequence_nan():
    x, bulk, p0 = zeros(2, 3, 3), ones(1, 3, 3), ones(3)
    bulk[0, 2, 1] = -9
    assert torch.vmap(lambda x: product(x, bulk, p0))(x).isnan().all()
    assert torch.func.grad(lambda x: product(x, bulk, p0).sum())(x).isnan().all()
    assert torch.compile(lambda x: product(x, bulk, p0), backend="eager", fullgraph=True)(x).isnan().all()


def value(function, *chain, **options):
    """The result of each sequence [*B], of which there is one in each query."""
    found = SUBJECTS[function](*chain, **options)
    return next(
        found[key] for key in ("log_norm", "score", "entropy", "divergence", "log_prob", "scores") if key in found
    )


@pytest.mark.parametrize("c", [3, 40])
@pytest.mark.parametrize("function", [*STRATEGIES, "product", *(name for name in OTHERS if name != "stream")])
def test_a_negative_sum_of_one_step_makes_its_sequence_nan(function, c):
    x, each, p0 = zeros(3, 40, c), ones(3, 39, c, c), ones(c)
    each[0, 20, 1, 2], each[1, 20, 1, 2] = -50.0, -50.0
    options = {} if function in STRATEGIES else {"lengths": [40, 15, 40]}
    found = value(function, x.requires_grad_(), each, p0, **options)
    found = found[..., 0] if found.dim() > 1 else found
    assert found.isnan().tolist() == [True, function in STRATEGIES, False]
    if function == "product":
        states = torch.autograd.grad(found.sum(), x)[0]
        assert states[0].isnan().any() and not states[1:].isnan().any()
    if function not in STRATEGIES:
        bounds = torch.tensor([0, 40, 55, 95])
        rows, each = x.detach().flatten(0, 1)[:95], torch.cat([each[:, :1], each], 1)
        into = torch.cat([each[0], each[1, :15], each[2]])
        found = value(function, rows, into, p0, cu_seqlens=bounds)
        found = found[..., 0] if found.dim() > 1 else found
        assert found.isnan().tolist() == [True, False, False]


@pytest.mark.parametrize("strategy", ["sequential", "segments", "tree"])
@pytest.mark.parametrize("each", [False, True])
def test_a_negative_weight_on_a_gpu_makes_its_sequence_nan(kernels, strategy, each):
    x, p0 = zeros(2, 4, 3, device=kernels), ones(3, device=kernels)
    bulk = ones((2, 3, 3, 3) if each else (1, 3, 3), device=kernels)
    bulk[(0, 1, 1, 0) if each else (0, 1, 0)] = -50.0
    expected = [True, not each]
    assert product(x, bulk, p0, strategy=strategy).isnan().tolist() == expected
    if strategy == "sequential":
        assert logchain.marginals(x, bulk, p0).log_norm.isnan().tolist() == expected
        assert logchain.viterbi(x, bulk, p0).score.isnan().tolist() == expected
        assert logchain.topk_paths(x, bulk, p0, 2).scores.isnan().all(-1).tolist() == expected
        assert product(x, bulk.abs(), -p0).isnan().all() and logchain.viterbi(x, bulk.abs(), -p0).score.isnan().all()
