"""Models of other packages as arguments of `logchain`'s functions; the packages themselves are not imported."""

from .chain_arguments import ChainArguments
from .ctc import ctc_labels, from_ctc
from .hmmlearn import from_hmmlearn
from .pyro import from_pyro
from .pytorch_crf import from_pytorch_crf
from .statsmodels import from_statsmodels
from .torch_struct import from_torch_struct

__all__ = [
    "ChainArguments",
    "ctc_labels",
    "from_ctc",
    "from_hmmlearn",
    "from_pyro",
    "from_pytorch_crf",
    "from_statsmodels",
    "from_torch_struct",
]
