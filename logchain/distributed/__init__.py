"""Chains whose variables are divided among the ranks of a `torch.distributed` process group."""

from .functions import entropy, log_prob, marginals, product, sample, viterbi

__all__ = ["entropy", "log_prob", "marginals", "product", "sample", "viterbi"]
