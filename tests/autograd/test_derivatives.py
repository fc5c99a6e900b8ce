"""Derivatives of `logchain.product`, first and second, agree with finite differences and with a plain recursion."""

import numpy as np
import pytest
import torch

import logchain
from tests import contract
from tests.contract import Truth
from tests.families import F32, F64, FAMILIES

SMALL = {"v": 4, "c": 3, "n": 2, "t": 1}


@pytest.mark.parametrize(
    "name", ["sparse", "left_to_right", "one_dead", "bakis_jump", "detour", "abyss", "sharp", "v1", "c1"]
)
@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
@pytest.mark.parametrize("one_matrix", [False, True])
def test_finite_differences_of_possible_entries(name, log, one_matrix):
    """Entries that are exactly zero stay zero, so that only the others are varied."""
    chain = FAMILIES[name](log=log, **({"n": 2, "t": 1} if name[-1].isdigit() else SMALL | {"seed": 3}))
    chain = chain._replace(bulk=chain.bulk[..., :1, :, :]) if one_matrix else chain
    options = {"log_params": chain.log_params}
    possible = logchain.product(*chain[:3], **options).isfinite()
    assert possible.any()
    zero = -torch.inf if chain.log_params else 0.0
    hard = [chain.x.isneginf(), chain.bulk == zero, chain.p0 == zero]

    def value(*varied):
        pairs = zip(hard, chain[:3], varied, strict=True)
        operands = (torch.where(mask, original, tensor) for mask, original, tensor in pairs)
        return logchain.product(*operands, **options)[possible]

    varied = [torch.where(mask, 0.5, tensor).requires_grad_() for mask, tensor in zip(hard, chain[:3], strict=True)]
    assert torch.autograd.gradcheck(value, varied)
    assert torch.autograd.gradgradcheck(value, varied, fast_mode=name not in ("sparse", "one_dead"))


def pairwise(x, bulk, p0):
    """The definition on logarithmic parameters, one `logsumexp` per step, for finite operands."""
    message = p0 + x[..., 0, :]
    for i in range(1, x.shape[-2]):
        message = torch.logsumexp(message[..., :, None] + bulk[..., i - 1, :, :], -2) + x[..., i, :]
    return torch.logsumexp(message, -1)


def second(function, operands, directions):
    """The directional derivative of the gradient: covariances of the counts."""
    operands = [operand.clone().requires_grad_() for operand in operands]
    first = torch.autograd.grad(function(*operands).sum(), operands, create_graph=True)
    slope = sum((gradient * direction).sum() for gradient, direction in zip(first, directions, strict=True))
    return torch.autograd.grad(slope, operands)


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", ["dense", "detour", "abyss", "sharp", "tiny_transitions", "v2"])
def test_second_derivatives_in_float32(name, each):
    """The covariances with the least certain state and the least certain transition are as good as a gradient."""
    chain = FAMILIES[name](F32, each=each, log=True)
    truth = Truth(chain)
    directions = [torch.zeros(operand.shape) for operand in chain[:3]]
    for i, posterior in enumerate((truth.states, truth.transitions)):
        variance = contract.sum_to(posterior * (1 - posterior), directions[i].shape)
        directions[i].view(-1)[variance.argmax()] = 1.0
        found = second(lambda *operands: logchain.product(*operands, log_params=True), chain[:3], directions)
        doubles = [tensor.double() for tensor in chain[:3]]
        expected = second(pairwise, doubles, [direction.double() for direction in directions])
        assert expected[i].abs().max() > 1e-3
        for operand, gradient, covariance in zip(chain[:3], found, expected, strict=True):
            assert gradient.dtype == F32
            counted = chain.x[..., 0, 0].numel() if operand is not chain.x and not each else 1
            bound = truth.gradient_bound(np.ones_like(truth.states)).max() * counted
            assert (gradient.double() - covariance).abs().max() <= bound
        directions[i].zero_()


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
@pytest.mark.parametrize("name", ["sparse", "left_to_right", "one_dead", "impossible", "bakis_jump"])
def test_second_derivatives_at_forbidden_entries_are_zero(name, log):
    chain = FAMILIES[name](F32, log=log)
    zero = -torch.inf if log else 0.0
    ones = [torch.ones_like(operand) for operand in chain[:3]]
    found = second(lambda *operands: logchain.product(*operands, log_params=log), chain[:3], ones)
    for gradient, forbidden in zip(found, (chain.x.isneginf(), chain.bulk == zero, chain.p0 == zero), strict=True):
        assert gradient.isfinite().all() and (gradient[forbidden] == 0).all()


ENDS = {
    "sequential": {"lengths": [400, 2]},
    "segments": {"lengths": [400, 2], "strategy": "segments:2:1"},
    "checkpoints": {"lengths": [400, 2], "memory_budget": 16_000},
    "packed": {"cu_seqlens": [0, 400, 402]},
    "structure": {"lengths": [400, 2]},
}


@pytest.mark.parametrize("case", ENDS)
def test_lengths_changed_before_the_backward_pass_change_no_gradient(case):
    """A change is an error, or has no influence."""
    x = torch.randn((402, 3) if case == "packed" else (2, 400, 3), dtype=F64, requires_grad=True)
    bulk, p0 = torch.rand(1, 3, 3, dtype=F64), torch.rand(3, dtype=F64)
    bulk = logchain.transitions.Banded(bulk[0], (0, 1, -1)) if case == "structure" else bulk
    options = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in ENDS[case].items()}
    ends = options.get("lengths", options.get("cu_seqlens"))
    (expected,) = torch.autograd.grad(logchain.product(x, bulk, p0, **options).sum(), x)
    value = logchain.product(x, bulk, p0, **options).sum()
    ends[1] -= 1
    try:
        (gradient,) = torch.autograd.grad(value, x)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert torch.equal(gradient, expected)


def reordered(tensor):
    return tensor.repeat_interleave(2, -1)[..., ::2] if tensor.dim() else tensor


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("each", [False, True], ids=["one_matrix", "each"])
def test_hooks_of_saved_tensors_may_change_strides(batch, each):
    x = torch.randn(5, *batch, 4).movedim(0, -2)
    bulk = (torch.rand(*batch, 4, 4, 4) if each else torch.rand(1, 4, 4)).mT
    operands = [one.detach().requires_grad_() for one in (x, bulk, torch.rand(4))]
    expected = torch.autograd.grad(logchain.product(*operands).sum(), operands)
    hooks = torch.autograd.graph.saved_tensors_hooks
    for context in (torch.autograd.graph.save_on_cpu(), hooks(reordered, reordered)):
        with context:
            value = logchain.product(*operands).sum()
        assert all(map(torch.equal, torch.autograd.grad(value, operands), expected))
