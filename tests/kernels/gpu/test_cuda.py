"""What only a device can show: CUDA graphs, no waiting for it, memory, compiled code, and agreement with a CPU."""

import pytest
import torch

import logchain
from tests.families import dense
from tests.kernels.gpu.steps import F32, STEPS, case, waiting_raises, with_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device")]

MB = 1_000_000


@pytest.mark.parametrize("name", STEPS)
def test_step_agrees_with_cpu(name):
    step, operands = case(name)
    _, on_cpu = case(name, "cpu")
    for result, expected in zip(step(operands), step(on_cpu), strict=True):
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", STEPS)
def test_cuda_graph_replays_step(name):
    step, operands = case(name)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(operands)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(operands)
    with torch.no_grad():
        for operand in operands:
            operand.mul_(0.5)
    graph.replay()
    for result, expected in zip(results, step(operands), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", STEPS)
def test_step_does_not_wait_for_device(name):
    step, operands = case(name)
    step(operands)
    torch.cuda.synchronize()
    with waiting_raises():
        step(operands)
        with pytest.raises(RuntimeError, match="synchronizing"):  # as the step would have raised
            operands[0].sum().item()


@pytest.mark.parametrize("name", ["shared", "separate", "matmul", "matrix_product"])
def test_inductor_compiles_step_into_one_graph(name):
    _, operands = case(name)
    torch._dynamo.reset()
    function = STEPS[name][1]
    compiled = torch.compile(function, fullgraph=True)
    for result, expected in zip(*(with_gradients(f, operands) for f in (compiled, function)), strict=True):
        torch.testing.assert_close(result, expected)


def peak(function, *args, **options) -> int:
    """The bytes that a call allocates at its peak, after a first one."""
    function(*args, **options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function(*args, **options)
    return torch.cuda.max_memory_allocated() - before


def test_main_job_takes_under_60_mb():
    operands = [tensor.cuda().requires_grad_() for tensor in dense(F32, n=500, t=1, v=40, c=200)[:3]]
    assert peak(with_gradients, logchain.product, operands) < 60 * MB


def test_tree_in_place_takes_no_stack():
    stack = torch.randn(64, 256, 256, device="cuda")
    assert peak(logchain.matrix_product, stack, inplace=True) < stack.nbytes / 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_device_that_is_not_current():
    chain = dense(F32)
    out = logchain.product(*(tensor.to("cuda:1") for tensor in chain[:3]))
    torch.testing.assert_close(out.cpu(), logchain.product(*chain[:3]))


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("hosts", [[0], [1], [0, 1]], ids=["x", "bulk", "x and bulk"])
def test_operands_on_host_are_moved_in_pieces(hosts, each):
    operands = dense(F32, each=each, n=4, t=1, v=700, c=20)[:3]
    mixed = [(tensor if i in hosts else tensor.cuda()).requires_grad_() for i, tensor in enumerate(operands)]
    there = [tensor.detach().cuda().requires_grad_() for tensor in operands]
    for lengths in (None, [700, 1, 350, 699], torch.tensor([700, 2, 3, 4]).cuda()):
        expected = with_gradients(logchain.product, there, lengths=lengths)
        for budget in (2_000_000, 10**9):
            results = with_gradients(logchain.product, mixed, lengths=lengths, memory_budget=budget)
            assert [result.device for result in results[1:]] == [tensor.device for tensor in mixed]
            for result, truth in zip(results, expected, strict=True):
                torch.testing.assert_close(result.cuda(), truth, rtol=1e-4, atol=1e-4)


def on_host(v: int) -> list[torch.Tensor]:
    """x [32, v, 32] on the host, and bulk and p0 on the device."""
    operands = torch.randn(32, v, 32), torch.rand(1, 32, 32).cuda(), torch.rand(32).cuda()
    return [operand.requires_grad_() for operand in operands]


def test_budget_bounds_memory_on_device():
    operands, budget = on_host(20_000), 24 * MB
    assert operands[0].nbytes > 3 * budget
    assert peak(with_gradients, logchain.product, operands, memory_budget=budget) <= budget + MB


def test_pieces_are_moved_while_others_are_computed():
    operands = on_host(20_000)
    with_gradients(logchain.product, operands, memory_budget=24 * MB)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with_gradients(logchain.product, operands, memory_budget=24 * MB)
        torch.cuda.synchronize()
    spans = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [event.time_range for event in spans if not event.name.startswith("Mem")]
    for way in ("Memcpy HtoD", "Memcpy DtoH"):
        copies = [event.time_range for event in spans if event.name.startswith(way)]
        overlapping = [any(copy.start < run.end and run.start < copy.end for run in kernels) for copy in copies]
        assert sum(overlapping) > len(overlapping) / 2
