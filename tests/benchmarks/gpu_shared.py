"""What processes that go through the same list share: who takes which item, what became of it, and who is at what.

A folder holds it. `NAME.jsonl` has a line for each item that is done, written at once; `claims` and `running` are of
the call in progress.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.results import digest


class Line(NamedTuple):
    """What became of an item, in so many seconds; `sources` is the digest of the files that it ran with."""

    name: str
    outcome: str
    seconds: float = 0.0
    text: str = ""
    sources: str = ""


class Shared:
    """The folder, as each process sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.claims, self.running = folder / "claims", folder / "running"

    def begin(self, done: Iterable[str]) -> None:
        """Forget who took what in an earlier call; nobody takes what is done."""
        for folder in (self.claims, self.running):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        for name in done:
            self.take(name)

    def take(self, name: str) -> bool:
        """Whether this process is the first to ask for an item."""
        try:
            os.close(os.open(self.claims / hashlib.sha256(name.encode()).hexdigest(), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def at(self, name: str) -> None:
        """Say what this process is at; nothing, between items."""
        (self.running / str(os.getpid())).write_text(name)

    def was_at(self, process: int) -> str:
        """What another process said last."""
        file = self.running / str(process)
        return file.read_text() if file.exists() else ""

    def tell(self, list_name: str, line: Line) -> None:
        """Add a line, in one piece, also beside other processes."""
        with (self.folder / f"{list_name}.jsonl").open("ab", buffering=0) as file:
            file.write(json.dumps(line._asdict()).encode() + b"\n")

    def told(self, list_name: str) -> dict[str, Line]:
        """The last line of each item that ran with today's files."""
        path, sources = self.folder / f"{list_name}.jsonl", digest()
        found = {}
        for text in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):  # a line that was cut
                line = Line(**json.loads(text))
                found |= {line.name: line} if line.sources == sources else {}
        return found
