"""Any family of `torch.distributions` as an emission, fitted by L-BFGS or by gradients."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.distributions import biject_to, constraints, transform_to
from torch.distributions.transforms import LowerCholeskyTransform, PositiveDefiniteTransform

from ...arguments import check_has_values
from ..checks import check_number
from ..parameters import arithmetic, broadcast, first_draw
from .emission import Emission, Units


class Distribution(Emission):
    r"""Observations of a family of torch: `log p(y | unit) = family(**parameters).log_prob(y)`, parameters by unit.

    Args:
        family: a class of `torch.distributions` or its name ("StudentT", "NegativeBinomial", "Gamma", "VonMises",
            "LogNormal"), or a function of keyword arguments that returns a distribution.
        units: `[*U, c]`, or `c` alone; the batch shape of the distribution.
        limits: a constraint for each parameter (`torch.distributions.constraints`); by default those of the class, and
            real numbers for a function.
        spread: standard deviation of the normal noise by which parameters that are the same for all states are made
            different, in the unconstrained parameters.
        generator: the source of randomness for the noise.
        **initial: initial values of the parameters, which broadcast to `[*U, c, *event of the parameter]`. Real
            parameters of a class that are not passed are trained from 0 of the unconstrained parameter.

    `free`: a `ParameterDict` of unconstrained real parameters, which `torch.distributions.biject_to` (or, where it
    has no bijection, `transform_to`) maps to the constraints. Integer parameters are not trained; tensors of them,
    which broadcast to `[*U, c]`, are buffers of `fixed`. Call: data `[..., *U, *event]` to `[..., *U, c]`, in nats; see
    `Emission`. An event is observed as a whole or not at all.

    Raises:
        TypeError: the family is neither a class nor a function, or `spread` is not a number.
        ValueError: torch has no such class; an initial value violates its constraint, or torch cannot map real numbers
            to the constraint (pass other `limits`); a value's or the distribution's shape does not go with the units;
            some of the data are outside the support of every unit (checked on a CPU).

    >>> rates = torch.tensor([1.0, 4.0])
    >>> waits = Distribution("Gamma", 2, concentration=2.0, rate=rates, spread=0)
    >>> waits(torch.tensor([1.0]))
    tensor([[-1.0000, -1.2274]], grad_fn=<MaskedFillBackward0>)
    >>> waits.distribution().mean
    tensor([2.0000, 0.5000], grad_fn=<DivBackward0>)
    """

    _allowed: Tensor

    def __init__(
        self,
        family: str | Callable[..., torch.distributions.Distribution],
        units: Units,
        *,
        limits: Mapping[str, Any] | None = None,
        spread: float = 0.1,
        generator: Generator | None = None,
        **initial: Any,
    ) -> None:
        super().__init__(units)
        if isinstance(family, str):
            if family not in torch.distributions.__all__:
                raise ValueError(f"family: expected the name of a class of torch.distributions, got {family!r}")
            family = getattr(torch.distributions, family)
        if not callable(family):
            raise TypeError(f"family: expected a class or a function, got {type(family).__name__}")
        check_number("spread", spread)
        if not 0 <= spread < torch.inf:
            raise ValueError(f"spread: expected a number from 0 on, got {spread}")
        if unknown := (limits or {}).keys() - initial.keys():
            expected = f"names of parameters, {', '.join(initial)}"
            raise ValueError(f"limits: expected {expected}, got {', '.join(sorted(unknown))}")
        declared = getattr(family, "arg_constraints", {}) if limits is None else limits
        declared = declared if isinstance(declared, Mapping) else {}
        values: dict[str, Any] = _unset(family, declared, initial) | initial
        self.family, self.spread, self._alike = family, spread, []
        self.transforms, self._fixed, self._initial, self.fixed = {}, {}, {}, nn.Module()
        for name, start in list(values.items()):
            limit = declared.get(name, constraints.real)
            if constraints.is_dependent(limit):
                raise ValueError(f"limits: expected a constraint of {name} alone, got {limit}; pass another")
            if limit.is_discrete or (isinstance(family, type) and name not in declared):
                if isinstance(start, Tensor):
                    shape = torch.Size(self.units) if limit.is_discrete else start.shape
                    values[name] = broadcast(name, start, shape).to(start.dtype).detach().clone()
                    self.fixed.register_buffer(name, values[name])
                else:
                    self._fixed[name] = start
                continue
            value = _start(name, start, limit)
            axes = value.dim() - limit.event_dim
            shape = torch.Size((*self.units, *value.shape[axes:]))
            values[name] = broadcast(name, value, shape).to(value.dtype).detach().clone()
            self.transforms[name] = _transform(name, limit)
            self._initial[name] = self.transforms[name].inv(values[name])
            if axes == 0 or value.shape[axes - 1] == 1:  # the same for all states
                self._alike.append(name)
        example = family(**values)
        self.event = tuple(example.event_shape)
        if example.batch_shape != self.units or len(self.event) > 1:
            raise ValueError(
                f"family: expected batch shape {list(self.units)} and an event () or (d,), "
                f"got {list(example.batch_shape)} and {list(example.event_shape)}"
            )
        # copies, so that training leaves the values to which `reset_parameters` returns
        free = {name: nn.Parameter(start.clone()) for name, start in self._initial.items()}
        self.free = _Free(free)
        self.free.transforms = self.transforms
        with torch.random.fork_rng(devices=[]):
            self.register_buffer("_allowed", example.sample()[(0,) * len(self.units)], persistent=False)
        first_draw(self, generator)

    @torch.no_grad()
    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Set the parameters to the initial values, with new noise."""
        for name, parameter in self.free.items():
            start = self._initial[name].to(parameter)
            noise = self.spread * torch.empty_like(parameter).normal_(generator=generator)
            parameter.copy_(start + noise if name in self._alike else start)

    def distribution(self, at: tuple[Tensor, ...] = ()) -> torch.distributions.Distribution:
        # torch's validation of parameters would make the host wait for a GPU
        options = {"validate_args": False} if isinstance(self.family, type) else {}
        trained = {name: self.transforms[name](arithmetic(free))[at] for name, free in self.free.items()}
        fixed = {name: arithmetic(value) for name, value in self.fixed.named_buffers()}
        of_units = {name: value[at] for name, value in fixed.items() if value.shape[: len(self.units)] == self.units}
        return self.family(**trained, **self._fixed, **(fixed | of_units), **options)

    def fill(self, data: Tensor, known: Tensor) -> Tensor:
        """Data with a sample of the initial distribution where nothing is observed."""
        return torch.where(known, data, self._allowed.to(data.dtype))

    def extra_repr(self) -> str:
        return f"{getattr(self.family, '__name__', self.family)}, {super().extra_repr()}"


class _Free(nn.ParameterDict):
    """Unconstrained parameters, and the transforms to their constraints."""

    transforms: Mapping[str, Any]

    def num_parameters(self) -> int:
        """The number of trained entries; of matrices whose Cholesky factors are trained, lower triangles count."""
        total = 0
        for name, parameter in self.items():
            triangular = isinstance(self.transforms[name], LowerCholeskyTransform | PositiveDefiniteTransform)
            entries = torch.ones_like(parameter)
            total += parameter.requires_grad * int((entries.tril() if triangular else entries).count_nonzero())
        return total


def _unset(family: Any, limits: Mapping[str, Any], initial: Mapping[str, Any]) -> dict[str, Tensor]:
    """The values of real parameters of a class that are not passed: 0, mapped to what their constraints allow."""
    if not isinstance(family, type):
        return {}
    parameters = {name: part for name, part in inspect.signature(family).parameters.items() if name in limits}
    # of parameters that default to None one is needed, such as `probs` or `logits`
    choices = [name for name, part in parameters.items() if part.default is None]
    skipped = choices if any(name in initial for name in choices) else choices[:-1]
    names = [name for name in parameters if name not in initial and name not in skipped]
    for name in names:
        if limits[name].event_dim or (limits[name].is_discrete and parameters[name].default is inspect.Parameter.empty):
            raise ValueError(f"{name}: expected an initial value of this parameter of {family.__name__}, got none")
    real = [name for name in names if not limits[name].is_discrete]
    return {name: _transform(name, limits[name])(torch.zeros(())) for name in real}


def _start(name: str, start: Any, limit: Any) -> Tensor:
    """An initial value as a floating tensor, after a check of its constraint."""
    value = torch.as_tensor(start)
    value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
    check_has_values(name, value)
    if not bool(limit.check(value).all()):
        raise ValueError(f"{name}: expected {limit}, got {start}")
    return value


def _transform(name: str, limit: Any) -> Any:
    for registry in (biject_to, transform_to):
        with suppress(NotImplementedError):
            return registry(limit)
    raise ValueError(f"limits: expected a constraint that torch can transform to for {name}, got {limit}; pass another")
