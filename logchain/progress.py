"""The progress bar of a loop, by tqdm, an optional dependency."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def check_progress() -> None:
    """Check that tqdm is installed."""
    try:
        import tqdm  # noqa: F401
    except ImportError as error:
        raise ImportError("progress: expected tqdm to be installed, see `pip install tqdm`") from error


def bar(items: Sequence[T], title: str, shown: bool, unit: str = "segments") -> Iterable[T]:
    """The items; iterating over them moves a progress bar on stderr, if it is `shown`."""
    if not shown:
        return items
    from tqdm.auto import tqdm

    counted: Iterable[T] = tqdm(items, desc=title, unit=f" {unit}")
    return counted
