"""Input layers by name, for the constructors of circuits and hidden Markov models."""

from typing import Any

import torch

from ..checks import check_count
from .categorical import Categorical
from .counts import Bernoulli, Binomial, Poisson
from .emission import Emission
from .gaussian import Gaussian

# the class of each name, the options that it needs, and those that it takes
_FAMILIES: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    "categorical": (Categorical, ("num_categories",), ("num_features", "prior_count")),
    "bernoulli": (Bernoulli, (), ()),
    "binomial": (Binomial, ("total_count",), ()),
    "gaussian": (
        Gaussian,
        (),
        ("num_features", "covariance", "prior_scatter", "prior_count", "prior_means", "prior_means_count"),
    ),
    "poisson": (Poisson, (), ("num_features", "prior_total", "prior_count")),
}


def named(
    argument: str,
    layer: Any,
    names: tuple[str, ...],
    units: tuple[int, ...],
    options: dict[str, Any],
    generator: torch.Generator | None,
) -> torch.nn.Module:
    """The layer of one of the names with given units, or a module as it is, after checks of the options (None: none).

    Independent features of a layer without events are its first units.
    """
    options = {name: value for name, value in options.items() if value is not None}
    if not isinstance(layer, str | torch.nn.Module):
        raise TypeError(f"{argument}: expected a name or a torch.nn.Module, got {type(layer).__name__}")
    if isinstance(layer, str) and layer not in names:
        raise ValueError(f"{argument}: expected {' or '.join(map(repr, names))}, or an input layer, got {layer!r}")
    kind: Any
    kind, needs, takes = _FAMILIES[layer] if isinstance(layer, str) else (None, (), ())
    for name, value in options.items():
        if name not in needs + takes:
            rest = f", whose options are {', '.join(needs + takes)}" if needs + takes else ""
            shown = repr(layer) if isinstance(layer, str) else "a module"
            raise ValueError(f"{name}: expected None with {argument}={shown}{rest}, got {value!r}")
    for name in needs:
        if name not in options:
            raise ValueError(f"{name}: expected an integer with {argument}={layer!r}, got None")
    if not isinstance(layer, str):
        return layer
    if kind is not Gaussian and "num_features" in options:
        check_count("num_features", options["num_features"])
        units = options.pop("num_features"), *units
    made: Emission = kind(units, **options, generator=generator)
    return made
