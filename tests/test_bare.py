"""Tests are collected where nothing is installed that is not needed: those for a device, and all."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.gpu_day import ROOT

NEEDED = ["torch", "triton", "numpy", "scipy", "pytest"]

PLUGIN = """
import sys

import torch

if {device}:
    torch.cuda.is_available = lambda: True  # as on the machine that it is for
sys.modules.update(dict.fromkeys({hidden}))  # which cannot be imported
"""


def with_needs(names):
    """Distributions and what they need, without extras."""
    found, todo = set(), list(names)
    while todo:
        name = re.split("[^A-Za-z0-9_.-]", todo.pop())[0].lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        todo += [need for need in needs if "extra ==" not in need]
    return found


def collected(needed, options, tmp_path):
    """How many tests are collected where nothing is installed but what is needed, and what needs itself."""
    needs = with_needs(needed) | {"logchain", "pip", "setuptools"}
    modules = importlib.metadata.packages_distributions()
    hidden = {name for name, owners in modules.items() if not {one.lower().replace("_", "-") for one in owners} & needs}
    # setuptools has copies of what it needs, which it imports by their names
    copies = Path(importlib.util.find_spec("setuptools").origin).with_name("_vendor")
    hidden -= {path.name for path in copies.iterdir()}
    assert {"nbformat", "hmmlearn", "matplotlib", "xdist"} <= hidden
    (tmp_path / "bare.py").write_text(PLUGIN.format(hidden=hidden, device="triton" in needed))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for name in ("TRITON_INTERPRET", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-p", "bare", *options, "--collect-only", "-q"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return int(re.search(r"^(\d+)(?:/\d+)? tests collected", run.stdout, re.MULTILINE)[1])


@pytest.mark.slow
def test_the_tests_for_a_device_need_no_other_package(tmp_path):
    assert collected(NEEDED, ["-m", "gpu"], tmp_path) > 100


@pytest.mark.slow
def test_all_tests_are_collected_without_any_extra(tmp_path):
    needed = [name for name in NEEDED if name != "triton"]
    assert collected(needed, ["-m", "slow or not slow"], tmp_path) > 3000
