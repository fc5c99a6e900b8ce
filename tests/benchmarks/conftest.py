"""Results files of a test, and rows for them."""

import pytest

from tests.benchmarks import results


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Results files of this test."""
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    for name in ("PEERS", "ACCURACY", "MEMORY", "SCALING", "LEFT_OUT"):
        monkeypatch.setattr(results, name, tmp_path / f"{name.lower()}.csv")
    return tmp_path
