"""No call runs more operators or functions, or allocates more often, than the results file says."""

import re

import pytest
import torch

import logchain
from tests.benchmarks import counts, results
from tests.benchmarks.results import Row

CONSTRAINTS = results.ROOT / "tests" / "constraints.txt"
TRACKED = {row[:4]: row for row in results.read(results.COUNTS)}


def more(found: list[Row], tracked: dict[tuple[str, ...], Row]) -> list[str]:
    """What counts more than it did, or is not tracked."""
    lines = []
    for row in found:
        before = tracked[row[:4]].value if row[:4] in tracked else -1
        if row.value > before:
            lines.append(f"{row.workload}, {row.mode}: {row.value:g} {row.metric}, tracked {before:g}")
    return lines


def test_nothing_counts_more_than_it_did():
    assert TRACKED
    pinned = re.search(r"^torch==([\d.]+)", CONSTRAINTS.read_text(), re.MULTILINE)[1]
    assert f"torch {pinned}" in next(iter(TRACKED.values())).versions, "count again: see the next assertion"
    # operators of another torch are made of others
    same = torch.__version__.split("+")[0] == pinned
    found = [row for row in counts.rows() if same or row.metric == "frames"]
    assert not more(found, TRACKED), "if that is meant: python -m tests.benchmarks run counts"
    assert {row[:4] for row in found} == {key for key in TRACKED if same or key[3] == "frames"}


def test_one_more_operator_is_found():
    row = Row("a", "logchain", "forward", "operators", 3, "")
    assert not more([row, row._replace(value=2)], {row[:4]: row})
    assert more([row._replace(value=4)], {row[:4]: row}) == ["a, forward: 4 operators, tracked 3"]
    assert more([row._replace(mode="backward")], {row[:4]: row})


def test_counts_are_those_of_one_call():
    x = torch.ones(1000)
    once = counts.counted(lambda: [x.exp().neg()])
    assert once == {"operators": 2, "allocations": 2}
    assert counts.counted(lambda: [x.exp_()]) == {"operators": 1, "allocations": 0}


def test_frames_are_the_librarys_own():
    x = torch.zeros(3, 2)
    sizes = [counts.frames(call) for call in (x.exp, lambda: logchain.viterbi(x, torch.ones(1, 2, 2), torch.ones(2)))]
    assert sizes[0] == 0 < sizes[1]


@pytest.mark.parametrize("metric", ["operators", "allocations"])
@pytest.mark.parametrize("mode", [results.FORWARD, results.GRADIENTS])
def test_a_long_chain_counts_no_more_than_a_short_one(mode, metric):
    short, long = (TRACKED[f"product, v={v}", "logchain", mode, metric].value for v in (20, 200))
    assert short == long
