"""Results files of which a part was measured anew: its rows take the place of those of the same case; others stay."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks import report
from tests.benchmarks.report import Row

LEFT_OUT = report.RESULTS.with_name("left_out.csv")


class Missing(NamedTuple):
    """Why there is no row; an empty workload and mode stand for all of them."""

    results: str
    workload: str
    provider: str
    mode: str
    reason: str
    versions: str = ""
    date: str = ""
    commit: str = ""


def keep(path: Path, new: Iterable[Row], order: Sequence[str] = ()) -> None:
    """Put rows in the place of those of the same workload, provider and mode, sorted by workload and mode."""
    new = list(new)
    replaced = {row[:3] for row in new}
    # read here: another run may have written meanwhile
    rows = [row for row in (report.read(path) if path.exists() else []) if row[:3] not in replaced] + new
    place = {workload: i for i, workload in enumerate(order)}
    rows.sort(key=lambda row: (place.get(row.workload, len(place)), row.mode))
    report.write(rows, path)


def leave_out(results: str, measured: Iterable[Row], missing: Iterable[Missing]) -> None:
    """Write down what could not be measured for a results file, and forget what now was."""
    missing = [entry._replace(results=results) for entry in missing]
    done = {(results, *row[:3]) for row in measured} | {entry[:4] for entry in missing}
    providers = {(results, "", provider, "") for _, _, provider, *_ in done}
    kept = [entry for entry in left_out() if entry[:4] not in done | providers]
    with LEFT_OUT.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Missing._fields)
        writer.writerows(sorted([*kept, *missing]))


def left_out() -> list[Missing]:
    """What was written down."""
    if not LEFT_OUT.exists():
        return []
    with LEFT_OUT.open(newline="") as file:
        return [Missing(**fields) for fields in csv.DictReader(file)]
