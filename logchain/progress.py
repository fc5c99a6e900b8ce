"""A bar that shows how far a loop has come, by tqdm, which is needed for nothing else."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def check_progress() -> None:
    """That bars can be shown."""
    try:
        import tqdm  # noqa: F401
    except ImportError as error:
        raise ImportError("progress: expected tqdm to be installed, see `pip install tqdm`") from error


def bar(items: Sequence[T], title: str, shown: bool) -> Iterable[T]:
    """The items, and a bar of them on stderr where it is to be shown."""
    return _shown(items, title) if shown else items


def _shown(items: Sequence[T], title: str) -> Iterator[T]:
    from tqdm.auto import tqdm

    yield from tqdm(items, desc=title, unit=" segments")
