"""The README shows what the results files hold, and its examples print what it says."""

import doctest
import re

import logchain
from tests.benchmarks import report

TEXT = report.README.read_text()
# later ones go on with the names of those before
EXAMPLES = "\n".join(block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if block.startswith(">>>"))


def test_examples_print_what_they_say():
    examples = doctest.DocTestParser().get_doctest(EXAMPLES, {}, "README", "README.md", 0)
    assert len(examples.examples) > 5
    runner = doctest.DocTestRunner()
    output: list[str] = []
    runner.run(examples, out=output.append)
    assert not runner.summarize(verbose=False).failed, "".join(output)


def test_tables_are_those_of_the_results_file():
    assert report.fill(TEXT) == TEXT, "run: python -m tests.benchmarks report"


def test_linked_files_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    missing = [link for link in links if not (report.README.parent / link.partition("#")[0]).exists()]
    assert links and not missing
    for path, heading in (link.split("#") for link in links if "#" in link):
        titles = re.findall(r"^#+ (.*)$", (report.README.parent / path).read_text(), flags=re.MULTILINE)
        assert heading in [title.lower().replace(" ", "-") for title in titles]


def test_no_measured_number_is_written_by_hand():
    assert not report.MEASURED.search(report.prose(TEXT))


def test_it_is_short_and_names_this_version():
    assert len(TEXT.splitlines()) <= 150
    assert f"version {logchain.__version__}" in TEXT
