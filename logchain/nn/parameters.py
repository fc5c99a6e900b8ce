"""Parameters: conversions to the dtype of arithmetic and to shapes, what is trained, and what nobody has set."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from inspect import signature
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ..arguments import check_is_tensor, has_values


def arithmetic(parameter: Tensor) -> Tensor:
    """A parameter in float32 at least."""
    return parameter.float() if parameter.dtype in (torch.float16, torch.bfloat16) else parameter


def broadcast(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    """A value expanded to the shape of parameters, in float64."""
    check_is_tensor(name, value)
    try:
        return value.double().expand(shape)
    except RuntimeError:
        raise ValueError(f"{name}: expected a shape that broadcasts to {[*shape]}, got {[*value.shape]}") from None


def fill(values: Tensor, known: Tensor) -> Tensor:
    """Values with 0 where the mask `known`, of their first axes, is False."""
    return values.masked_fill(~over(known, values.shape), 0)


def over(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Values expanded to a shape with further axes on the right."""
    return values[(..., *(None,) * (len(shape) - values.dim()))].expand(shape)


def log_prior(model: nn.Module) -> Any:
    """The sum of `log_prior()` of the modules that have it, 0 if there is none."""
    parts: Iterable[Any] = model.modules()
    return sum(part.log_prior().double() for part in parts if hasattr(type(part), "log_prior"))


@contextmanager
def frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A context that restores the parameters that are not trained, in which the others may be written."""
    before = [(fixed, fixed.detach().clone()) for fixed in parameters if not fixed.requires_grad]
    yield
    with torch.no_grad():
        for parameter, value in before:
            parameter.copy_(value)


@contextmanager
def untrained(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A context in which these parameters are not trained."""
    trained = [parameter.requires_grad_(False) for parameter in parameters if parameter.requires_grad]
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def first_draw(module: Any, generator: Generator | None) -> None:
    """Call `reset_parameters` at the end of a constructor, and record for `set_parameters` what it drew."""
    module.reset_parameters(generator)
    for part in module.modules():
        parameters = part.parameters(recurse=False)
        part._first_draw = [(parameter.dtype, _fingerprint(parameter, parameter.dtype)) for parameter in parameters]


def is_as_drawn(module: nn.Module) -> bool:
    """Whether the module's own parameters have the values that its constructor drew, perhaps in a wider dtype."""
    drawn: Any = getattr(module, "_first_draw", None)
    parameters = list(module.parameters(recurse=False))
    if drawn is None or len(parameters) != len(drawn) or not all(map(has_values, parameters)):
        return False
    return all(
        _fingerprint(parameter, dtype) == fingerprint
        and torch.equal(parameter.to(dtype).to(parameter.dtype), parameter)
        for parameter, (dtype, fingerprint) in zip(parameters, drawn, strict=True)
    )


def _fingerprint(parameter: Tensor, dtype: torch.dtype) -> bytes:
    """A digest of the values in a dtype, which takes no memory as a copy would."""
    if not has_values(parameter):
        return b""
    values = parameter.detach().to(dtype).cpu().double()
    return blake2b(values.numpy().tobytes(), digest_size=16).digest()


def set_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that were set: all but those of modules that are as their constructors drew them."""
    parts = filter(is_as_drawn, model.modules())
    drawn = {id(parameter) for part in parts for parameter in part.parameters(recurse=False)}
    return [parameter for parameter in model.parameters() if id(parameter) not in drawn]


def reset_parameters(
    module: nn.Module, generator: Generator | None = None, *, without: nn.Module | None = None, name: str = ""
) -> None:
    """Draw all trained parameters again, by `reset_parameters` of submodules, but not those of `without`.

    A generator draws the seed for methods that take none, as those of torch.
    """
    if module is without or not any(parameter.requires_grad for parameter in module.parameters()):
        return
    name, reset = name or type(module).__name__, getattr(module, "reset_parameters", None)
    if reset is None:
        for attribute, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                expected = f"expected `reset_parameters` of {name}, which has {attribute}, got none"
                raise ValueError(f"restarts: {expected}; give the module that method, or pass restarts=0")
        for child, part in module.named_children():
            reset_parameters(part, generator, without=without, name=f"{name}.{child}")
        return
    with frozen(module.parameters()):
        if "generator" in signature(reset).parameters:
            reset(generator=generator)
        else:
            with seeded(generator, {p.device for p in module.parameters() if p.device.type == "cuda"}):
                reset()


@contextmanager
def seeded(generator: Generator | None, devices: Iterable[torch.device]) -> Iterator[None]:
    """A context of global randomness that a generator seeds, without effect on later draws; None changes nothing."""
    with torch.random.fork_rng(devices=list(devices), enabled=generator is not None):
        if generator is not None:
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
        yield
