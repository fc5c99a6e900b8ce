"""What only a device can show: CUDA graphs, no waiting for it, memory, compiled code, and agreement with a CPU."""

import pytest
import torch

import logchain
from tests.families import FAMILIES, dense
from tests.kernels.gpu.steps import F32, STEPS, case, chain_step, on_device, waiting_raises

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device")]

MB = 1_000_000


@pytest.mark.parametrize("name", STEPS)
def test_a_cuda_graph_replays_it(name):
    step, operands = case(name)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(operands)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(operands)
    with torch.no_grad():
        for operand in operands:
            operand.mul_(0.5)
    graph.replay()
    for one, other in zip(found, step(operands), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", STEPS)
def test_nothing_waits_for_the_device(name):
    step, operands = case(name)
    step(operands)
    torch.cuda.synchronize()
    with waiting_raises():
        step(operands)
        with pytest.raises(RuntimeError, match="synchronizing"):  # as the step would have been told
            operands[0].sum().item()
    operands[0].sum().item()


@pytest.mark.parametrize("name", ["shared", "each", "matmul", "tree"])
def test_inductor_compiles_it_into_one_graph(name):
    step, operands = case(name)
    torch._dynamo.reset()
    function = {"matmul": logchain.matmul, "tree": logchain.matrix_product}.get(name, logchain.product)
    compiled = torch.compile(function, fullgraph=True)
    torch.testing.assert_close(compiled(*operands), function(*operands), rtol=0, atol=0)
    found = torch.autograd.grad(compiled(*operands).sum(), operands)
    for one, other in zip(found, torch.autograd.grad(function(*operands).sum(), operands), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", STEPS)
def test_runs_agree_to_the_last_bit(name):
    step, operands = case(name)
    for one, other in zip(step(operands), step(operands), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", ["dense", "left_to_right", "detour"])
def test_it_agrees_with_the_cpu(family):
    chain = FAMILIES[family](F32, n=4, t=1, v=33, c=20)
    with torch.no_grad():
        here = logchain.product(*chain[:3], log_params=chain.log_params)
        there = logchain.product(*(t.cuda() for t in chain[:3]), log_params=chain.log_params)
    torch.testing.assert_close(there.cpu(), here, rtol=2.0**-22, atol=2e-5)


@pytest.mark.parametrize("family", ["dense", "left_to_right", "detour"])
def test_questions_agree_with_the_cpu(family):
    chain = FAMILIES[family](F32, n=4, t=1, v=33, c=20)
    options = {"log_params": chain.log_params, "lengths": [33, 5, 20, 1]}
    there = [tensor.cuda() for tensor in chain[:3]]
    for question in (logchain.forward_backward, logchain.entropy, logchain.marginals, logchain.viterbi):
        found, expected = question(*there, **options), question(*chain[:3], **options)
        for one, other in zip(*(t if isinstance(t, tuple) else (t,) for t in (found, expected)), strict=True):
            if one is not None:
                torch.testing.assert_close(one.cpu(), other, rtol=2.0**-20, atol=4e-5)
    paths = logchain.sample(*there, 50, generator=torch.Generator("cuda").manual_seed(0), **options)
    assert logchain.log_prob(*there, paths, **options).isfinite().all()
    best = logchain.topk_paths(*there, 3, **options).scores
    torch.testing.assert_close(
        best.cpu(), logchain.topk_paths(*chain[:3], 3, **options).scores, rtol=2.0**-20, atol=4e-5
    )


def test_the_forums_case_takes_under_60_mb():
    chain = dense(F32, n=500, t=1, v=40, c=200)
    operands = on_device(chain)
    chain_step(operands)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    chain_step(operands)
    assert torch.cuda.max_memory_allocated() - before < 60 * MB


@pytest.mark.parametrize("strategy", ["sequential", "chunked"])
def test_allocations_do_not_grow_with_v(strategy):
    def count(v):
        operands = on_device(dense(F32, n=20, t=1, v=v, c=16))
        chain_step(operands, strategy=strategy)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        chain_step(operands, strategy=strategy)
        return torch.cuda.memory_stats()["allocation.all.allocated"] - before

    assert count(20) == count(160)


def test_a_tree_in_place_takes_no_stack():
    stack = torch.randn(64, 256, 256, device="cuda")
    logchain.matrix_product(stack.clone(), inplace=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logchain.matrix_product(stack, inplace=True)
    assert torch.cuda.max_memory_allocated() - before < stack.numel() * 4 / 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_another_device_than_the_current_one():
    chain = dense(F32)
    out = logchain.product(*(tensor.to("cuda:1") for tensor in chain[:3]))
    torch.testing.assert_close(out.cpu(), logchain.product(*chain[:3]))


@pytest.mark.parametrize("wanted", [[0, 1, 2], [1]], ids=["all gradients", "that of bulk"])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("hosts", [[0], [1], [0, 1]], ids=["x", "bulk", "x and bulk"])
def test_operands_on_the_host_are_moved_in_pieces(hosts, each, wanted):
    chain = dense(F32, each=each, n=4, t=1, v=700, c=20)
    mixed = [tensor if i in hosts else tensor.cuda() for i, tensor in enumerate(chain[:3])]
    there = [tensor.cuda() for tensor in chain[:3]]
    for i in wanted:
        mixed[i].requires_grad_()
        there[i].requires_grad_()
    for lengths in (None, [700, 1, 350, 699], torch.tensor([700, 2, 3, 4]).cuda()):
        expected = logchain.product(*there, lengths=lengths)
        for budget in (2_000_000, 10**9):
            out = logchain.product(*mixed, lengths=lengths, memory_budget=budget)
            assert out.device == there[0].device
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
            found = torch.autograd.grad(out.sum(), [mixed[i] for i in wanted])
            truth = torch.autograd.grad(expected.sum(), [there[i] for i in wanted], retain_graph=True)
            for i, one, other in zip(wanted, found, truth, strict=True):
                assert one.device == mixed[i].device
                torch.testing.assert_close(one, other.to(one.device), rtol=1e-4, atol=1e-4)
            with torch.no_grad():
                value = logchain.product(*mixed, lengths=lengths, memory_budget=budget)
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


def on_the_host(v=20_000):
    """x [32, v, 32] on the host, and what goes with it."""
    x, bulk = torch.randn(32, v, 32), torch.rand(1, 32, 32)
    return [x.requires_grad_(), bulk.cuda().requires_grad_(), torch.rand(32).cuda().requires_grad_()]


def test_the_budget_bounds_what_a_device_holds():
    operands, budget = on_the_host(), 24 * MB
    assert operands[0].nbytes > 3 * budget
    chain_step(on_the_host(100), memory_budget=budget)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    chain_step(operands, memory_budget=budget)
    assert torch.cuda.max_memory_allocated() - before <= budget + MB


def test_pieces_are_moved_while_others_are_computed():
    operands = on_the_host()
    chain_step(operands, memory_budget=24 * MB)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        chain_step(operands, memory_budget=24 * MB)
        torch.cuda.synchronize()
    spans = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [event.time_range for event in spans if not event.name.startswith("Mem")]
    for way in ("Memcpy HtoD", "Memcpy DtoH"):
        copies = [event.time_range for event in spans if event.name.startswith(way)]
        beside = [any(one.start < other.end and other.start < one.end for other in kernels) for one in copies]
        assert sum(beside) > len(beside) / 2
