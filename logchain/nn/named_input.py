"""The input layer of a circuit, by its name."""

import torch

from .bernoulli import Bernoulli
from .binomial import Binomial
from .categorical import Categorical
from .checks import check_count
from .gaussian import Gaussian
from .input_layer import InputLayer


def named_input(
    input: str | InputLayer,
    units: tuple[int, int, int],
    num_categories: int | None,
    total_count: int | None,
    generator: torch.Generator | None,
) -> InputLayer:
    """The layer that a name stands for, or the layer itself, if it goes with the other options."""
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
