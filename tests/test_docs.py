"""The pages of the site print what they say, and name what is there; `mkdocs build --strict` checks the rest."""

import doctest
import importlib
import importlib.util
import inspect
import re
import warnings
from pathlib import Path

import pytest

import logchain
import logchain.nn
from tests.benchmarks import report

ROOT = Path(__file__).parents[1]
PAGES = ROOT / ".docs" / "pages"
TEXTS = {path.relative_to(PAGES).as_posix(): path.read_text() for path in sorted(PAGES.rglob("*.md"))}
# modules whose public names have places of their own in the reference
MODULES = (logchain, logchain.distributed, logchain.memory, logchain.nn, logchain.nn.transitions, logchain.transitions)
# modules that the reference shows as a whole
PACKAGES = {f"logchain.{name}" for name in ("adapters", "distributed", "nn", "reference", "semirings", "transitions")}


# packages whose code stands on the left, with the name to import; ours is on the right
PEERS = {
    "cirkit": "cirkit",
    "hmmlearn": "hmmlearn",
    "pyro": "pyro",
    "pytorch-crf": "torchcrf",
    "statsmodels": "statsmodels",
    "torch-struct": "torch_struct",
}
BLOCK = re.compile(r'^```python(?: title="(.*?)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)
BLOCKS = {page: BLOCK.findall(text) for page, text in TEXTS.items()}
SIDES = [
    (page, title) for page in TEXTS for title in dict.fromkeys(title for title, _ in BLOCKS[page]) if title in PEERS
]


def run(page, *titles):
    """The blocks of a page that have one of the titles; later ones go on with the names of those before."""
    text = "\n".join(block for title, block in BLOCKS[page] if title in ("", *titles))
    output = []
    runner = doctest.DocTestRunner()
    runner.run(doctest.DocTestParser().get_doctest(text, {}, page, page, 0), out=output.append)
    assert not runner.summarize(verbose=False).failed, "".join(output)


@pytest.mark.parametrize("page", [page for page in TEXTS if BLOCKS[page]])
def test_examples_print_what_they_say(page):
    run(page, "logchain")


@pytest.mark.parametrize(("page", "peer"), SIDES)
def test_code_of_other_packages_prints_what_it_says(page, peer):
    pytest.importorskip(PEERS[peer], exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        run(page, peer, "logchain")


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
    assert report.fill(TEXTS[page]) == TEXTS[page], "run: python -m tests.benchmarks report"


def test_every_table_stands_on_a_page():
    documents = [report.README.read_text(), *TEXTS.values()]
    shown = re.findall(r"<!-- (\w+): from the results file -->", "\n".join(documents))
    assert set(shown) == set(report.TABLES)


@pytest.mark.parametrize("page", TEXTS)
def test_no_measured_number_is_written_by_hand(page):
    assert not report.MEASURED.search(report.prose(TEXTS[page]).replace("Below 1 x", ""))
