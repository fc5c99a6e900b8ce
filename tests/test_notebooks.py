"""Notebooks run from top to bottom in a fresh kernel, and are kept with what they show; the assertions are in them."""

import ast
import re
import sys
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [
    "01_casino",
    "02_crf_swap",
    "03_el_nino",
    "04_how_many_states",
    "05_recessions",
    "06_digits",
    "07_endless_sensor",
    "08_where_float32_fails",
    "09_alignment",
]
# what logchain needs, and the extras "notebooks" and "peers"
PACKAGES = {"logchain", "matplotlib", "numpy", "scipy", "sklearn", "statsmodels", "torch"}
PACKAGES |= {"cirkit", "hmmlearn", "pyro", "torch_struct", "torchcrf"}
PUBLIC = re.compile(
    r"logchain(\.(adapters|distributed|memory|nn(\.(emissions|transitions))?|reference|semirings|transitions))?"
)
# of whatever machine it was
PLACES = re.compile(rf"/(home|root|tmp|usr|Users|private)/|site-packages|ipykernel_\d|{re.escape(str(ROOT))}")


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def kinds(cell):
    """What a cell shows: text, values, figures."""
    return {(output.output_type, output.get("name"), *sorted(output.get("data", ()))) for output in cell.outputs}


def test_there_are_nine():
    assert [path.stem for path in NOTEBOOKS] == NAMES


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
    assert path.stat().st_size < 300_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_lines_of_code_fit_a_narrow_page(path):
    lines = [line for cell in code_cells(path) for line in cell.source.splitlines()]
    assert not [line for line in lines if len(line) > 88]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_imports_are_public_and_of_the_extra(path):
    trees = [ast.walk(ast.parse(cell.source)) for cell in code_cells(path)]
    nodes = [node for tree in trees for node in tree if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes]
    names = [part for node in nodes for alias in node.names for part in alias.name.split(".")]
    assert not {module.split(".")[0] for module in modules} - PACKAGES - sys.stdlib_module_names
    assert not [part for part in [*names, *".".join(modules).split(".")] if part.startswith("_")]
    ours = [module for module in modules if module.split(".")[0] == "logchain"]
    assert not [module for module in ours if not PUBLIC.fullmatch(module)]
