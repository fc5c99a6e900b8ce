"""The arguments of functions of a chain, as one value."""

from typing import NamedTuple

from torch import Tensor

from .transitions.transition import Transition


class ChainArguments(NamedTuple):
    """The arguments of every function of a chain, as in `product(**arguments._asdict())`.

    Those of `logchain.distributed` take no packed sequences, and so no `cu_seqlens`.

    Attributes:
        x: `[*B, v, c]` in nats.
        bulk: `[*B or less, v-1 or 1, c, c]` as `[from, to]`, or a structure of `logchain.transitions`.
        p0: `[*B or less, c]`.
        log_params: whether `bulk` and `p0` are logarithms.
        lengths: the lengths of the sequences, where they differ.
        cu_seqlens: the offsets of packed sequences, whose `x` is `[total, c]`.
    """

    x: Tensor
    bulk: Tensor | Transition
    p0: Tensor
    log_params: bool = False
    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None
