"""The loops in C at each level of CPU that this machine has."""

import pytest

from logchain.kernels.cpu import arguments, library

# a machine computes at its level and at all below
LEVELS = [level for level in ("aarch64", "x86_64_v2", "x86_64_v3", "x86_64_v4") if level[:3] == library.level()[:3]]
LEVELS = [level for level in LEVELS if level <= library.level()]


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    monkeypatch.setattr(library, "level", lambda: request.param)
    arguments.function.cache_clear()
    request.addfinalizer(arguments.function.cache_clear)
    return request.param
