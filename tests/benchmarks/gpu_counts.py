"""What the GPU kernels compile to for devices that are not here: `python -m tests.benchmarks gpu-count [module ...]`.

Static counts of machine code, see `tests.kernels.gpu.compiled`; nothing is measured. Rows of other modules stay as they
are, also of kernels that are gone: they say what was before, at their commit.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tests.benchmarks import results


class Counted(NamedTuple):
    """One configuration of a kernel. A step is the outermost loop around the hottest one, each counted once."""

    module: str
    case: str
    target: str
    warps: int
    registers: int
    spills: int
    spills_in_loops: int
    shared_bytes: int
    instructions_a_step: int
    instructions_of_loop: int
    tensor_core_instructions_of_loop: int
    instructions: int
    defect: str
    versions: str = ""
    date: str = ""
    commit: str = ""


def main(modules: Sequence[str] = (), targets: Sequence[str] = ()) -> None:
    """Compile, print the table, and write the results file."""
    import triton

    from tests.kernels.gpu import compile_cases
    from tests.kernels.gpu.compiled import TARGETS, reports, table

    place = results.machine()
    labels = {"versions": f"triton {triton.__version__}", "date": place["date"], "commit": place["commit"]}
    pairs = [
        (module, target)
        for module in modules or compile_cases.modules()
        for target in compile_cases.targets(module)
        if target in (targets or TARGETS)
    ]
    rows = results.read(results.GPU_COUNTS, Counted)
    with ThreadPoolExecutor(2) as pool:
        for pair, found in zip(pairs, pool.map(lambda pair: reports(*pair), pairs), strict=True):
            print(*table(found, head=pair == pairs[0]), sep="\n", flush=True)
            rows = [row for row in rows if (row.module, row.target) != pair]
            rows += [counted(pair[0], report)._replace(**labels) for report in found]
            results.write(sorted(rows, key=lambda row: row[:3]), results.GPU_COUNTS)


def counted(module: str, report) -> Counted:
    """The row of a report."""
    from tests.kernels.gpu.machine_code import TENSOR

    return Counted(
        module, report.name, report.target, report.warps, report.registers, report.spills, report.in_loops,
        report.shared, report.count(-1), report.count(0), report.count(0, TENSOR), report.instructions, report.defect,
    )  # fmt: skip
