"""Imports point down only, and the kernels know nothing of the library."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom up; a module may import from its own layer and from those before it.
LAYERS = [
    ["kernels", "_forum", "reference", "semirings", "workspace"],
    [
        "_arguments",
        "_batching",
        "_cost",
        "_crf",
        "_layout",
        "_measure",
        "_operators",
        "_packed",
        "_paths",
        "_pieces",
        "_progress",
        "_rescues",
        "_tree",
    ],
    ["_log_matmul", "_tree_products"],
    ["_chain_operators", "_tangent_operators", "_tree_leaves", "_tree_operators"],
    [
        "_budget",
        "_chain",
        "_checkpoints",
        "_cost_counts",
        "_matrix_chain",
        "_messages",
        "_packed_chain",
        "_schedule",
        "_semiring_chain",
        "_tree_chain",
        "_viterbi",
    ],
    [
        "entropy",
        "forward_backward",
        "kl_divergence",
        "log_prob",
        "marginals",
        "matmul",
        "matrix_product",
        "memory_report",
        "plan",
        "prefix_products",
        "product",
        "sample",
        "topk_paths",
        "viterbi",
    ],
    [
        "_stream",
        "_stream_arguments",
        "_stream_block",
        "_stream_filter",
        "_stream_lag",
        "_stream_paths",
        "_stream_state",
        "adapters",
        "stream",
    ],
    ["nn"],
    ["__init__", "_demo"],
    ["__main__"],
]


# The modules of `logchain.nn`, from the bottom up likewise.
MODULES = [
    ["checks", "em", "parameters", "stationary"],
    ["fitting", "input_layer", "log_weights"],
    ["exponential_family", "finite", "layers", "starts"],
    ["bernoulli", "binomial", "categorical", "distribution", "gaussian", "mixture", "poisson"],
    ["circuit", "emissions", "named_input"],
    ["chain_circuit", "hmm", "hmmlearn_models", "linear_chain_crf", "tree_circuit"],
    ["__init__"],
]


def imported(path: Path) -> set[str]:
    """The library's own modules that a file imports, and the packages of others."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found |= {"." + (node.module or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "logchain").glob("*.py")), ids=lambda path: path.stem)
def test_imports_point_down(path):
    level = next(i for i, layer in enumerate(LAYERS) if path.stem in layer)
    below = {name for layer in LAYERS[: level + 1] for name in layer}
    own = {name[1:] for name in imported(path) if name.startswith(".")}
    assert own <= below, f"{path.stem} imports {sorted(own - below)}"
    assert "logchain" not in imported(path), "import relatively"


@pytest.mark.parametrize("path", sorted((ROOT / "logchain" / "nn").glob("*.py")), ids=lambda path: path.stem)
def test_modules_call_the_public_functions(path):
    level = next(i for i, layer in enumerate(MODULES) if path.stem in layer)
    below = {name for layer in MODULES[: level + 1] for name in layer}
    froms = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    own = {node.module or "__init__" for node in froms if node.level == 1}
    library = {node.module or "__init__" for node in froms if node.level == 2}
    assert own <= below, f"{path.stem} imports {sorted(own - below)}"
    # checks of arguments are shared; nothing else that is private
    assert not {name for name in library if name.startswith("_")} - {
        "__init__",
        "_arguments",
        "_crf",
        "_operators",
        "_progress",
    }


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda path: path.stem)
def test_kernels_stand_alone(path):
    others = {name for name in imported(path) if not name.startswith(".")}
    assert others <= {"torch", "triton", "numba", "llvmlite", "numpy", "setuptools", *sys.stdlib_module_names}


@pytest.mark.parametrize("name", ["sum_product"])
def test_twins_have_the_same_doors(name):
    pytest.importorskip("triton")
    twins = [importlib.import_module(f"logchain.kernels.{room}.{name}") for room in ("plain", "cpu", "gpu")]
    for door in ("forward", "backward"):
        plain, *others = (inspect.signature(getattr(twin, door)) for twin in twins)
        assert [plain, plain] == others


def test_importing_the_library_does_not_import_what_takes_long():
    # kernels of other devices, and modules that few programs use
    late = {"triton", "numba", "scipy", "logchain.nn", "logchain.adapters", "logchain.reference"}
    code = f"import sys, logchain; sys.exit(bool({late} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
