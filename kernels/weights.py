"""The error of a weight below 0: loops that read weights raise it, and callers name the argument and the place."""

from typing import Any


class NegativeWeights(ValueError):
    """A weight is below 0, as logarithms are that are passed for weights; a ValueError to all but the library."""

    # tracebacks and other processes say what is documented
    __module__, __qualname__ = "builtins", "ValueError"

    def __init__(self, message: str = "weights: expected non-negative ones, got others") -> None:
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return ValueError, self.args


NegativeWeights.__name__ = "ValueError"
