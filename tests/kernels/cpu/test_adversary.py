"""Nothing that a chain on a CPU loses goes unseen: a random search, and the smallest of what it has found."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import logchain
from logchain import reference
from logchain.kernels.cpu import arguments, library, short
from tests.kernels.cpu.adversary import search

inf = torch.inf

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@pytest.fixture(autouse=True)
def no_function_is_known():
    """What a test loads must not outlast it, nor be kept from it."""
    for forget in (arguments.function.cache_clear, short._known.clear):
        forget()
    yield
    for forget in (arguments.function.cache_clear, short._known.clear):
        forget()


@pytest.fixture(params=["cpu", "plain"])
def room(request):
    """Loops in C, and torch's operations."""
    if request.param == "plain":
        request.getfixturevalue("plain")


EVERYWHERE = pytest.mark.usefixtures("room")


@EVERYWHERE
@pytest.mark.parametrize(("high", "low", "dtype"), [(1e30, 1e-30, torch.float32), (1e200, 1e-128, torch.float64)])
def test_an_entry_that_rescaling_its_matrix_loses_is_still_a_path(high, low, dtype):
    bulk, p0 = torch.tensor([[[high, 0.0], [0.0, low]]], dtype=dtype), torch.tensor([0.0, 1.0], dtype=dtype)
    x = torch.zeros(2, 3, 2, dtype=dtype)
    out = logchain.product(x, bulk, p0, strategy="sequential")
    torch.testing.assert_close(out.double(), torch.from_numpy(reference.product(x, bulk, p0)))


@EVERYWHERE
def test_a_weight_far_below_the_largest_is_still_a_start():
    x = torch.tensor([[-inf, 0.0]], dtype=torch.float64)
    p0 = torch.tensor([1e275, 1e-320], dtype=torch.float64)
    out = logchain.product(x, torch.ones(1, 2, 2, dtype=torch.float64), p0)
    torch.testing.assert_close(out, torch.tensor(1e-320, dtype=torch.float64).log())


@EVERYWHERE
def test_a_start_that_the_emissions_nearly_shut_has_its_gradient():
    """Its backward message is small, and its emission: their product, over what the largest are, is no double."""
    x = torch.tensor([[0.0, -576], [0, -576], [0, 0]], dtype=torch.float64)
    p0 = torch.tensor([0.0, 0.25], dtype=torch.float64, requires_grad=True)
    logchain.product(x, torch.eye(2, dtype=torch.float64)[None], p0, strategy="sequential").backward()
    torch.testing.assert_close(p0.grad, torch.tensor([0.0, 4.0], dtype=torch.float64))


@EVERYWHERE
@pytest.mark.parametrize(("nats", "entry", "dtype"), [(-36, 1e21, torch.float32), (-170, 1e80, torch.float64)])
def test_a_state_that_is_hardly_seen_but_always_entered(nats, entry, dtype):
    """Its backward message is far below the others, the entries into it are as far above."""
    x = torch.zeros(2, 2, 4, dtype=dtype)
    x[:, 1, 0] = nats
    bulk = torch.full((1, 4, 4), 0.5, dtype=dtype)
    bulk[..., 0] = entry
    bulk.requires_grad_()
    logchain.product(x, bulk, torch.ones(4, dtype=dtype), strategy="sequential").sum().backward()
    weights = bulk.detach().double() * x[:, 1:].double().exp()[0]
    expected = 2 * weights / weights.sum()
    torch.testing.assert_close(bulk.grad.double() * bulk.detach().double(), expected, rtol=1e-5, atol=1e-6)


@EVERYWHERE
def test_a_weight_that_makes_a_gradient_a_number():
    p0 = torch.tensor([4e-309, 0.0], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([[0.0, -inf], [-inf, 600], [-600, -inf]], dtype=torch.float64)
    (0.25 * logchain.product(x, torch.ones(1, 2, 2, dtype=torch.float64), p0, strategy="sequential")).backward()
    torch.testing.assert_close(p0.grad * 4e-309, torch.tensor([0.25, 0], dtype=torch.float64))


@EVERYWHERE
def test_a_path_that_is_below_all_numbers_until_it_is_the_only_one():
    """One sequence of few states under one matrix, of which a sum is 0 though a path leads there."""
    bulk, x = torch.zeros(1, 4, 4), torch.zeros(6, 4)
    bulk[0, 0, 3] = bulk[0, 1, 1] = bulk[0, 2, 2] = 2.0**-14
    bulk[0, 3, 1] = 2.0**-47.9
    x[0, 0], x[1, 3] = -56.07, -74.79
    x[3, [0, 2, 3]] = -inf
    out = logchain.product(x, bulk, torch.tensor([1.0, 0, 1, 0]), strategy="sequential")
    torch.testing.assert_close(out, x[0, 0] + x[1, 3] + bulk[0, [0, 3, 1, 1, 1], [3, 1, 1, 1, 1]].log().sum())


@EVERYWHERE
def test_a_gradient_close_to_the_least_number_is_not_lost():
    x = torch.tensor([[-24.0, -600, -600, -600], [0, 0, 0, 0]], dtype=torch.float64)
    bulk = torch.zeros(1, 4, 4, dtype=torch.float64)
    bulk[0, 1, 2], bulk[0, 2, 2] = 9e303, 6e303
    p0 = torch.tensor([1e51, 4e70, 3e73, 1e111], dtype=torch.float64)
    bulk.requires_grad_()
    logchain.product(x, bulk, p0, strategy="sequential").backward()
    torch.testing.assert_close((bulk.grad * bulk)[0, 1:3, 2], torch.tensor([0.36, 180], dtype=torch.float64) / 180.36)


@EVERYWHERE
@BOTH
def test_no_path_times_a_matrix_of_denormal_entries_is_nothing(dtype):
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    bulk = torch.full((2, 1, 2, 2), least, dtype=dtype, requires_grad=True)
    x = torch.tensor([[0.0, 0.0], [0.0, -inf]], dtype=dtype).repeat(2, 1, 1)
    logchain.product(x, bulk, torch.ones(2, dtype=dtype), strategy="sequential").sum().backward()
    assert (bulk.grad[..., 1] == 0).all() and (bulk.grad[..., 0] > 1).all()


@EVERYWHERE
@BOTH
def test_counts_of_entries_at_either_end_of_the_format(dtype):
    """Sequences that are redone add 1 / p to the gradient of the one entry p that they take."""
    sizes = [1e-37, 1e37] if dtype == torch.float32 else [1e-300, 1e300]
    for size in sizes:
        bulk = torch.tensor([[[size, 0.0], [0.0, 1.0]]], dtype=dtype, requires_grad=True)
        p0 = torch.tensor([size, 1.0], dtype=dtype, requires_grad=True)
        x = torch.tensor([[0.0, -3000.0], [-3000.0, -6000.0], [0.0, -inf]], dtype=dtype)
        logchain.product(x, bulk, p0, strategy="sequential").backward()
        torch.testing.assert_close((bulk.grad * bulk)[0, 0, 0].item(), 2.0)
        torch.testing.assert_close((p0.grad * p0)[0].item(), 1.0)


@pytest.mark.parametrize("draws", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_nothing_that_was_searched_is_wrong(draws):
    seen = search(3, draws)
    assert not seen.wrong, "\n".join([*seen.wrong[:20], str(seen)])
    assert seen.chains == 64 * draws
    assert 0.1 < seen.redone / seen.chains < 0.9 < 1.3 * seen.possible / seen.chains


# a machine computes at its own level and at all below
LEVELS = [level for level in ("aarch64", "x86_64_v2", "x86_64_v3", "x86_64_v4") if level[:3] == library.level()[:3]]


@pytest.mark.parametrize("level", [level for level in LEVELS if level <= library.level()])
def test_nor_is_it_at_any_level_of_this_machine(level, monkeypatch):
    monkeypatch.setattr(library, "level", lambda: level)
    seen = search(4, 40)
    assert not seen.wrong, "\n".join([*seen.wrong[:20], str(seen)])


# A text of the sources and what takes its place. That a matrix's largest entry is not looked at stays unseen: matrices
# of which it lies far from 1 have been rescaled, and the rest is less than the guard bits.
MUTANTS = {
    "zeros are always believed": ("step.h", "return matrix->low < safe_entry;", "return 0;"),
    "the last sum is not looked at": (
        "forward.h",
        "(sum > 0 && sum < (double)TRUSTED)",
        "(sum > 0 && sum < 0)",
    ),
    "raised emissions are not asked about": (
        "step.h",
        "return raised || least < bits_of(TRUSTED) ||",
        "return (raised & 0) || least < bits_of(TRUSTED) ||",
    ),
    "the threshold is 2^20 lower": (
        "scale.h",
        "power_of_two(TOP - DEEPEST + GUARD)",
        "power_of_two(TOP - DEEPEST + GUARD - 20)",
    ),
    "backward messages are not tested": (
        "backward.h",
        "lost |= is_lossy(c, row, summary.scale, summary.most, &w->matrix, safe_entry);",
        "",
    ),
    "what rescaling loses is forgotten": ("step.h", "if (low == 0) a->low = 0;", ""),
    "nor are they of one sequence of few states": ("few_loops.h", "return !low &&", "return"),
    "nor where each step has a matrix": ("few_loops.h", "least_after_raised(narrow, l, entries)", "bounds.least[0]"),
    "the largest entry that a product has seen is 0": (
        "step.h",
        "a->high = real_of((whole)bits), a->has_high = 1;",
        "a->high = 0, a->has_high = 1;",
    ),
    "what was counted is counted again": ("exact.h", "step + 1 <= a->uncounted[q]", "step + 1 <= a->steps"),
    "what was not counted is not redone": ("backward.h", "a->uncounted[q] = step + 1", "a->uncounted[q] = 0"),
    "starts are not looked at": ("step.h", "return lossy;\n}", "return 0 * lossy;\n}"),
}


# What a search calls, and nothing else, which would have to be compiled: no messages either, which need float64.
SEARCHED = """
#define BITS 32
#include "call.h"
int64_t logchain_forward64(const Chain *a) { return !a; }
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", *MUTANTS])
def test_the_search_sees_what_a_mutant_loses(name, tmp_path, monkeypatch):
    pytest.importorskip("setuptools")
    pytest.importorskip("ziglang")
    from logchain.kernels.cpu import build

    file, text, other = MUTANTS.get(name, ("step.h", "", ""))
    folder = Path(shutil.copytree(build.HERE / "c", tmp_path / "c"))
    source = (folder / file).read_text()
    assert text in source
    (folder / file).write_text(source.replace(text, other))
    (folder / "call.c").write_text(SEARCHED)
    units = [folder / f"{unit}.c" for unit in ("call", "single4", "single8", "single16", "memory")]
    # the least level, whatever the machine: narrow vectors lose more
    build.compile_c(build.this_machine(), LEVELS[0], tmp_path, "-w", "-shared", "-fPIC", *units, "-o", "mutant")
    mutant = ctypes.CDLL(str(tmp_path / "mutant"))
    monkeypatch.setattr(arguments, "library", lambda: mutant)
    seen = search(5, 4000 if name in MUTANTS else 700, dtypes=[torch.float32], enough=1)
    assert bool(seen.wrong) == (name in MUTANTS)


def structured(name: str, c: int, dtype: torch.dtype) -> torch.Tensor:
    i, j = torch.meshgrid(torch.arange(c), torch.arange(c), indexing="ij")
    zeros = {
        "left to right": (j < i) | (j > i + 1),
        "banded": (j - i).abs() > 2,
        "blocks": i // 4 != j // 4,
    }
    bulk = torch.rand(c, c, generator=torch.Generator().manual_seed(0), dtype=dtype).masked_fill(zeros[name], 0) + 0.0
    return bulk[None] / bulk.sum(-1, keepdim=True)


@BOTH
@pytest.mark.parametrize("c", [5, 40])
@pytest.mark.parametrize("name", ["left to right", "banded", "blocks"])
def test_zeros_alone_cost_nothing(name, c, dtype):
    x = torch.randn(6, 20, c, generator=torch.Generator().manual_seed(1), dtype=dtype)
    p0 = torch.zeros(c, dtype=dtype)
    p0[0] = 1
    with logchain.rescues() as seen:
        out = logchain.product(x, structured(name, c, dtype), p0, strategy="sequential")
    assert seen.sequences == 0 and out.isfinite().all()


@BOTH
def test_an_infinite_weight_makes_an_infinite_sum_in_either_form(dtype):
    x, p0 = torch.zeros(2, 3, 2, dtype=dtype), torch.tensor([[1.0, inf], [1.0, 1.0]], dtype=dtype)
    for log in (False, True):
        out = logchain.product(x, torch.ones(1, 2, 2, dtype=dtype), p0, log_params=log, strategy="sequential")
        assert out[0] == inf and out[1].isfinite()


@BOTH
def test_logarithms_so_far_apart_that_their_difference_rounds_by_many_nats(dtype):
    r = torch.Generator().manual_seed(0)
    for size in (1e9, 1e12, 1e20, 1e25, 1e30):
        for _ in range(20):
            x, bulk, p0 = (torch.rand(*shape, generator=r, dtype=dtype) for shape in ((3, 2), (1, 2, 2), (2,)))
            out = logchain.product(x, bulk * size, p0 * size, log_params=True, strategy="sequential")
            truth = reference.product(x, bulk * size, p0 * size, log_params=True)
            torch.testing.assert_close(out.double(), torch.tensor(truth), rtol=1e-6, atol=0)


@BOTH
def test_a_nan_stays_where_no_path_follows(dtype):
    bulk, p0 = torch.ones(2, 2, 2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype)
    bulk[0], p0[0, 0] = 0, torch.nan
    out = logchain.product(torch.zeros(2, 3, 2, dtype=dtype), bulk, p0, strategy="sequential")
    assert out[0].isnan() and out[1].isfinite()


@BOTH
def test_matrices_behind_what_is_redone_may_be_nan(dtype):
    far = -1000.0 if dtype == torch.float32 else -8000.0
    x = torch.tensor([[0, far], [far, 0], [0, 0]], dtype=dtype).repeat(2, 1, 1)
    bulk = torch.eye(2, dtype=dtype).log().repeat(2, 2, 1, 1)
    bulk[0, 1] = torch.nan
    bulk.requires_grad_()
    with logchain.rescues() as seen:
        out = logchain.product(x, bulk, bulk.new_zeros(2), log_params=True, lengths=torch.tensor([2, 3]))
    out.sum().backward()
    assert seen.sequences == 2 and (bulk.grad[0, 1] == 0).all()


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages as Linux does")
def test_no_loop_reads_behind_an_operand(tmp_path):
    beyond = "import torch, ctypes; from tests.kernels.cpu.guarded import guarded; t = guarded(torch.ones(3)); "
    reads = f"{beyond} ctypes.string_at(t.data_ptr(), 13)"
    everything = "import runpy; runpy.run_module('tests.kernels.cpu.guarded', run_name='__main__')"
    # the library that is tested here, which need not lie beside the tests
    environment = {**os.environ, "PYTHONPATH": str(Path(logchain.__file__).parents[1])}
    died, done = (
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.append({str(Path(__file__).parents[3])!r}); {code}"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
        )
        for code in (reads, everything)
    )
    assert died.returncode < 0
    assert done.returncode == 0, done.stderr
