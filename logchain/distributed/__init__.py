"""Chains whose variables lie on several ranks of a `torch.distributed` process group."""

from .entropy import entropy
from .marginals import marginals
from .product import product
from .sample import sample
from .viterbi import viterbi

__all__ = ["entropy", "marginals", "product", "sample", "viterbi"]
