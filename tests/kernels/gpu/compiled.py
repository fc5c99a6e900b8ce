"""Registers, spills, shared memory and instructions of kernels that are compiled for devices that are not here.

`python -m tests.kernels.gpu.compiled [module [target]]` prints a table of `compile_cases`. Needs triton, whose wheel
carries the assemblers and disassemblers; no driver, no device. Instructions are those of the hottest loop and of the
outermost one around it, which is a step of a chain: static counts, see `machine_code`.
"""

import argparse
import dataclasses
import faulthandler
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kernels.gpu import machine_code
from tests.kernels.gpu.machine_code import SPILL, TENSOR, Loop

if TYPE_CHECKING:
    from triton import JITFunction

# target: shared memory that one program may use, in bytes
TARGETS = {"sm_80": 166_912, "sm_86": 101_376, "sm_90": 232_448, "gfx942": 65_536}

# how long the compiler may think about one case, in seconds
PATIENCE = 180

_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Case:
    """One configuration of a kernel, as a launcher would choose it."""

    name: str
    kernel: "JITFunction"
    arguments: dict[str, str]  # at run time: {"a_ptr": "*fp32", "m": "i32", ...}
    constants: dict[str, object]  # constexpr arguments, and unit strides specialised to 1
    divisible: tuple[str, ...] = ()  # arguments known to be divisible by 16
    warps: int = 4
    stages: int = 3
    dot: bool | None = True  # tensor-core instructions are expected in the machine code; None: where `tl.dot` may
    registers: int | None = None  # the most of a thread, where the launcher says so to CUDA's assembler
    grid: tuple[int, ...] = ()  # of the launch, where it is known
    bytes: int = 0  # of its tensors, likewise


@dataclass(frozen=True)
class Report:
    """What became of a case. `error` says why it did not compile, and `defect` what is wrong with it if it did."""

    name: str
    target: str
    registers: int = 0
    spills: int = 0  # loads and stores of spilled registers on CUDA, spilled registers on ROCm
    in_loops: int = 0  # loads and stores of spilled registers in loops
    stack: int = 0  # bytes
    shared: int = 0  # bytes
    tensor: int = 0  # tensor-core instructions
    instructions: int = 0
    warps: int = 0
    seconds: float = 0.0
    dot: bool = False
    grid: tuple[int, ...] = ()
    bytes: int = 0
    before: int = 0  # instructions of a step between an arrival and the loop that waits for those of other programs
    loops: list[dict[str, int]] = field(default_factory=list)  # operations of the hottest loop, and of those around it
    error: str = ""

    def count(self, loop: int, pattern: str = "") -> int:
        """The instructions of a loop, 0 for the hottest and -1 for the outermost, whose name begins like this."""
        operations = self.loops[loop] if self.loops else {}
        return sum(number for name, number in operations.items() if re.match(pattern, name))

    @property
    def defect(self) -> str:
        """Empty for a kernel as it should be."""
        if self.error:
            return self.error
        found = []
        if self.in_loops:
            found.append(f"{self.in_loops} spills in loops")
        if self.shared > TARGETS[self.target]:
            found.append(f"{self.shared} bytes of shared memory, {TARGETS[self.target]} are there")
        if self.dot and not self.tensor:
            found.append("no tensor-core instruction")
        return ", ".join(found)


def reports(module: str, target: str, cache: str | None = None) -> list[Report]:
    """The reports of one module of `compile_cases`, compiled in other processes: a compiler may crash."""
    names, found = None, []
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": cache} if cache else {}
    while names is None or len(found) < len(names):
        command = [sys.executable, "-m", "tests.kernels.gpu.compiled", module, target, f"--first={len(found)}"]
        child = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
        if not child.stdout:
            raise RuntimeError(f"{module} for {target}: {child.stderr[-2000:]}")
        head, *lines = map(json.loads, child.stdout.splitlines())
        names = head
        found += [Report(**line) for line in lines]
        if len(found) < len(names):
            end = f"the compiler died (exit code {child.returncode}): {child.stderr.strip()[-500:]}"
            found.append(Report(names[len(found)], target, error=" ".join(end.split())))
    return found


def compile_case(case: Case, target: str) -> Report:
    """Compile one case in this process, which must not interpret kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    start = time.perf_counter()
    names = case.kernel.arg_names
    if sorted(names) != sorted([*case.arguments, *case.constants]):
        given = {*case.arguments, *case.constants}
        wrong = given.symmetric_difference(names) or set(case.arguments) & set(case.constants)
        return Report(case.name, target, error=f"arguments missing, unknown or given twice: {sorted(wrong)}")
    signature = {name: case.arguments.get(name, "constexpr") for name in names}
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible}
    source = ASTSource(case.kernel, signature, case.constants, divisible)
    cuda = target.startswith("sm_")
    chip = GPUTarget("cuda", int(target[3:]), 32) if cuda else GPUTarget("hip", target, 64)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    if cuda and case.registers is not None:
        options["maxnreg"] = case.registers
    try:
        kernel = compile(source, target=chip, options=options)
    except Exception as error:
        return Report(case.name, target, error=f"{type(error).__name__}: {' '.join(str(error).split())[-500:]}")
    read, loops = _read_cuda(kernel.asm["cubin"]) if cuda else _read_rocm(kernel.asm["amdgcn"])
    hottest = machine_code.hottest(loops)
    return Report(
        case.name, target, **read, in_loops=machine_code.in_loops(loops, SPILL), shared=kernel.metadata.shared,
        tensor=loops[0].count(TENSOR), instructions=loops[0].instructions, warps=kernel.metadata.num_warps,
        seconds=round(time.perf_counter() - start, 2),
        dot=_tensor_cores(kernel.asm["ttir"], target) if case.dot is None else case.dot,
        grid=case.grid, bytes=case.bytes, before=hottest[-1].before if hottest else 0,
        loops=[loop.operations for loop in hottest],
    )  # fmt: skip


def _tensor_cores(ttir: str, target: str) -> bool:
    """Whether a product is one that tensor cores do: on CUDA not one of exact float32, on sm_86 not of float64."""
    without = {"sm_86": ("f32", "f64"), "gfx942": ()}.get(target, ("f32",))
    products = re.findall(r"tt\.dot (.*) -> tensor<\w+x(\w+)>", ttir)
    return any("inputPrecision" in operands or kind not in without for operands, kind in products)


def _read_cuda(cubin: bytes) -> tuple[dict[str, int], list[Loop]]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loops = machine_code.sass(text)
    registers, stack = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK"))
    return {"registers": registers, "stack": stack, "spills": loops[0].count(SPILL)}, loops


def _read_rocm(text: str) -> tuple[dict[str, int], list[Loop]]:
    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])

    names = {"registers": "vgpr_count", "stack": "private_segment_fixed_size", "spills": "vgpr_spill_count"}
    return {field: number(name) for field, name in names.items()}, machine_code.rocm(text)


def row(report: Report) -> dict[str, int]:
    """The numbers of a table, by their names."""
    return {
        "warps": report.warps, "registers": report.registers, "spills": report.spills, "shared": report.shared,
        "step": report.count(-1), "loop": report.count(0), "tensor": report.count(0, TENSOR),
        "loop spills": report.in_loops, "all": report.instructions,
    }  # fmt: skip


def table(found: list[Report], head: bool = False) -> Iterator[str]:
    """Lines for people."""
    if head:
        yield f"{'target':7} {'case':60} {' '.join(f'{name:>11}' for name in row(found[0]))} {'s':>6} defect"
    for report in found:
        cells = " ".join(f"{number:>11,}" for number in row(report).values())
        yield f"{report.target:7} {report.name:60} {cells} {report.seconds:6.2f} {report.defect}"


def _compile_here(module: str, target: str, first: int) -> None:
    """One line of JSON with all names, then one for each case as soon as it is done."""
    cases = importlib.import_module(f"tests.kernels.gpu.compile_cases.{module}").cases(target)
    with open(os.dup(1), "w") as lines:
        os.dup2(2, 1)  # where compilers complain on stdout
        print(json.dumps([case.name for case in cases]), file=lines, flush=True)
        for case in cases[first:]:
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            print(json.dumps(dataclasses.asdict(compile_case(case, target))), file=lines, flush=True)
        faulthandler.cancel_dump_traceback_later()


def _main() -> int:
    from tests.kernels.gpu import compile_cases

    parser = argparse.ArgumentParser(prog="python -m tests.kernels.gpu.compiled", description=__doc__.splitlines()[0])
    parser.add_argument("module", nargs="?", help="one of tests/kernels/gpu/compile_cases, by default all")
    parser.add_argument("target", nargs="?", choices=TARGETS, help="by default all")
    parser.add_argument("--first", type=int, help="compile in this process, from this case on; print JSON")
    options = parser.parse_args()
    if options.first is not None:
        _compile_here(options.module, options.target, options.first)
        return 0
    defects, head = 0, True
    for module in [options.module] if options.module else compile_cases.modules():
        for target in [options.target] if options.target else compile_cases.targets(module):
            found = reports(module, target)
            defects += sum(bool(report.defect) for report in found)
            print(*table(found, head), sep="\n", flush=True)
            head = False
    return int(defects > 0)


if __name__ == "__main__":
    sys.exit(_main())
