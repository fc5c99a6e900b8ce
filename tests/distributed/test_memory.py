"""A rank allocates what its own variables take, however many the others hold."""

import pytest
import torch

from logchain import distributed
from logchain.memory import peak_bytes

# Bytes of what does not depend on the number of variables: gradients of matrices, headers, the exchanged messages.
SLACK = 2**17


def peak(rank: int, sizes: tuple[int, ...], c: int, strategy: str) -> int:
    """The most bytes that a rank allocates for the log-partition and its gradients."""
    x = torch.zeros(sizes[rank], c, requires_grad=True)
    bulk, p0 = torch.full((1, c, c), 1 / c, requires_grad=True), torch.ones(c, requires_grad=True)

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(distributed.product(x, bulk, p0, strategy=strategy), (x, bulk, p0))

    return peak_bytes(gradients)


def peak_of_marginals(rank: int, sizes: tuple[int, ...], c: int) -> int:
    x, bulk, p0 = torch.zeros(sizes[rank], c), torch.full((1, c, c), 1 / c), torch.ones(c)
    return peak_bytes(lambda: list(distributed.marginals(x, bulk, p0)[:1]))


def assert_own(peaks: list[int], sizes: tuple[int, ...], c: int) -> None:
    """The messages that a rank keeps and the gradient of its x are twice the size of its x."""
    for found, size in zip(peaks, sizes, strict=True):
        assert 4 * size * c <= found <= 2 * 4 * size * c + SLACK


@pytest.mark.parametrize("strategy", ["vectors", "products", "overlapped"])
@pytest.mark.parametrize("long", [0, 1, 2])
def test_gradients_take_twice_a_rank_s_own_operands(teams, strategy, long):
    sizes = tuple(100_000 if rank == long else 3000 for rank in range(3))
    assert_own(teams(3).values(peak, sizes, 8, strategy), sizes, 8)


@pytest.mark.parametrize("long", [0, 1])
def test_two_ranks(teams, long):
    sizes = (200_000, 10) if long == 0 else (10, 200_000)
    assert_own(teams(2).values(peak, sizes, 16, "auto"), sizes, 16)
    assert_own(teams(2).values(peak_of_marginals, sizes, 16), sizes, 16)
