"""How operators of a chain take a mapped axis of `torch.vmap`: as the first of the batch axes."""

from typing import Any

from torch import Tensor

# the axes that are an operand's own, behind those of the batch
_OWN = {"grad": 0, "x": 2, "bulk": 3, "p0": 1, "lengths": 0}


def with_batch_first(
    size: int, in_dims: tuple[Any, ...], x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Operands of `size` chains at once; parameters that are not mapped stay shared."""
    axes = _batch_axes(x, in_dims[0])
    return (
        _mapped_first(size, axes, "x", x, in_dims[0], expand=True),
        _mapped_first(size, axes, "bulk", bulk, in_dims[1], expand=False),
        _mapped_first(size, axes, "p0", p0, in_dims[2], expand=False),
        _mapped_first(size, axes, "lengths", lengths, in_dims[3], expand=True),
    )


def of_each(size: int, kinds: str, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> list[Any]:
    """The first arguments, of these kinds, each expanded to one of its own for every example."""
    names = kinds.split()
    axes = _batch_axes(args[names.index("x")], in_dims[names.index("x")])
    return [
        _mapped_first(size, axes, name, operand, dim, expand=True)
        for name, operand, dim in zip(names, args, in_dims, strict=False)
    ]


def as_one(size: int, found: Any, in_dims: tuple[Any, ...], operands: tuple[Any, ...], needs: Any) -> Any:
    """Gradients of operands `of_each`, in the shape that one example of the operand has; empty where not needed."""
    return tuple(
        gradient.reshape(size, *_shape_of_one(operand, dim)) if need else gradient.expand(size, 0)
        for gradient, operand, dim, need in zip(found, operands, in_dims, needs, strict=True)
    )


def _batch_axes(x: Tensor, dim: int | None) -> int:
    """How many batch axes one example has."""
    return x.dim() - 2 - (dim is not None)


def _mapped_first(size: int, axes: int, name: str, operand: Any, dim: int | None, *, expand: bool) -> Any:
    """The operand with the mapped axis first, and after it room for all `axes` of one example's batch.

    One that is not mapped gets size 1 there, or is expanded: as a view.
    """
    if operand is None:
        return None
    moved = operand.unsqueeze(0) if dim is None else operand.movedim(dim, 0)
    missing = axes - (moved.dim() - 1 - _OWN[name])
    moved = moved[(slice(None), *(None,) * missing)]
    return moved.expand(size, *moved.shape[1:]) if expand else moved


def _shape_of_one(operand: Tensor, dim: int | None) -> list[int]:
    """The shape of one example."""
    return [size for axis, size in enumerate(operand.shape) if dim is None or axis != dim % operand.dim()]
