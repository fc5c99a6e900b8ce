"""Input layers by name, for the constructors of circuits and hidden Markov models."""

from typing import Any

import torch
from torch import Tensor

from ...arguments import check_choice
from ..checks import check_count
from .categorical import Categorical
from .counts import Bernoulli, Binomial, Poisson
from .gaussian import Gaussian
from .input_layer import InputLayer


def named_input(
    input: str | InputLayer,
    units: tuple[int, int, int],
    num_categories: int | None,
    total_count: int | None,
    generator: torch.Generator | None,
) -> InputLayer:
    """The input layer of a circuit that a name stands for, or the given layer, after checks of the other options."""
    given = {"num_categories": num_categories, "total_count": total_count}
    needs = {"categorical": "num_categories", "bernoulli": None, "binomial": "total_count", "gaussian": None}
    for name, size in zip(("num_repetitions", "num_variables", "num_states"), units, strict=True):
        check_count(name, size)
    if not isinstance(input, str | InputLayer):
        raise TypeError(f"input: expected a name or a logchain.nn.InputLayer, got {type(input).__name__}")
    if isinstance(input, str) and input not in needs:
        raise ValueError(f"input: expected {' or '.join(map(repr, needs))}, or an input layer, got {input!r}")
    need = needs[input] if isinstance(input, str) else None
    for name, value in given.items():
        if (value is not None) != (name == need):
            expected = "an integer" if name == need else "None"
            raise ValueError(f"{name}: expected {expected} with input={input!r}, got {value!r}")
    if isinstance(input, InputLayer):
        if input.units != units:
            raise ValueError(f"input: expected units {list(units)}, got {list(input.units)}")
        return input
    if num_categories is not None:
        return Categorical(units, num_categories, generator=generator)
    if total_count is not None:
        return Binomial(units, total_count, generator=generator)
    if input == "bernoulli":
        return Bernoulli(units, generator=generator)
    return Gaussian(units, generator=generator)


# the emissions of an HMM that have names, and the priors that each takes
_EMISSIONS: dict[str, tuple[str, ...]] = {
    "categorical": ("prior_count",),
    "gaussian": ("prior_scatter", "prior_count", "prior_means", "prior_means_count"),
    "poisson": ("prior_total", "prior_count"),
}


def emission_of(
    emission: str | torch.nn.Module,
    num_states: int,
    num_features: int | None,
    num_categories: int | None,
    covariance: str,
    priors: dict[str, float | Tensor | None],
    generator: torch.Generator | None,
) -> torch.nn.Module:
    """The emission of an HMM that a name stands for, or the given module, after checks of the other options."""
    given = {"num_features": num_features, "num_categories": num_categories}
    chosen: dict[str, Any] = {name: value for name, value in priors.items() if value is not None}
    if isinstance(emission, torch.nn.Module):
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name}: expected None with an emission module, got {value}")
        if covariance != "diagonal":
            raise ValueError(f"covariance: expected 'diagonal' with an emission module, got {covariance!r}")
        for name, value in chosen.items():
            raise TypeError(f"{name}: expected None with an emission module, which has its own, got {value}")
        if isinstance(emission, InputLayer) and (emission.units[-1] != num_states or len(emission.units) > 2):
            expected = f"units ({num_states},) or (d, {num_states})"
            raise ValueError(f"emission: expected {expected}, got {emission.units}")
        return emission
    if not isinstance(emission, str):
        raise TypeError(f"emission: expected a name or a torch.nn.Module, got {type(emission).__name__}")
    check_choice("emission", emission, tuple(_EMISSIONS))
    for name in chosen:
        if name not in _EMISSIONS[emission]:
            takes = ", ".join(_EMISSIONS[emission])
            raise TypeError(
                f"{name}: expected None with emission {emission!r}, whose priors are {takes}, got {chosen[name]}"
            )
    for name, value in given.items():
        if value is not None:
            check_count(name, value)
    if (emission == "categorical") != (num_categories is not None):
        expected = "an integer" if emission == "categorical" else "None"
        raise ValueError(f"num_categories: expected {expected} with emission {emission!r}, got {num_categories}")
    if covariance != "diagonal" and emission != "gaussian":
        raise ValueError(f"covariance: expected 'diagonal' with emission {emission!r}, got {covariance!r}")
    if emission == "gaussian":
        return Gaussian(num_states, num_features, covariance, **chosen, generator=generator)
    units = (num_states,) if num_features is None else (num_features, num_states)
    if num_categories is not None:
        return Categorical(units, num_categories, **chosen, generator=generator)
    return Poisson(units, **chosen, generator=generator)
