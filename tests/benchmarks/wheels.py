"""The peers that run on a GPU as files, for a machine that reaches no package index.

    python -m tests.benchmarks.wheels FOLDER                where there is one
    python -m tests.benchmarks gpu measure --wheels FOLDER  on the other machine

Pure Python alone: those fit any machine. What a machine with a GPU has to have of its own: torch, triton, numpy, scipy
and, for pyjuice, numba and matplotlib. JAX would bring hundreds of megabytes of CUDA, and is not carried.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"

# each peer, and what it needs that is neither carried by another nor on the machine
PEERS = {
    "torch-struct": (),
    "torch-semiring-einsum": ("pynvml<12", "typing-extensions"),
    "pytorch-crf": (),
    "pyro-ppl": ("pyro-api", "opt-einsum", "tqdm"),
    "funsor": ("makefun", "multipledispatch", "opt-einsum", "typing-extensions"),
    "libcirkit": ("einops", "graphviz<0.21", "opt-einsum"),
    "pyjuice": ("networkx", "packaging", "tqdm"),
}

MOST = 60_000_000  # bytes


def requirements() -> list[str]:
    """What is carried, each once, of the version that the tests use where they use it."""
    lines = (line.split(";")[0].strip() for line in CONSTRAINTS.read_text().splitlines())
    pinned = {line.split("==")[0]: line for line in lines if "==" in line}
    names = [name for peer, needs in PEERS.items() for name in (peer, *needs)]
    return list(dict.fromkeys(pinned.get(name, name) for name in names))


def pip(*arguments: str) -> str:
    """What pip says when it fails, in a line, or nothing."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--disable-pip-version-check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in run.stderr.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith("ERROR")] or lines or ["failed"]
    return re.sub(r"\s+", " ", failed[-1])[:200] if run.returncode else ""


def collect(folder: Path, wanted: Sequence[str]) -> dict[str, str]:
    """Put wheels into the folder; what could not be had, with the reason."""
    folder.mkdir(parents=True, exist_ok=True)
    missing: dict[str, str] = {}
    for requirement in wanted:
        with tempfile.TemporaryDirectory() as name:
            reason = pip("wheel", "--wheel-dir", name, requirement)
            size = sum(file.stat().st_size for file in folder.glob("*.whl"))
            for wheel in Path(name).glob("*.whl"):
                size += wheel.stat().st_size
                if not wheel.name.endswith("-none-any.whl"):
                    reason = f"{wheel.name} is for one kind of machine"
                elif size > MOST:
                    reason = f"with it the folder would be {size / 1e6:.1f} MB"
                else:
                    (folder / wheel.name).write_bytes(wheel.read_bytes())
        if reason:
            missing[requirement] = reason
    return missing


@contextmanager
def installed(folder: Path | None) -> Iterator[None]:
    """With the folder's wheels to be imported, here and in processes that are spawned, behind what is installed."""
    if folder is None:
        yield
        return
    files = sorted(map(str, folder.glob("*.whl")))
    if not files:
        raise SystemExit(f"no wheels in {folder}: `python -m tests.benchmarks.wheels {folder}` collects them")
    with tempfile.TemporaryDirectory() as target:
        arguments = ("install", "--no-index", "--target", target)
        if pip(*arguments, *files):
            for file in files:  # without the one that does not fit
                reason = pip(*arguments, file)
                print(f"not installed: {Path(file).name}: {reason}" if reason else file, flush=True)
        sys.path.append(target)
        try:
            yield
        finally:
            sys.path.remove(target)


def main() -> None:
    """Collect all, and say how large they are."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.wheels", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    missing = collect(folder, requirements())
    files = sorted(folder.glob("*.whl"))
    for file in files:
        print(f"{file.stat().st_size / 1e6:6.2f} MB  {file.name}")
    print(f"{sum(file.stat().st_size for file in files) / 1e6:6.2f} MB  in all")
    for requirement, reason in missing.items():
        print(f"not to be had: {requirement}: {reason}")


if __name__ == "__main__":
    main()
