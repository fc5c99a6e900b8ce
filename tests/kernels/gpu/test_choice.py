"""The choice of Triton kernels or torch operations on a GPU, and the fallback where kernels cannot be compiled."""

import ast
import sys
from subprocess import CalledProcessError
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import logchain
from logchain import kernels as devices
from logchain.kernels import choice
from logchain.kernels.plain import product as plain_product
from tests.families import FAMILIES, dense
from tests.subjects import SUBJECTS

triton = pytest.importorskip("triton")
MISSING = ModuleNotFoundError("No module named 'triton'", name="triton")
RESOURCES = triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")
STATIC = triton.compiler.errors.CompileTimeAssertionFailure(None, ast.Pass(), "static_assert")
BEFORE_LAUNCH = [MISSING, RESOURCES, STATIC, triton.runtime.errors.PTXASError("255"), CalledProcessError(1, ["gcc"])]
BEFORE_LAUNCH += map(RuntimeError, ["PassManager::run failed", "Failed to find C compiler.", "0 active drivers ([])"])
RAISED = [RuntimeError("CUDA error: an illegal access"), torch.OutOfMemoryError("CUDA out of memory")]
RAISED += [triton.runtime.errors.InterpreterError("bounds"), ImportError("scan", name="logchain.kernels.gpu.scan")]


@pytest.fixture
def kernels(device, monkeypatch):
    """The device, of whose tensors all are treated as if on a GPU: choices for a GPU are what is tested."""
    monkeypatch.setattr(devices, "on_gpu", lambda tensor: True)
    return device


@pytest.fixture(autouse=True)
def fake(kernels, monkeypatch):
    """A function that replaces those of a Triton module; an error represents a function that raises it."""
    torch.manual_seed(0)
    modules, load = {}, choice.load
    monkeypatch.setattr(choice, "_state", choice._State("auto", ""))
    monkeypatch.setattr(choice, "load", lambda name: modules[name] if name in modules else load(name))
    return lambda module, **functions: modules.update(
        {f"gpu.{module}": SimpleNamespace(**{name: Mock(side_effect=value) for name, value in functions.items()})}
    )


def matmul():
    a = torch.zeros(2, 3, 3)
    torch.testing.assert_close(devices.module("matmul", a).forward(a, a)[0].exp(), torch.full_like(a, 3.0))


def test_use_in_contexts_and_calls_restores_former_choice():
    x = torch.zeros(1)
    with devices.use("plain"):
        with devices.use("triton"):
            assert devices.in_triton(x)
        assert not devices.in_triton(x)
        devices.use("auto")
        assert devices.in_triton(x)
        devices.use("plain")
    assert devices.in_triton(x)
    devices.use("plain")
    with pytest.raises(ValueError, match="choice: expected .auto., .triton. or .plain., got 'fast'; pass one"):
        devices.use("fast")
    with pytest.raises(ValueError, match="device: expected .cuda. or .cpu., got 'tpu'; pass one"):
        devices.use("plain", "tpu")
    assert not devices.in_triton(x)


def test_use_on_a_cpu_chooses_loops_in_c_torch_operations_or_the_interpreter(monkeypatch):
    monkeypatch.undo()  # tensors on a CPU are no longer treated as if on a GPU
    x = torch.zeros(1)
    assert devices.in_c(x) and not devices.on_gpu(x)
    with devices.use("plain", "cpu"):
        assert not devices.in_c(x) and not devices.on_gpu(x)
        with devices.use("plain"), devices.use("triton", device="cpu"):
            assert devices.on_gpu(x) and not devices.in_c(x) and not devices.in_triton(x)
        assert not devices.in_c(x)
    assert devices.in_c(x)


@pytest.mark.parametrize("subject", ["product", "segments:3:2", "memory_budget", "packed", "banded", "low rank"])
def test_backward_on_a_cpu_under_another_choice_raises(subject, monkeypatch):
    monkeypatch.undo()
    x, bulk, p0 = (operand.requires_grad_() for operand in dense(torch.float32, v=20, n=2, t=1)[:3])
    for first, other in (("auto", "plain"), ("plain", "auto")):
        with devices.use(first, "cpu"):
            value = SUBJECTS[subject](x, bulk, p0)["log_norm"].sum()
        with devices.use(other, "cpu"), pytest.raises(RuntimeError, match=f"^backward: expected kernels.use.'{first}'"):
            value.backward(retain_graph=True)
        with devices.use(first, "cpu"):
            value.backward()


@pytest.mark.parametrize("error", BEFORE_LAUNCH, ids=lambda error: type(error).__name__)
def test_failure_before_launch_warns_once_and_computes_with_torch(error, fake):
    fake("matmul", forward=error)
    with pytest.warns(RuntimeWarning, match=f"Triton .{type(error).__name__}.*torch operations") as warned:
        matmul()
    matmul()
    assert len(warned) == 1 and not devices.in_triton(torch.zeros(1))
    with devices.use("triton"), pytest.raises(type(error)):
        matmul()
    with devices.use("auto"), pytest.warns(RuntimeWarning):
        matmul()
    matmul()  # as before these contexts


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_errors_of_the_device_and_of_this_library_are_raised(error, fake):
    fake("matmul", forward=error)
    with pytest.raises(type(error), match=str(error)):
        matmul()
    assert devices.in_triton(torch.zeros(1))


def test_old_triton_falls_back(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.4.0")
    for name in [name for name in sys.modules if name.startswith("logchain.kernels.gpu")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(choice, "load", lambda name: choice.import_module(f"logchain.kernels.{name}"))
    with pytest.warns(RuntimeWarning, match="Triton .ImportError: Triton 3.5 or later .*3.4.0.* install Triton 3.5"):
        matmul()


def test_warning_names_the_kernel(fake):
    def broken_kernel():
        triton.language.static_assert(False)

    fake("matmul", forward=lambda a, b: triton.runtime.jit.JITFunction(broken_kernel)[(1,)]())
    with pytest.warns(RuntimeWarning, match="kernel broken_kernel .*: torch operations compute on the GPU"):
        matmul()


def test_cpu_and_meta_device_are_not_affected(fake, plain, monkeypatch):
    fake("matmul", forward=AssertionError)
    monkeypatch.setattr(devices, "on_gpu", lambda tensor: False)
    with devices.use("triton"):
        matmul()
        on_meta = torch.zeros(2, 2, device="meta")
        assert logchain.matmul(on_meta, on_meta).is_meta and not devices.in_triton(on_meta)


def results(operands, lengths):
    x, bulk, _ = operands = [tensor.clone().requires_grad_() for tensor in operands]
    values = [logchain.product(*operands, lengths=lengths), logchain.matmul(x.mT, x)]
    values += [logchain.matrix_product(bulk.log()), logchain.prefix_products(bulk.log())]
    gradients = [torch.autograd.grad(value.sum(), operands, materialize_grads=True) for value in values]
    return values, gradients, logchain.viterbi(*operands, lengths=lengths)


def test_torch_operations_on_gpu_give_results_of_plain(kernels, plain, monkeypatch):
    operands = [tensor.to(kernels) for tensor in dense(torch.float32, v=5, c=4)[:3]]
    lengths = torch.tensor([[5], [2], [3]], device=kernels).expand(operands[0].shape[:2])
    a, outside = operands[0][0].mT.detach().requires_grad_(), lengths * 2 - 4
    with devices.use("plain"):
        computed = results(operands, lengths)
        assert torch.equal(logchain.product(*operands, lengths=outside).isnan(), (outside > 5) | (outside < 1))
        assert torch.autograd.grad(logchain.matmul(a, a.detach().mT).sum(), a)[0].is_contiguous()
        assert torch.equal((logchain.viterbi(*operands, lengths=outside).states < 0).all(-1), outside != 2)
    monkeypatch.setattr(devices, "on_gpu", lambda tensor: False)
    torch.testing.assert_close(computed, results(operands, lengths), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # in the interpreter, of sequences without weight
@pytest.mark.parametrize(("subject", "dtype"), [("product", torch.float32), ("memory_budget", torch.float64)])
@pytest.mark.parametrize("order", [("auto", "auto"), ("triton", "plain"), ("plain", "triton")], ids="-".join)
def test_backward_by_a_backend_that_forward_did_not_use_is_exact(order, subject, dtype, kernels, fake):
    chain = FAMILIES["detour"](dtype, v=5, c=4, n=3, t=1, each=True)  # which underflows
    chain.x[2, 0, 2] = torch.nan  # has no weight
    operands = [operand.to(kernels).requires_grad_() for operand in chain[:3]]
    weight = torch.tensor([[1.0], [3.0], [0.0]], dtype=torch.float64, device=kernels)
    if order == ("auto", "auto"):
        fake("backward", backward=RESOURCES)

    def gradients(*order):
        with devices.use(order[0]):
            value = SUBJECTS[subject](*operands, lengths=[5, 4, 5], log_params=chain.log_params)["log_norm"]
        with devices.use(order[1]):
            return torch.autograd.grad(value, operands, weight.to(value.dtype))

    with pytest.warns(RuntimeWarning) if "auto" in order else devices.use("auto"):
        computed = gradients(*order)
    torch.testing.assert_close(computed, gradients("plain", "plain"))
    assert not any(gradient.isnan().any() for gradient in computed)


def test_tree_that_does_not_compile_computes_with_torch(fake):
    stack, weight, out = torch.randn(2, 5, 3, 3), torch.rand(2, 3, 3), torch.empty(2, 3, 3)
    stacks, into, expected = (
        devices.module("product", stack),
        torch.full_like(stack, torch.nan),
        torch.empty_like(stack),
    )
    plain_product.product_gradient(weight, stack, expected)
    fake("product", product_gradient=RESOURCES, write_product=RESOURCES)
    with devices.use("plain"):
        stacks.product_gradient(weight, stack, into)  # without a warning
    torch.testing.assert_close(into, expected)
    with pytest.warns(RuntimeWarning):
        stacks.product_gradient(weight, stack, into.fill_(torch.nan))
    torch.testing.assert_close(into, expected)
    devices.use("auto")
    message = "inplace: expected .* got .*OutOfResources.*; call again"
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match=message):
        stacks.write_product(stack, out, inplace=True)
    stacks.write_product(stack.clone(), out, inplace=True)
    torch.testing.assert_close(out, logchain.matrix_product(stack))
    devices.use("auto")
    fake("product", write_product=MISSING)
    with pytest.warns(RuntimeWarning):
        stacks.write_product(stack, out.zero_(), inplace=True)
    assert out.count_nonzero() == out.numel()
