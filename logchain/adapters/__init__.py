"""Models of other packages as arguments of `logchain`'s functions; the packages themselves are not imported."""

from .arcs import Acceptor, from_arcs, openfst_arcs
from .chain_arguments import ChainArguments
from .ctc import ctc_labels, from_ctc
from .hmmlearn import from_hmmlearn
from .pyro import from_pyro
from .pytorch_crf import from_pytorch_crf
from .statsmodels import from_statsmodels
from .torch_struct import from_torch_struct

__all__ = [
    "Acceptor",
    "ChainArguments",
    "ctc_labels",
    "from_arcs",
    "from_ctc",
    "from_hmmlearn",
    "from_pyro",
    "from_pytorch_crf",
    "from_statsmodels",
    "from_torch_struct",
    "openfst_arcs",
]
