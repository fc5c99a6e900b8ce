"""Parameters: conversions to the dtype of arithmetic and to shapes, what is trained, and what nobody has set."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_is_tensor


def arithmetic(parameter: Tensor) -> Tensor:
    """A parameter in float32 at least."""
    return parameter.float() if parameter.dtype in (torch.float16, torch.bfloat16) else parameter


def broadcast(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    """A value expanded to the shape of parameters, in float64."""
    check_is_tensor(name, value)
    try:
        return value.double().expand(shape)
    except RuntimeError:
        raise ValueError(f"{name}: expected what broadcasts to {list(shape)}, got {list(value.shape)}") from None


def fill(values: Tensor, known: Tensor) -> Tensor:
    """Values with 0 where the mask `known`, of their first axes, is False."""
    return values.masked_fill(~over(known, values.shape), 0)


def over(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Values expanded to a shape with further axes on the right."""
    return values[(..., *(None,) * (len(shape) - values.dim()))].expand(shape)


def log_prior(model: torch.nn.Module) -> Any:
    """The sum of `log_prior()` of the modules that have it, 0 if there is none."""
    parts: Iterable[Any] = (part for part in model.modules() if hasattr(type(part), "log_prior"))
    return sum(part.log_prior().double() for part in parts)


@contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """A context that restores the parameters that are not trained, in which the others may be written."""
    before = [(fixed, fixed.detach().clone()) for fixed in model.parameters() if not fixed.requires_grad]
    yield
    with torch.no_grad():
        for parameter, value in before:
            parameter.copy_(value)


@contextmanager
def untrained(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """A context in which these parameters are not trained."""
    trained = [parameter.requires_grad_(False) for parameter in parameters if parameter.requires_grad]
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


class Draw:
    """The versions of a module's parameters as its constructor drew them; copies and files of the module have one."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.__setstate__((list(module.parameters()), True))

    def is_current(self) -> bool:
        """Whether nothing was written since."""
        return self.versions == [parameter._version for parameter in self.parameters]

    def __getstate__(self) -> tuple[list[torch.nn.Parameter], bool]:
        return self.parameters, self.is_current()

    def __setstate__(self, state: tuple[list[torch.nn.Parameter], bool]) -> None:
        self.parameters = state[0]
        self.versions = [parameter._version if state[1] else -1 for parameter in self.parameters]


class DrawnModule(torch.nn.Module):
    """A module that records its first `reset_parameters`, which its constructor calls."""

    _draw: Draw | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "reset_parameters" in vars(cls):
            cls.reset_parameters = _recording(vars(cls)["reset_parameters"])  # type: ignore[attr-defined]


def _recording(reset_parameters: Callable[..., None]) -> Callable[..., None]:
    @wraps(reset_parameters)
    def reset(self: DrawnModule, generator: torch.Generator | None = None) -> None:
        reset_parameters(self, generator)
        if self._draw is None and not torch.is_inference_mode_enabled():
            self._draw = Draw(self)

    return reset


def set_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that were set: all but those that `DrawnModule`s drew when they were constructed."""
    draws = [part._draw for part in model.modules() if isinstance(part, DrawnModule) and part._draw is not None]
    drawn = {id(parameter) for draw in draws if draw.is_current() for parameter in draw.parameters}
    return [parameter for parameter in model.parameters() if id(parameter) not in drawn]


def reset_parameters(
    model: torch.nn.Module, generator: torch.Generator | None = None, *, without: torch.nn.Module | None = None
) -> None:
    """Draw all trained parameters again, those of the module `without` excepted, by `reset_parameters` of submodules.

    A generator draws the seed where that method takes none, as those of torch.
    """
    with frozen(model):
        _reset(model, type(model).__name__, generator, without)


def _reset(
    module: torch.nn.Module, name: str, generator: torch.Generator | None, without: torch.nn.Module | None
) -> None:
    if module is without or not any(parameter.requires_grad for parameter in module.parameters()):
        return
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is not None and "generator" in signature(reset).parameters:
        reset(generator=generator)
        return
    if reset is not None:
        devices = sorted({p.device for p in module.parameters() if p.device.type == "cuda"}, key=str)
        with torch.random.fork_rng(devices=devices, enabled=generator is not None):
            if generator is not None:
                torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
            reset()
        return
    for own, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad:
            remedy = "give the module that method, or pass restarts=0"
            raise ValueError(f"restarts: expected `reset_parameters` of {name}, which has {own}, got none; {remedy}")
    for child, part in module.named_children():
        _reset(part, f"{name}.{child}", generator, without)
