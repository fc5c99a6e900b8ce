"""Measure, write the results files, and draw plots, and the tables of the README and of the pages, from them."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.benchmarks import (
    accuracy,
    counts,
    cpu,
    gpu,
    gpu_counts,
    idle,
    launches,
    layers,
    memory,
    overlapped,
    peers,
    plots,
    predicted,
    questions,
    ranks,
    report,
    results,
    scaling,
    sharpness,
    structures,
)

OWN = {
    "product": (cpu, "the product on this CPU, with what it should reach"),
    "questions": (questions, "the questions of a chain, likewise"),
    "layers": (layers, "logchain.nn, likewise"),
    "overlapped": (overlapped, "the schedules of one long sequence, beside each other"),
    "sharpness": (sharpness, "the product and marginals of sharp emissions over those of others"),
    "structures": (structures, "chains of structures, beside their products alone"),
    "ranks": (ranks, "one sequence on two ranks beside one process, and what a model says of more"),
    "idle": (idle, "the questions of one long sequence, on one thread and on two"),
    "counts": (counts, "operators, allocations and frames of our own calls, which the tests compare"),
}
# each in a process of its own: a part can be chosen
EVERYBODY = {
    "peers": (peers, "times beside everybody else's"),
    "accuracy": (accuracy, "everybody's errors"),
    "memory": (memory, "everybody's peaks"),
    "scaling": (scaling, "times against v, c and n, ours and some peers'"),
}
GROUPS = OWN | EVERYBODY


def group(name: str) -> str:
    """An argument."""
    if name not in GROUPS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(GROUPS)}, got {name}")
    return name


def run(options: argparse.Namespace) -> None:
    """Measure some groups, or all."""
    for name in options.groups or GROUPS:
        print(f"measuring: {name}", flush=True)
        if name in OWN:
            OWN[name][0].main()
        else:
            EVERYBODY[name][0].main(options.only, options.workloads)
    publish(options)


def publish(_: argparse.Namespace) -> None:
    """From the results files."""
    plots.draw()
    report.update()
    print(report.figures())


def measure_gpu(options: argparse.Namespace) -> int:
    """Figures of a GPU, or a dry run of them without one."""
    if options.dry:
        if options.results == results.FOLDER:
            raise SystemExit("--dry: expected --results, another folder than that of the results")
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    elif not torch.cuda.is_available():
        raise SystemExit("no GPU here: --dry runs the same on a CPU, without meaning")
    return gpu.measure(options.results, options.minutes, options.only, options.dry)


def main(argv: Sequence[str] | None = None) -> int | None:
    """An exit code, if there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)

    on_cpu = commands.add_parser("run", help="on this CPU")
    groups = "; ".join(f"{name}: {what}" for name, (_, what) in GROUPS.items())
    on_cpu.add_argument("groups", nargs="*", type=group, metavar="group", help=groups)
    on_cpu.add_argument("--only", nargs="+", default=(), help=f"{', '.join(EVERYBODY)}: parts of providers' names")
    on_cpu.add_argument("--workloads", nargs="+", default=(), help="of the same: parts of workloads' names, as c=64")
    on_cpu.set_defaults(call=run)

    drawn = commands.add_parser("plot", help="the plots and all tables, from the results files")
    drawn.set_defaults(call=publish)

    on_gpu = commands.add_parser("gpu", help="on a GPU: everybody's times, peaks and errors; goes on where it was cut")
    on_gpu.add_argument("--results", type=Path, default=results.FOLDER, help="the folder of the results files")
    on_gpu.add_argument("--minutes", type=float, default=8.0, help="what does not fit is left for the next call")
    on_gpu.add_argument("--only", nargs="+", default=(), help="parts of providers' names")
    on_gpu.add_argument("--dry", action="store_true", help="on a CPU, on tiny sizes: times mean nothing")
    on_gpu.set_defaults(call=measure_gpu)

    compiled = commands.add_parser("gpu-count", help="what the GPU kernels compile to, without a GPU: registers, loops")
    compiled.add_argument("modules", nargs="*", help="of tests/kernels/gpu/compile_cases, by default all")
    compiled.add_argument("--targets", nargs="+", default=(), help="some of sm_80, sm_86, sm_90 and gfx942")
    compiled.set_defaults(call=lambda options: gpu_counts.main(options.modules, options.targets))

    estimated = commands.add_parser("gpu-predict", help="estimates of the GPU kernels' times, without a GPU")
    estimated.set_defaults(call=lambda options: predicted.main())

    launched = commands.add_parser("gpu-launch", help="how much Python a launch of a GPU kernel takes, without a GPU")
    launched.set_defaults(call=lambda options: launches.main())

    options = parser.parse_args(argv)
    return options.call(options)


if __name__ == "__main__":
    sys.exit(main())
