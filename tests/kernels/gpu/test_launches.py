"""What the host does for kernels: few launches and allocations, and it reads no value."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import logchain
from logchain.autograd.operator import IMPLEMENTATIONS
from tests.conftest import INTERPRETED

interpreter = pytest.importorskip("triton.runtime.interpreter")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="counts launches in the interpreter")


class Host(TorchDispatchMode):
    """Lists the operations outside of kernels; one whose result depends on values raises."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.launches, self.in_kernel = [], [], False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        with self:  # below an operator of the library, operations arrive whole that are usually made of others
            parts = IMPLEMENTATIONS.get(function._opname, function.decompose)(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        if not self.in_kernel:
            self.operations.append(str(function))
            if torch.Tag.data_dependent_output in function.tags or _has_dynamic_shape(function, args):
                refuse()
        return function(*args, **(kwargs or {}))


def _has_dynamic_shape(function, args) -> bool:
    if function is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.dynamic_output_shape in function.tags


def refuse(*_, **__):
    raise RuntimeError("the host reads a value")


@pytest.fixture
def host(kernels, monkeypatch):
    mode, launch = Host(), interpreter.GridExecutor.__call__

    def launched(self, *args, **options):
        mode.launches.append(self.fn.__name__)
        mode.in_kernel = True
        launch(self, *args, **options)
        mode.in_kernel = False

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    for method in ("cpu", "numpy", "tolist", "__array__"):
        monkeypatch.setattr(torch.Tensor, method, refuse)
    with logchain.kernels.use("triton"):
        yield mode


@pytest.fixture(params=[1, 8], ids=["from one end", "from both ends"])
def processors(request, monkeypatch):
    """The number of a device's multiprocessors, on which it depends where scans begin."""
    from logchain.kernels.gpu import chains

    monkeypatch.setattr(chains, "num_processors", lambda device: request.param)


def chain(v: int = 9, c: int = 3, *, separate: bool = False) -> list[torch.Tensor]:
    """x, bulk and p0 of two sequences, a matrix for each step."""
    shapes = (2, v, c), (2, v - 1, c, c) if separate else (v - 1, c, c), (c,)
    return [torch.rand(shape).requires_grad_() for shape in shapes]


def gradients(function, *operands, **options) -> None:
    torch.autograd.grad(function(*operands, **options).sum(), operands)


def test_main_job_has_few_launches(host, processors):
    operands = chain()
    with host:
        with torch.no_grad():
            logchain.product(*operands)
        assert len(host.launches) <= 4, host.launches
        host.launches.clear()
        gradients(logchain.product, *operands)
    assert len(host.launches) <= 9, host.launches


LENGTHS = torch.tensor([9, 1])
CALLS = {
    "product": lambda: gradients(logchain.product, *chain(), lengths=LENGTHS),
    "separate": lambda: gradients(logchain.product, *chain(separate=True), log_params=True),
    "many states": lambda: gradients(logchain.product, *chain(2, 257)),
    "marginals": lambda: logchain.marginals(*chain(), transitions="full", lengths=LENGTHS),
    "viterbi": lambda: logchain.viterbi(*chain(), lengths=LENGTHS),
    "matmul": lambda: gradients(logchain.matmul, *chain()[1:2] * 2),
    "matrix_product": lambda: gradients(logchain.matrix_product, *chain()[1:2]),
    "prefix_products": lambda: gradients(logchain.prefix_products, *chain()[1:2]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_host_reads_no_value(call, host):
    with host:
        call()
        assert host.launches
        for read in (bool, torch.Tensor.item, torch.Tensor.tolist, torch.nonzero, lambda one: one[one]):
            with pytest.raises(RuntimeError, match="the host reads a value"):
                read(torch.ones(1) > 0)


def test_host_operations_do_not_grow_with_v(host, processors):
    operations = []
    for v in (8, 11):
        operands = chain(v)
        with host:
            gradients(logchain.product, *operands)
        operations.append(sorted(host.operations))
        host.operations.clear()
    assert operations[0] == operations[1]
