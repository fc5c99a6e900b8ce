"""Everybody's errors against float64, of cases that are what they are called."""

import math

import numpy as np
import pytest

from tests import oracle
from tests.benchmarks import accuracy, cases, kept, report, results
from tests.benchmarks.aside import Item
from tests.benchmarks.kept import Missing
from tests.benchmarks.results import GRADIENTS
from tests.benchmarks.test_kept import row


@pytest.mark.parametrize(
    ("found", "truth", "error"),
    [
        (2.5, 2.0, 0.5),
        (-math.inf, -math.inf, 0.0),
        (-23.0, -math.inf, math.inf),
        (-math.inf, 5.0, math.inf),
        (math.nan, 5.0, math.nan),
        (math.nan, -math.inf, math.nan),
    ],
)
def test_the_largest_error_counts_infinities_and_nan(found, truth, error):
    np.testing.assert_equal(accuracy.worst(np.array([found, 1.0]), np.array([truth, 1.0])), (error, found))


def test_cases_are_what_they_are_called(files):
    truths = {
        name: oracle.chain(case.x, case.bulk, case.p0) for name, case in accuracy.cases().items() if case.x.shape[1] < 9
    }
    apart = truths["misaligned maxima: two peaks, no way between"]
    assert apart.log_norm[0] == pytest.approx(math.log(0.5) - 200)
    assert truths["impossible evidence"].log_norm[0] == -math.inf
    for name, truth in truths.items():
        log_norm, states = cases.truth(name, accuracy.cases()[name], files, accuracy.by_reference)
        np.testing.assert_allclose(log_norm, truth.log_norm, rtol=1e-12)
        np.testing.assert_allclose(states, truth.states, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, case in accuracy.cases().items() if case.x.shape[1] < 100])
def test_logchain_keeps_its_contract(name, files):
    found = accuracy.rows_of(files, Item(name, "logchain", GRADIENTS))
    bars = [one for one in found if one.bar]
    assert len(bars) == 2 and all(one.reached for one in bars), bars


def test_the_forums_faults_are_found(files):
    found = accuracy.rows_of(files, Item("misaligned maxima: two peaks", "forum", GRADIENTS))
    errors = {one.metric: one.value for one in found}
    assert errors["error of a log-partition"] == pytest.approx(46.05, abs=0.01)
    assert errors["log-partition"] == pytest.approx(-23.03, abs=0.01)


def test_table_of_errors(files):
    def of(provider, case, errors, value):
        metrics = ("error of a log-partition", "log-partition", "error of a posterior")
        values = (errors[0], value, errors[1])
        return [row(case, provider, GRADIENTS, *pair) for pair in zip(metrics, values, strict=True)]

    results.write(
        [
            *of("one", "a", (2e-6, 1e-20), 5.0),
            *of("one", "b", (math.inf, math.nan), -math.inf),
            *of("logchain", "a", (0.0, 0.0), 5.0),
            *of("logchain", "b", (math.inf, 0.25), -23.0),
        ],
        results.ACCURACY,
    )
    kept.leave_out("accuracy", [], [Missing("", "a", "two", GRADIENTS, "ValueError: no")])
    assert report.accuracy().splitlines()[2:] == [
        "| logchain | 0, 0 | finite: -23, 0.25 |",
        "| one | 2.0e-06, < 1e-12 | -inf, NaN |",
    ]
    kept.keep(results.ACCURACY, of("two", "b", (1.0, 1.0), 0.0))
    assert report.accuracy().splitlines()[-1] == "| two | ValueError | 1, 1 |"
