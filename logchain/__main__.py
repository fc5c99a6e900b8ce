"""The command line: `python -m logchain` demonstrates, `python -m logchain FILE.npz` computes log-partitions."""

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import __version__
from .check import check
from .demo import demonstrate
from .product import product

DESCRIPTION = """\
Without a file, chains are checked against scipy in float64, and timed.
With a file, the log-partitions of its sequences are printed, in nats, one per line.
numpy.savez("chain.npz", x=x, bulk=bulk, p0=p0) writes a file of n sequences:
  x        [n, v, c]       log-potentials: for an HMM, log-likelihoods of the data
  bulk     [1, v-1, c, c]  transition weights, [from, to]; [1, 1, c, c] for all steps
  p0       [1, c]          weights of the first state
  lengths  [n]             numbers of variables of the sequences, integers; optional"""

NAMES = "x", "bulk", "p0", "lengths"


class FileError(Exception):
    """A file that cannot be used, with the reason in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, or 2 if an argument or a file is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m logchain", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"logchain {__version__}")
    parser.add_argument("--size", metavar="N,V,C", type=_size, help="of the demonstration: 500,40,200 by default")
    parser.add_argument("file", nargs="?", metavar="FILE.npz", help="chains to compute")
    parser.add_argument("--log-params", action="store_true", help="bulk and p0 of the file are logarithms")
    parser.add_argument("--output", metavar="OUT.npy", help="write the result to this file instead of printing it")
    options = parser.parse_args(argv)
    if options.file is None and (options.output is not None or options.log_params):
        parser.error("--output and --log-params need FILE.npz")
    if options.file is not None and options.size is not None:
        parser.error("--size cannot be combined with FILE.npz")
    try:
        if options.file is None:
            print(demonstrate(*(options.size or ())))
            return 0
        result = _product_of(options.file, log_params=options.log_params)
        if options.output is None:
            print("\n".join(map(str, result.flatten())))
        else:
            _save(options.output, result)
    except FileError as error:
        print(f"logchain: {error}", file=sys.stderr)
        return 2
    return 0


def _product_of(path: str, *, log_params: bool) -> NDArray[np.generic]:
    """The log-partitions of the arrays in a file, of which integer ones are converted to float64."""
    arrays = _read(path)
    missing = ", ".join(name for name in NAMES[:3] if name not in arrays)
    unknown = ", ".join(name for name in arrays if name not in NAMES)
    if missing:
        raise FileError(f"{path}: {missing}: missing; the file holds {', '.join(arrays) or 'nothing'}")
    if unknown:
        raise FileError(f"{path}: {unknown}: expected only x, bulk, p0 and lengths")
    for name, array in arrays.items():
        if array.dtype.kind not in ("iu" if name == "lengths" else "fiu") or array.dtype.itemsize > 8:
            expected = "integers" if name == "lengths" else "real numbers of at most 64 bits"
            raise FileError(f"{path}: {name}: expected {expected}, got {array.dtype}")
    x, bulk, p0 = (_tensor(arrays[name], np.float64) for name in NAMES[:3])
    lengths = _tensor(arrays["lengths"], np.int64) if "lengths" in arrays else None
    try:
        check(x, bulk, p0, log_params=log_params, lengths=lengths)
        return product(x, bulk, p0, log_params=log_params, lengths=lengths).numpy()
    except (ValueError, TypeError) as error:
        raise FileError(f"{path}: {_line(error)}") from error


def _read(path: str) -> dict[str, NDArray[np.generic]]:
    """The arrays of an .npz file; pickled objects are refused."""
    try:
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            return dict(archive)
    except FileNotFoundError as error:
        raise FileError(f"{path}: no such file") from error
    except Exception as error:  # NumPy and the zip reader have exceptions of many kinds
        raise FileError(f"{path}: not readable as an .npz file of plain arrays: {_line(error)}") from error


def _tensor(array: NDArray[np.generic], integers_as: type[np.generic]) -> Tensor:
    """An array as a tensor in this machine's byte order; floats keep their dtype, integers become `integers_as`."""
    dtype = array.dtype if array.dtype.kind == "f" else np.dtype(integers_as)
    return torch.from_numpy(np.array(array, dtype.newbyteorder("=")))


def _save(path: str, result: NDArray[np.generic]) -> None:
    """Save an array with `numpy.save` under exactly this name, to which NumPy adds no ending."""
    try:
        with open(path, "wb") as file:
            np.save(file, result)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _size(text: str) -> tuple[int, int, int]:
    try:
        n, v, c = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected three integers N,V,C, got {text!r}") from None
    if n < 1 or v < 2 or c < 1:
        raise argparse.ArgumentTypeError(f"expected N >= 1, V >= 2 and C >= 1, got {text}")
    return n, v, c


if __name__ == "__main__":
    sys.exit(main())
