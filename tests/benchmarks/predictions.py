"""What a model says of an H200 before anyone has measured: `results/gpu_predicted.csv`.

    time = launches * LAUNCH + max(bytes / BANDWIDTH, multiply-adds / RATE, waiting steps * STEP)

The constants are a data sheet's, or guesses where it is silent; a measurement on the device replaces the file's use,
and shows where the model is wrong.
"""

import csv
import itertools
from pathlib import Path

from tests.benchmarks import workloads

RESULTS = Path(__file__).parent / "results" / "gpu_predicted.csv"

# bytes a second that a copy reaches, of 4.8e12 nominal
BANDWIDTH = 4.3e12
# multiply-adds a second, dense: TF32 495 TFLOP/s, a third for 3xTF32, float32 67 TFLOP/s
RATE = {"high": 495e12 / 2, "highest": 495e12 / 6, "ieee": 67e12 / 2}
LAUNCH = 4e-6
# seconds that one step of a chain takes which waits for the last one: one tile in registers, and several tiles
STEP, WIDE_STEP = 1.5e-6, 4e-6
COLUMNS = ("predicted", "workload", "mode", "precision", "milliseconds", "bound by", "floor, milliseconds")


def seconds(work: workloads.Work, precision: str) -> tuple[float, str]:
    """How long it will take, and what it waits for."""
    wide = "c=200" in work.name or "c=256" in work.name
    parts = {
        "memory": work.moved_bytes / BANDWIDTH,
        "arithmetic": work.multiply_adds / RATE[precision],
        "steps": work.steps * (WIDE_STEP if wide else STEP) if work.name.startswith("product") else 0.0,
    }
    bound = max(parts, key=parts.__getitem__)
    return work.launches * LAUNCH + parts[bound], bound


def floor(work: workloads.Work, precision: str, bandwidth: float = BANDWIDTH, rate: float | None = None) -> float:
    """The time below which no program gets."""
    return max(work.floor_bytes / bandwidth, work.multiply_adds / (rate or RATE[precision]))


def rows() -> list[tuple[str, ...]]:
    """One line for each figure and precision."""
    found = []
    for work in itertools.chain(*workloads.groups().values()):
        for precision in ("highest", "high") if work.provider == "logchain" else ():
            time, bound = seconds(work, precision)
            least = floor(work, precision)
            found.append(
                (
                    "H200, not measured",
                    work.name,
                    work.mode,
                    precision,
                    f"{time * 1e3:.3g}",
                    bound,
                    f"{least * 1e3:.3g}",
                )
            )
    return found


def write() -> None:
    """Write the file anew."""
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows())
