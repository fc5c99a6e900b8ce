"""Long chains of non-negative matrices, multiplied in log space: fast, small, exact."""

from . import reference
from ._rescues import Rescues, rescues
from .matmul import matmul
from .product import product

__all__ = ["Rescues", "matmul", "product", "reference", "rescues"]
__version__ = "0.1.0"
