"""The order of a model's hidden states: parameters and their priors permuted along the axes of states."""

from torch import Tensor, nn

from .durations import FamilyWeights
from .emissions import Categorical, Emission
from .log_weights import LogWeights
from .priors import Prior
from .transitions import Transitions


def permute_states(emission: Emission, initial: LogWeights | None, transition: Transitions, order: Tensor) -> None:
    """Permute the states of the parts of a hidden Markov model, in place; transitions are dense, or have durations."""
    _, *durations = transition.weights
    # the moves and durations of segments share a prior
    for name, module in {"emission": emission, **({"transition": transition} if durations else {})}.items():
        priors = (layer for layer in module.modules() if isinstance(layer, Prior))
        if any(tensor.numel() > 1 for prior in priors for tensor in prior.buffers()):
            remedy = "sort states before a prior with tensors is assigned"
            raise ValueError(f"{name}: expected numbers in its prior, got tensors; {remedy}")
    _permute_units(emission, order)
    for part in durations:
        if isinstance(part, FamilyWeights):
            _permute_units(part.family, order)
        else:
            _permute(part.logits, order, -2)
    for tensor in () if initial is None else _tensors(initial):
        _permute(tensor, order, -1)
    of_durations = {id(tensor) for part in durations for tensor in _tensors(part)}
    for tensor in _tensors(transition):
        if id(tensor) not in of_durations:
            _permute(tensor, order, -1, -2)


def _permute_units(emission: Emission, order: Tensor) -> None:
    # the axis of states comes after those of features, but is the last one of categories
    families = [layer for layer in emission.modules() if isinstance(layer, Categorical)]
    last = {id(tensor) for layer in families if layer.units == emission.units for tensor in _tensors(layer)}
    for tensor in _tensors(emission):
        _permute(tensor, order, -1 if id(tensor) in last else len(emission.units) - 1)


def _permute(tensor: Tensor, order: Tensor, *axes: int) -> None:
    """Permute the entries along axes that have as many as there are states, in place."""
    for axis in axes:
        if -tensor.dim() <= axis < tensor.dim() and tensor.shape[axis] == len(order):
            tensor.copy_(tensor.index_select(axis, order))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
