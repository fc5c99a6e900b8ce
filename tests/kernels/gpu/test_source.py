"""The source of kernels holds nothing by which programs could wait for each other, and launches are ordinary ones."""

import ast
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[3] / "kernels" / "gpu").glob("*.py"))

# options of `tl.load` and `tl.store` by which programs could see each other's writes, and one that versions disagree on
OPTIONS = {"cache_modifier", "volatile", "sem", "scope", "maxnreg"}


def violations(source: str) -> list[str]:
    """The lines that break a rule, each with its rule."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    jitted = [node for node in functions if any("jit" in ast.unparse(line) for line in node.decorator_list)]
    inside = {id(node) for function in jitted for node in ast.walk(function)}
    launched = {
        id(node.func.value) for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and id(node) not in inside
    }  # fmt: skip
    found = []
    for node in ast.walk(tree):
        name = getattr(node, "attr", getattr(node, "id", ""))
        if isinstance(node, ast.While) and id(node) in inside:
            found.append(f"{node.lineno}: while")
        elif name.startswith(("atomic_", "inline_asm")):
            found.append(f"{node.lineno}: {name}")
        elif name.endswith("_kernel") and id(node) not in launched:
            found.append(f"{node.lineno}: {name} without a grid")
        elif {getattr(node, "arg", None), getattr(node, "value", None)} & OPTIONS:
            found.append(f"{node.lineno}: option")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_kernels_have_no_way_to_wait(path):
    assert not violations(path.read_text())


HEAD = "@triton.jit\ndef add_kernel(x_ptr):\n    "
BROKEN = {
    HEAD + "while tl.load(x_ptr) == 0:\n        pass": "3: while",
    HEAD + "tl.atomic_add(x_ptr, 1)": "3: atomic_add",
    HEAD + "tl.load(x_ptr, volatile=True)": "3: option",
    HEAD + 'tl.load(x_ptr, **{"cache_modifier": ".cg"})': "3: option",
    "add_kernel[(1,)](x, maxnreg=128)": "1: option",
    "launch(add_kernel, x)": "1: add_kernel without a grid",
    "add_kernel.run(x, grid=(1,), warmup=False)": "1: add_kernel without a grid",
}


@pytest.mark.parametrize("source", BROKEN)
def test_violations_are_found(source):
    assert violations(source) == [BROKEN[source]]
    assert not violations("while True:\n    chains.add_kernel[(1,)](x)")
