"""Messages as the flat float64 rows that ranks exchange."""

import math

import torch
from torch import Tensor

from ..kernels.message import Message, normalised
from ..kernels.numbers import exact_sum
from ..kernels.plain import matmul as log_matmul

# the sizes (g, m, c) of a message
Grid = tuple[int, int, int]


def size_of(grid: Grid) -> int:
    """The length of a row that holds a message with its scale."""
    g, m, c = grid
    return g * m * (c + 2)


def row_of(size: int, *parts: Tensor) -> Tensor:
    """The parts of a message, or of a product, as a row of this size, filled up with zeros."""
    row = torch.cat([part.flatten() for part in parts])
    return torch.nn.functional.pad(row, (0, size - len(row)))


def message_of(row: Tensor, grid: Grid, device: torch.device) -> Message:
    """The message that a row holds."""
    count = math.prod(grid)
    both = row[: size_of(grid)].to(device)
    return unless_infinite(Message(both[:count].view(grid), both[count:].view(2, *grid[:2])))


def unless_infinite(message: Message) -> Message:
    """The message, with NaN where its sum is infinite, so that nothing is taken for impossible later."""
    infinite = (message.scale[0] == torch.inf)[..., None]
    return Message(message.values.masked_fill(infinite, torch.nan), message.scale)


def times(values: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Messages (g, m, c) behind matrices (g, m, c, c), logarithms with sum 1, and the logarithm of the sum (g, m)."""
    after = log_matmul.forward(values.flatten(0, 1).unsqueeze(1), matrices.flatten(0, 1), torch.float64)[0]
    return normalised(after.view(values.shape))


def log_norm_of(ahead: Tensor, behind: Tensor, scales: list[Tensor]) -> Tensor:
    """The log-partition (g, m), of a forward and a backward message (g, m, c) and terms (k, g, m) of their scales."""
    together = torch.logsumexp(ahead + behind, -1)
    return torch.stack(exact_sum(torch.cat([*scales, together[None]]))).sum(0)
