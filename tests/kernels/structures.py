"""Chains of structures of each kind, and a check of their scans against dense matrices."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import logchain
from logchain import reference, transitions
from tests.backends import on
from tests.contract import assert_values, poisoned_memory, sum_to, ulp, unit
from tests.families import F32, F64, INF

FACTORS = transitions.LowRank, transitions.BlockDiagonal, transitions.Monarch, transitions.Kronecker


class Kind(NamedTuple):
    """A structure of c states: the sizes of its parameters, without batch axes and steps, and what makes it of them."""

    c: int
    sizes: list[tuple[int, ...]]
    make: Callable[..., transitions.Transition]

    @property
    def is_product(self) -> bool:
        return self.make in FACTORS

    def random(self, rand: Callable[..., Tensor], *lead: int) -> transitions.Transition:
        """A structure whose parameters have such leading axes, and are drawn by a function of a shape."""
        return self.make(*(rand(*lead, *size) for size in self.sizes))


def arcs(c: int, pairs: list[tuple[int, int]]) -> Kind:
    def make(values: Tensor) -> transitions.Transition:
        return transitions.Sparse(torch.tensor(pairs, dtype=torch.int64).view(-1, 2).mT, values, c)

    return Kind(c, [(len(pairs),)], make)


def random_arcs(c: int, density: float = 0.4) -> Kind:
    """Some states have none."""
    there = torch.rand(c, c, generator=torch.Generator().manual_seed(c)) < density
    return arcs(c, [(int(i), int(j)) for i, j in there.nonzero()])


def hub(count: int) -> list[tuple[int, int]]:
    """Arcs between state 0 and so many others, and two that lie apart."""
    return sorted({(0, j) for j in range(count)} | {(j, 0) for j in range(count)} | {(5, 5), (5, 6)})


def bands(c: int, *offsets: int) -> Kind:
    return Kind(c, [(len(offsets), c)], lambda values: transitions.Banded(values, offsets))


def durations(segments: int, longest: int) -> Kind:
    return Kind(segments * longest, [(segments, segments), (segments, longest)], transitions.Duration)


def low_rank(c: int, r: int, diagonal: bool = True) -> Kind:
    return Kind(c, [(c, r), (c, r), *([(c,)] if diagonal else [])], transitions.LowRank)


def block_diagonal(a: int, b: int) -> Kind:
    return Kind(a * b, [(a, b, b)], transitions.BlockDiagonal)


def monarch(a: int, b: int, middle: int) -> Kind:
    return Kind(a * b, [(a, b, middle), (middle, a, a * b // middle)], transitions.Monarch)


def kronecker(*sizes: int) -> Kind:
    return Kind(math.prod(sizes), [(size, size) for size in sizes], transitions.Kronecker)


KINDS = {
    "arcs": random_arcs(9),
    "bands": bands(11, 0, 1, -3),
    "durations": durations(4, 3),
    "low_rank": low_rank(11, 3),
    "low_rank_only": low_rank(9, 2, False),
    "block_diagonal": block_diagonal(3, 5),
    "monarch": monarch(4, 6, 8),
    "kronecker": kronecker(3, 2),
    "kronecker3": kronecker(2, 3, 2),
    "one_state": low_rank(1, 1),
}


class Chain(NamedTuple):
    """x [*B, v, c], parameters [*B or ones, v-1 or 1, *size] and p0 [*B or ones, c], and the lengths [*B] or None."""

    x: Tensor
    parameters: tuple[Tensor, ...]
    p0: Tensor
    kind: Kind
    lengths: Tensor | None = None
    log_params: bool = False

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return self.x, *self.parameters, self.p0

    @property
    def batch(self) -> torch.Size:
        return self.x.shape[:-2]

    def logs(self) -> "Chain":
        logs = tuple(parameter.log() for parameter in self.parameters)
        return self._replace(parameters=logs, p0=self.p0.log(), log_params=True)

    def call(self, function: Callable, *args, **options):
        """A function of x, the structure and p0."""
        options |= {"log_params": self.log_params, "lengths": self.lengths}
        return function(self.x, self.kind.make(*self.parameters), self.p0, *args, **options)


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
) -> Chain:
    """A random chain whose parameters have batch axes of the sizes `owned`, or ones; `zeros`: the share of zeros."""
    generator = torch.Generator().manual_seed(seed)
    owned = tuple(1 for _ in batch) if owned is None else owned

    def sparse(one: Tensor, zero: float) -> Tensor:
        return one.masked_fill(torch.rand(one.shape, generator=generator) < zeros, zero).to(dtype)

    x = scale * torch.randn(*batch, v, kind.c, generator=generator, dtype=F64)
    sizes = [(*owned, steps, *size) for size in kind.sizes] + [(*owned, kind.c)]
    weights = [torch.rand(size, generator=generator, dtype=F64) + 0.01 for size in sizes]
    *parameters, p0 = (sparse(one.log(), -INF) if log else sparse(one, 0.0) for one in weights)
    lengths = torch.randint(1, v + 1, batch, generator=generator) if ends else None
    return Chain(sparse(x, -INF), tuple(parameters), p0, kind, lengths, log)


def single(kind: Kind, parameters: list, x: list, p0: list[float], dtype: torch.dtype = F32) -> Chain:
    """One sequence, under one matrix or one for each step."""
    tensors = (torch.tensor(one, dtype=dtype)[None] for one in parameters)
    return Chain(torch.tensor(x, dtype=dtype)[None], tuple(tensors), torch.tensor(p0, dtype=dtype)[None], kind)


class Results(NamedTuple):
    """The log-partitions, gradients of all operands, and how many sequences were recomputed in logarithms."""

    log_norm: Tensor
    gradients: list[Tensor]
    recomputed: int


def weights_of(chain: Chain) -> Tensor:
    """Weights of both signs."""
    return torch.linspace(-0.5, 2.0, max(1, chain.batch.numel()), dtype=F64)[: chain.batch.numel()].view(chain.batch)


def results(backend: str, chain: Chain, weight: Tensor | None = None) -> Results:
    """The product, which does not depend on whether gradients are wanted, and its gradients."""
    leaves = [operand.detach().requires_grad_() for operand in chain.operands]
    varied = chain._replace(x=leaves[0], parameters=tuple(leaves[1:-1]), p0=leaves[-1])
    with on(backend):
        alone = chain.call(logchain.product)
        with logchain.rescues() as seen:
            value = varied.call(logchain.product)
        weight = torch.ones_like(value) if weight is None else weight.to(value.dtype)
        gradients = torch.autograd.grad(value, leaves, weight)
    assert torch.equal(alone.nan_to_num(0.5), value.detach().nan_to_num(0.5))
    return Results(value.detach(), list(gradients), seen.sequences)


def _sum(terms: Tensor, dim: int) -> Tensor:
    """log of the sum of exp, with gradient 0 where nothing is summed."""
    top = terms.detach().amax(dim, keepdim=True)
    top = top.masked_fill(top == -INF, 0.0)
    sums = (terms - top).exp().sum(dim)
    none = sums == 0
    return (sums.masked_fill(none, 1.0).log() + top.squeeze(dim)).masked_fill(none, -INF)


def dense(structure: transitions.Transition) -> Tensor:
    """The logarithms of the matrices [..., c, c], of those of parameters, written out for each kind."""
    first, *others = structure.parameters
    c = structure.states
    nothing = torch.full((*structure.lead, c, c), -INF, dtype=F64)
    match structure:
        case transitions.Sparse():
            nothing[..., structure.indices[0], structure.indices[1]] = first
            return nothing
        case transitions.Banded():
            for band, offset in enumerate(structure.offsets):
                to = torch.arange(max(0, offset), c + min(0, offset))
                nothing[..., to - offset, to] = first[..., band, to]
            return nothing
        case transitions.LowRank():
            matrix = _sum(first[..., :, None, :] + others[0][..., None, :, :], -1)
            if len(others) == 1:
                return matrix
            diagonal = nothing.diagonal_scatter(others[1].expand(nothing.shape[:-1]), 0, -2, -1)
            return _sum(torch.stack([matrix.expand_as(nothing), diagonal]), 0)
        case transitions.Duration():
            longest = others[0].shape[-1]
            for source in range(c):
                if source % longest:
                    nothing[..., source, source - 1] = 0.0
                else:
                    entries = first[..., source // longest, :, None] + others[0]
                    nothing[..., source, :] = entries.flatten(-2)
            return nothing
        case transitions.BlockDiagonal():
            places = torch.arange(c).view(first.shape[-3:-1])
            nothing[..., places[:, :, None], places[:, None]] = first
            return nothing
        case transitions.Monarch():
            pairs = first[..., None] + others[0].transpose(-3, -2)[..., :, None, :, :]
            return pairs.flatten(-2).flatten(-3, -2)
    for factor in others:
        pairs = first[..., :, None, :, None] + factor[..., None, :, None, :]
        first = pairs.flatten(-2).flatten(-3, -2)
    return first


def truth(chain: Chain, *weights: Tensor) -> tuple[np.ndarray, list[list[Tensor]]]:
    """The log-partitions, and for each of the weights gradients with respect to x and logarithms of all parameters."""
    wide = (parameter.double() for parameter in chain.parameters)
    leaves = [(one if chain.log_params else one.log()).detach().requires_grad_() for one in wide]
    matrices = dense(chain.kind.make(*leaves))
    p0 = chain.p0.double() if chain.log_params else chain.p0.double().log()
    operands = (one.detach().numpy() for one in (chain.x.double(), matrices, p0))
    lengths = None if chain.lengths is None else chain.lengths.numpy()
    computed, gradients = reference.marginals(*operands, log_params=True, lengths=lengths), []
    for weight in weights:
        factor = weight.numpy()[..., None, None]
        states, counts = factor * computed.states, sum_to(factor[..., None] * computed.transitions, matrices.shape)
        upstream = torch.from_numpy(np.ascontiguousarray(counts))
        used = torch.autograd.grad(matrices, leaves, upstream, retain_graph=True)
        first = torch.from_numpy(sum_to(states[..., 0, :], chain.p0.shape))
        gradients.append([torch.from_numpy(states), *used, first])
    return np.asarray(computed.log_norm), gradients


def possible(chain: Chain) -> Chain:
    """The chain with weights of 1 in place of all that are not 0."""

    def ones(one: Tensor, zero: float, value: float) -> Tensor:
        return torch.where(one == zero, one, value)

    zero, value = (-INF, 0.0) if chain.log_params else (0.0, 1.0)
    parameters = tuple(ones(parameter, zero, value) for parameter in chain.parameters)
    return chain._replace(x=ones(chain.x, -INF, 0.0), parameters=parameters, p0=ones(chain.p0, zero, value))


def nearness(chain: Chain) -> float:
    """Relative errors of values, and half of those of gradients, besides those of the reference."""
    (v, c), dtype = chain.x.shape[-2:], chain.x.dtype
    if chain.kind.is_product:
        return {F32: 2e-6, F64: 1e-12}[dtype]
    if len(chain.kind.sizes[0]) == 1:  # arcs
        return v * (c + 8) * unit(dtype)
    return {F32: 2e-6, F64: 5e-14}[dtype]


def check(backend: str, chain: Chain, near: float | None = None) -> Results:
    """Results are as near the truth as `near`, and exactly 0 where they have to be."""
    weight, v, dtype = weights_of(chain), chain.x.shape[-2], chain.x.dtype
    with poisoned_memory():
        computed = results(backend, chain, weight)
    # the reference subtracts logarithms as large as these
    largest = max(float(one.double().nan_to_num(0, 0, 0).abs().max()) for one in chain.operands if one.numel())
    near = (near or nearness(chain)) + 8 * v * largest * 2.0**-53
    log_norm, (wanted, sizes) = truth(chain, weight, weight.abs())
    _, (reached,) = truth(possible(chain), weight.abs())
    assert computed.log_norm.dtype == dtype
    assert_values(computed.log_norm, log_norm, near + ulp(log_norm, dtype))
    for one, want, size, reach, operand in zip(computed.gradients, wanted, sizes, reached, chain.operands, strict=True):
        assert one.shape == operand.shape and one.dtype == dtype
        # products of factors flush what is small compared with the largest
        most = float(size.max()) if size.numel() else 0.0
        allowed = 2 * near * (size + max(1e-4, most) if chain.kind.is_product else size) + 2.0**-50
        log = chain.log_params or operand is chain.x
        entry, zero = 1.0 if log else operand.double(), operand == (-INF if log else 0.0)
        assert not one[zero | (reach == 0)].any(), "the impossible has a gradient"
        expected = torch.where(zero, 0.0, want / entry).to(dtype).double()  # infinite beyond the dtype
        off = (one.double() - expected).abs() * entry
        assert (zero | (one == expected) | (off <= allowed)).all(), f"{(off / allowed).nan_to_num(0).max()}"
    return computed
