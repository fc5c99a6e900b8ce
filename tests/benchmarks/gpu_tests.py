"""The tests marked gpu on all cores: compiled, then run; in as many calls as it takes.

`python -m tests.benchmarks gpu compile` puts every kernel that tests and figures launch into Triton's cache, so that
`... gpu test` does not wait for compilers. Both need pytest alone, keep what they have done in a folder, and go on with
the rest when they are called again: after a cut with what had no turn, after a change of any file with everything.
A test that failed is run again.
"""

import collections
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from tests.benchmarks.gpu_shared import Line, Shared
from tests.benchmarks.gpu_worker import LOST
from tests.benchmarks.results import ROOT, digest

DONE, FAILED, CUT = 0, 1, 3

# of the report at the end: it may be read through a window of a few thousand characters
MOST_FAILURES, LONGEST_REPORT = 40, 9_000


class Call(NamedTuple):
    """What a caller says: where things are kept, on how many cores and how long."""

    folder: Path
    out: Path | None
    workers: int
    minutes: float
    patience: float  # seconds that one test may take, with what it compiles
    paths: Sequence[str]


def compile_kernels(call: Call, target: str | None) -> int:
    """Fill the cache for a target, by default that of this machine's device.

    0 if all is compiled, 1 if something may not be, 3 if the call was cut.
    """
    there = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    if target is None:
        if there is None:
            raise SystemExit("no GPU here: `--target sm_90` compiles for one that is not")
        target = there.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{there.major}{there.minor}"
    # no device is looked at; -O leaves out assertions, so that tests go on to their last launch
    environment = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-O", "-m", "tests.benchmarks.gpu_worker", "--target", target]
    command += ["--processors", str(there.multi_processor_count)] if there else []
    pool = Pool(call, f"compile-{target}", command, environment)
    tried = pool.shared.told(f"kernels-{target}").values()
    # which test launches a kernel that was not compiled is not known
    code = pool.run(anew=any(line.outcome != "compiled" for line in tried))
    kernels, walked = pool.shared.told(f"kernels-{target}"), pool.shared.told(pool.list_name)
    bad = [line for line in kernels.values() if line.outcome != "compiled"]
    for line in bad[:MOST_FAILURES]:
        print(f"NOT COMPILED {line.name}: {line.text}")
    slowest = sorted(kernels.values(), key=lambda line: -line.seconds)[:5]
    named = ", ".join(f"{line.name.split()[0]} {line.seconds:.0f} s" for line in slowest)
    spent = sum(line.seconds for line in kernels.values())
    print(f"{len(kernels) - len(bad)} kernels for {target}, {spent:.0f} s of compilers; the slowest: {named}")
    early = [line for line in walked.values() if line.outcome in ("failed", "ended")]
    for line in early[:MOST_FAILURES]:
        print(f"ENDED BEFORE ITS LAST LAUNCH {line.name}: {' '.join(line.text.split())[-200:]}")
    return FAILED if bad or early else code


def test(call: Call, *, dry: bool = False) -> int:
    """Run the tests, and print what failed; 0, 1 if something did, 3 if nothing did but the call was cut.

    `dry`: in Triton's interpreter.
    """
    if not dry and not torch.cuda.is_available():
        raise SystemExit("no GPU here: --dry runs the tests in Triton's interpreter")
    print("in Triton's interpreter" if dry else torch.cuda.get_device_name())
    before = compiled(call.folder)
    environment = {"TRITON_INTERPRET": str(int(dry))}
    pool = Pool(call, "test", [sys.executable, "-m", "tests.benchmarks.gpu_worker"], environment)
    code = pool.run()
    lines = pool.shared.told("test")
    bad = [line for line in lines.values() if line.outcome not in ("passed", "skipped")]
    for line in bad[:MOST_FAILURES]:
        text = line.text[-LONGEST_REPORT // max(1, min(len(bad), MOST_FAILURES)) :]
        print(f"FAILED {line.name}\n{text}")
    counts = collections.Counter(line.outcome for line in lines.values())
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()), end="; ")
    print(f"{compiled(call.folder) - before} kernels were not in the cache")
    return FAILED if bad else code


def cache(folder: Path) -> Path:
    """Where Triton keeps the kernels of all three calls."""
    return folder.absolute() / "cache"


def compiled(folder: Path) -> int:
    """How many kernels the cache holds."""
    return sum(1 for kind in ("cubin", "hsaco") for _ in cache(folder).glob(f"*/*.{kind}"))


class Pool:
    """Processes that walk through the same list, each taken up again after what ended it."""

    def __init__(self, call: Call, list_name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.call, self.folder, self.list_name = call, call.folder.absolute(), list_name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shared, self.sources = Shared(self.folder), digest()
        options = ["--patience", str(call.patience), "--paths", *call.paths]
        self.command = [*command, str(self.folder), self.sources, *options]
        own = {"TRITON_CACHE_DIR": str(cache(self.folder)), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # what else is installed there has no say
        self.environment = os.environ | own | environment
        self.children: list[subprocess.Popen[bytes]] = []

    def run(self, *, anew: bool = False) -> int:
        """0 when the list is done, 1 when a process cannot start, 3 when it was cut: by its time or by a signal."""
        start = time.monotonic()
        told = [] if anew else self.shared.told(self.list_name).values()
        done = [line.name for line in told if line.outcome in ("passed", "skipped")]
        self.shared.begin(done)
        workers = self.call.workers
        print(f"{self.list_name}: {len(done)} done before, {workers} processes, files {self.sources}", flush=True)
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            self.children = [self.started() for _ in range(workers)]
            while self.children:
                time.sleep(0.2)
                if time.monotonic() - start > 60 * self.call.minutes:
                    raise KeyboardInterrupt
                if not self.tend():
                    return FAILED
            return DONE
        except KeyboardInterrupt:
            print("CUT: the next call goes on from here", flush=True)
            return CUT
        finally:
            for child in self.children:
                child.kill()
            for child in self.children:
                child.wait()
            print(f"{time.monotonic() - start:.0f} s")
            if self.call.out:
                self.call.out.mkdir(parents=True, exist_ok=True)
                for file in (*self.folder.glob("*.jsonl"), self.folder / f"{self.list_name}.log"):
                    shutil.copy(file, self.call.out)

    def started(self) -> subprocess.Popen[bytes]:
        """Another process; what it prints is kept."""
        with (self.folder / f"{self.list_name}.log").open("ab") as log:
            return subprocess.Popen(self.command, cwd=ROOT, env=self.environment, stdout=log, stderr=log)

    def tend(self) -> bool:
        """Take up the work of processes that have ended too soon; whether that makes sense."""
        for child in list(self.children):
            code = child.poll()
            if code is None:
                continue
            self.children.remove(child)
            name = self.shared.was_at(child.pid)
            if name:
                end = "took too long" if code == -signal.SIGALRM else f"ended its process, code {code}"
                self.shared.tell(self.list_name, Line(name, "ended", 0.0, end, self.sources))
            elif code not in (0, LOST):
                log = (self.folder / f"{self.list_name}.log").read_text(errors="replace")
                print(f"a process did not get to its first test (code {code}):\n{log[-3000:]}")
                return False
            if code:
                self.children.append(self.started())
        return True


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
