"""Alignments of labels with frames: CTC, forced alignment as spans, and weighted acceptors, as chains."""

from ..chain_arguments import ChainArguments
from .arcs import Acceptor, from_arcs, lattice_total, openfst_arcs
from .ctc import ctc_labels, ctc_loss, from_ctc
from .spans import Spans, align

__all__ = [
    "Acceptor",
    "ChainArguments",
    "Spans",
    "align",
    "ctc_labels",
    "ctc_loss",
    "from_arcs",
    "from_ctc",
    "lattice_total",
    "openfst_arcs",
]
