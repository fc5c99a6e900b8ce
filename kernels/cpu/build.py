"""Commands and setuptools classes that compile the C library, by clang from the package `ziglang`.

`python kernels/cpu/build.py` compiles for this machine, next to the sources; `--release dist` makes an sdist and, of
what it holds, the wheels of all platforms. setuptools reads this file alone: it imports nothing of logchain, and no
torch.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from setuptools import build_meta
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = sorted(HERE.glob("c/*.[ch]"))

# the macros with which library.c is compiled, once for each of the loops that it includes
_LOOPS = ("-DSCALED", "-DSPLIT", "-DROW=4", "-DROW=8", "-DROW=16")
_EXACT_FLOAT32 = ["-DBITS=64", "-DSPLIT", "-DFLOAT32_OPERANDS"]
UNITS = [[], _EXACT_FLOAT32, *([f"-DBITS={bits}", loops] for bits in (32, 64) for loops in _LOOPS)]

# by which a program that runs in the root finds the kernels
LINK = ROOT / "logchain" / "kernels"

# what an sdist holds in addition to the package: the tests, and what they read
AROUND = (".ci", ".docs", "notebooks", "tests")
GENERATED = {"__pycache__", ".ipynb_checkpoints", "site"}

# the compiler may fuse a product and a sum, and change nothing else about the arithmetic; the loops set flush to zero
FLAGS = """-O3 -std=c11 -ffreestanding -nostdlib -ffp-contract=fast -fno-math-errno -fdenormal-fp-math=dynamic
    -fvisibility=hidden -s -Wall -Wextra -Werror""".split()

# torch reports AVX512 on CPUs that may lack avx512cd
X86_64 = {"x86_64_v2": "x86_64_v2", "x86_64_v3": "x86_64_v3", "x86_64_v4": "x86_64_v4-avx512cd"}
AARCH64 = {"aarch64": "generic"}


class Target(NamedTuple):
    """A platform that the library is compiled for."""

    triple: str  # zig's name of it
    levels: dict[str, str]  # zig's name of the CPU by the name of the level
    suffix: str
    wheel: str  # the tag of its wheels
    flags: tuple[str, ...] = ()

    def library(self, level: str) -> str:
        """The name of a library's file."""
        return f"logchain-{level}{self.suffix}"


TARGETS = {
    "linux-x86_64": Target("x86_64-linux-none", X86_64, ".so", "manylinux_2_17_x86_64"),
    "linux-aarch64": Target("aarch64-linux-none", AARCH64, ".so", "manylinux_2_17_aarch64"),
    "darwin-arm64": Target("aarch64-macos.11.0", AARCH64, ".dylib", "macosx_11_0_arm64"),
    "darwin-x86_64": Target("x86_64-macos.10.13", X86_64, ".dylib", "macosx_10_13_x86_64"),
    "windows-amd64": Target("x86_64-windows-gnu", X86_64, ".dll", "win_amd64", ("-Wl,--no-entry",)),
}


def this_machine() -> Target:
    """The target that this Python runs on."""
    name = f"{platform.system()}-{platform.machine()}".lower()
    if name not in TARGETS:
        raise RuntimeError(f"the machine: expected one of {', '.join(TARGETS)}, found {name}")
    return TARGETS[name]


def compile_c(target: Target, level: str, folder: Path, *arguments: str | Path) -> None:
    """Run the compiler for a level of a target, in a folder."""
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target.triple, f"-mcpu={target.levels[level]}"]
    subprocess.run([*command, *FLAGS, "-fPIC", *map(str, arguments)], cwd=folder, check=True)


def compile_units(target: Target, level: str, folder: Path) -> list[str]:
    """The names of the object files of a library, compiled in a folder, in parallel."""

    def compile_unit(number: int) -> str:
        name = f"{number}.o"
        compile_c(target, level, folder, "-c", *UNITS[number], HERE / "c" / "library.c", "-o", name)
        return name

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_unit, range(len(UNITS))))


def compile_library(target: Target, level: str, into: Path) -> Path:
    """The file of one library, moved into a folder when it is complete."""
    name = target.library(level)
    with TemporaryDirectory(dir=into) as scratch:
        units = compile_units(target, level, Path(scratch))
        # a library for macOS contains the path that it was linked as: a bare name, not a folder of this machine
        compile_c(target, level, Path(scratch), "-shared", *target.flags, *units, "-o", name)
        return Path(scratch, name).replace(into / name)


def libraries(target: Target, into: Path) -> list[Path]:
    """The libraries of a target in a folder; other libraries there are deleted.

    Without a compiler, the libraries next to the sources are copied, unless a source is newer.
    """
    into.mkdir(parents=True, exist_ok=True)
    files = [into / target.library(level) for level in target.levels]
    for old in {*into.glob("logchain-*")} - {*files}:
        old.unlink()
    if find_spec("ziglang"):
        return [compile_library(target, level, into) for level in target.levels]
    newest = max(path.stat().st_mtime for path in [Path(__file__), *SOURCES])
    compiled = [HERE / file.name for file in files]
    if not all(path.is_file() and path.stat().st_mtime >= newest for path in compiled):
        raise ModuleNotFoundError("the compiler of the C library: expected ziglang, found nothing; pip install ziglang")
    if into != HERE:
        for path in compiled:
            shutil.copy2(path, into)
    return files


def description(readme: str, repository: str | None) -> str:
    """The README for other pages: relative links lead into the repository, or are plain text if it has no address."""
    target = rf"[\1]({repository}/blob/HEAD/\2)" if repository else r"\1"
    return re.sub(r"!?\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)", target, readme)


class EggInfo(egg_info):
    """The metadata: a description whose links lead somewhere, and a list of files that are there."""

    def finalize_options(self) -> None:
        """Set the description."""
        super().finalize_options()
        metadata = self.distribution.metadata
        metadata.long_description = description(metadata.long_description, metadata.project_urls.get("Repository"))

    def find_sources(self) -> None:
        """List the files again: setuptools would add those of the list that an earlier build left."""
        Path(self.egg_info, "SOURCES.txt").unlink(missing_ok=True)
        super().find_sources()


class Wheel(bdist_wheel):
    """A wheel for all versions of Python 3 on one platform: `--plat-name`, otherwise this machine."""

    def finalize_options(self) -> None:
        """Set the target from the name of the platform."""
        targets = {target.wheel: target for target in TARGETS.values()}
        if self.plat_name and self.plat_name not in targets:
            raise ValueError(f"--plat-name: expected one of {', '.join(targets)}, found {self.plat_name}")
        self.target = targets[self.plat_name] if self.plat_name else this_machine()
        # on Linux the machine's own tag stays, since its C library need not be glibc
        if sys.platform != "linux":
            self.plat_name = self.target.wheel
        # so that setuptools treats the wheel as platform-specific
        self.distribution.has_ext_modules = lambda: True
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        """The tag of a wheel for any Python 3, without an ABI of Python, on the platform."""
        return "py3", "none", super().get_tag()[2]


class BuildPy(build_py):
    """The command that builds the modules with the libraries next to them; C sources go into an sdist only."""

    def run(self) -> None:
        """Copy the modules and compile."""
        super().run()
        # which an unpacked sdist lacks, since not every system can have it
        with suppress(OSError):
            LINK.symlink_to("../kernels", target_is_directory=True)
        if self.target() != this_machine():
            libraries(self.target(), self.folder())
            return
        # next to the sources too, since a program that runs in this folder imports the modules here
        for path in libraries(self.target(), HERE):
            if not self.editable_mode:
                self.folder().mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, self.folder())

    def target(self) -> Target:
        """The target of the wheel."""
        target: Target = self.get_finalized_command("bdist_wheel").target
        return target

    def folder(self) -> Path:
        """The folder of the libraries below that of the build."""
        return Path(self.build_lib, "logchain/kernels/cpu")

    def get_output_mapping(self) -> dict[str, str]:
        """The source file of each built file, to which a strict editable installation links."""
        files = [self.target().library(level) for level in self.target().levels]
        compiled = {str(self.folder() / file): str((HERE / file).relative_to(ROOT)) for file in files}
        return {**super().get_output_mapping(), **compiled}

    def get_source_files(self) -> list[str]:
        """The files of an sdist, as paths from the root."""
        around = [path for folder in AROUND for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
        paths = [path.relative_to(ROOT) for path in (*SOURCES, *around)]
        return [*super().get_source_files(), *(str(path) for path in paths if not GENERATED & {*path.parts})]


def release(into: Path) -> list[Path]:
    """An sdist, and the wheels of all targets, which are built from what it holds and not from this folder."""
    into = into.resolve()
    os.chdir(ROOT)
    source = into / build_meta.build_sdist(into, {"--global-option": ["--quiet"]})
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    files = [source]
    for target in TARGETS.values():
        settings = f"--config-settings=--build-option=--plat-name={target.wheel}"
        subprocess.run([*pip, settings, "-w", into, source], check=True)
        files += into.glob(f"{source.name.removesuffix('.tar.gz')}-*-{target.wheel}.whl")
    return files


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile the C library for this machine, next to its sources.")
    parser.add_argument("--release", type=Path, metavar="FOLDER", help="make an sdist and all wheels there instead")
    folder = parser.parse_args().release
    print(*(release(folder) if folder else libraries(this_machine(), HERE)), sep="\n")
