"""Teams of processes, which tests of one file share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.processes import Team


@pytest.fixture(scope="module")
def teams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Team]]:
    """Gives a working team of so many processes, made when it is first asked for, or anew once it is broken."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch.distributed has no gloo here")
    working: dict[int, Team] = {}

    def team(size: int) -> Team:
        if size in working and working[size].broken:
            working.pop(size).close()
        if size not in working:
            folder: Path = tmp_path_factory.mktemp(f"team_of_{size}")
            working[size] = Team(size, folder)
        return working[size]

    yield team
    for one in working.values():
        one.close()
