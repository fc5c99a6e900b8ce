"""Held launches call the kernel that Triton would call, with its arguments in order, and ask Triton but once for each.

Triton itself says which kernel that is, with a driver that launches nothing and a compiler that compiles nothing.
"""

import importlib
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.jit import JITFunction

from logchain.kernels import gpu
from logchain.kernels.gpu import held
from tests.kernels.gpu.no_driver import Driver, compiled_here


def kernel_of(x_ptr, ends_ptr, out_ptr, v, m, stride_v, stride_m, C: tl.constexpr, PRECISION: tl.constexpr):
    """Nothing: it is not compiled."""


@pytest.fixture
def compiled():
    """All that has been compiled, in order."""
    with compiled_here() as found:
        yield found


@pytest.fixture
def kernel():
    return JITFunction(kernel_of, do_not_specialize=["v", "m"])


def call(kernel, x=None, ends=None, out=None, v=3, m=5, stride_v=15, stride_m=1, grid=(6,), **options):
    """A launch, with the arguments that are given, by `held.run`; all of them in order."""
    x, out = torch.empty(64) if x is None else x, torch.empty(64) if out is None else out
    arguments = (x, ends, out, v, m, stride_v, stride_m)
    options = {"C": 200, "PRECISION": "tf32x3", "num_warps": 8} | options
    held.run(kernel, grid, *arguments, **options)
    return *arguments, options["C"], options["PRECISION"]


def test_arguments_come_in_order_from_the_first_launch_on(kernel, compiled):
    for time, grid in enumerate([(6,), (6,), (7, 2), (8, 3, 4)]):
        expected = call(kernel, grid=grid, v=time)
        *place, stream, function, packed, metadata, enter, leave = compiled[0].launches[time][:9]
        assert place == [*grid, 1, 1][:3]
        assert (stream, function, packed) == (Driver.stream, compiled[0].function, "metadata")
        assert (metadata, enter, leave) == (None, None, None) or time == 0
        found = compiled[0].launches[time][9:]
        assert all(a is b if isinstance(a, torch.Tensor) else a == b for a, b in zip(found, expected, strict=True))
    assert len(compiled) == 1


def test_triton_is_asked_once(kernel, compiled, monkeypatch):
    call(kernel)
    monkeypatch.setattr(JITFunction, "run", None)
    call(kernel, v=16, m=1)  # not specialised
    call(kernel, torch.empty(80), stride_v=17)
    assert len(compiled[0].launches) == 3


SAME = [{"v": 1}, {"v": 16}, {"m": 1}, {"m": 32}, {"stride_v": 33}, {"x": torch.empty(5, 5)}]
OTHER = [
    {"x": torch.empty(64, dtype=torch.float64)},
    {"x": torch.empty(64)[1:]},
    {"out": torch.empty(64)[1:]},
    {"ends": torch.empty(64, dtype=torch.int64)},
    {"v": 2**31},
    {"stride_v": 16},
    {"stride_v": 2**31 + 1},
    {"stride_v": 1},
    {"stride_m": 2},
    {"C": 100},
    {"C": "tf32x3", "PRECISION": 200},
    {"num_warps": 4},
    {"num_stages": 1},
]


@pytest.mark.parametrize("options", SAME, ids=lambda options: ", ".join(options))
def test_no_other_kernel_is_compiled(kernel, compiled, options):
    call(kernel)
    call(kernel, **options)
    assert len(compiled) == 1


@pytest.mark.parametrize("options", OTHER, ids=lambda options: ", ".join(options))
def test_another_kernel_is_compiled_and_both_are_known(kernel, compiled, options):
    for _ in range(2):
        call(kernel)
        call(kernel, **options)
    assert [len(one.launches) for one in compiled] == [2, 2]


def test_names_of_options_are_told_apart(kernel, compiled):
    for first, second in [("C", "PRECISION"), ("PRECISION", "C")]:
        held.run(kernel, (1,), None, None, None, 1, 1, 1, 1, **{first: 1, second: 2})
    assert [one.source.constants[7,] for one in compiled] == [1, 2]


def test_the_kernel_is_the_one_that_triton_would_launch(kernel, compiled):
    """Of every pair of changes, and of every two odd pointers: with all kernels known, none is launched for another."""
    changes = [*SAME, *OTHER, {"x": torch.empty(64)[2:]}, {"out": torch.empty(64)[3:]}]
    for _ in range(2):
        for pair in itertools.product(changes, repeat=2):
            arguments = call(kernel, **pair[0] | pair[1])
            options = {"num_warps": 8} | {
                name: value for name, value in (pair[0] | pair[1]).items() if name.startswith("num")
            }
            ours = max(compiled, key=lambda one: bool(one.launches))
            counts = [len(one.launches) for one in compiled]
            kernel[(6,)](*arguments[:7], C=arguments[7], PRECISION=arguments[8], **options)
            (theirs,) = [one for one, count in zip(compiled, counts, strict=True) if len(one.launches) > count]
            assert theirs is ours
            for one in compiled:
                one.launches.clear()


def test_devices_have_kernels_of_their_own_and_the_stream_is_the_current_one(kernel, compiled, monkeypatch):
    for device, stream in [(0, 7), (1, 7), (0, 8), (1, 9)]:
        monkeypatch.setattr(Driver, "device", device)
        monkeypatch.setattr(Driver, "stream", stream)
        call(kernel)
    assert [[launch[3] for launch in one.launches] for one in compiled] == [[7, 8], [107, 109]]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_triton_launches_where_a_profiler_listens(kernel, compiled, hook):
    call(kernel)
    chain = getattr(held.knobs.runtime, hook)
    chain.add(print)
    try:
        call(kernel)
    finally:
        chain.remove(print)
    call(kernel)
    assert [launch[6] for launch in compiled[0].launches] == ["launch metadata", "launch metadata", None]


def test_triton_launches_what_is_no_plain_kernel(kernel, compiled):
    calls = []

    class Tuned:
        fn = kernel

        def __getitem__(self, grid):
            return lambda *arguments, **options: calls.append((grid, arguments, options))

    held.run(Tuned(), (3,), None, 5, C=1)
    assert calls == [((3,), (None, 5), {"C": 1})]
    kernel.pre_run_hooks.append(lambda *arguments, **_: calls.append(arguments))
    call(kernel)
    call(kernel)
    assert len(calls) == 3


def test_what_cannot_be_held_is_refused(kernel, compiled):
    with pytest.raises(AssertionError, match="constexprs by name"):
        held.run(kernel, (1,), None, None, None, 1, 1, 1, C=1, PRECISION="", stride_m=1)
    with pytest.raises(AssertionError, match="expected an integer"):
        call(kernel, stride_v=0.5)


def test_threads_share_kernels(kernel, compiled):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: call(kernel, v=i, stride_v=15 + i % 2), range(400)))
    launched = [launch[9:] for one in compiled for launch in one.launches]
    assert sorted(launch[3] for launch in launched) == list(range(400))
    for one in compiled:
        assert len({launch[14] % 16 == 0 for launch in one.launches}) == 1


def test_integers_are_forgotten_in_the_end():
    kinds = held._Kinds(True)
    assert [kinds[value] for value in range(30_000)][:2] == [4, 8] and len(kinds) <= 10_001


def launched():
    """The kernels that `launch.run` launches, by their names."""
    found = {}
    for path in sorted(Path(gpu.__path__[0]).glob("*.py")):
        for kernel in re.findall(r"\brun\(\s*(\w+_kernel),", path.read_text()):
            module = importlib.import_module(f"{gpu.__name__}.{path.stem}")
            found[f"{path.stem}.{kernel}"] = getattr(module, kernel).fn
    return found


@pytest.mark.parametrize("name", launched())
def test_kernels_have_thirty_arguments_at_most_pointers_first_and_constexprs_last(name):
    kernel = held._Held(JITFunction(launched()[name]))
    assert kernel.pointers and len(kernel.names) <= 30


def test_kernels_are_found():
    assert {"chain_forward._forward_kernel", "chains._prepare_kernel"} < set(launched())
