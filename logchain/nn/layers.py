"""Layers of circuits: sums and products of log-probabilities."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..arguments import check_tensor
from ..matmul import matmul
from .checks import check_count, check_last_axes, check_lead
from .log_weights import LogWeights
from .parameters import arithmetic

# a function that picks an index along the last axis of log-weights: [..., c] to int64 [...]
Choice = Callable[[Tensor], Tensor]


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
        TypeError: a size is no integer, or x no floating tensor.
        ValueError: a size is not positive, or the shape of x does not end in `[*L, c]`.

    Cost: `c c'` multiply-adds for each of `[..., *L]`, as one batched product of matrices; see `logchain.matmul`.

    >>> layer = SumLayer(2, 1)
    >>> layer.weights.set(torch.tensor([[0.25], [0.75]]))
    >>> layer(torch.tensor([[0.0, -torch.inf], [-1000.0, -1000.0]]))
    tensor([[   -1.3863],
            [-1000.0000]], grad_fn=<SelectBackward0>)
    >>> layer.best(torch.zeros(2)).exp()
    tensor([0.7500], grad_fn=<ExpBackward0>)
    >>> layer.choose(torch.zeros(2), torch.tensor(0), lambda log_weights: log_weights.argmax(-1))
    tensor(1)
    """

    def __init__(
        self, in_units: int, out_units: int, lead: tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        check_count("in_units", in_units)
        check_count("out_units", out_units)
        check_lead(lead)
        self.shape = (*lead, in_units)
        self.weights = LogWeights(*lead, in_units, out_units, dim=-2, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """The mixtures `[..., *L, c']`."""
        # `matmul` takes all rows that share weights as one matrix, without copies
        return matmul(_check(x, self.shape).unsqueeze(-2), self.weights())[..., 0, :]

    def best(self, x: Tensor) -> Tensor:
        """The best term of each mixture, `max_i (x_i + log W_io)`.

        Args:
            x: `[..., *L, c]` in nats.

        Returns:
            `[..., *L, c']` in nats.
        """
        x = _check(x, self.shape)
        # one output at a time, so that memory does not hold [..., c, c']
        return torch.stack([(x + column).amax(-1) for column in self.weights().unbind(-1)], -1)

    def choose(self, x: Tensor, units: Tensor, choice: Choice) -> Tensor:
        """The input unit chosen for each given output unit.

        Args:
            x: `[..., *L, c]` in nats.
            units: output units, int64 `[..., *L]`.
            choice: a function of log-weights `[..., c]` that picks an index int64 `[...]`: the largest, or at random.

        Returns:
            int64 `[..., *L]`, from 0 to c-1.
        """
        table = self.weights().movedim(-2, -1)  # (*L, c', c)
        *lead, out_units, in_units = table.shape
        groups = torch.arange(table.shape[:-2].numel(), device=units.device).view(lead) * out_units
        return choice(x + table.reshape(-1, in_units)[groups + units])


class ProductLayer(torch.nn.Module):
    r"""Products of neighbours, unit by unit: `out_j = sum of x_i` over the neighbours i of group j.

    Args:
        arity: number of neighbours in a group.

    Call: `[..., f, c]` to `[..., ceil(f / arity), c]` in nats, in float32 at least. The last group may be smaller.

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
        """The unit of each factor, that of its product: int64 `[..., f]`; see `SumLayer.choose`."""
        return units.repeat_interleave(self.arity, -1)[..., : x.shape[-2]]

    def extra_repr(self) -> str:
        """The arity."""
        return f"arity={self.arity}"


class CPLayer(torch.nn.Module):
    r"""Products of mixtures: `out_jo = sum_i logsumexp_k (x_ik + log W_iko)` over the neighbours i of group j.

    The weights of all combinations of the neighbours' units form a tensor in canonical polyadic decomposition.

    Args:
        num_inputs: f, the number of inputs; each has weights of its own.
        in_units: c.
        out_units: c'.
        arity: number of neighbours in a group.
        lead: sizes `[*L]` of the axes before the inputs along which weights differ.
        generator: the source of randomness for the initial weights, uniform over the simplex.

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
        check_lead(lead)
        self.sums = SumLayer(in_units, out_units, (*lead, num_inputs), generator=generator)
        self.products = ProductLayer(arity)

    def forward(self, x: Tensor) -> Tensor:
        """The products `[..., *L, ceil(f / arity), c']`."""
        products: Tensor = self.products(self.sums(x))
        return products

    def best(self, x: Tensor) -> Tensor:
        """The products `[..., *L, ceil(f / arity), c']` of the best term of each mixture; see `SumLayer.best`."""
        products: Tensor = self.products(self.sums.best(x))
        return products

    def choose(self, x: Tensor, units: Tensor, choice: Choice) -> Tensor:
        """Input units int64 `[..., *L, f]` for output units `[..., *L, ceil(f / arity)]`; see `SumLayer.choose`."""
        return self.sums.choose(x, self.products.choose(x, units, choice), choice)


class TuckerLayer(torch.nn.Module):
    r"""Mixtures of all pairs of two neighbours' units: `out_jo = logsumexp_kl (x_2j,k + x_2j+1,l + log W_jklo)`.

    Args:
        num_inputs: f, the number of inputs; each pair of neighbours has weights of its own.
        in_units: c.
        out_units: c'.
        lead: sizes `[*L]` of the axes before the inputs along which weights differ.
        generator: the source of randomness for the initial weights, uniform over the simplex.

    Call: `[..., *L, f, c]` to `[..., *L, ceil(f / 2), c']` in nats. If f is odd, the last input is mixed alone.

    Raises:
        TypeError: a size is no integer, or x no floating tensor.
        ValueError: a size is not positive, or the shape of x does not end in `[*L, f, c]`.

    Cost: `f c^2 c' / 2` multiply-adds; `f c^2 / 2` numbers are kept for the backward pass.

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
        check_lead(lead)
        self.shape = (*lead, num_inputs, in_units)
        pairs, alone = divmod(num_inputs, 2)
        self.pairs = SumLayer(in_units**2, out_units, (*lead, pairs), generator=generator) if pairs else None
        self.alone = SumLayer(in_units, out_units, (*lead, 1), generator=generator) if alone else None

    def forward(self, x: Tensor) -> Tensor:
        """The mixtures `[..., *L, ceil(f / 2), c']`."""
        parts = [layer(part) for layer, part in zip((self.pairs, self.alone), self._split(x), strict=True) if layer]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)

    def best(self, x: Tensor) -> Tensor:
        """The best term of each mixture, `[..., *L, ceil(f / 2), c']`; see `SumLayer.best`."""
        layers = zip((self.pairs, self.alone), self._split(x), strict=True)
        return torch.cat([layer.best(part) for layer, part in layers if layer], -2)

    def choose(self, x: Tensor, units: Tensor, choice: Choice) -> Tensor:
        """Input units int64 `[..., *L, f]` for output units `[..., *L, ceil(f / 2)]`; see `SumLayer.choose`."""
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
        """Log-weights of all pairs of two neighbours' units (..., *L, pairs, c^2), and the input without a partner."""
        x = arithmetic(_check(x, self.shape))
        f = 2 * (x.shape[-2] // 2)
        left, right = x[..., 0:f:2, :], x[..., 1:f:2, :]
        return (left[..., :, None] + right[..., None, :]).flatten(-2), x[..., f:, :]


def shifted(x: Tensor) -> tuple[Tensor, Tensor]:
    """Log-weights (..., f, c) shifted to a largest entry of 0 at each node, and the sum (...) of shifts in float64."""
    top = x.detach().amax(-1, keepdim=True)
    # a node with -inf alone is not shifted
    top = torch.where(top == -torch.inf, 0.0, top)
    return x - top, top.double().sum((-2, -1))


def _check(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The input, after checks of its kind and of its last axes."""
    check_tensor("x", x, 1)
    check_last_axes("x", x, shape)
    return x
