"""Notebooks run from top to bottom in a fresh kernel, and are kept with what they show; the assertions are in them."""

import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# of whatever machine it was
PLACES = re.compile(rf"/(home|root|tmp|usr|Users|private)/|site-packages|ipykernel_\d|{re.escape(str(ROOT))}")


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def kinds(cell):
    """What a cell shows: text, values, figures."""
    return {(output.output_type, output.get("name"), *sorted(output.get("data", ()))) for output in cell.outputs}


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
