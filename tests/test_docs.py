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
CONFIG = (ROOT / ".docs" / "mkdocs.yml").read_text()
NAV = CONFIG.partition("\nnav:\n")[2]
LISTED = re.findall(r"[-:] (\S+\.(?:md|ipynb))$", NAV, re.MULTILINE)
# modules whose public names have places of their own in the reference
MODULES = (logchain, logchain.distributed, logchain.memory, logchain.nn, logchain.nn.transitions, logchain.transitions)
# modules that the reference shows as a whole
PACKAGES = {f"logchain.{name}" for name in ("adapters", "distributed", "nn", "reference", "semirings", "transitions")}
# what the hooks take from elsewhere
ELSEWHERE = {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")} | {"changelog.md"}


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
# what fits on a screen of 1,400 pixels, and into one of two columns there
COLUMNS, HALF = 116, 55


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


@pytest.mark.parametrize("page", TEXTS)
def test_examples_are_run_and_not_cut(page):
    assert all(title in ("", "logchain", *PEERS) and block.startswith(">>>") for title, block in BLOCKS[page])
    fits = [max(map(len, block.splitlines())) <= (HALF if title else COLUMNS) for title, block in BLOCKS[page]]
    assert all(fits), [block for (_, block), fit in zip(BLOCKS[page], fits, strict=True) if not fit]


@pytest.mark.parametrize("page", dict(SIDES))
def test_code_of_other_packages_stands_beside_ours(page):
    begins = re.findall(r"""^```python title="(.*?)"|^(```\n\n```python title="logchain")""", TEXTS[page], re.MULTILINE)
    assert len(begins) % 2 == 0
    assert all(left in PEERS and beside for (left, _), (_, beside) in zip(begins[::2], begins[1::2], strict=True))


@pytest.mark.parametrize("page", [page for page in TEXTS if not page.startswith("api/") or page == "api/index.md"])
def test_a_page_opens_with_its_question(page):
    """On the start page it is the first heading, behind a sentence on what this is and a line that installs it."""
    title, first, rest = TEXTS[page].split("\n\n", 2)
    assert "?" in (rest[: rest.index("\n|")] if page == "index.md" else title + first)


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


# Whoever calls these reads what goes in, what comes out, and an example.
SAID_IN_FULL = ("logchain.Stream", "logchain.adapters", "logchain.nn", "logchain.stream", "logchain.transitions")
# what the pages leave out: names that begin with "_", `extra_repr`, ...
HIDDEN = "|".join(re.findall(r'"!([^"]+)"', re.search("filters: (.*)", CONFIG)[1]))
WITHOUT_EXAMPLE = {"logchain.nn.HMM.to_hmmlearn"}  # it needs hmmlearn


def said_in_full():
    """The functions, classes and methods that have to say all, by name; with the class of a method."""
    shown = re.findall(r"^::: (\S+)$", "\n".join(TEXTS.values()), re.MULTILINE)
    named = {}
    for name in (name for name in shown if name.startswith(SAID_IN_FULL)):
        item = resolve(name)
        names = [f"{name}.{one}" for one in item.__all__] if inspect.ismodule(item) else [name]
        named |= {one: resolve(one) for one in names}
    for name, item in named.items():
        yield name, item, None
        yield from ((f"{name}.{one}", method, item) for one, method in methods(item).items())


def resolve(name):
    """What a full name stands for."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def methods(item):
    """A class's own public methods by name, without what the pages leave out and second names such as `forward`."""
    own = {name: getattr(item, name) for name in vars(item)} if inspect.isclass(item) else {}
    shown = {name: method for name, method in own.items() if not re.search(HIDDEN, name)}
    return {name: method for name, method in shown.items() if inspect.isroutine(method) and method.__name__ == name}


def arguments(item):
    """The names of the arguments that a caller gives: a class's own constructor's; the fields of a tuple."""
    if inspect.isclass(item) and issubclass(item, tuple):
        return set(item._fields)
    is_plain = inspect.isclass(item) and "__init__" not in vars(item)
    return set() if is_plain else set(inspect.signature(item).parameters) - {"self"}


def unsaid(name, item, cls):
    """What a docstring does not say: names of arguments, "Returns", "an example"."""
    text, called = inspect.getdoc(item), name.rpartition(".")[2]
    about = inspect.getdoc(cls) if cls else ""
    for other in re.findall(rf"`(\w+)\.{called}`", text):
        there = getattr(logchain.nn, other, getattr(logchain.transitions, other, cls))
        method = methods(there).get(called)
        if method not in (None, item) and arguments(item) <= arguments(method):
            return unsaid(f"{other}.{called}", method, there)
    example = any(">>> " in part for part in (text, about if called == "forward" else ""))
    example |= bool(re.search(rf"^(>>>|\.\.\.) .*(\.|def ){called}\(", about, re.MULTILINE))
    example |= name in WITHOUT_EXAMPLE or (inspect.isclass(item) and issubclass(item, tuple))
    if called == "forward" and re.search(r"(^|\. )Call: ", about, re.MULTILINE):
        return [] if example else ["an example"]
    section = re.search(r"^(?:Args|Attributes):\n((?: {4}.*(?:\n|$))+)", text, re.MULTILINE)
    heads = re.findall(r"^ {4}([\w*][\w*, ]*): ", section[1] if section else "", re.MULTILINE)
    said = {word.strip("* ") for head in heads for word in head.split(",")}
    result = None if inspect.isclass(item) else inspect.signature(item).return_annotation
    returns = result is None or re.search("^Returns:$", text, re.MULTILINE)
    return sorted(arguments(item) - said) + ["Returns"] * (not returns) + ["an example"] * (not example)


def test_what_goes_in_and_what_comes_out_is_said():
    assert {name: lacks for name, *item in said_in_full() if (lacks := unsaid(name, *item))} == {}


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


def docstrings():
    """The extension of griffe that the pages are built with."""
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / ".docs" / "docstrings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_public_functions_are_not_the_files_that_they_stand_in():
    griffe = pytest.importorskip("griffe", reason="comes with the extra docs")
    extensions = griffe.load_extensions(docstrings().Docstrings)
    package = griffe.load("logchain", search_paths=[ROOT], extensions=extensions)
    shown = re.findall(r"^::: logchain\.(\S+)$", "\n".join(TEXTS.values()), re.MULTILINE)
    assert [name for name in shown if package[name].is_module != inspect.ismodule(resolve(f"logchain.{name}"))] == []


def test_docstrings_become_markdown():
    pytest.importorskip("griffe", reason="comes with the extra docs")
    text = """Messages [*B, v, c] of `x[i]`:

    a_i = b_i

They take
    lengths: one of two,
        or both.

Args:
    a, b: as in `logchain.product`.

Returns:
    One: or two.

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

Returns:
    One&#58; or two.

**Cost:** none.

```pycon
>>> 1 + 1
2
```"""
    assert docstrings().markdown(text) == expected
