"""Measure, write the results file, then draw the plot and the README's tables from it."""

import argparse
from pathlib import Path

from tests.benchmarks import accuracy, counts, cpu, gpu, layers, memory, peers, predictions, questions, report, scaling

COMMANDS = {
    "all": "questions, layers and the product on this CPU",
    "questions": "of those, all but the product and the layers",
    "layers": "of those, logchain.nn",
    "report": "the plots and the README's tables, from the results files",
    "gpu": "on a GPU",
    "predict": "what a model says of one",
    "peers": "times beside everybody else's, on this CPU",
    "accuracy": "everybody's errors",
    "memory": "everybody's peaks",
    "scaling": "times against v, c and n, ours and some peers'",
    "counts": "operators and allocations of our own calls, which the tests compare",
}
# what is measured of everybody, each in a process of its own
BESIDE = {"peers": peers, "accuracy": accuracy, "memory": memory, "scaling": scaling}

parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
parser.add_argument(
    "what", nargs="?", choices=COMMANDS, default="all", help="; ".join(f"{k}: {v}" for k, v in COMMANDS.items())
)
parser.add_argument("--out", type=Path, help="gpu: a folder for one more copy of the results")
parser.add_argument("--minutes", type=float, default=7.5, help="gpu: what does not fit is left out")
parser.add_argument(
    "--only", nargs="+", default=(), help="gpu: groups to measure; of everybody: parts of providers' names"
)
parser.add_argument("--workloads", nargs="+", default=(), help="of everybody: parts of workloads' names, n=10 or c=64")
parser.add_argument("--dry", action="store_true", help="gpu: run everything on a CPU, on tiny sizes")
options = parser.parse_args()
if options.what == "gpu" and not set(options.only) <= set(gpu.GROUPS):
    parser.error(f"--only: expected some of {', '.join(gpu.GROUPS)}, got {' '.join(options.only)}")
if options.what == "gpu":
    gpu.main(dry=options.dry, minutes=options.minutes, out=options.out, only=options.only)
elif options.what in BESIDE:
    BESIDE[options.what].main(options.only, options.workloads)
elif options.what == "counts":
    counts.main()
elif options.what == "predict":
    predictions.write()
else:
    if options.what == "all":
        report.write(cpu.measure())
    if options.what in ("all", "questions"):
        report.write(questions.measure(), report.QUESTIONS)
    if options.what in ("all", "layers"):
        report.write(layers.measure(), report.LAYERS)
    rows = report.read()
    report.plot(rows)
    report.update_readme(rows)
    print(report.figures(rows))
