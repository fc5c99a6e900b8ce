"""A workspace lends its memory to one call after the other, with gradients all the same."""

import pytest
import torch

import logchain
from logchain.memory import peak_bytes
from tests.contract import assert_contract
from tests.families import FAMILIES

V, C = 400, 16


def operands(n=6, v=V, c=C):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, v, c, generator=draw).requires_grad_()
    bulk = torch.rand(1, c, c, generator=draw).requires_grad_()
    return x, bulk, torch.rand(c, generator=draw).requires_grad_()


@pytest.mark.parametrize("backend", ["cpu", "plain"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_contract_holds_in_it(name, backend, request):
    if backend == "plain":
        request.getfixturevalue("plain")
    workspace = logchain.Workspace()
    for dtype in (torch.float32, torch.float64):
        assert_contract(FAMILIES[name](dtype=dtype), workspace=workspace)
    assert workspace.nbytes > 0


def test_steps_of_training_share_the_memory():
    workspace, (x, bulk, p0) = logchain.Workspace(), operands()

    def step():
        found = logchain.product(x, bulk, p0, workspace=workspace)
        return torch.autograd.grad(found.sum(), (x, bulk, p0))

    expected = torch.autograd.grad(logchain.product(x, bulk, p0).sum(), (x, bulk, p0))
    for _ in range(3):
        for found, truth in zip(step(), expected, strict=True):
            torch.testing.assert_close(found, truth, rtol=0, atol=0)
    messages = 6 * V * C * 4
    assert workspace.nbytes == messages
    # the gradient of x and what else is small
    fresh = peak_bytes(lambda: torch.autograd.grad(logchain.product(x, bulk, p0).sum(), (x, bulk, p0)))
    assert peak_bytes(step) < fresh - 0.9 * messages


def test_it_grows_to_the_largest_call_and_shrinks_no_more():
    workspace = logchain.Workspace()
    for v in (5, 9, 3):
        logchain.product(*operands(2, v, 4), workspace=workspace)
    assert workspace.nbytes == 2 * 9 * 4 * 4
    with torch.no_grad():
        logchain.product(*operands(2, 50, 4), workspace=workspace)
    assert workspace.nbytes == 2 * 9 * 4 * 4


def test_a_backward_pass_behind_the_next_call_is_an_error():
    workspace, (x, bulk, p0) = logchain.Workspace(), operands(2, 5, 4)
    first = logchain.product(x, bulk, p0, workspace=workspace)
    second = logchain.product(x * 2, bulk, p0, workspace=workspace)
    second.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


def test_lengths_second_derivatives_and_transforms():
    workspace, (x, bulk, p0) = logchain.Workspace(), operands(3, 5, 4)
    found = logchain.product(x, bulk, p0, lengths=[5, 1, 3], workspace=workspace)
    torch.testing.assert_close(found, logchain.product(x, bulk, p0, lengths=[5, 1, 3]))

    def curvature(**options):
        (gradient,) = torch.autograd.grad(logchain.product(x, bulk, p0, **options).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    torch.testing.assert_close(curvature(workspace=workspace), curvature())
    mapped = torch.func.vmap(lambda x: logchain.product(x, bulk, p0, workspace=workspace))(x)
    torch.testing.assert_close(mapped, logchain.product(x, bulk, p0))
    compiled = torch.compile(lambda x: logchain.product(x, bulk, p0, workspace=workspace), backend="aot_eager")
    torch.testing.assert_close(compiled(x), logchain.product(x, bulk, p0))


def test_what_it_does_not_go_with():
    x, bulk, p0 = operands(2, 5, 4)
    with pytest.raises(TypeError, match=r"workspace: expected a logchain.Workspace or None, got dict"):
        logchain.product(x, bulk, p0, workspace={})
    workspace = logchain.Workspace()
    for options in ({"memory_budget": 10**6}, {"semiring": logchain.semirings.MAX}):
        with pytest.raises(ValueError, match="workspace: expected None with"):
            logchain.product(x, bulk, p0, workspace=workspace, **options)
    with pytest.raises(ValueError, match="strategy: expected 'auto' or 'sequential' with a workspace, got 'tree'"):
        logchain.product(x, bulk, p0, workspace=workspace, strategy="tree")
