"""The tree-shaped circuit: a binary tree of layers that joins neighbouring variables in pairs."""

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..arguments import check_choice
from ..viterbi import Path
from .circuit import Circuit
from .emissions.input_layer import InputLayer
from .layers import Choice, CPLayer, SumLayer, TuckerLayer, shifted


class TreeCircuit(Circuit):
    r"""`log p(data) = logsumexp_r (mixing_r + root_r(layer_L(... layer_1(log p_r(data | state)))))`: a binary tree.

    Each layer joins neighbouring nodes in pairs, of c units each; the root mixes the units of the last node. The number
    of variables need not be a power of two: a node without a neighbour goes up alone.

    Args:
        num_variables: v.
        num_states: c, the units of every node.
        num_repetitions: t.
        input: "categorical", "bernoulli", "binomial" or "gaussian", or an `InputLayer` with units `[t, v, c]`.
        layer: "cp" multiplies mixtures, `CPLayer`; "tucker" mixes all pairs of two nodes' units, `TuckerLayer`.
        num_categories: K, for categorical variables.
        total_count: number of trials, for binomial variables.
        generator: the source of randomness for the initial parameters.

    Data are `[*B, v, *event]`; entries that are NaN, or False in `observed`, are summed out. The methods are those of
    `Circuit`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, or the layer is unknown.

    Cost: about `2 t v c^2` multiply-adds a data point with "cp", `t v c^3` with "tucker", in `log2 v` dependent layers;
    twice that for gradients.

    Source: hidden tree models as tensor decompositions of circuits: A. Mari, G. Vessio and A. Vergari, "Unifying and
    understanding overparameterized circuit representations via low-rank tensor decompositions" (2023).

    >>> circuit = TreeCircuit(5, 4, num_categories=3, generator=torch.Generator().manual_seed(0))
    >>> len(circuit.layers)  # 5, 3, 2, 1 nodes
    3
    >>> data = torch.tensor([0, 2, 1, 1, 0])
    >>> circuit.log_prob(data, torch.zeros(5, dtype=torch.bool)).exp()  # nothing is observed
    tensor(1.0000, grad_fn=<ExpBackward0>)
    """

    def __init__(
        self,
        num_variables: int,
        num_states: int,
        num_repetitions: int = 1,
        input: str | InputLayer = "categorical",
        *,
        layer: Literal["cp", "tucker"] = "cp",
        num_categories: int | None = None,
        total_count: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        t, v, c = num_repetitions, num_variables, num_states
        check_choice("layer", layer, ("cp", "tucker"))
        super().__init__(input, (t, v, c), num_categories, total_count, generator)
        make = CPLayer if layer == "cp" else TuckerLayer
        nodes = [v]
        while nodes[-1] > 1:
            nodes.append(math.ceil(nodes[-1] / 2))
        self.layers = torch.nn.ModuleList(make(f, c, c, lead=(t,), generator=generator) for f in nodes[:-1])
        self.root = SumLayer(c, 1, (t, 1), generator=generator)

    def components(self, x: Tensor) -> Tensor:
        """The log-likelihood at the root of each repetition: see `Circuit.components`."""
        *_, root, scale = self._up(x, best=False)
        return root[..., 0, 0].double() + scale

    def best_states(self, x: Tensor) -> Path:
        """The most probable states, chosen from the root down: see `Circuit.best_states`."""
        *below, root, scale = self._up(x, best=True)
        return Path(self._down(below, root[..., 0], partial(torch.argmax, dim=-1)), root[..., 0, 0].double() + scale)

    def draw_states(self, x: Tensor, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """States drawn from the root down: see `Circuit.draw_states`."""

        def draw(log_weights: Tensor) -> Tensor:
            # an impossible repetition has no shares: any draw will do, since it is never selected
            shares = torch.softmax(log_weights, -1).nan_to_num_(1.0).flatten(0, -2)
            return torch.multinomial(shares, 1, generator=generator).view(log_weights.shape[:-1])

        *below, root, _ = self._up(x, best=False)
        return self._down(below, root[..., 0].expand(num_samples, *root.shape[:-1]), draw)

    def _up(self, x: Tensor, best: bool) -> list[Tensor]:
        """The shifted inputs of each layer and of the root, the root's output, and the sum of all shifts."""
        below, scale = [], x.new_zeros(x.shape[:-2], dtype=torch.float64)
        layer: Any
        for layer in (*self.layers, self.root):
            x, shift = shifted(x)
            scale = scale + shift
            below.append(x)
            x = layer.best(x) if best else layer(x)
        return [*below, x, scale]

    def _down(self, below: list[Tensor], root: Tensor, choice: Choice) -> Tensor:
        """States of all variables, chosen layer by layer given the unit of the node above."""
        units = torch.zeros_like(root, dtype=torch.int64)  # (..., t, 1)
        layer: Any
        for layer, x in zip((self.root, *reversed(self.layers)), reversed(below), strict=True):
            units = layer.choose(x, units, choice)
        return units
