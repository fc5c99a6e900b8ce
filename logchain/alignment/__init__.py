"""Alignments and acceptors as arguments of `logchain`'s functions; no other package is imported."""

from ..chain_arguments import ChainArguments
from .arcs import Acceptor, from_arcs, openfst_arcs
from .ctc import ctc_labels, from_ctc

__all__ = ["Acceptor", "ChainArguments", "ctc_labels", "from_arcs", "from_ctc", "openfst_arcs"]
