"""Chains whose matrices are arcs, bands or products of factors, and a check of kernels against dense matrices."""

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from logchain import reference
from logchain.autograd import chain as product
from logchain.kernels import use
from logchain.kernels.structured import Arcs, Factor, Factors, Gradients, Structured, Walk
from logchain.operands import Operands
from logchain.transitions import Banded, Sparse
from logchain.transitions.products import Product
from logchain.transitions.sparse import _Graph
from tests.contract import poisoned_memory, sum_to, unit

F32, F64 = torch.float32, torch.float64
INF = float("inf")
ALL = True, True, True


class Kind(NamedTuple):
    """A structure of c states: the sizes of its parameters, without batch axes and steps, and its pattern."""

    c: int
    sizes: list[tuple[int, ...]]
    pattern: Any


def arcs(c: int, pairs: list[tuple[int, int]]) -> Kind:
    source, target = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(-1)
    return Kind(c, [(len(pairs),)], Arcs(source.contiguous(), target.contiguous()))


def random_arcs(c: int, density: float = 0.4) -> Kind:
    """Some states have none."""
    there = torch.rand(c, c, generator=torch.Generator().manual_seed(c)) < density
    return arcs(c, [(int(i), int(j)) for i, j in there.nonzero()])


def hub(count: int) -> list[tuple[int, int]]:
    """Arcs between state 0 and so many others, and two that lie apart."""
    return sorted({(0, j) for j in range(count)} | {(j, 0) for j in range(count)} | {(5, 5), (5, 6)})


def bands(c: int, *offsets: int) -> Kind:
    return Kind(c, [(len(offsets), c)], offsets)


def low_rank(c: int, r: int, diagonal: bool = True) -> Kind:
    factors = Factor(c, r), Factor(r, c, transposed=True)
    return Kind(c, [(c, r), (c, r), *([(c,)] if diagonal else [])], Factors(factors, diagonal))


def block_diagonal(a: int, b: int) -> Kind:
    return Kind(a * b, [(a, b, b)], Factors((Factor(b, b, blocks=a),)))


def monarch(a: int, b: int, middle: int) -> Kind:
    last = a * b // middle
    factors = Factor(b, middle, blocks=a), Factor(a, last, blocks=middle)
    return Kind(a * b, [(a, b, middle), (middle, a, last)], Factors(factors))


def kronecker(*sizes: int) -> Kind:
    factors = (
        Factor(size, size, math.prod(sizes[:place]), math.prod(sizes[place + 1 :])) for place, size in enumerate(sizes)
    )
    return Kind(math.prod(sizes), [(size, size) for size in sizes], Factors(tuple(factors)))


KINDS = {
    "arcs": random_arcs(9),
    "bands": bands(11, 0, 1, -3),
    "low_rank": low_rank(11, 3),
    "low_rank_only": low_rank(9, 2, False),
    "block_diagonal": block_diagonal(3, 5),
    "monarch": monarch(4, 6, 8),
    "kronecker": kronecker(3, 2),
    "kronecker3": kronecker(2, 3, 2),
    "one_state": low_rank(1, 1),
}


def draw(
    kind: Kind,
    batch: tuple[int, ...] = (3,),
    owned: tuple[int, ...] | None = None,
    *,
    v: int = 5,
    steps: int = 1,
    dtype: torch.dtype = F32,
    log: bool = False,
    ends: bool = False,
    scale: float = 1.0,
    zeros: float = 0.0,
    seed: int = 0,
) -> Structured:
    """A random chain whose parameters have batch axes of the sizes `owned`, or ones; `zeros`: the share of zeros."""
    generator = torch.Generator().manual_seed(seed)
    owned = tuple(1 for _ in batch) if owned is None else owned

    def sparse(one: Tensor, zero: float) -> Tensor:
        return one.masked_fill(torch.rand(one.shape, generator=generator) < zeros, zero).to(dtype)

    x = scale * torch.randn(*batch, v, kind.c, generator=generator, dtype=F64)
    sizes = [(*owned, steps, *size) for size in kind.sizes] + [(*owned, kind.c)]
    weights = [torch.rand(size, generator=generator, dtype=F64) + 0.01 for size in sizes]
    *parameters, p0 = (sparse(one.log(), -INF) if log else sparse(one, 0.0) for one in weights)
    last = torch.randint(1, v + 1, batch, generator=generator) if ends else None
    return Structured(sparse(x, -INF), tuple(parameters), p0, kind.pattern, last, log, dtype)


def given(kind: Kind, parameters: list, x: list, p0: list[float], dtype: torch.dtype = F32) -> Structured:
    """One sequence, under one matrix or one for each step."""
    tensors = (torch.tensor(one, dtype=dtype)[None] for one in parameters)
    rows, start = torch.tensor(x, dtype=dtype)[None], torch.tensor(p0, dtype=dtype)[None]
    return Structured(rows, tuple(tensors), start, kind.pattern, None, False, dtype)


def as_logs(chain: Structured) -> Structured:
    """The chain with logarithms of parameters and p0."""
    logs = tuple(parameter.log() for parameter in chain.parameters)
    return replace(chain, parameters=logs, p0=chain.p0.log(), log_params=True)


class Room:
    """The two passes of a chain by one room, "cpu" in C or "plain" in torch, with what both leave to logarithms."""

    def __init__(self, room: str) -> None:
        self.choice: Literal["auto", "plain"] = "auto" if room == "cpu" else "plain"

    def forward(self, chain: Structured, keep: bool) -> Walk:
        with use(self.choice, device="cpu"):
            return product.forward(operands(chain), keep)

    def backward(self, chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
        with use(self.choice, device="cpu"):
            return product.backward(operands(chain), walk, weight, needs, by_log=chain.by_log)


class _Product(Product):
    """A product of factors of any pattern."""

    def __init__(self, chain: Structured) -> None:
        super().__init__(*chain.parameters)
        self.states, self.pattern, self._axes = chain.c, chain.pattern, len(chain.batch) + 1

    @property
    def own_axes(self) -> tuple[int, ...]:
        return tuple(parameter.dim() - self._axes for parameter in self.parameters)


def operands(chain: Structured) -> Operands:
    pattern, structure = chain.pattern, None
    if isinstance(pattern, Factors):
        structure = _Product(chain)
    elif isinstance(pattern, Arcs):
        structure = object.__new__(Sparse)  # a graph may be without arcs here
        structure.parameters, structure.states = chain.parameters, chain.c
        structure._graph = _Graph(torch.stack([pattern.source, pattern.target]), chain.c)
    else:
        structure = Banded(chain.parameters[0], pattern)
    return Operands(chain.x, structure, chain.p0, chain.ends, chain.log_params)


def weights_of(chain: Structured) -> Tensor:
    """Weights of both signs."""
    return torch.linspace(-0.5, 2.0, max(1, chain.batch.numel()), dtype=F64)[: chain.batch.numel()].view(chain.batch)


def answers(room: str, chain: Structured, weight: Tensor | None = None, needs=ALL) -> tuple[Walk, Gradients]:
    """What forward and backward return; the log-partitions do not depend on what is kept."""
    module = Room(room)
    walk, weight = module.forward(chain, True), torch.ones(chain.batch, dtype=F64) if weight is None else weight
    assert torch.equal(module.forward(chain, False).log_norm.nan_to_num(0.5), walk.log_norm.nan_to_num(0.5))
    return walk, module.backward(chain, walk, weight, needs)


def flat(gradients: Gradients) -> list[Tensor]:
    return [gradients.x, *gradients.parameters, gradients.p0]


def _sum(terms: Tensor, dim: int) -> Tensor:
    """log of the sum of exp, with gradient 0 where nothing is summed."""
    top = terms.detach().amax(dim, keepdim=True)
    top = top.masked_fill(top == -INF, 0.0)
    sums = (terms - top).exp().sum(dim)
    none = sums == 0
    return (sums.masked_fill(none, 1.0).log() + top.squeeze(dim)).masked_fill(none, -INF)


def dense(pattern: Any, logs: list[Tensor], c: int) -> Tensor:
    """The logarithms of the matrices (n, c, c), of those of parameters (n, ...), written out for each kind."""
    n = len(logs[0])
    nothing = torch.full((n, c, c), -INF, dtype=F64)
    if isinstance(pattern, Arcs):
        nothing[:, pattern.source, pattern.target] = logs[0]
        return nothing
    if not isinstance(pattern, Factors):
        for band, offset in enumerate(pattern):
            to = torch.arange(max(0, offset), c + min(0, offset))
            nothing[:, to - offset, to] = logs[0][:, band, to]
        return nothing
    first = pattern.factors[0]
    if first.others == 1:
        matrix = _sum(logs[0][:, :, None] + logs[1][:, None], 3)
        if not pattern.diagonal:
            return matrix
        return _sum(torch.stack([matrix, nothing.diagonal_scatter(logs[2], 0, 1, 2)]), 0)
    if len(pattern.factors) == 1:
        places = torch.arange(c).view(logs[0].shape[1:3])
        nothing[:, places[:, :, None], places[:, None]] = logs[0]
        return nothing
    if first.blocks:
        return (logs[0][..., None] + logs[1].transpose(1, 2)[:, :, None]).reshape(n, c, c)
    matrix = logs[0]
    for factor in logs[1:]:
        size = matrix.shape[1] * factor.shape[1]
        matrix = (matrix[:, :, None, :, None] + factor[:, None, :, None, :]).reshape(n, size, size)
    return matrix


def truth(chain: Structured, *weights: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
    """The log-partitions, and for each of the weights gradients with respect to x and logarithms of all parameters."""
    axes, c = len(chain.batch), chain.c
    logs = [one.double() if chain.log_params else one.double().log() for one in (*chain.parameters, chain.p0)]
    *leaves, p0 = (one.detach().requires_grad_() for one in logs)
    lead = torch.broadcast_shapes(*(leaf.shape[: axes + 1] for leaf in leaves))
    rows = [leaf.expand(*lead, *leaf.shape[axes + 1 :]).flatten(0, axes) for leaf in leaves]
    matrices = dense(chain.pattern, rows, c).view(*lead, c, c)
    operands = (one.detach().numpy() for one in (chain.x.double(), matrices, p0))
    lengths = None if chain.ends is None else chain.ends.numpy()
    found, gradients = reference.marginals(*operands, log_params=True, lengths=lengths), []
    for weight in weights:
        factor = weight.numpy()[..., None, None]
        states, counts = factor * found.states, sum_to(factor[..., None] * found.transitions, matrices.shape)
        upstream = torch.from_numpy(np.ascontiguousarray(counts))
        used = torch.autograd.grad(matrices, leaves, upstream, retain_graph=True)
        first = torch.from_numpy(sum_to(states[..., 0, :], chain.p0.shape))
        gradients.append([torch.from_numpy(states), *used, first])
    return torch.from_numpy(np.asarray(found.log_norm)), gradients


def possible(chain: Structured) -> Structured:
    """The chain with weights of 1 in place of all that are not 0."""

    def ones(one: Tensor, zero: float, value: float) -> Tensor:
        return torch.where(one == zero, one, value)

    zero, value = (-INF, 0.0) if chain.log_params else (0.0, 1.0)
    parameters = tuple(ones(parameter, zero, value) for parameter in chain.parameters)
    return replace(chain, x=ones(chain.x, -INF, 0.0), parameters=parameters, p0=ones(chain.p0, zero, value))


def nearness(chain: Structured) -> float:
    """Relative errors of values, and half of those of gradients, besides those of the reference."""
    if isinstance(chain.pattern, Arcs):
        return chain.v * (chain.c + 8) * unit(chain.dtype)
    if isinstance(chain.pattern, Factors):
        return {F32: 2e-6, F64: 1e-12}[chain.dtype]
    return {F32: 2e-6, F64: 5e-14}[chain.dtype]


def check(room: str, chain: Structured, near: float | None = None) -> Walk:
    """The answers are as near the truth as `near`, and exactly 0 where they have to be; what `forward` returned."""
    weight, operands = weights_of(chain), (chain.x, *chain.parameters, chain.p0)
    with poisoned_memory():
        walk, gradients = answers(room, chain, weight)
    near = near or nearness(chain)
    # the reference subtracts logarithms as large as these
    largest = max(float(one.double().nan_to_num(0, 0, 0).abs().max()) for one in operands if one.numel())
    near = near + 8 * chain.v * largest * 2.0**-53
    log_norm, (wanted, sizes) = truth(chain, weight, weight.abs())
    _, (reached,) = truth(possible(chain), weight.abs())
    assert walk.log_norm.dtype == F64 and walk.log_norm.shape == chain.batch
    np.testing.assert_allclose(walk.log_norm, log_norm, rtol=4e-16, atol=near)
    factors = isinstance(chain.pattern, Factors)
    for found, want, size, reach, operand in zip(flat(gradients), wanted, sizes, reached, operands, strict=True):
        assert found.shape == operand.shape and found.dtype == chain.dtype and found.is_contiguous()
        # products of factors flush what is small compared with the largest
        most = float(size.max()) if size.numel() else 0.0
        allowed = 2 * near * (size + max(1e-4, most) if factors else size) + 2.0**-50
        entry = 1.0 if chain.log_params or chain.by_log or operand is chain.x else operand.double()
        zero = operand == (-INF if chain.log_params or operand is chain.x else 0.0)
        assert not found[zero | (reach == 0)].any(), "the impossible has a gradient"
        expected = torch.where(zero, 0.0, want / entry).to(chain.dtype).double()  # infinite beyond the dtype
        off = (found.double() - expected).abs() * entry
        assert (zero | (found == expected) | (off <= allowed)).all(), f"{(off / allowed).nan_to_num(0).max()}"
    return walk
