"""The chain of a hidden Markov model for data whose variables are sharded over the ranks of a process group.

Every rank has all parameters, and computes with them what belongs to its own data; their gradients are summed over the
ranks once, behind all of that.
"""

from typing import Any

import torch
from torch import Tensor

from ..adapters import ChainArguments
from ..arguments import Lengths
from ..distributed.exchange import Exchange
from ..distributed.replicated import replicated
from ..distributed.shards import first_variable
from .emissions.input_layer import InputLayer
from .potentials import event_axes, over


class _Arguments(torch.nn.Module):
    """A model, whose parameters can be replaced for a call that makes the arguments of its chain."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> ChainArguments:
        arguments: ChainArguments = self.model.local_arguments(*args)
        return arguments


def sharded_arguments(
    model: Any,
    data: Tensor,
    observed: Tensor | None,
    lengths: Lengths | None,
    covariates: Tensor | None,
    group: Any,
) -> ChainArguments:
    """The arguments of `logchain.distributed.product` for this rank's data; `lengths` are those of whole sequences.

    What lies behind a sequence's end is not observed.
    """
    exchange = Exchange(group)
    steps = data.shape[: data.dim() - event_axes(model.emission)]
    start = first_variable(exchange, steps[-1] if steps else 0)
    if lengths is not None:
        if not isinstance(model.emission, InputLayer):
            raise TypeError("lengths: expected None with a group and an emission that is no InputLayer")
        ends = torch.as_tensor(lengths, device=data.device)
        inside = start + torch.arange(steps[-1], device=data.device) < over(ends, steps[:-1])[..., None]
        observed = inside if observed is None else observed & over(inside, observed.shape)
    weights = replicated({f"model.{name}": one for name, one in model.named_parameters()}, group)
    chain: ChainArguments = torch.func.functional_call(_Arguments(model), weights, (data, observed, covariates, start))
    return chain._replace(lengths=None if lengths is None else torch.as_tensor(lengths))
