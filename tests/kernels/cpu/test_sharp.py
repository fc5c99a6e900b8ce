"""Sharp emissions cost no more than others: no operand is denormal, nothing is recomputed, the caller's mode stays.

Processors mark in a register that an operand was denormal: tests clear the mark, call, and read it.
"""

import ctypes
import platform
import sys
from functools import partial

import pytest
import torch

import logchain
from logchain import reference
from logchain.kernels.cpu import template
from logchain.transitions import Banded, Kronecker, LowRank, Sparse
from tests.contract import unit
from tests.kernels.conftest import LEVELS

READS = pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="reads MXCSR of x86-64")
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@pytest.fixture(params=[False, True], ids=["kept", "flushed"])
def flushed(request):
    """Whether the caller has torch flush denormal numbers."""
    torch.set_flush_denormal(request.param)
    yield request.param
    torch.set_flush_denormal(False)


class Environment(ctypes.Structure):
    """`fenv_t` of x86-64 on Linux, with the register MXCSR."""

    _fields_ = [("x87", ctypes.c_uint32 * 7), ("mxcsr", ctypes.c_uint32)]


@pytest.fixture
def denormal_memory(monkeypatch):
    """Fresh memory is full of denormal numbers, of either precision: what computes with it before writing it shows."""
    allocate = torch.empty

    def empty(*args, **kwargs):
        out = allocate(*args, **kwargs)
        if out.device.type == "cpu" and out.nbytes % 4 == 0:
            pattern = torch.tensor([0x0008_0000], dtype=torch.int32).repeat(out.nbytes // 4)
            out.view(-1).view(torch.uint8).copy_(pattern.view(torch.uint8))
        return out

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(template, "_free_scratch", [])


def uses_denormals(call) -> bool:
    """Whether an operand in a call was denormal, which bit 1 of the register says."""
    libm, environment = ctypes.CDLL("libm.so.6"), Environment()
    call()
    libm.fegetenv(ctypes.byref(environment))
    environment.mxcsr &= ~0x3F
    libm.fesetenv(ctypes.byref(environment))
    call()
    libm.fegetenv(ctypes.byref(environment))
    return bool(environment.mxcsr & 2)


def uniform(*shape, dtype):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def sparse(c, dtype):
    weights = uniform(c, c, dtype=dtype) * (uniform(c, c, dtype=dtype) < 0.2) + torch.eye(c, dtype=dtype)
    arcs = weights.nonzero().mT
    return Sparse(arcs, weights[tuple(arcs)], c)


# sizes n, v, c, and matrices
CHAINS = {
    "a matrix a step": (24, 12, 40, lambda dtype: uniform(11, 40, 40, dtype=dtype)),
    "one matrix": (9, 20, 33, lambda dtype: uniform(1, 33, 33, dtype=dtype)),
    "one matrix, one sequence": (1, 60, 40, lambda dtype: uniform(1, 40, 40, dtype=dtype)),
    "own matrices": (3, 15, 20, lambda dtype: uniform(3, 14, 20, 20, dtype=dtype)),
    "few states, one matrix": (1, 80, 7, lambda dtype: uniform(1, 7, 7, dtype=dtype)),
    "few states, own matrices": (2, 40, 16, lambda dtype: uniform(2, 39, 16, 16, dtype=dtype)),
    "few states, a matrix a step": (5, 40, 4, lambda dtype: uniform(39, 4, 4, dtype=dtype)),
    "bands": (4, 20, 24, lambda dtype: Banded(uniform(3, 24, dtype=dtype), [-1, 0, 1])),
    "arcs": (4, 20, 24, lambda dtype: sparse(24, dtype)),
    "factors": (4, 20, 24, lambda dtype: Kronecker(uniform(4, 4, dtype=dtype), uniform(6, 6, dtype=dtype))),
    "low rank": (4, 20, 24, lambda dtype: LowRank(*(uniform(24, *size, dtype=dtype) for size in ((3,), (3,), ())))),
}


def drawn(kind, dtype):
    """x ~ N(0, 1), matrices and p0 of a kind."""
    n, v, c, make = CHAINS[kind]
    x = torch.randn(n, v, c, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    return x, make(dtype), uniform(c, dtype=dtype)


def gradients(x, bulk, p0):
    """Of x and, where they are tensors, of the others."""
    leaves = [t.clone().requires_grad_() if isinstance(t, torch.Tensor) else t for t in (x, bulk, p0)]
    out = logchain.product(*leaves).sum()
    return torch.autograd.grad(out, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])


def gradients_of_logarithms(x, bulk, p0):
    leaf = bulk.log().requires_grad_()
    return torch.autograd.grad(logchain.product(x, leaf, p0.log(), log_params=True).sum(), leaf)


QUERIES = {
    "product": logchain.product,
    "gradients": gradients,
    "gradients of logarithms": gradients_of_logarithms,
    "marginals": lambda *chain: logchain.marginals(*chain, transitions="sum"),
    "messages": logchain.forward_backward,
}
OF_STRUCTURES = ["product", "gradients", "marginals"]

# every chain meets every query it has, and levels in turn; products of factors are torch's
MET = [
    (kind, query, LEVELS[(i + j) % len(LEVELS)])
    for i, kind in enumerate(CHAINS)
    for j, query in enumerate(OF_STRUCTURES if kind in ("bands", "arcs") else QUERIES)
    if kind not in ("factors", "low rank")
]


@READS
@pytest.mark.usefixtures("denormal_memory")
@BOTH
@pytest.mark.parametrize(("kind", "query", "level"), MET, indirect=["level"])
def test_sharp_emissions_meet_no_denormal_operand(kind, query, level, dtype):
    x, bulk, p0 = drawn(kind, dtype)
    for sharpness in (1, 10, 30, 100):
        assert not uses_denormals(partial(QUERIES[query], sharpness * x, bulk, p0)), f"x ~ {sharpness} N(0, 1)"


@READS
@pytest.mark.usefixtures("denormal_memory")
@BOTH
def test_sharp_matrices_meet_no_denormal_operand(level, dtype):
    a, b = torch.randn(2, 6, 40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    for sharpness in (1, 10, 30, 100):
        leaves = [(sharpness * t).requires_grad_() for t in (a, b)]
        assert not uses_denormals(lambda: torch.autograd.grad(logchain.matmul(*leaves).sum(), leaves))  # noqa: B023


@READS
def test_the_register_marks_denormal_operands_alone():
    tiny, small = torch.tensor([1e-40]), torch.tensor([1e-30])
    assert uses_denormals(lambda: tiny * 0.5)
    assert not uses_denormals(lambda: small * 0.5)


def denormals_vanish(count: int = 1) -> bool:
    """Whether a thread of torch computes as if denormal numbers were 0."""
    return bool((torch.full((count,), 1e-40) * 0.5 == 0).any())


@pytest.mark.parametrize("kind", CHAINS)
def test_mode_of_the_caller_stays(kind, flushed):
    x, bulk, p0 = drawn(kind, torch.float32)
    gradients(30 * x, bulk, p0)
    assert denormals_vanish() == flushed


def test_modes_of_all_threads_stay(set_threads):
    set_threads(2)
    x, bulk = 30 * torch.randn(64, 200, 40), uniform(199, 40, 40, dtype=torch.float32)
    gradients(x, bulk, uniform(40, dtype=torch.float32))
    assert not denormals_vanish(1_000_000)


def test_a_message_far_below_the_largest_has_no_rounding_error_of_that():
    x = torch.full((3, 20), 0.1, dtype=torch.float64)
    x[:, 3] = 5e4
    messages = logchain.forward_backward(x, torch.ones(1, 20, 20, dtype=torch.float64), torch.ones(20).double())
    torch.testing.assert_close(messages.forward[0], x[0], rtol=1e-15, atol=0)


@BOTH
@pytest.mark.parametrize(
    ("c", "each", "sharpness"), [(5, False, 1000), (5, True, 30), (20, False, 30), (20, True, 1000)]
)
def test_stretches_with_sharp_emissions_are_not_recomputed(c, each, sharpness, dtype):
    v = 3000
    bulk, p0 = uniform(v - 1 if each else 1, c, c, dtype=dtype), uniform(c, dtype=dtype)
    x = torch.randn(v, c, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype) * sharpness
    leaf = x.requires_grad_()
    (whole,) = torch.autograd.grad(logchain.product(leaf, bulk, p0, strategy="sequential"), leaf)
    for options in ({"memory_budget": x.nbytes // 2}, {"strategy": "segments"}):
        with logchain.rescues() as seen:
            (found,) = torch.autograd.grad(logchain.product(leaf, bulk, p0, **options), leaf)
        assert (seen.sequences, seen.boundaries) == (0, 0)
        torch.testing.assert_close(found, whole, rtol=4 * v * (c + 8) * unit(dtype), atol=c * unit(dtype) / 4)


@BOTH
@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize(("beside", "exponent"), [("alike", -110), ("alike", 90), ("ones", -50), ("ones", -70)])
def test_gradients_keep_their_digits_under_any_weight(beside, exponent, kind, dtype):
    """Weights that make gradients denormal numbers, or huge ones, beside others like them or beside ones."""
    x, bulk, p0 = drawn(kind, dtype)
    (n, v, c), size = x.shape, 2.0**exponent
    weight = torch.full((n,), size if beside == "alike" else 1.0, dtype=dtype)
    weight[0] = size

    def first(weight):
        """The gradients that the first sequence has alone, or all alike."""
        parameters = [bulk] if torch.is_tensor(bulk) else bulk.parameters
        leaves = [one.clone().requires_grad_() for one in (x, *parameters)]
        matrices = leaves[1] if torch.is_tensor(bulk) else bulk.with_parameters(*leaves[1:])
        found = torch.autograd.grad((logchain.product(leaves[0], matrices, p0) * weight).sum(), leaves)
        own = beside == "alike" or found[-1].shape[:1] == (n,)
        return [found[0][0], *(gradient[0] for gradient in found[1:] if own)]

    for found, one in zip(first(weight), first(torch.ones_like(weight)), strict=True):
        expected = one.double() * size
        near = 4 * torch.finfo(dtype).eps * expected.abs() + size * c * v * torch.finfo(dtype).eps / 4
        assert ((found.double() - expected).abs() <= near + torch.finfo(dtype).smallest_normal).all()


@BOTH
@pytest.mark.parametrize("exponent", [-20, -31, -57])
@pytest.mark.parametrize("matrices", [1, 9], ids=["one matrix", "a matrix a step"])
def test_transitions_of_one_sequence_alone_keep_their_digits_under_any_weight(matrices, exponent, dtype):
    """Two sequences share matrices, but no transition."""
    x = torch.zeros(2, 10, 24, dtype=dtype)
    x[0, :, 12:] = x[1, :, :12] = -torch.inf
    bulk = torch.ones(matrices, 24, 24, dtype=dtype, requires_grad=True)
    weight = torch.tensor([1.0, 2.0**exponent], dtype=dtype)
    logchain.product(x, bulk, torch.ones(24, dtype=dtype)).backward(weight)
    counts = bulk.grad[:, 12:, 12:].double().sum() / 2.0**exponent
    assert counts.item() == pytest.approx(9, rel=1e-5 if dtype == torch.float32 else 1e-12)


@BOTH
@pytest.mark.parametrize(("c", "exponent"), [(2, -59), (3, -40), (16, -20), (24, -59)])
@pytest.mark.parametrize("function", [logchain.matrix_product, logchain.prefix_products, logchain.matmul])
def test_gradients_of_products_keep_their_digits_under_any_weight(function, exponent, c, dtype):
    """A set of a batch under a weight below that of the other."""
    stack = torch.randn(2, 5, c, c, generator=torch.Generator().manual_seed(c), dtype=dtype)

    def gradient(second):
        leaf = stack.clone().requires_grad_()
        out = function(leaf, leaf) if function is logchain.matmul else function(leaf)
        weight = torch.ones_like(out)
        weight[1] = second
        out.backward(weight)
        return leaf.grad[1].double() / second

    found, expected = gradient(2.0**exponent), gradient(1.0)
    near = 1e3 * torch.finfo(dtype).eps * expected.abs() + c**3 * torch.finfo(dtype).eps / 8
    assert ((found - expected).abs() <= near).all()


@pytest.mark.parametrize(
    ("dtype", "weight", "large", "small"),
    [
        (torch.float32, 1.0, 3e38, 1e18),
        (torch.float32, 2.0**-59, 2.0**68, 2.0**7),
        (torch.float64, 1.0, 1.7e308, 1e150),
    ],
)
def test_counts_over_large_values_of_bands_add_up(dtype, weight, large, small):
    """Each is a denormal number."""
    values = torch.tensor([[small], [large]], dtype=dtype).repeat(1, 8).requires_grad_()
    chain = torch.zeros(101, 8, dtype=dtype), Banded(values, [1, 0]), torch.ones(8, dtype=dtype)
    (logchain.product(*chain) * weight).backward()
    assert values.grad[1, 0].item() / weight * large == pytest.approx(100 / 8, rel=1e-4)


@BOTH
@pytest.mark.parametrize(("scale", "sharpness"), [(255.0, 0), (100.0, 1), (1.0, 10), (255.0, 10)])
def test_posteriors_of_factors_with_large_entries(sharpness, scale, dtype):
    """Half of the states are left for others alone: their messages are far below the largest."""
    left = torch.full((32, 32), scale, dtype=dtype)
    left[:16, :16] = 0
    right = torch.full((32, 32), scale, dtype=dtype)
    x = sharpness * torch.randn(3, 1024, generator=torch.Generator().manual_seed(0), dtype=dtype)
    x[1, 0] += 7
    leaf = x.clone().requires_grad_()
    with logchain.rescues() as seen:
        logchain.product(leaf, Kronecker(left, right), torch.ones(1024, dtype=dtype)).backward()
    assert seen.sequences == 0
    truth = torch.from_numpy(reference.marginals(x, torch.kron(left, right)[None], torch.ones(1024)).states)
    near = 4 * 3 * 1024 * unit(dtype) * truth + 1024 * unit(dtype) / 4
    assert ((leaf.grad.double() - truth).abs() <= near).all()
