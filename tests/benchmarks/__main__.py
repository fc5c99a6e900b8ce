"""Measure, write the results file, then draw the plot and the README's tables from it."""

import argparse
from pathlib import Path

from tests.benchmarks import cpu, gpu, peers, predictions, questions, report

parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
parser.add_argument(
    "what",
    nargs="?",
    choices=("all", "questions", "report", "gpu", "predict", "peers"),
    default="all",
    help="all: on this CPU; questions: of those, all but the product; report: from the results files; gpu: on a GPU; "
    "predict: what a model says of one; peers: on this CPU, beside everybody else",
)
parser.add_argument("--out", type=Path, help="gpu: a folder for one more copy of the results")
parser.add_argument("--minutes", type=float, default=7.5, help="gpu: what does not fit is left out")
parser.add_argument("--only", nargs="+", default=(), help="gpu: groups to measure; peers: parts of providers' names")
parser.add_argument("--workloads", nargs="+", default=(), help="peers: parts of workloads' names, n=10 or c=64")
parser.add_argument("--dry", action="store_true", help="gpu: run everything on a CPU, on tiny sizes")
options = parser.parse_args()
if options.what == "gpu" and not set(options.only) <= set(gpu.GROUPS):
    parser.error(f"--only: expected some of {', '.join(gpu.GROUPS)}, got {' '.join(options.only)}")
if options.what == "gpu":
    gpu.main(dry=options.dry, minutes=options.minutes, out=options.out, only=options.only)
elif options.what == "peers":
    peers.main(options.only, options.workloads)
elif options.what == "predict":
    predictions.write()
else:
    if options.what == "all":
        report.write(cpu.measure())
    if options.what in ("all", "questions"):
        report.write(questions.measure(), report.QUESTIONS)
    rows = report.read()
    report.plot(rows)
    report.update_readme(rows)
    print(report.figures(rows))
