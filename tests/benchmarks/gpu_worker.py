"""One of several processes that go through the tests of the Triton kernels: `python -m tests.benchmarks.gpu_worker`.

All collect the same tests in the same order, and each test is done by whoever comes to it first. A test that takes too
long ends its process, as a test that breaks the device does: another process goes on with the next one.
"""

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.benchmarks.gpu_shared import Line, Shared
from tests.benchmarks.results import ROOT

# files of tests, or all tests and figures
EVERYTHING = ["tests"]
# exit codes of a process whose device answers no more, and of one that finds none
LOST, NO_DEVICE = 9, 10
# of a failure's report
LINES = 12


class Walk:
    """A pytest plugin: the tests that nobody has taken, and a line for each as soon as it is done."""

    def __init__(self, shared: Shared, list_name: str, sources: str, patience: float) -> None:
        self.shared, self.list_name, self.sources, self.patience = shared, list_name, sources, patience
        self.reports: list[pytest.TestReport] = []
        self.lost, self.parent = False, os.getppid()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of pytest's own loop; each test takes down all that it has set up."""
        if session.testsfailed:
            raise session.Interrupted("not everything can be collected")
        for item in session.items:
            if self.lost or os.getppid() != self.parent:
                break
            if self.shared.take(item.nodeid):
                self.do(item.nodeid, lambda item=item: self.test(item))
        return True

    def do(self, name: str, what: Callable[[], tuple[str, str]]) -> None:
        """Something that may end the process, and its line."""
        self.shared.at(name)
        signal.setitimer(signal.ITIMER_REAL, self.patience)  # ends the process, whatever it does
        start = time.monotonic()
        outcome, text = what()
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.shared.tell(self.list_name, Line(name, outcome, time.monotonic() - start, text, self.sources))
        self.shared.at("")

    def test(self, item: pytest.Item) -> tuple[str, str]:
        """A test's outcome, and the end of its report if it failed."""
        self.reports = []
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        bad = next((report for report in self.reports if report.failed), None)
        if bad:
            self.lost = not answers()
            return "failed", "\n".join(bad.longreprtext.splitlines()[-LINES:])
        skipped = next((report for report in self.reports if report.skipped), None)
        return ("skipped", str(skipped.longrepr)[-300:]) if skipped else ("passed", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """An error of the device is that of the test which made it."""
        result = yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return result


def answers() -> bool:
    """Whether the device still does."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def main() -> int:
    """Walk through the tests; when they are to be compiled, through the figures too."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu_worker", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("sources", help="the digest of all files")
    parser.add_argument("--target", help="compile for it, and launch nothing")
    parser.add_argument("--processors", type=int, default=132, help="of the target")
    parser.add_argument("--patience", type=float, required=True, help="seconds that one test may take")
    parser.add_argument("--paths", nargs="+", default=EVERYTHING)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shared = Shared(options.folder)
    list_name = f"compile-{options.target}" if options.target else "test"
    walk = Walk(shared, list_name, options.sources, options.patience)
    arguments = ["-q", "-c", str(ROOT / "pyproject.toml"), "--no-header", "-o", "addopts=", "-p", "no:cacheprovider"]
    if os.environ["TRITON_INTERPRET"] == "0":  # otherwise no test is marked
        arguments += ["-m", "gpu", "--ignore-glob=*/test_native_*.py"]
        if not options.target and not torch.cuda.is_available():
            print("there is no device any more")
            return NO_DEVICE
    if options.target:
        from tests.benchmarks import gpu_compile

        gpu_compile.install(shared, options.target, options.processors, options.sources)
        arguments += ["--assert=plain", "-W", "ignore::pytest.PytestConfigWarning"]  # of assertions that -O leaves out
    code = pytest.main([*arguments, *options.paths], plugins=[walk])
    if walk.lost:
        return LOST
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(code)
    if options.target and options.paths == EVERYTHING:
        for name, turn, call in gpu_compile.figures(options.folder):
            if shared.take(name):
                with turn:
                    walk.do(name, call)
    return 0


if __name__ == "__main__":
    os._exit(main())  # a device that is lost may hang at exit
