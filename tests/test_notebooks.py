"""Notebooks run from top to bottom in a fresh kernel, and are kept with what they show; the assertions are in them."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

import logchain

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# what logchain needs, and the extra "notebooks"
PACKAGES = {"logchain", "matplotlib", "numpy", "scipy", "sklearn", "statsmodels", "torch"}
# of the extra "peers": imported only where they are installed
PEERS = {"cirkit", "hmmlearn", "pyro", "torch_struct", "torchcrf"}
# where text ends on a desktop's page
WIDTH = 88
# of whatever machine it was
PLACES = re.compile(rf"/(home|root|tmp|usr|Users|private)/|site-packages|ipykernel_\d|{re.escape(str(ROOT))}")


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def kinds(cell):
    """What a cell shows: text, values, figures."""
    return {(output.output_type, output.get("name"), *sorted(output.get("data", ()))) for output in cell.outputs}


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_running_it_shows_what_is_kept(path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # each worker has a core to itself
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    executed = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for i, (cell, kept) in enumerate(zip(executed, code_cells(path), strict=True)):
        assert kinds(cell) == kinds(kept), f"code cell {i}: run `jupyter execute --inplace notebooks/{path.name}`"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "of one run, from the top"
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    text = "\n".join(output.get("text", "") + str(output.get("data", {}).get("text/plain", "")) for output in outputs)
    assert not PLACES.search(text) and "Warning" not in text
    assert any("image/png" in kind for kind in kinds(cells[-1])), "it ends in a figure"
    assert path.stat().st_size < 150_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_fits_a_page(path):
    sources = [line for cell in code_cells(path) for line in cell.source.splitlines()]
    outputs = [output.get("text", "") for cell in code_cells(path) for output in cell.outputs]
    assert not [line for line in [*sources, *"\n".join(outputs).splitlines()] if len(line) > WIDTH]
    first = nbformat.read(path, as_version=4).cells[0].source.splitlines()[0]
    assert first.startswith("# ") and first.endswith("?"), "its title is its question"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_imports_are_public_and_of_the_extras(path):
    cells = code_cells(path)
    trees = [ast.parse(cell.source) for cell in cells]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes]
    names = [part for node in nodes for alias in node.names for part in alias.name.split(".")]
    assert not {module.split(".")[0] for module in modules} - PACKAGES - PEERS - sys.stdlib_module_names
    assert not [part for part in [*names, *".".join(modules).split(".")] if part.startswith("_")]
    outright = [node for tree in trees for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    needed = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0] for node in outright
    }
    assert not needed & PEERS, "a peer that is not installed is left out"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_names_of_logchain_are_public(path):
    tree = ast.parse("\n".join(cell.source for cell in code_cells(path)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("logchain", "nn"):
            module = logchain if node.value.id == "logchain" else logchain.nn
            assert node.attr in module.__all__
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_") or node.attr in (
                "_asdict",
                "__init__",
            )  # of any NamedTuple, of a class
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "logchain":
            module = importlib.import_module(node.module)
            assert {alias.name for alias in node.names} <= set(module.__all__)
