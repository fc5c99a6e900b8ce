"""A batch of chains whose transition matrices have fewer parameters than they have entries.

`forward` and `backward` take a `Structured`. Sequences lie in the order of the batch, and operands are read in place:
one that sequences share has stride 0 along their axis.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Cost(NamedTuple):
    """The multiply-adds of a dense chain that take as long on a CPU as one state of one band, and as one arc."""

    of_band: int
    of_arc: int


# of products, of posteriors and gradients, of filtered posteriors, of messages, and of best paths and draws
PRODUCT, POSTERIORS, FILTERED, MESSAGES, PATHS = Cost(16, 95), Cost(16, 33), Cost(16, 27), Cost(21, 60), Cost(16, 16)

# the results of `forward`, which `backward` reads: log-partitions [*B] in float64; which sequences underflowed [*B],
# that the caller computes in logarithms; and, if they are to be differentiated, other tensors
Saved = tuple[Tensor, ...]

# of `Structured.tensors`, in their shapes; None for what is not needed, no entries for unneeded parameters
Gradients = tuple[Any, ...]


class Factor(NamedTuple):
    """One factor of a product of matrices, which maps an axis of rows of states.

    Attributes:
        entering: the size of that axis.
        leaving: its size after the factor.
        before: the size of the axes of a row before that axis.
        after: the size of those after it.
        blocks: 0 for one matrix `(entering, leaving)`; otherwise a row is (blocks, entering), and there is a matrix
            for each block, `(blocks, entering, leaving)`. What leaves is (blocks, leaving) after the last factor of a
            product, and (leaving, blocks) before another one. All factors of a product have blocks, or none has.
        transposed: whether the parameter holds the transposed matrices.
    """

    entering: int
    leaving: int
    before: int = 1
    after: int = 1
    blocks: int = 0
    transposed: bool = False

    @property
    def vectors(self) -> int:
        """How many vectors of a row the matrices map."""
        return self.before * self.after * max(1, self.blocks)

    @property
    def size(self) -> int:
        """The entries of a row after the factor."""
        return self.vectors * self.leaving

    @property
    def reverse(self) -> "Factor":
        """The factor of the transposed matrices."""
        return self._replace(entering=self.leaving, leaving=self.entering)


class Factors(NamedTuple):
    """A product of factors, one parameter for each, plus a diagonal (c) if there is one: the last parameter."""

    factors: tuple[Factor, ...]
    diagonal: bool = False


class Durations(NamedTuple):
    """Segments with durations: a matrix `(segments, segments)` and the durations `(segments, longest)`.

    They are one parameter, a vector of the entries of both. State `s longest + r` is the state s of a segment with r
    more steps; see `transitions.Duration`.
    """

    segments: int
    longest: int


@dataclass(frozen=True, eq=False)
class Arcs:
    """The transitions that are not zero, each from a source to a target: int64 (arcs), sorted by source, then target.

    No pair occurs twice. `arranged` caches what kernels compute from the arcs.
    """

    source: Tensor
    target: Tensor
    arranged: dict[Any, Any] = field(default_factory=dict, init=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Arcs):
            return False
        return torch.equal(self.source, other.source) and torch.equal(self.target, other.target)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has addresses of its memory
        return Arcs, (self.source, self.target)


class Structured(NamedTuple):
    """The operands of a batch of chains of v steps and c states, with batch axes *B.

    Attributes:
        x: log-potentials [*B, v, c].
        transition: the `logchain.transitions.Transition`. Its parameters are [*B or ones, s, *sizes], s = v - 1, or 1
            for the same at all steps; all batch axes are there. Its `pattern` is where they are in matrices. For bands
            the offsets, a tuple of integers: parameter (bands, c), of which `values[band, j]` is the weight from state
            j - offset to j, and is ignored where no state is. `Arcs` for a parameter (arcs). `Durations` for one of
            segments. `Factors` for a product. None for any other structure.
        p0: initial weights [*B or ones, c].
        lengths: the number of steps of each sequence, int64 [*B] from 1 to v, or None.
        log_params: whether parameters and `p0` are logarithms.
        packed: the `logchain.chain.Chain` of packed sequences that kernels of dense matrices read in place, with x
            [total, c] and lengths (n); otherwise None.
    """

    x: Tensor
    transition: Any
    p0: Tensor
    lengths: Tensor | None
    log_params: bool
    packed: Any = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that may need gradients: x, p0, and the parameters."""
        return self.x, self.p0, *self.transition.parameters

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters in the order of the transition's pattern."""
        values: tuple[Tensor, ...] = self.transition.to_pattern(self.transition.parameters)
        return values

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the arithmetic: float64 if an operand is, otherwise float32."""
        return torch.float64 if torch.float64 in {tensor.dtype for tensor in self.tensors} else torch.float32

    @property
    def v(self) -> int:
        """Steps of the longest sequence."""
        return self.x.shape[-2]

    @property
    def c(self) -> int:
        """States."""
        return self.x.shape[-1]

    @property
    def batch(self) -> torch.Size:
        """The batch axes."""
        return self.x.shape[:-2]
