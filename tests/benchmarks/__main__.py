"""Measure, write the results files, and draw plots, and the tables of the README and of the pages, from them."""

import argparse
import sys
from collections.abc import Sequence

from tests.benchmarks import (
    accuracy,
    counts,
    cpu,
    idle,
    layers,
    memory,
    overlapped,
    peers,
    plots,
    questions,
    ranks,
    report,
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

    options = parser.parse_args(argv)
    return options.call(options)


if __name__ == "__main__":
    sys.exit(main())
