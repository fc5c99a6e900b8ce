"""Sums and products of log-probabilities, as the layers that a circuit is put together from."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..arguments import check_tensor
from ..matmul import matmul
from .checks import check_count, check_last_axes
from .log_weights import LogWeights
from .parameters import arithmetic

# the choice of one of the last axis' log-weights: [..., c] to int64 [...]
Choice = Callable[[Tensor], Tensor]


class SumLayer(torch.nn.Module):
    r"""`out_o = logsumexp_i (x_i + log W_io)`: every output is a mixture of the inputs, with weights of its own.

    Args:
        in_units: c, how many are mixed.
        out_units: c', how many mixtures there are.
        lead: sizes `[*L]` of axes before the units along which weights differ: variables, repetitions.
        generator: where the initial weights come from, uniform over the simplex.

    `weights`: `LogWeights` `[*L, c, c']` that sum to 1 over the inputs. Call: `[..., *L, c]` to `[..., *L, c']` in
    nats, in float32 at least; exact at any offset, and exactly -inf where all that is mixed is.

    Raises:
        TypeError: a size is no integer, or x no floating tensor.
        ValueError: a size is not positive, or the shape of x does not end in `[*L, c]`.

    Cost: `c c'` multiply-adds for each of `[..., *L]`, as one batched product of matrices; see `logchain.matmul`.

    >>> layer = SumLayer(2, 1)
    >>> layer.weights.set(torch.tensor([[0.25], [0.75]]))
    >>> layer(torch.tensor([[0.0, -torch.inf], [-1000.0, -1000.0]]))
    tensor([[   -1.3863],
            [-1000.0000]], grad_fn=<SelectBackward0>)
    """

    def __init__(
        self, in_units: int, out_units: int, lead: tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        check_count("in_units", in_units)
        check_count("out_units", out_units)
        check_count("lead", *lead)
        self.shape = (*lead, in_units)
        self.weights = LogWeights(*lead, in_units, out_units, dim=-2, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """The mixtures `[..., *L, c']`."""
        # rows of one leading entry are one matrix: nothing is copied or expanded
        return matmul(_check(x, self.shape).unsqueeze(-2), self.weights())[..., 0, :]

    def best(self, x: Tensor) -> Tensor:
        """`max_i (x_i + log W_io)`, the best term of each mixture: `[..., *L, c']`."""
        x = _check(x, self.shape)
        # one output at a time, so that no [..., c, c'] is held
        return torch.stack([(x + column).amax(-1) for column in self.weights().unbind(-1)], -1)

    def choose(self, x: Tensor, units: Tensor, choice: Choice) -> Tensor:
        """Which input each given output takes: int64 `[..., *L]` to int64 `[..., *L]`.

        `choice`: takes one of log-weights `[..., c]` along the last axis: `torch.argmax`, or a draw.
        """
        table = self.weights().movedim(-2, -1)  # (*L, c', c)
        *lead, out_units, in_units = table.shape
        groups = torch.arange(table.shape[:-2].numel(), device=units.device).view(lead) * out_units
        return choice(x + table.reshape(-1, in_units)[groups + units])


class ProductLayer(torch.nn.Module):
    r"""`out_j = sum of x_i` over neighbours i: independent variables side by side, unit by unit.

    Args:
        arity: how many neighbours are multiplied.

    Call: `[..., f, c]` to `[..., ceil(f / arity), c]` in nats, in float32 at least. A last group that is not full is
    multiplied alone.

    Raises:
        TypeError: the arity is no integer, or x no floating tensor.
        ValueError: the arity is not positive, or x has less than two axes.

    >>> ProductLayer()(torch.tensor([[1.0], [2.0], [3.0]]))
    tensor([[3.],
            [3.]])
    """

    def __init__(self, arity: int = 2) -> None:
        super().__init__()
        check_count("arity", arity)
        self.arity = arity

    def forward(self, x: Tensor) -> Tensor:
        """The products `[..., ceil(f / arity), c]`."""
        check_tensor("x", x, 2)
        x = arithmetic(x)
        *batch, f, c = x.shape
        full = f - f % self.arity
        products = x[..., :full, :].reshape(*batch, full // self.arity, self.arity, c).sum(-2)
        return products if full == f else torch.cat([products, x[..., full:, :].sum(-2, keepdim=True)], -2)

    def choose(self, x: Tensor, units: Tensor, choice: Choice) -> Tensor:
        """The unit of a product is that of all its factors: int64 `[..., ceil(f / arity)]` to `[..., f]`."""
        return units.repeat_interleave(self.arity, -1)[..., : x.shape[-2]]

    def extra_repr(self) -> str:
        """The arity."""
        return f"arity={self.arity}"


class CPLayer(torch.nn.Module):
    r"""`out_jo = sum_i logsumexp_k (x_ik + log W_iko)` over neighbours i: a product of mixtures.

    A tensor of weights over the units of all neighbours is the sum of outer products: a canonical polyadic
    decomposition.

    Args:
        num_inputs: f, how many inputs stand side by side; each has weights of its own.
        in_units: c.
        out_units: c'.
        arity: how many neighbours are multiplied.
        lead: sizes `[*L]` of axes before the inputs along which weights differ.
        generator: where the initial weights come from, uniform over the simplex.

    Call: `[..., *L, f, c]` to `[..., *L, ceil(f / arity), c']` in nats; see `SumLayer` and `ProductLayer`.

    Raises:
        TypeError: a size is no integer, or x no floating tensor.
        ValueError: a size is not positive, or the shape of x does not end in `[*L, f, c]`.

    Cost: `f c c'` multiply-adds.

    >>> CPLayer(3, 8, 4)(torch.zeros(10, 3, 8)).shape
    torch.Size([10, 2, 4])
    """

    def __init__(
        self,
        num_inputs: int,
        in_units: int,
        out_units: int,
        *,
        arity: int = 2,
        lead: tuple[int, ...] = (),
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_count("num_inputs", num_inputs)
        self.sums = SumLayer(in_units, out_units, (*lead, num_inputs), generator=generator)
        self.products = ProductLayer(arity)

    def forward(self, x: Tensor) -> Tensor:
        """The products `[..., *L, ceil(f / arity), c']`."""
        products: Tensor = self.products(self.sums(x))
        return products

    def best(self, x: Tensor) -> Tensor:
        """The same of the best term of each mixture."""
        products: Tensor = self.products(self.sums.best(x))
        return products

    def choose(self, x: Tensor, units: Tensor, choice: Choice) -> Tensor:
        """Which input units the given outputs take: int64 `[..., *L, ceil(f / arity)]` to `[..., *L, f]`."""
        return self.sums.choose(x, self.products.choose(x, units, choice), choice)


class TuckerLayer(torch.nn.Module):
    r"""`out_jo = logsumexp_kl (x_2j,k + x_2j+1,l + log W_jklo)`: mixtures of all pairs of two neighbours' units.

    Args:
        num_inputs: f, how many inputs stand side by side; each pair has weights of its own.
        in_units: c.
        out_units: c'.
        lead: sizes `[*L]` of axes before the inputs along which weights differ.
        generator: where the initial weights come from, uniform over the simplex.

    Call: `[..., *L, f, c]` to `[..., *L, ceil(f / 2), c']` in nats. If f is odd the last input has no partner, and is
    mixed alone.

    Raises:
        TypeError: a size is no integer, or x no floating tensor.
        ValueError: a size is not positive, or the shape of x does not end in `[*L, f, c]`.

    Cost: `f c^2 c' / 2` multiply-adds, and `f c^2 / 2` numbers that are kept for the backward pass.

    Source: R. Peharz et al., "Einsum networks", ICML (2020), arXiv:2004.06231.

    >>> TuckerLayer(3, 8, 4)(torch.zeros(10, 3, 8)).shape
    torch.Size([10, 2, 4])
    """

    def __init__(
        self,
        num_inputs: int,
        in_units: int,
        out_units: int,
        *,
        lead: tuple[int, ...] = (),
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_count("num_inputs", num_inputs)
        check_count("in_units", in_units)
        self.shape = (*lead, num_inputs, in_units)
        pairs, alone = divmod(num_inputs, 2)
        self.pairs = SumLayer(in_units**2, out_units, (*lead, pairs), generator=generator) if pairs else None
        self.alone = SumLayer(in_units, out_units, (*lead, 1), generator=generator) if alone else None

    def forward(self, x: Tensor) -> Tensor:
        """The mixtures `[..., *L, ceil(f / 2), c']`."""
        paired, alone = self._split(x)
        parts = [layer(part) for layer, part in ((self.pairs, paired), (self.alone, alone)) if layer is not None]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)

    def best(self, x: Tensor) -> Tensor:
        """The same of the best pair of each mixture."""
        paired, alone = self._split(x)
        parts = [layer.best(part) for layer, part in ((self.pairs, paired), (self.alone, alone)) if layer is not None]
        return torch.cat(parts, -2)

    def choose(self, x: Tensor, units: Tensor, choice: Choice) -> Tensor:
        """Which input units the given outputs take: int64 `[..., *L, ceil(f / 2)]` to `[..., *L, f]`."""
        paired, alone = self._split(x)
        pairs = paired.shape[-2]
        parts = []
        if self.pairs is not None:
            pair = self.pairs.choose(paired, units[..., :pairs], choice)
            parts.append(torch.stack([pair // x.shape[-1], pair % x.shape[-1]], -1).flatten(-2))
        if self.alone is not None:
            parts.append(self.alone.choose(alone, units[..., pairs:], choice))
        return torch.cat(parts, -1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The products of all units of two neighbours (..., *L, pairs, c^2), and the input without a partner."""
        x = arithmetic(_check(x, self.shape))
        f = 2 * (x.shape[-2] // 2)
        left, right = x[..., 0:f:2, :], x[..., 1:f:2, :]
        return (left[..., :, None] + right[..., None, :]).flatten(-2), x[..., f:, :]


def shifted(x: Tensor) -> tuple[Tensor, Tensor]:
    """Log-weights (..., f, c) with largest entry 0 at each node, and the sum of the nodes' shifts in float64."""
    top = x.detach().amax(-1, keepdim=True)
    # an impossible node has no shift
    top = torch.where(top == -torch.inf, 0.0, top)
    return x - top, top.double().sum((-2, -1))


def _check(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    check_tensor("x", x, 1)
    check_last_axes("x", x, shape)
    return x
