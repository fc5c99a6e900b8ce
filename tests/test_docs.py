"""The README and the pages of the site print what they say, and show what the results file holds.

`mkdocs build --strict` checks links and references.
"""

import doctest
import re
import warnings

import pytest

import logchain
from tests.benchmarks import report

ROOT = report.README.parent
PAGES = ROOT / ".docs" / "pages"
TEXTS = {path.relative_to(PAGES).as_posix(): path.read_text() for path in sorted(PAGES.rglob("*.md"))}
TEXTS["README.md"] = report.README.read_text()

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


@pytest.mark.parametrize("page", [page for page in TEXTS if "from the results file -->" in TEXTS[page]])
def test_tables_are_those_of_the_results_files(page):
    assert report.fill(TEXTS[page]) == TEXTS[page], "run: python -m tests.benchmarks report"


def test_every_table_stands_on_a_page():
    shown = re.findall(r"<!-- (\w+): from the results file -->", "\n".join(TEXTS.values()))
    assert set(shown) == set(report.TABLES)


@pytest.mark.parametrize("page", TEXTS)
def test_no_measured_number_is_written_by_hand(page):
    assert not report.MEASURED.search(report.prose(TEXTS[page]).replace("Below 1 x", ""))


def test_files_that_the_readme_links_to_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXTS["README.md"]) if "://" not in link]
    assert links and not [link for link in links if not (ROOT / link.partition("#")[0]).exists()]
    for path, heading in (link.split("#") for link in links if "#" in link):
        titles = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), flags=re.MULTILINE)
        assert heading in [title.lower().replace(" ", "-") for title in titles]


def test_pages_are_few_and_short():
    pages = [text for page, text in TEXTS.items() if page != "README.md"]
    assert len(pages) <= 20 and sum(len(text.split()) for text in pages) <= 10_000


def test_readme_is_short_and_names_this_version():
    assert len(TEXTS["README.md"].splitlines()) <= 120
    assert f"version {logchain.__version__}" in TEXTS["README.md"]


def test_completion_offers_the_public_names():
    assert dir(logchain) == sorted(logchain.__all__) and all(hasattr(logchain, name) for name in logchain.__all__)
