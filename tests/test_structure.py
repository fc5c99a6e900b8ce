"""Imports point down only, and the kernels know nothing of the library."""

import ast
import graphlib
import importlib
import inspect
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Rooms from the bottom up: a file imports from rooms below its own, and from files before it in its own room.
ROOMS = [
    "kernels",
    "shared",
    "schedules",
    "autograd",
    "transitions",
    "structured",
    "streams",
    "public",
    "distributed",
    "adapters",
    "nn",
    "programs",
]
# files that stand beside the public functions and belong to another room
SHARED = ["arguments", "layout", "operands", "rescues", "reference", "progress", "memory"]
PROGRAMS = ["__init__", "__main__", "demo", "demo_plot"]


def room_of(path: Path) -> str:
    """The room in which a file of the library stands."""
    folder = path.relative_to(ROOT / "logchain").parts[0]
    if folder != path.name:
        return folder
    if path.stem in SHARED:
        return "shared"
    if path.stem in PROGRAMS:
        return "programs"
    return "public"


# The modules of `logchain.nn`, from the bottom up likewise.
MODULES = [
    ["checks", "degenerate", "em", "masked_sequences", "parameters", "stationary"],
    ["fitting", "log_weights"],
    ["emissions", "transitions"],
    ["layers", "potentials"],
    ["sharded"],
    ["circuit"],
    ["chain_circuit", "hmm", "hmmlearn_models", "hmmlearn_priors", "linear_chain_crf", "tree_circuit"],
    ["__init__"],
]


def absolute(node: ast.ImportFrom, path: Path) -> str:
    """The module that an import in a file of the library names, as `folder.module` below the package."""
    folders = list(path.relative_to(ROOT / "logchain").parts[:-1])
    return ".".join([*folders[: len(folders) - node.level + 1], *([node.module] if node.module else [])])


def imported(path: Path) -> set[str]:
    """The packages of others that a file imports, and `.` with the library's own first names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            names |= {"." + (node.module or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


def own_imports(path: Path) -> set[Path]:
    """The files of the library that a file imports when it is imported itself; of kernels, their door."""
    files = set()
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        module = absolute(node, path)
        for name in [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]:
            place = (ROOT / "logchain").joinpath(*filter(None, name.split(".")))
            if place.with_suffix(".py").is_file() and place != ROOT / "logchain":
                files.add(place.with_suffix(".py"))
    return files


FILES = [path for path in sorted((ROOT / "logchain").rglob("*.py")) if "kernels" not in path.parts]


def test_rooms_import_rooms_below_only():
    order = {room: level for level, room in enumerate(ROOMS)}
    assert {room_of(path) for path in FILES} <= set(order)
    up = [
        f"{path.relative_to(ROOT)} imports {other.relative_to(ROOT)}"
        for path in FILES
        for other in own_imports(path)
        if order[room_of(other) if "kernels" not in other.parts else "kernels"] > order[room_of(path)]
    ]
    assert up == []


def test_no_file_imports_one_that_imports_it():
    list(graphlib.TopologicalSorter({path: own_imports(path) for path in FILES}).static_order())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports_of_the_library_are_relative(path):
    assert "logchain" not in imported(path)


@pytest.mark.parametrize("path", sorted((ROOT / "logchain" / "nn").rglob("*.py")), ids=lambda path: path.stem)
def test_modules_call_the_public_functions(path):
    *folders, _ = path.relative_to(ROOT / "logchain" / "nn").parts
    name = folders[0] if folders else path.stem
    level = next(i for i, layer in enumerate(MODULES) if name in layer)
    below = {name for layer in MODULES[: level + 1] for name in layer}
    froms = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    own = {(node.module or "__init__").split(".")[0] for node in froms if node.level == 1 + len(folders)}
    library = {node.module or "__init__" for node in froms if node.level == 2 + len(folders)}
    assert own <= below, f"{path.stem} imports {sorted(own - below)}"
    # checks of arguments are shared; no other room is entered
    rooms = {name.split(".")[0] for name in library} & {"autograd", "schedules", "streams", "kernels"}
    assert not rooms, f"{path.stem} imports {sorted(rooms)}"


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda path: path.stem)
def test_kernels_stand_alone(path):
    others = {name for name in imported(path) if not name.startswith(".")}
    assert others <= {"torch", "triton", "numpy", "setuptools", *sys.stdlib_module_names}


ARITHMETIC = ("plain", "cpu", "gpu")
STEMS = [path.stem for room in ARITHMETIC for path in sorted((ROOT / "kernels" / room).glob("*.py"))]
TWINS = sorted({stem for stem in STEMS if STEMS.count(stem) > 1} - {"__init__"})


def doors(module) -> dict[str, list[str]]:
    """The public functions that a module defines, with the parameters that a caller has to give."""
    functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
    return {
        name: [str(one) for one in inspect.signature(value).parameters.values() if one.default is one.empty]
        for name, value in functions.items()
        if value.__module__ == module.__name__ and not name.startswith("_")
    }


def rooms_of(name: str) -> list[dict[str, list[str]]]:
    """The doors of a name in each room that has it."""
    rooms = [room for room in ARITHMETIC if (ROOT / "kernels" / room / f"{name}.py").exists()]
    return [doors(importlib.import_module(f"logchain.kernels.{room}.{name}")) for room in rooms]


@pytest.mark.parametrize("name", TWINS)
def test_twins_have_the_same_doors(name):
    pytest.importorskip("triton")
    for one, other in itertools.combinations(rooms_of(name), 2):
        shared = one.keys() & other.keys()
        assert {door: one[door] for door in shared} == {door: other[door] for door in shared}


def test_there_are_twins():
    pytest.importorskip("triton")
    pairs = [(name, *pair) for name in TWINS for pair in itertools.combinations(rooms_of(name), 2)]
    shared = {(name, door) for name, one, other in pairs for door in one.keys() & other.keys()}
    assert len(shared) >= 5 and {("matmul", "forward"), ("viterbi", "paths")} <= shared


def test_importing_the_library_does_not_import_what_takes_long(tmp_path):
    # kernels of other devices, and modules that few programs use
    late = {"triton", "scipy", "logchain.nn", "logchain.adapters", "logchain.reference"}
    code = f"import sys; sys.path.append({str(ROOT)!r}); import logchain; sys.exit(bool({late} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0
