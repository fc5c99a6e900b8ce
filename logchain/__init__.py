"""Long chains of non-negative matrices, multiplied in log space: fast, small, exact."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import kernels, semirings, transitions
from .check import check
from .entropy import entropy
from .filtered import filtered
from .forward_backward import forward_backward
from .kl_divergence import kl_divergence
from .log_prob import log_prob
from .marginals import marginals
from .matmul import matmul
from .matrix_product import matrix_product
from .plan import plan
from .prefix_products import prefix_products
from .product import product
from .rescues import rescues
from .sample import sample
from .stream import Stream
from .topk_paths import topk_paths
from .viterbi import viterbi

__all__ = [
    "Stream",
    "alignment",
    "check",
    "distributed",
    "entropy",
    "filtered",
    "forward_backward",
    "kernels",
    "kl_divergence",
    "log_prob",
    "marginals",
    "matmul",
    "matrix_product",
    "memory",
    "nn",
    "plan",
    "prefix_products",
    "product",
    "reference",
    "rescues",
    "sample",
    "semirings",
    "topk_paths",
    "transitions",
    "viterbi",
]
__version__ = "0.3.0"

if TYPE_CHECKING:
    from . import alignment, distributed, memory, nn, reference


def __getattr__(name: str) -> Any:
    """A submodule that is imported when first used: these take as long to import as the rest of the package."""
    if name in ("alignment", "distributed", "memory", "nn", "onnx", "reference"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
