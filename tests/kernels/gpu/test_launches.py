"""What the host does for kernels: few launches, nothing for each step, and it reads no value."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import logchain
from logchain.autograd.operator import IMPLEMENTATIONS
from tests.conftest import INTERPRETED
from tests.kernels.gpu.steps import call_chain, call_matrices

interpreter = pytest.importorskip("triton.runtime.interpreter")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="counts launches in the interpreter")

# of operations whose results, or shapes of results, depend on values
DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Host(TorchDispatchMode):
    """Lists launches, and the operations outside of kernels; one that reads a value raises."""

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
            indices = args[1] if function is torch.ops.aten.index.Tensor else [torch.ones(1) > 0]
            if DEPENDENT & set(function.tags) and torch.bool in {i.dtype for i in indices if i is not None}:
                refuse()
        return function(*args, **(kwargs or {}))


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
    """The number of multiprocessors, by which a scan begins at one end or at both."""
    monkeypatch.setattr("logchain.kernels.gpu.chains.num_processors", lambda device: request.param)


LENGTHS = torch.tensor([9, 1])
product = partial(call_chain, logchain.product, 2)
CALLS = {
    "product": partial(product, 9, 3, lengths=LENGTHS),
    "separate": partial(product, 9, 3, separate=True, log_params=True),
    "many states": partial(product, 2, 257),
    "marginals": partial(call_chain, logchain.marginals, 2, 9, 3, transitions="full", lengths=LENGTHS),
    "viterbi": partial(call_chain, logchain.viterbi, 2, 9, 3, lengths=LENGTHS),
    "matmul": partial(call_matrices, logchain.matmul, 8, 3, 3),
    "matrix_product": partial(call_matrices, logchain.matrix_product, 8, 3, 3),
    "prefix_products": partial(call_matrices, logchain.prefix_products, 8, 3, 3),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_host_reads_no_value(call, host):
    with host:
        call()
        assert host.launches
        for read in (bool, torch.Tensor.item, torch.Tensor.tolist, torch.nonzero, lambda one: one[one]):
            with pytest.raises(RuntimeError, match="the host reads a value"):
                read(torch.ones(1) > 0)


def test_main_job_has_few_launches(host, processors):
    with host:
        with torch.no_grad():
            product(9, 3)
        assert len(host.launches) <= 4, host.launches
        host.launches.clear()
        product(9, 3)
    assert len(host.launches) <= 9, host.launches


def test_host_operations_do_not_grow_with_v(host, processors):
    operations = []
    for v in (8, 11):
        with host:
            product(v, 3)
        operations.append(sorted(host.operations))
        host.operations.clear()
    assert operations[0] == operations[1]
