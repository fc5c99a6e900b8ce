"""The C library is compiled for every platform, needs nothing of theirs, and gets into the wheels."""

import ctypes
import functools
import itertools
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logchain import reference
from logchain.kernels.cpu import library
from logchain.kernels.cpu.arguments import Arguments

# the machine for tests of a device has none of them
lief = pytest.importorskip("lief")
pytest.importorskip("setuptools")
pytest.importorskip("ziglang")

from logchain.kernels.cpu import build  # noqa: E402

ON_LINUX = [(name, next(iter(target.levels))) for name, target in build.TARGETS.items() if name.startswith("linux")]


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The folder of an sdist and the wheels of all platforms, and what the command that makes them prints."""
    folder = tmp_path_factory.mktemp("release")
    left_out = shutil.ignore_patterns(".git", ".*_cache", "*.egg-info", "build", "logchain-*")
    copy = shutil.copytree(build.ROOT, folder / "copy", symlinks=True, ignore=left_out)
    # one level is compiled, as the sources and the flags are the same for all
    script = copy / "kernels" / "cpu" / "build.py"
    script.write_text(script.read_text().replace('X86_64, ".', 'dict([*X86_64.items()][:1]), ".'))
    # a list of files that an earlier build left
    (copy / "logchain.egg-info").mkdir()
    (copy / "logchain.egg-info" / "SOURCES.txt").write_text("kernels/cpu/build.py\n.gitignore\n")
    command = [sys.executable, "kernels/cpu/build.py", "--release", folder]
    printed = subprocess.run(command, cwd=copy, check=True, capture_output=True, text=True).stdout
    return folder, printed.splitlines()


@pytest.fixture(scope="module")
def root(release):
    (sdist,) = release[0].glob("*.tar.gz")
    subprocess.run(["tar", "-xf", sdist, "-C", release[0]], check=True)  # `filter` of shutil came with Python 3.11.4
    return release[0] / sdist.name.removesuffix(".tar.gz")


def wheel_of(target, release):
    (wheel,) = release[0].glob(f"logchain-*-py3-none-{target.wheel}.whl")
    return wheel


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name.removeprefix("logchain/kernels/cpu/") for name in archive.namelist() if "/kernels/cpu/" in name}


def expected(target, levels=1):
    """The files of the package in a wheel, with the one level that the release of these tests has."""
    modules = {path.name for path in Path(build.__file__).parent.glob("*.py")}
    return modules | {target.library(level) for level in [*target.levels][:levels]}


@pytest.mark.slow
def test_one_command_makes_the_wheels_of_all_platforms(release):
    for target in build.TARGETS.values():
        wheel = wheel_of(target, release)
        assert names(wheel) == expected(target)
        assert str(wheel) in release[1]
    assert {Path(line).name for line in release[1]} == {path.name for path in release[0].iterdir() if path.is_file()}


@pytest.mark.slow
def test_an_sdist_holds_what_is_tracked_and_nothing_else(root):
    if not (build.ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    listed = subprocess.run(["git", "ls-files"], cwd=build.ROOT, check=True, capture_output=True, text=True).stdout
    tracked = set(listed.splitlines()) - {".gitignore", "logchain/kernels"}
    held = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    made = {name for name in held if name.startswith("logchain.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert held - made == tracked


@pytest.mark.slow
def test_what_is_released_is_described_as_a_package_index_wants_it(release):
    pytest.importorskip("twine")
    files = [path for path in release[0].iterdir() if path.is_file()]
    assert len(files) == 1 + len(build.TARGETS)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True, capture_output=True)


def test_links_of_the_description_are_absolute():
    readme = "[Here](a/b.md#c), [there](https://d.org), ![a picture](e.svg) and [below](#f)"
    assert build.description(readme, None) == "Here, [there](https://d.org), a picture and [below](#f)"
    linked = build.description(readme, "https://host.org/us/logchain")
    assert linked.startswith("[Here](https://host.org/us/logchain/blob/HEAD/a/b.md#c), [there](https://d.org), ")
    assert "[a picture](https://host.org/us/logchain/blob/HEAD/e.svg) and [below](#f)" in linked
    assert not re.search(r"\]\((?!https?:|#)", build.description((build.ROOT / "README.md").read_text(), None))


@pytest.mark.slow
@pytest.mark.parametrize("name", build.TARGETS)
def test_a_library_exports_its_functions_and_needs_nothing(name, root, release, tmp_path):
    target = build.TARGETS[name]
    shutil.unpack_archive(wheel_of(target, release), tmp_path, "zip")
    (file,) = (tmp_path / "logchain" / "kernels" / "cpu").glob("logchain-*")
    binary = lief.parse(str(file))
    exported = {symbol.name for symbol in binary.exported_functions}
    imported = {symbol.name for symbol in binary.imported_functions}
    needed = {getattr(one, "name", one) for one in binary.libraries}
    if name.startswith("darwin"):
        # a library names itself there, and has to link to the system's
        needed -= {file.name, "/usr/lib/libSystem.B.dylib"}
        imported -= {"dyld_stub_binder"}
        exported = {symbol[1:] for symbol in exported} - {"_mh_dylib_header", "__dso_handle"}
        assert binary.has_code_signature == (name == "darwin-arm64")
    if name.startswith("linux"):
        assert not [symbol.name for symbol in binary.dynamic_symbols if symbol.name and symbol.shndx == 0]
    # the functions of this machine's library, which other tests call
    assert exported == {symbol.name for symbol in lief.parse(library.library()._name).exported_functions}
    assert not imported
    assert not needed
    assert not [place for place in (Path.home(), root.parent) if str(place).encode() in file.read_bytes()]


@pytest.mark.slow
def test_a_wheel_from_an_sdist_holds_the_libraries_of_this_machine(root, tmp_path):
    shutil.copy(build.__file__, root / "kernels" / "cpu")  # with all levels
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, root]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    target, kernels = build.this_machine(), root / "logchain" / "kernels" / "cpu"
    assert names(wheel) == expected(target, len(target.levels))
    # a program that runs in the folder of an sdist finds all of it, too
    assert {path.name for path in kernels.glob("logchain-*")} == {*map(target.library, target.levels)}


def compile_program(target: build.Target, level: str, into: Path) -> list[str]:
    """The command that runs the program of a Linux target: under qemu where this machine is another one."""
    emulated = target != build.this_machine()
    qemu = shutil.which(f"qemu-{target.triple.partition('-')[0]}")
    if platform.system() != "Linux" or (emulated and not qemu):
        pytest.skip(f"no {target.triple} here: needs Linux, and qemu-user for another CPU")
    file = into / f"program-{level}"
    source = Path(__file__).parent / "c" / "program.c"
    units = build.compile_units(target, level, into)
    architecture = target.triple.partition("-")[0]
    command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{architecture}-linux-musl", "-O2", "-static"]
    subprocess.run([*command, source, *units, "-o", file], cwd=into, check=True)
    return [qemu, str(file)] if emulated else [str(file)]


def offset_of(struct: Any, field: str) -> int:
    """The place of a field in a struct, or of a field of a struct in it."""
    name, _, part = field.partition(".")
    inner = dict(struct._fields_).get(name)
    return getattr(struct, name).offset + (offset_of(inner, part) if part else 0)


def run_program(
    command: list[str], name: str, argument: ctypes.Structure, buffers: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What the function of that name leaves in buffers, to which fields of its struct point, or parts of these."""
    where = [(offset_of(type(argument), field), array.nbytes) for field, array in buffers.items()]
    head = struct.pack("=64sqq", name.encode(), ctypes.sizeof(argument), len(buffers))
    sizes = b"".join(struct.pack("=qq", *pair) for pair in where)
    sent = head + sizes + bytes(argument) + b"".join(array.tobytes() for array in buffers.values())
    done = subprocess.run(command, input=sent, capture_output=True, check=True, timeout=60)
    got, left = {}, done.stdout
    for field, array in buffers.items():
        got[field] = np.frombuffer(left[: array.nbytes], array.dtype).reshape(array.shape)
        left = left[array.nbytes :]
    assert not left
    return got


def chain_of(dtype, c, steps=7, members=3):
    """The fields and the buffers of a chain; emissions of the second sequence are lost, and one weight is denormal."""
    generator = np.random.default_rng(c)
    x = generator.normal(size=(steps, members, c)).astype(dtype)
    x[:, 1] *= 1000
    bulk = generator.random((steps - 1, c, c)).astype(dtype) * (generator.random((steps - 1, c, c)) < 0.5)
    bulk += np.eye(c, dtype=dtype)
    if c > 1:
        bulk[1, 0, -1] = np.finfo(dtype).tiny / 4
    arguments = Arguments(steps=steps, sets=1, members=members, states=c, last=members)
    arguments.x.step = arguments.out.step = arguments.messages.step = members * c
    arguments.bulk.step = arguments.grad_bulk.step = c * c
    arguments.bulk.from_, arguments.bulk.to, arguments.p0.step = c, 1, 1
    arguments.paths.steps, arguments.paths.ranks = steps, 1
    rows = np.arange(members)
    places = {f"{name}.at": rows * c for name in ("x", "out", "messages")} | {"paths.at": rows * steps}
    places |= {f"{name}.at": np.zeros(1, np.int64) for name in ("bulk", "grad_bulk")}
    empty = functools.partial(np.zeros, dtype=dtype)
    buffers = {
        "x": x, "bulk": bulk, "p0": np.ones(c, dtype), "messages": empty((steps, members, c)),
        "log_norm": np.zeros(members), "flagged": np.zeros(members, np.uint8),
        "uncounted": np.zeros(members, np.int64),
        "weight": np.ones(members), "grad_x": empty(x.shape), "grad_bulk": empty(bulk.shape),
        "grad_p0": np.zeros((members, c)), "log_forward": empty(x.shape), "log_backward": empty(x.shape),
        "scratch": np.zeros(2**20, np.uint8), "paths": np.zeros((members, steps), np.int64), **places,
    }  # fmt: skip
    return arguments, buffers


@pytest.mark.slow
@pytest.mark.parametrize(("name", "level"), ON_LINUX)
def test_a_program_computes_the_same_on_every_cpu(name, level, tmp_path):
    command = compile_program(build.TARGETS[name], level, tmp_path)
    for dtype, c in itertools.product((np.float32, np.float64), (1, 3, 17)):
        bits = np.dtype(dtype).itemsize * 8
        arguments, buffers = chain_of(dtype, c)
        for function in ("forward", "recompute_forward", "backward", "recompute_backward", "messages"):
            buffers = run_program(command, f"{function}{bits}", arguments, buffers)
        x, bulk = (buffers[field].astype(float) for field in ("x", "bulk"))
        chain = x.swapaxes(0, 1), bulk[None], np.ones(c)
        truth, messages = reference.marginals(*chain), reference.forward_backward(*chain)
        assert buffers["flagged"].tolist()[::2] == [0, 0]
        for found, exact in (
            (buffers["log_norm"], truth.log_norm),
            (buffers["grad_x"], truth.states.swapaxes(0, 1)),
            (buffers["grad_bulk"] * bulk, truth.transitions.sum(0)),
            (buffers["grad_p0"], truth.states[:, 0]),
            (buffers["log_forward"], messages.forward.swapaxes(0, 1)),
            (buffers["log_backward"], messages.backward.swapaxes(0, 1)),
        ):
            accuracy = 1e-5 if bits == 32 else 1e-12
            np.testing.assert_allclose(found, exact, rtol=accuracy, atol=accuracy)
        assert buffers["grad_bulk"][1, 0, -1] > 0  # although flush to zero takes a denormal weight for 0 on aarch64
        best = reference.viterbi(*chain)
        for function in ("viterbi", "topk_paths"):
            found = run_program(command, f"{function}{bits}", arguments, buffers)
            np.testing.assert_array_equal(found["paths"], best.states)
        arguments.last = 1  # messages of the first sequence: of a draw by a number of 0, the last state of a weight
        buffers = run_program(command, f"forward{bits}", arguments, buffers)
        found = run_program(command, f"sample{bits}", arguments, buffers)
        assert found["paths"][0, -1] == c - 1 and (found["paths"][0] >= 0).all()


def test_each_level_can_be_loaded():
    for level in build.this_machine().levels:
        for bits in (32, 64):
            assert getattr(library.load(level), f"logchain_size{bits}")() == ctypes.sizeof(Arguments)
    assert library.library() is library.load(library.level())
    assert library.SUFFIX == build.this_machine().suffix


LEVELS = {"AVX512": "x86_64_v4", "AVX2": "x86_64_v3", "DEFAULT": "x86_64_v2"}


@pytest.mark.parametrize("capability", LEVELS)
def test_level_is_what_torch_finds(capability, monkeypatch):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    for machine, level in (("x86_64", LEVELS[capability]), ("AMD64", LEVELS[capability]), ("arm64", "aarch64")):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert library.level() == level
        assert any(level in target.levels for target in build.TARGETS.values())


def test_a_missing_library_says_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    with pytest.raises(ImportError, match=r"logchain-\S+: expected next to library.py, .* python kernels/cpu/build.py"):
        library.library()


@pytest.mark.slow
def test_without_a_compiler_libraries_that_are_newer_than_the_sources_are_used(tmp_path, monkeypatch):
    target, beside, into = build.this_machine(), tmp_path / "beside", tmp_path / "into"
    into.mkdir()
    other = into / "logchain-of_another_platform.dll"
    other.touch()
    files = build.libraries(target, beside)
    monkeypatch.setattr(build, "HERE", beside)
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    assert [path.read_bytes() for path in build.libraries(target, into)] == [path.read_bytes() for path in files]
    assert not other.exists()
    os.utime(files[0], (0, 0))
    with pytest.raises(ModuleNotFoundError, match="pip install ziglang"):
        build.libraries(target, into)


def test_an_unknown_machine_is_refused(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "pdp11")
    with pytest.raises(RuntimeError, match="the machine: expected one of linux-x86_64, .*, found .*-pdp11"):
        build.this_machine()


def test_an_unknown_platform_of_a_wheel_is_refused():
    from setuptools import Distribution

    command = build.Wheel(Distribution())
    command.plat_name = "pdp11"
    with pytest.raises(ValueError, match="--plat-name: expected one of manylinux_2_17_x86_64, .* found pdp11"):
        command.finalize_options()
