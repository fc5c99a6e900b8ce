"""How operators of a chain take a mapped axis of `torch.vmap`: as the first of the batch axes."""

from typing import Any

from torch import Tensor

# the axes that are an operand's own, behind those of the batch
OWN = {"x": 2, "bulk": 3, "p0": 1, "lengths": 0, "grad": 0}


def batch_axes(x: Tensor, dim: int | None) -> int:
    """How many batch axes one example has."""
    return x.dim() - 2 - (dim is not None)


def mapped_first(size: int, axes: int, own: int, operand: Any, dim: int | None, *, expand: bool) -> Any:
    """The operand with the mapped axis first, and after it room for all `axes` of one example's batch.

    One that is not mapped gets size 1 there, or is expanded: as a view.
    """
    if operand is None:
        return None
    moved = operand.unsqueeze(0) if dim is None else operand.movedim(dim, 0)
    missing = axes - (moved.dim() - 1 - own)
    moved = moved[(slice(None), *(None,) * missing)]
    return moved.expand(size, *moved.shape[1:]) if expand else moved


def with_batch_first(
    size: int, in_dims: tuple[Any, ...], x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Operands of `size` chains at once; parameters that are not mapped stay shared."""
    axes = batch_axes(x, in_dims[0])
    return (
        mapped_first(size, axes, 2, x, in_dims[0], expand=True),
        mapped_first(size, axes, 3, bulk, in_dims[1], expand=False),
        mapped_first(size, axes, 1, p0, in_dims[2], expand=False),
        mapped_first(size, axes, 0, lengths, in_dims[3], expand=True),
    )


def shape_of_one(operand: Tensor, dim: int | None) -> list[int]:
    """The shape of one example."""
    return [size for axis, size in enumerate(operand.shape) if dim is None or axis != dim % operand.dim()]
