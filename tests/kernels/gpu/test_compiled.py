"""The configurations of kernels that need most compile for the devices they are meant for, without a device.

A register that is spilled in a loop, or more shared memory than a program may have, is a defect; so is a `tl.dot` that
was not to be done without tensor cores, and is. Exceptions have names.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.kernels.gpu import compile_cases
from tests.kernels.gpu.compiled import reports, table

pytest.importorskip("triton")

# loads and stores of spilled registers in loops that are known of, at most
EXCEPTIONS = {
    # of some 1,000 instructions a step
    ("chain_backward", "sm_80"): {
        "c=200 parts of 64 fp32 tf32x3 ends": 3,
        "c=200 parts of 64 fp32 tf32x3 log_params final ends": 3,
    },
}


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """The reports to come of the selected pairs (module, target): as many are made at a time as there are cores."""
    cache = str(tmp_path_factory.mktemp("triton"))
    wanted = [
        item.callspec.params for item in request.session.items if getattr(item, "originalname", "") == "test_no_defects"
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield {
            (pair["module"], pair["target"]): pool.submit(reports, pair["module"], pair["target"], cache)
            for pair in wanted
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "target"),
    [(module, target) for module in compile_cases.modules() for target in compile_cases.targets(module)],
)
def test_no_defects(compiled, module, target):
    found = compiled[module, target].result()
    assert found, "a module without a case"
    names = [report.name for report in found]
    assert len(set(names)) == len(names), "two cases of one name"
    excepted = EXCEPTIONS.get((module, target), {})
    assert set(excepted) <= set(names), "an exception for no case"
    spared = [replace(one, in_loops=0) if one.in_loops <= excepted.get(one.name, 0) else one for one in found]
    defects = [report for report in spared if report.defect]
    assert not defects, "\n".join(table(defects))


@pytest.mark.slow
def test_defects_are_seen(tmp_path):
    found = {report.name: report.defect for report in reports("_probe", "sm_80", str(tmp_path))}
    assert found.pop("spills") == ""  # outside of loops
    assert found.pop("spills in a loop").endswith(" spills in loops")
    assert found.pop("dies").startswith("the compiler died (exit code -6)")
    assert found.pop("unknown argument") == "arguments missing, unknown or given twice: ['c_ptr']"
    assert found.pop("no tensor cores") == "no tensor-core instruction"
    assert found.pop("too large") == "262144 bytes of shared memory, 166912 are there"
    assert found == {"fast": ""}


def test_a_module_that_cannot_be_imported_is_said(tmp_path):
    with pytest.raises(RuntimeError, match="No module named 'tests.kernels.gpu.compile_cases.absent'"):
        reports("absent", "sm_80", str(tmp_path))
