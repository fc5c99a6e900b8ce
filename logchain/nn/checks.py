"""Checks of the modules' arguments: kinds, sizes and ranges, before anything is computed."""

from numbers import Real
from typing import Literal

import torch
from torch import Tensor, nn


def check_unsharded(model: nn.Module) -> None:
    """Check that no module is sharded by FSDP2, whose methods write to copies of parameters that are dropped."""
    for module in model.modules():
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            raise ValueError(f"model: expected one that is not sharded yet, got {type(module).__name__}")


def check_differentiable(name: str) -> None:
    """Check for a call outside `torch.inference_mode`; inside `torch.no_grad`, gradients can be enabled."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"{name}: expected a call outside torch.inference_mode, which takes no gradients")


def check_count(name: str, *values: object, least: Literal[0, 1] = 1) -> None:
    """Check for positive integers, or with `least=0` for non-negative ones."""
    expected = f"{name}: expected a {'positive' if least else 'non-negative'} integer"
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{expected}, got {value!r}")
        if value < least:
            raise ValueError(f"{expected}, got {value}")


def check_lead(lead: object, least: Literal[0, 1] = 1) -> None:
    """Check for a tuple of integers, the sizes of leading axes."""
    if not isinstance(lead, tuple | list):
        raise TypeError(f"lead: expected a tuple of integers, got {lead!r}")
    check_count("lead", *lead, least=least)


def check_number(name: str, value: object) -> None:
    """Check for a real number of Python or NumPy."""
    if not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")


def check_step(step: float) -> float:
    """A step size of expectation maximization, checked to be from 0 to 1."""
    check_number("step", step)
    if not 0 <= step <= 1:
        raise ValueError(f"step: expected a number from 0 to 1, got {step}")
    return step


def check_last_axes(name: str, value: Tensor, sizes: tuple[int, ...]) -> None:
    """Check that the shape of a tensor ends in these sizes."""
    if value.shape[max(0, value.dim() - len(sizes)) :] != sizes:
        expected = ", ".join(map(str, ("...", *sizes)))
        raise ValueError(f"{name}: expected shape [{expected}], got {list(value.shape)}")


def check_rows(name: str, covariates: Tensor, sizes: tuple[int, ...]) -> None:
    """Check covariates `[*B, v, ...]` for the sizes `(*B, v)`, or 1 in their places."""
    if not all(size in (1, expected) for size, expected in zip(covariates.shape, sizes, strict=False)):
        expected = f"[{', '.join(map(str, sizes))}, ...], a row for each step, or 1 for batch and steps"
        raise ValueError(f"{name}: expected shape {expected}, got {list(covariates.shape)}")


def check_mask(observed: object, *shapes: torch.Size) -> None:
    """Check for a bool mask of one of the shapes."""
    if not isinstance(observed, Tensor) or observed.dtype != torch.bool:
        got = f"a tensor of {observed.dtype}" if isinstance(observed, Tensor) else type(observed).__name__
        raise TypeError(f"observed: expected a bool tensor, got {got}")
    if observed.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ValueError(f"observed: expected shape {expected}, got {list(observed.shape)}")
