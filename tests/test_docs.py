"""The pages of the site print what they say, and name what is there; `mkdocs build --strict` checks the rest."""

import doctest
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import logchain
import logchain.nn
from tests.benchmarks import report

ROOT = Path(__file__).parents[1]
PAGES = ROOT / ".docs" / "pages"
TEXTS = {path.relative_to(PAGES).as_posix(): path.read_text() for path in sorted(PAGES.rglob("*.md"))}
NAV = (ROOT / ".docs" / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
LISTED = re.findall(r"[-:] (\S+\.(?:md|ipynb))$", NAV, re.MULTILINE)
# modules whose public names have places of their own in the reference
MODULES = (logchain, logchain.distributed, logchain.memory, logchain.nn, logchain.nn.transitions, logchain.transitions)
# modules that the reference shows as a whole
PACKAGES = {f"logchain.{name}" for name in ("adapters", "distributed", "nn", "reference", "semirings", "transitions")}
# what the hooks take from elsewhere
ELSEWHERE = {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")} | {"changelog.md"}


def examples(page):
    """The blocks of a page; later ones go on with the names of those before."""
    blocks = re.findall(r"```python\n(.*?)```", TEXTS[page], re.DOTALL)
    assert all(block.startswith(">>>") for block in blocks), "an example that nobody runs"
    return doctest.DocTestParser().get_doctest("\n".join(blocks), {}, page, page, 0)


@pytest.mark.parametrize("page", [page for page in TEXTS if examples(page).examples])
def test_examples_print_what_they_say(page):
    output = []
    runner = doctest.DocTestRunner()
    runner.run(examples(page), out=output.append)
    assert not runner.summarize(verbose=False).failed, "".join(output)


def test_every_page_and_notebook_is_listed_once():
    assert sorted(LISTED) == sorted({*TEXTS, *ELSEWHERE})


@pytest.mark.parametrize("page", TEXTS)
def test_linked_pages_exist(page):
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", TEXTS[page]) if "://" not in link]
    targets = [(PAGES / page).parent / link for link in links if link and not link.endswith(".svg")]
    assert not [link for link in targets if link.resolve().relative_to(PAGES).as_posix() not in {*TEXTS, *ELSEWHERE}]


def test_every_public_name_has_its_place_in_the_reference():
    shown = re.findall(r"^::: (\S+)$", "\n".join(TEXTS.values()), re.MULTILINE)
    public = {f"{module.__name__}.{name}" for module in MODULES for name in module.__all__} - {
        f"logchain.transitions.{name}" for name in ("LINEAR", "LOG", "MAX")
    }
    assert len(shown) == len(set(shown))
    assert set(shown) == (public | result_types()) - {module.__name__ for module in MODULES}


def result_types():
    """The classes that stand in the files of public functions, and have no other public name."""
    modules = [importlib.import_module(f"logchain.{name}") for name in logchain.__all__ if name.islower()]
    modules = [module for module in modules if module.__name__ not in PACKAGES] + [
        importlib.import_module("logchain.stream")
    ]
    return {
        f"{module.__name__}.{name}"
        for module in modules
        for name, item in inspect.getmembers(module, inspect.isclass)
        if item.__module__ == module.__name__ and name[0] != "_" and name not in logchain.__all__
    }


def test_names_that_pages_link_to_exist():
    for name in set(re.findall(r"\[`(logchain\.[\w.]+)`\]\[\]", "\n".join(TEXTS.values()))):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize("page", [page for page in TEXTS if "from the results file -->" in TEXTS[page]])
def test_tables_are_those_of_the_results_files(page):
    assert report.fill(TEXTS[page]) == TEXTS[page], "run: python -m tests.benchmarks plot"


def test_every_table_stands_on_a_page():
    shown = re.findall(r"<!-- (\w+): from the results file -->", "\n".join(TEXTS.values()))
    assert set(shown) == set(report.TABLES)


@pytest.mark.parametrize("page", TEXTS)
def test_no_measured_number_is_written_by_hand(page):
    assert not report.MEASURED.search(report.prose(TEXTS[page]).replace("Below 1 x", ""))


def test_docstrings_become_markdown():
    pytest.importorskip("griffe", reason="comes with the extra docs")
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / ".docs" / "docstrings.py")
    docstrings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(docstrings)
    text = """Messages [*B, v, c] of `x[i]`:

    a_i = b_i

They take
    lengths: one of two,
        or both.

Args:
    a, b: as in `logchain.product`.

Cost: none.

>>> 1 + 1
2"""
    expected = """Messages `[*B, v, c]` of `x[i]`:

    a_i = b_i

They take

- `lengths`: one of two,
    or both.

Args:
    a: with `b`.
    b: as in <autoref identifier="logchain.product" optional><code>logchain.product</code></autoref>.

**Cost:** none.

```pycon
>>> 1 + 1
2
```"""
    assert docstrings.markdown(text) == expected
