"""Teams of processes, shared by all tests."""

from contextlib import ExitStack

import pytest
import torch.distributed as dist

from tests.distributed.processes import Team


@pytest.fixture(scope="session")
def teams(tmp_path_factory):
    """Returns a working team of a number of processes, started when it is first needed, or again once it is broken."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch.distributed has no gloo here")
    working = {}

    def team(size):
        if size not in working or working[size].broken:
            working[size] = stack.enter_context(Team(size, tmp_path_factory.mktemp("team")))
        return working[size]

    with ExitStack() as stack:
        yield team
