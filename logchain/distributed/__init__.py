"""Chains whose variables lie on several ranks of a `torch.distributed` process group."""

from .product import product

__all__ = ["product"]
