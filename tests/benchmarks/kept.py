"""Results files of which a part was measured anew: its rows take the place of those of the same case; others stay."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks import results
from tests.benchmarks.results import AnyRow, Measured, Row


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


# how many fields of a row name its case
_CASE = {Row: 3, Measured: 4}


def key(row: Row | Measured) -> tuple[str, ...]:
    """The case that a row is of."""
    return row[: _CASE[type(row)]]


def put(path: Path, new: Sequence[AnyRow], missing: Iterable[Missing], order: Sequence[str] = ()) -> None:
    """Put rows in the place of those of the same case, and write down why others could not be measured."""
    keep(path, new, order)
    leave_out(path.stem, new, missing)


def keep(path: Path, new: Sequence[AnyRow], order: Sequence[str] = ()) -> None:
    """Put rows in the place of those of the same case, sorted by workload and mode."""
    if not new:
        return
    replaced = set(map(key, new))
    # read here: another run may have written meanwhile
    rows = [row for row in results.read(path, type(new[0])) if key(row) not in replaced] + list(new)
    place = {workload: i for i, workload in enumerate(order)}
    rows.sort(key=lambda row: (place.get(row.workload, len(place)), row.mode))
    results.write(rows, path)


def leave_out(group: str, measured: Iterable[Row | Measured], missing: Iterable[Missing]) -> None:
    """Write down what could not be measured of a group, and forget what now was."""
    missing = [entry._replace(results=group) for entry in missing]
    done = {(group, *row[:3]) for row in measured} | {entry[:4] for entry in missing}
    providers = {(group, "", provider, "") for _, _, provider, *_ in done}
    kept = [entry for entry in left_out() if entry[:4] not in done | providers]
    with results.LEFT_OUT.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(Missing._fields)
        writer.writerows(sorted([*kept, *missing]))


def left_out() -> list[Missing]:
    """What was written down."""
    if not results.LEFT_OUT.exists():
        return []
    with results.LEFT_OUT.open(newline="") as found:
        return [Missing(**fields) for fields in csv.DictReader(found)]
