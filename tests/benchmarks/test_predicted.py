"""Estimates follow from counts as their formula says, and no row of theirs passes for a measurement."""

import pytest

from tests.benchmarks import gpu_counts, results
from tests.benchmarks.predicted import ASSUMED, Predicted, Turns, predict

pytest.importorskip("triton")

from tests.kernels.gpu.compiled import Case, Report

CASE = Case("kernel c=1", None, {}, {}, grid=(132,), bytes=3_000_000)
LOOP = {
    "FFMA": 600,
    "HMMA.1688.F32.TF32": 96,
    "MUFU.EX2": 4,
    "LDS.128": 100,
    "LDG.E.128.STRONG.GPU": 10,
    "BAR.SYNC": 10,
}
REPORT = Report("kernel", "sm_90", instructions=1000, registers=255, shared=100_000, warps=8, before=100, loops=[LOOP])


def test_clocks_of_a_step():
    row = predict("", CASE, REPORT, Turns(39, 1, 1))
    assert (row.resident, row.rounds, row.instructions_a_step) == (1, 1, 820)
    assert row.issue_clocks == 820 * 8 / 4
    assert row.tensor_clocks == 96 * 6.5 * 2
    assert row.mufu_clocks == 4 * 32 * 8 / 16
    assert row.shared_clocks == 100 * 512 * 8 / 128
    assert row.l2_clocks == max(10 * 512 * 8 / 64, 10 * 512 * 8 * 132 / ASSUMED["L2, bytes a clock"])
    assert row.waiting_clocks == ASSUMED["meeting, clocks"] - 100 * 8 / 4
    assert row.message_clocks == 300 + 10 * 30
    assert row.step_clocks == row.waiting_clocks + row.message_clocks + row.shared_clocks
    assert row.memory_us == 1
    assert row.once_clocks == 180 * 8 / 4
    assert row.estimate_us == pytest.approx((39 * row.step_clocks + row.once_clocks) / 1755 + 1.1)
    free = predict("", CASE, REPORT, Turns(39))
    assert free.message_clocks == 0 and free.shared_clocks == row.shared_clocks


def test_a_loop_in_a_step_counts_as_often_as_it_turns():
    outer = {name: count + 50 for name, count in LOOP.items()}
    report = Report("kernel", "sm_90", registers=255, warps=8, loops=[LOOP, outer])
    assert predict("", CASE, report, Turns(39, 3)).instructions_a_step == 820 + 50 * 6 + 2 * 820


def test_wide_products():
    def tensor(name: str) -> float:
        report = Report("kernel", "sm_90", registers=128, warps=4, loops=[{name: 1}])
        return predict("", CASE, report, Turns(1)).tensor_clocks

    assert tensor("HGMMA.64x128x8.F32.TF32") == 64 * 128 * 8 / 1024
    assert tensor("DMMA.16x8x16") == 16 * 8 * 16 / 128 * 4


def test_more_programs_share_a_multiprocessor_or_come_after():
    few = Report("kernel", "sm_90", registers=128, shared=100_000, warps=8, loops=[LOOP])
    row, one = predict("", Case("kernel", None, {}, {}, grid=(528,)), few, Turns(1)), predict("", CASE, few, Turns(1))
    assert (row.resident, row.rounds) == (2, 2) and row.issue_clocks == 2 * one.issue_clocks


def test_a_kernel_that_returns_at_once_takes_a_launch():
    assert predict("", CASE, REPORT, Turns(0)).estimate_us == 1.1


def test_what_is_not_modelled_is_not_estimated():
    assert predict("", CASE, Report("kernel", "sm_90", registers=64, warps=4), None).estimate_us == 1 + 1.1
    report = Report("kernel", "sm_90", registers=64, warps=4, tensor=5, loops=[LOOP])
    assert predict("", CASE, report, None).estimate_us is None


def test_every_tracked_row_says_what_it_is():
    rows = results.read(results.PREDICTED, Predicted)
    assert rows and {row.status for row in rows} == {"estimate, not measured"}
    assert all(row.commit and row.versions.startswith("triton") for row in rows)
    modelled = [row for row in rows if row.estimate_us is not None and float(row.steps) > 0]
    assert all(row.estimate_us > 0.999 * max(row.memory_us, ASSUMED["launch, us"]) for row in modelled)


def test_counted_rows_are_read_back():
    rows = results.read(results.GPU_COUNTS, gpu_counts.Counted)
    assert rows and all(int(row.instructions) >= int(row.instructions_of_loop) for row in rows)
    report = Report("kernel", "sm_90", warps=8, loops=[LOOP], instructions=900, in_loops=2)
    row = gpu_counts.counted("module", report)
    assert (row.instructions_a_step, row.tensor_core_instructions_of_loop) == (820, 96)
    assert row.defect == "2 spills in loops"
