"""Long chains of non-negative matrices, multiplied in log space: fast, small, exact."""

from . import reference
from ._rescues import Rescues, rescues
from .entropy import entropy
from .forward_backward import Messages, forward_backward
from .kl_divergence import kl_divergence
from .marginals import Marginals, marginals
from .matmul import matmul
from .matrix_product import matrix_product
from .prefix_products import prefix_products
from .product import product

__all__ = [
    "Marginals",
    "Messages",
    "Rescues",
    "entropy",
    "forward_backward",
    "kl_divergence",
    "marginals",
    "matmul",
    "matrix_product",
    "prefix_products",
    "product",
    "reference",
    "rescues",
]
__version__ = "0.1.0"
