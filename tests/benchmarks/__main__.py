"""Measure, write the results files, and draw plots and the README's tables from them."""

import argparse
from pathlib import Path

from tests.benchmarks import (
    accuracy,
    counts,
    cpu,
    gpu,
    layers,
    memory,
    peers,
    plots,
    predictions,
    questions,
    report,
    scaling,
)

GROUPS = {
    "product": (cpu, "the product on this CPU, with what it should reach"),
    "questions": (questions, "the questions of a chain, likewise"),
    "layers": (layers, "logchain.nn, likewise"),
    "counts": (counts, "operators and allocations of our own calls, which the tests compare"),
    "peers": (peers, "times beside everybody else's"),
    "accuracy": (accuracy, "everybody's errors"),
    "memory": (memory, "everybody's peaks"),
    "scaling": (scaling, "times against v, c and n, ours and some peers'"),
}
# what is measured of everybody, each in a process of its own: a part can be chosen
EVERYBODY = ("peers", "accuracy", "memory", "scaling")

parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
commands = parser.add_subparsers(dest="command", required=True)
run = commands.add_parser("run", help="on this CPU; an hour or two for everything")
groups = "; ".join(f"{name}: {what}" for name, (_, what) in GROUPS.items())
run.add_argument("groups", nargs="*", metavar="group", help=groups)
run.add_argument("--only", nargs="+", default=(), help=f"{', '.join(EVERYBODY)}: parts of providers' names")
run.add_argument("--workloads", nargs="+", default=(), help="of the same: parts of workloads' names, n=10 or c=64")
commands.add_parser("plot", help="the plots and the README's tables, from the results files")
device = commands.add_parser("gpu", help="on a GPU: tests, times, memory, accuracy, peers, tiles")
device.add_argument("--out", type=Path, help="a folder for one more copy of the results")
device.add_argument("--minutes", type=float, default=7.5, help="what does not fit is left out")
device.add_argument("--only", nargs="+", default=(), choices=gpu.GROUPS, help="groups to measure")
device.add_argument("--dry", action="store_true", help="run everything on a CPU, on tiny sizes")
device.add_argument("--wheels", type=Path, help="a folder that `python -m tests.benchmarks.wheels` has filled")
commands.add_parser("predict", help="what a model says of a GPU")

options = parser.parse_args()
if options.command == "gpu":
    gpu.main(dry=options.dry, minutes=options.minutes, out=options.out, only=options.only, carried=options.wheels)
elif options.command == "predict":
    predictions.write()
else:
    chosen = getattr(options, "groups", None)
    if chosen is not None and not set(chosen) <= set(GROUPS):
        parser.error(f"group: expected some of {', '.join(GROUPS)}, got {' '.join(chosen)}")
    for name in [] if chosen is None else chosen or GROUPS:
        module, _ = GROUPS[name]
        print(f"measuring: {name}", flush=True)
        if name in EVERYBODY:
            module.main(options.only, options.workloads)
        else:
            module.main()
    plots.draw()
    report.update_readme()
    print(report.figures())
