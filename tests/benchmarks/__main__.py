"""`run` measures cases and writes their rows; `report` writes plots and tables from the rows."""

import argparse

from tests.benchmarks import report, run

parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
commands = parser.add_subparsers(dest="command", required=True)
measured = commands.add_parser("run", help="measure cases on this CPU, or all, for more than an hour")
kinds = ", ".join(dict.fromkeys(task.name.partition("/")[0] for task in run.tasks()))
text = f"part of the name of a case, kind/workload/provider, in which * is anything; kinds are {kinds}"
measured.add_argument("cases", nargs="*", metavar="CASE", help=text)
commands.add_parser("report", help="write the plots and the tables of all documents")
if __name__ == "__main__":
    options = parser.parse_args()
    run.main(options.cases) if options.command == "run" else report.main()
