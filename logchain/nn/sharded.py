"""The chain of a hidden Markov model for data whose variables are sharded over the ranks of a process group.

Every rank has all parameters, and computes with them what belongs to its own data; their gradients are summed over the
ranks once, behind all of that.
"""

from typing import Any

import torch
from torch import Tensor

from ..adapters import ChainArguments
from ..arguments import Lengths, check_is_tensor, tensor_of
from ..distributed.exchange import Exchange
from ..distributed.replicated import replicated
from .checks import mask_of
from .emissions.input_layer import InputLayer
from .log_weights import LogWeights
from .potentials import event_axes, over
from .transitions.weights import TransitionWeights


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
    question: str,
) -> dict[str, Any]:
    """The arguments of `logchain.distributed.product` for this rank's data; `lengths` are those of whole sequences.

    What lies behind a sequence's end is not observed.
    """
    exchange, chains = Exchange(group), list[ChainArguments]()

    def steps() -> int:
        check_is_tensor("data", data)
        if lengths is not None and not isinstance(model.emission, InputLayer):
            raise TypeError("lengths: expected None with a group and an emission that is no InputLayer")
        if data.dim() <= event_axes(model.emission):
            raise ValueError(f"data: expected at least {event_axes(model.emission) + 1} axes, got {list(data.shape)}")
        return data.shape[data.dim() - 1 - event_axes(model.emission)]

    def compute() -> None:
        known = observed
        if lengths is not None:
            shape = data.shape[: data.dim() - event_axes(model.emission)]
            places, ends = start + torch.arange(shape[-1], device=data.device), tensor_of(lengths).to(data.device)
            inside = places < over(ends, shape[:-1])[..., None]
            if observed is not None:
                known = mask_of(observed, data.shape, shape)
            known = inside if known is None else known & over(inside, known.shape)
        chains.append(torch.func.functional_call(_Arguments(model), weights, (data, known, covariates, start)))

    parameters = {f"model.{name}": one for name, one in model.named_parameters()}
    weights, start = replicated(exchange, f"{question} of a model", parameters, steps)
    exchange.gather((), compute)  # what is wrong on one rank is raised on all
    chain = chains[0]._replace(lengths=None if lengths is None else tensor_of(lengths))
    named = isinstance(model.transition, LogWeights | TransitionWeights)
    return {**chain._asdict(), "one_matrix": model.num_steps is None if named else None, "group": group}
