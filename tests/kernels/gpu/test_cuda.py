"""What only a device can show: CUDA graphs, no waiting for it, memory, compiled code, and agreement with a CPU."""

import pytest
import torch

import logchain
from tests.families import dense
from tests.kernels.gpu.steps import F32, STEPS, run, waiting_raises

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device")]

MB = 1_000_000
EACH_STEP = pytest.mark.parametrize(("function", "operands"), STEPS.values(), ids=STEPS)


def on_device(operands) -> list[torch.Tensor]:
    return [operand.detach().cuda().requires_grad_() for operand in operands]


def assert_near(results, expected, tolerance: float = 1e-4) -> None:
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), value.cpu(), rtol=tolerance / 10, atol=tolerance)


@EACH_STEP
def test_cuda_graph_replays_step_without_waiting(function, operands):
    operands, side, graph = on_device(operands()), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(function, operands)
        torch.cuda.synchronize()
        with waiting_raises():
            run(function, operands)
            with pytest.raises(RuntimeError, match="synchronizing"):  # as the step would have raised
                operands[0].sum().item()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        results = run(function, operands)
    with torch.no_grad():
        for operand in operands:
            operand.mul_(0.5)
    graph.replay()
    assert_near(results, run(function, operands), tolerance=0.0)


@pytest.mark.parametrize("name", ["shared", "separate", "matmul", "matrix_product"])
def test_inductor_compiles_step_into_one_graph(name):
    function, operands = STEPS[name][0], on_device(STEPS[name][1]())
    torch._dynamo.reset()
    assert_near(run(torch.compile(function, fullgraph=True), operands), run(function, operands))


def peak(function, *args, **options) -> int:
    """The bytes that a call allocates at its peak, after a first one."""
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function(*args, **options)
    return torch.cuda.max_memory_allocated() - before


def test_main_job_takes_under_60_mb():
    assert peak(run, logchain.product, on_device(dense(F32, n=500, t=1, v=40, c=200)[:3])) < 60 * MB


@pytest.mark.parametrize("c", [64, 200])
def test_matrix_product_takes_half_a_stack_or_bounded_memory(c):
    stack = torch.randn(4, 1000, c, c, device="cuda")
    assert peak(logchain.matrix_product, stack) <= 0.6 * stack.nbytes
    assert peak(logchain.matrix_product, stack, inplace=True) <= 2**26


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("hosts", [[0], [1], [0, 1]], ids=["x", "bulk", "x and bulk"])
def test_operands_on_host_are_moved_in_pieces(hosts, each):
    operands = dense(F32, each=each, n=4, t=1, v=700, c=20)[:3]
    mixed = [(tensor if i in hosts else tensor.cuda()).requires_grad_() for i, tensor in enumerate(operands)]
    for lengths in (None, [700, 1, 350, 699], torch.tensor([700, 2, 3, 4]).cuda()):
        results = run(logchain.product, mixed, lengths=lengths, memory_budget=2 * MB)
        assert [result.device for result in results[1:]] == [tensor.device for tensor in mixed]
        assert_near(results, run(logchain.product, on_device(operands), lengths=lengths), tolerance=1e-3)


def test_budget_bounds_memory_and_pieces_are_moved_while_others_are_computed():
    x, budget = torch.randn(32, 20_000, 32).requires_grad_(), 24 * MB
    operands = [x, *on_device([torch.rand(1, 32, 32), torch.rand(32)])]
    assert x.nbytes > 3 * budget
    assert peak(run, logchain.product, operands, memory_budget=budget) <= budget + MB
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(logchain.product, operands, memory_budget=budget)
        torch.cuda.synchronize()
    spans = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [event.time_range for event in spans if not event.name.startswith("Mem")]
    for way in ("Memcpy HtoD", "Memcpy DtoH"):
        copies = [event.time_range for event in spans if event.name.startswith(way)]
        overlapping = [any(copy.start < other.end and other.start < copy.end for other in kernels) for copy in copies]
        assert sum(overlapping) > len(overlapping) / 2
