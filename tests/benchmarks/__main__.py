"""Measure, write the results file, then draw the plot and the README's tables from it."""

import argparse

from tests.benchmarks import cpu, report

parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
parser.add_argument("what", nargs="?", choices=("all", "report"), default="all", help="report: from the results file")
if parser.parse_args().what == "all":
    report.write(cpu.measure())
rows = report.read()
report.plot(rows)
report.update_readme(rows)
print(report.figures(rows))
