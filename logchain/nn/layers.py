"""A layer of mixtures of log-probabilities."""

import torch
from torch import Generator, Tensor

from ..arguments import check_tensor
from ..matmul import matmul
from .checks import check_count, check_last_axes, check_lead
from .log_weights import LogWeights


class SumLayer(torch.nn.Module):
    r"""Mixtures of all inputs, `out_o = logsumexp_i (x_i + log W_io)`, with weights for each output.

    Args:
        in_units: c, the number of inputs.
        out_units: c', the number of mixtures.
        lead: sizes `[*L]` of the axes before the units along which weights differ: repetitions, variables.
        generator: the source of randomness for the initial weights, uniform over the simplex.

    `weights`: `LogWeights` `[*L, c, c']`, which sum to 1 over the inputs. Call: `[..., *L, c]` to `[..., *L, c']` in
    nats, in float32 at least. Nothing underflows, however small the inputs, and the result is exactly -inf where all
    inputs of positive weight are.

    Raises:
        TypeError: a size is not an integer, or x is not a floating tensor.
        ValueError: a size is not positive, or the shape of x does not end in `[*L, c]`.

    Cost: `c c'` multiply-adds for each of `[..., *L]`, as one batched product of matrices; see `logchain.matmul`.

    >>> layer = SumLayer(2, 1)
    >>> layer.weights.set(torch.tensor([[0.25], [0.75]]))
    >>> layer(torch.tensor([[0.0, -torch.inf], [-1000.0, -1000.0]]))
    tensor([[   -1.3863],
            [-1000.0000]], grad_fn=<SelectBackward0>)
    """

    def __init__(
        self, in_units: int, out_units: int, lead: tuple[int, ...] = (), *, generator: Generator | None = None
    ) -> None:
        super().__init__()
        check_count("in_units", in_units)
        check_count("out_units", out_units)
        check_lead(lead)
        self.shape = (*lead, in_units)
        self.weights = LogWeights(*lead, in_units, out_units, dim=-2, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """The mixtures `[..., *L, c']`."""
        check_tensor("x", x, 1)
        check_last_axes("x", x, self.shape)
        # `matmul` takes all rows that share weights as one matrix, without copies
        return matmul(x.unsqueeze(-2), self.weights())[..., 0, :]
