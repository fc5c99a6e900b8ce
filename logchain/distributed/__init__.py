"""Chains that lie on several ranks of a `torch.distributed` process group: their variables, or a large matrix."""

from .columns import Columns
from .entropy import entropy
from .marginals import marginals
from .product import product
from .sample import sample
from .viterbi import viterbi

__all__ = ["Columns", "entropy", "marginals", "product", "sample", "viterbi"]
