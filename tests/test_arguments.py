"""Wrong arguments are refused before anything is computed, by name, with what was expected and what came."""

import re

import numpy as np
import pytest
import torch

import logchain
from logchain import arguments as checks
from tests.families import FAMILIES

NAN, INF = float("nan"), float("inf")


def chain(**changes):
    x, bulk, p0 = torch.zeros(10, 1, 6, 4), torch.ones(1, 1, 5, 4, 4), torch.ones(1, 1, 4)
    return {"x": x, "bulk": bulk, "p0": p0} | changes


def expect_refusal(error, message, function=logchain.product, **arguments):
    with pytest.raises(error, match="^" + re.escape(message)):
        function(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"bulk": torch.ones(1, 1, 6, 4, 4)},
            "bulk: expected shape [1 or 10, 1, 5 or 1, 4, 4] to go with x [10, 1, 6, 4], got [1, 1, 6, 4, 4]",
        ),
        ({"bulk": torch.ones(3, 1, 5, 4, 4)}, "bulk: expected shape [1 or 10, 1, 5 or 1, 4, 4] to go"),
        (
            {"bulk": torch.ones(5, 4, 3)},
            "bulk: expected shape [5 or 1, 4, 4] to go with x [10, 1, 6, 4], got [5, 4, 3]",
        ),
        ({"bulk": torch.ones(2, 1, 1, 5, 4, 4)}, "bulk: expected shape [1 or 10, 1, 5 or 1, 4, 4] to go"),
        ({"bulk": torch.ones(4, 4)}, "bulk: expected at least 3 axes, got shape [4, 4]"),
        ({"p0": torch.ones(2, 1, 4)}, "p0: expected shape [1 or 10, 1, 4] to go with x [10, 1, 6, 4], got [2, 1, 4]"),
        ({"p0": torch.ones(())}, "p0: expected at least 1 axes, got shape []"),
        ({"x": torch.zeros(4)}, "x: expected at least 2 axes, got shape [4]"),
        ({"x": torch.zeros(10, 0, 4)}, "x: expected at least one variable and one state [..., v, c], got [10, 0, 4]"),
        ({"x": torch.zeros(10, 6, 0)}, "x: expected at least one variable and one state"),
        ({"lengths": [7] * 10}, "lengths: expected values from 1 to v = 6, got 7 to 7"),
        ({"lengths": [0] * 10}, "lengths: expected values from 1 to v = 6, got 0 to 0"),
        ({"lengths": [3, 4]}, "lengths: expected shape [10] or [10, 1] to go with x [10, 1, 6, 4], got [2]"),
        (
            {"strategy": "parallel"},
            "strategy: expected 'auto' or 'sequential' or 'chunked' or 'tree' or 'overlapped' or 'meeting',"
            " got 'parallel'",
        ),
    ],
)
def test_sizes_are_refused(changes, message):
    expect_refusal(ValueError, message, **chain(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.zeros((10, 1, 6, 4))}, "x: expected a torch.Tensor, got ndarray"),
        ({"bulk": None}, "bulk: expected a torch.Tensor, got NoneType"),
        ({"p0": torch.ones(4, dtype=torch.int64)}, "p0: expected float32, float64, bfloat16 or float16, got int64"),
        ({"x": torch.zeros(6, 4, dtype=torch.complex64)}, "x: expected float32, float64, bfloat16 or float16"),
        ({"lengths": [1.5] * 10}, "lengths: expected integers, got float32"),
        ({"lengths": torch.ones(10, dtype=torch.bool)}, "lengths: expected integers, got bool"),
        ({"lengths": [None] * 10}, "lengths: expected integers, got [None"),
        ({"lengths": torch.ones(10, dtype=torch.int64).to_sparse()}, "lengths: expected a dense tensor, got"),
        ({"log_params": "no"}, "log_params: expected True or False, got 'no'"),
        ({"bulk": torch.ones(4, 4).to_sparse()}, "bulk: expected a dense tensor, got torch.sparse_coo"),
        ({"lengths": "all"}, "lengths: expected integers, got 'all'"),
    ],
)
def test_kinds_are_refused(changes, message):
    expect_refusal(TypeError, message, **chain(**changes))


def test_devices_are_compared():
    expect_refusal(ValueError, "p0: expected device cpu, got meta", **chain(p0=torch.ones(4, device="meta")))


def test_a_single_variable_takes_no_matrix_or_an_unused_one():
    for steps in (0, 1):
        out = logchain.product(torch.zeros(2, 1, 3), torch.ones(steps, 3, 3), torch.ones(3))
        torch.testing.assert_close(out, torch.full((2,), 3.0).log())
    expect_refusal(
        ValueError,
        "bulk: expected shape [1 or 0, 3, 3] to go with x [2, 1, 3], got [2, 3, 3]",
        x=torch.zeros(2, 1, 3),
        bulk=torch.ones(2, 3, 3),
        p0=torch.ones(3),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.full((6, 4), NAN)}, "x: expected no NaN, got 24"),
        ({"x": torch.full((6, 4), INF)}, "x: expected no +inf, got 24"),
        ({"bulk": torch.full((1, 4, 4), NAN)}, "bulk: expected no NaN, got 16"),
        ({"bulk": torch.full((1, 4, 4), -0.5)}, "bulk: expected non-negative weights, got -0.5 at "),
        ({"p0": torch.tensor([1.0, INF, 0.0, 0.0])}, "p0: expected no +inf, got 1"),
        ({"p0": torch.tensor([1.0, -1.0, 0.0, 0.0])}, "p0: expected non-negative weights, got -1 at "),
    ],
)
def test_values_are_refused_where_asked(changes, message):
    operands = chain(x=torch.zeros(6, 4), bulk=torch.ones(1, 4, 4), p0=torch.ones(4)) | changes
    expect_refusal(ValueError, message, logchain.check, **operands)


def test_values_behind_an_end_are_not_looked_at():
    x, bulk, lengths = torch.zeros(2, 3, 4), torch.ones(2, 2, 4, 4), [3, 2]
    x[1, 2], bulk[1, 1] = NAN, -1.0
    logchain.check(x, bulk, torch.ones(4), lengths=lengths)
    packed = torch.cat([x[0], x[1, :2]]), torch.cat([bulk[0, :1] * NAN, bulk[0], bulk[0, :1] * NAN, bulk[1, :1]])
    logchain.check(*packed, torch.ones(4), cu_seqlens=torch.tensor([0, 3, 5]))
    operands = {"x": x, "bulk": bulk, "p0": torch.ones(4)}
    expect_refusal(ValueError, "x: expected no NaN, got 4", logchain.check, **operands, lengths=3)
    shared = {"bulk": bulk[1], "p0": torch.ones(4), "lengths": lengths}
    expect_refusal(ValueError, "bulk: expected non-negative weights, got -1 at ", logchain.check, x=x, **shared)


def test_one_length_serves_all_sequences():
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    bulk, p0 = torch.ones(4, 4, 4), torch.ones(4)
    short = logchain.product(x[:3], bulk[:2], p0)
    assert logchain.product(x, bulk, p0, lengths=3) == short
    assert logchain.product(x, bulk, p0, lengths=torch.tensor(3)) == short


def test_negative_logarithms_and_zeros_are_valid():
    x = torch.tensor([[0.0, -INF], [-1.0, -2.0]])
    logs = torch.full((1, 2, 2), -3.0), torch.tensor([0.0, -INF])
    logchain.check(x, *logs, log_params=True)
    logchain.check(x, torch.eye(2)[None], torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize(
    ("a", "b", "options", "error", "message"),
    [
        (torch.ones(2, 3), torch.ones(4, 2), {}, ValueError, "b: expected [..., 3, n] to go with a [2, 3], got [4, 2]"),
        (torch.ones(3), torch.ones(3, 2), {}, ValueError, "a: expected at least 2 axes, got shape [3]"),
        (torch.ones(2, 3), [[1.0]], {}, TypeError, "b: expected a torch.Tensor, got list"),
        (
            torch.ones(2, 2, 3),
            torch.ones(3, 3, 2),
            {},
            ValueError,
            "b: expected leading axes that broadcast with those of a [2, 2, 3], got [3, 3, 2]",
        ),
        (
            torch.ones(2, 3),
            torch.ones(3, 2),
            {"out": torch.ones(2, 3)},
            ValueError,
            "out: expected float32 [2, 2], got float32 [2, 3]",
        ),
        (
            torch.ones(2, 3),
            torch.ones(3, 2),
            {"out": torch.ones(2, 2, dtype=torch.float64)},
            ValueError,
            "out: expected float32 [2, 2], got float64 [2, 2]",
        ),
        (
            torch.ones(2, 3, requires_grad=True),
            torch.ones(3, 2),
            {"out": torch.ones(2, 2)},
            ValueError,
            "out: expected operands that need no gradient",
        ),
    ],
)
def test_matmul_refuses(a, b, options, error, message):
    expect_refusal(error, message, logchain.matmul, a=a, b=b, **options)


@pytest.mark.parametrize("entries", [1, 7, 20])
def test_values_are_checked_some_steps_at_a_time(entries, monkeypatch):
    monkeypatch.setattr(checks, "_CHECKED", entries)
    lengths = torch.tensor([[1, 5], [17, 2], [11, 6]])
    x, bulk, p0, _ = FAMILIES["dense"](each=True)
    logchain.check(x, bulk, p0, lengths=lengths)
    for i, length in enumerate(lengths.flatten().tolist()):
        x.flatten(0, 1)[i, length:], bulk.flatten(0, 1)[i, length - 1 :] = torch.nan, torch.inf
    logchain.check(x, bulk, p0, lengths=lengths)
    for broken, message in ((x, "x: expected no NaN, got 4"), (bulk, "bulk: expected non-negative weights, got -")):
        places = broken.flatten(0, 1)[2] if broken is x else broken.flatten(0, 1)[2, :, 0]
        kept = places.clone()
        places[1:16:4, 1] = torch.nan if broken is x else torch.tensor([-1.0, -3.0, -2.0, -1.0])
        with pytest.raises(ValueError, match=f"^{message}"):
            logchain.check(x, bulk, p0, lengths=lengths)
        places.copy_(kept)


@pytest.mark.parametrize("lead", [(), (1,), (0,)], ids=str)
def test_no_sequence_has_no_wrong_values(lead):
    bulk = torch.full((*lead, 4, 2, 2), -1.0)
    logchain.check(torch.zeros(0, 5, 2), bulk, torch.ones(2), lengths=torch.zeros(0, dtype=torch.int64))
