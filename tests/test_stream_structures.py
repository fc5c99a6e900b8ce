"""A stream of structures answers what the same stream of dense matrices does."""

import copy
import io
import math

import pytest
import torch

from logchain.stream import Stream
from logchain.transitions import (
    Banded,
    BlockDiagonal,
    Kronecker,
    LowRank,
    Monarch,
    Sparse,
    Transition,
)
from tests.streams import joined
from tests.subjects import division

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
ARCS = torch.tensor([[0, 0, 1, 2, 3, 5, 4, 1, 4, 2], [0, 2, 2, 3, 5, 4, 0, 1, 4, 0]])


class Shift(Transition):
    """A structure of a user's own: state i leads to i + by, modulo c, and to itself."""

    own = (1, 1)

    def __init__(self, moves, stays, by=1):
        super().__init__(moves, stays)
        self.states, self.by = moves.shape[-1], by

    def apply(self, message, arithmetic):
        moved, stayed = (arithmetic.times(message, weight[..., None, :]) for weight in self.parameters)
        return arithmetic.plus(moved.roll(self.by, -1), stayed)


# a structure of six states, and the sizes of its parameters
STRUCTURES = {
    "banded": (lambda values: Banded(values, [0, 1, -2]), (3, 6)),
    "sparse": (lambda values: Sparse(ARCS, values, 6), (10,)),
    "low rank": (LowRank, (6, 2), (6, 2), (6,)),
    "blocks": (BlockDiagonal, (2, 3, 3)),
    "kronecker": (Kronecker, (2, 2), (3, 3)),
    "monarch": (Monarch, (2, 3, 2), (2, 2, 3)),
    "own": (Shift, (6,), (6,)),
}
WITH_PATHS = [name for name in STRUCTURES if name != "low rank"]
V, BATCH = 17, (2, 3)


def drawn(*shape, dtype=F64, seed=0):
    return torch.rand(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def structure_of(name, *lead, dtype=F64, log_params=False, seed=0):
    make, *sizes = STRUCTURES[name]
    weights = [0.05 + drawn(*lead, *size, seed=seed + i) for i, size in enumerate(sizes)]
    return make(*((weight.log() if log_params else weight).to(dtype) for weight in weights))


def parts_of(bulk, start, stop):
    """The steps from `start` to before `stop` of a structure, or of matrices, which have a step for each variable."""
    if isinstance(bulk, torch.Tensor):
        return bulk[..., start:stop, :, :]
    return bulk.with_parameters(
        *(one.narrow(-1 - own, start, stop - start) for one, own in zip(bulk.parameters, bulk.own_axes, strict=True))
    )


def streamed(x, bulk, p0, *, shared, pieces, lengths=None, reset=None, **options):
    """What a stream returns for all pieces and a flush, and the stream."""
    stream = Stream(bulk if shared else None, p0, **options)
    found = []
    for i, (start, stop) in enumerate(pieces):
        if i == reset:
            stream.reset(torch.tensor([[True, False, False], [False, True, False]]))
        ends = None if lengths is None else (lengths - start).clamp(0, stop - start)
        into = None if shared else parts_of(bulk, start, stop)
        found.append(stream.update(x[..., start:stop, :], into, lengths=ends))
    found.append(stream.flush())
    return [found[-1].log_norm, *(joined(found, field) for field in range(1, 4))], stream


def assert_same(found, expected, dtype=F64):
    close = {F64: dict(rtol=1e-10, atol=1e-12), F32: dict(rtol=2.0**-22, atol=2.0**-22)}[dtype]
    for one, other in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(one, other if other is None else other.to(dtype), **close)
    assert found[3] is expected[3] is None or found[3].equal(expected[3])


@pytest.mark.parametrize("kind", ["shared", "own", "each", "each own"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_as_dense_matrices(name, kind):
    index = list(STRUCTURES).index(name)
    dtype, log_params = (F32, F64)[index % 2], "own" in kind
    shared = "each" not in kind
    # no axes at all stand for one matrix too
    lead = {"shared": (), "own": (2, 1, 1), "each": (V,), "each own": (3, V)}[kind]
    structure = structure_of(name, *lead, dtype=dtype, log_params=log_params)
    dense = structure.to(F64).to_dense(log_params=log_params).view(*(lead or (1,)), 6, 6)
    x, p0 = 3 * drawn(*BATCH, V, 6, dtype=dtype), drawn(6, dtype=dtype)
    x[0, 0, 3] = -math.inf
    lengths = torch.tensor([[17, 9, 1], [0, 16, 12]]) if kind in ("own", "each") else None
    options = dict(shared=shared, log_params=log_params, lag=3, viterbi=name in WITH_PATHS, reset=3)
    options |= dict(pieces=division(V, index), lengths=lengths)
    found, stream = streamed(x, structure, p0, **options)
    expected, of_dense = streamed(x.double(), dense, p0.double(), **options)
    assert found[0].dtype == found[1].dtype == found[2].dtype == dtype
    assert_same(found, expected, dtype)
    torch.testing.assert_close(stream.filtered, of_dense.filtered.to(dtype), rtol=2.0**-22, atol=2.0**-22)
    # without what asks for logarithms, and without posteriors
    options |= dict(lag=0, viterbi=False, filtered=False)
    torch.testing.assert_close(
        streamed(x, structure, p0, **options)[0][0], expected[0].to(dtype), rtol=2.0**-22, atol=0.0
    )


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("name", STRUCTURES)
def test_gradients(name, detach):
    shared = list(STRUCTURES).index(name) % 2 == 0
    structure = structure_of(name, *((1,) if shared else (2, 1, 9)))
    x, p0 = drawn(*BATCH, 9, 6), drawn(6)
    x[1, 0] = -math.inf  # an impossible sequence has gradient 0
    leaves = [x, p0, *structure.parameters]
    found = []
    for dense in (False, True):
        ours = [leaf.clone().requires_grad_() for leaf in leaves]
        bulk = structure.with_parameters(*ours[2:])
        bulk = bulk.to_dense() if dense else bulk
        options = dict(shared=shared, pieces=[(0, 1), (1, 5), (5, 5), (5, 9)], lag=2, detach=detach)
        (log_norm, filtered, smoothed, _), _ = streamed(ours[0], bulk, ours[1], **options)
        value = log_norm.masked_fill(log_norm.isneginf(), 0.0).sum() + (filtered * smoothed * drawn(9, 6)).sum()
        first = torch.autograd.grad(value, ours, create_graph=True)
        second = torch.autograd.grad(sum((grad * drawn(*grad.shape)).sum() for grad in first), ours)
        found.append([*first, *second])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    assert all(grad.abs().sum() > 0 for grad in found[0][: len(leaves)])


def test_half_precision_is_computed_in_float64():
    structure, x, p0 = structure_of("banded", dtype=BF16), drawn(*BATCH, V, 6, dtype=BF16), drawn(6, dtype=BF16)
    options = dict(shared=True, pieces=division(V, 1), lag=2, viterbi=True)
    found, _ = streamed(x, structure, p0, **options)
    expected, _ = streamed(x.double(), structure.to(F64).to_dense()[None], p0.double(), **options)
    assert found[0].dtype == F32
    assert_same(found, expected, F32)


def test_a_chain_without_batch_axes():
    structure, x, p0 = structure_of("sparse", V), drawn(V, 6), drawn(6)
    options = dict(shared=False, pieces=division(V, 2), lag=2, viterbi=True)
    assert_same(
        streamed(x, structure, p0, **options)[0],
        streamed(x, structure.to_dense(), p0, **options)[0],
    )


@pytest.mark.parametrize("name", WITH_PATHS)
def test_of_equal_paths_that_through_the_lowest_states(name):
    structure = structure_of(name).map(torch.ones_like)
    x = torch.zeros(*BATCH, 6, 6)
    x[0, 1, 4], x[1, 2, 3] = -math.inf, math.nan  # an impossible sequence, and one that is unknown
    x[1, 1, 2, ::2] = -math.inf
    for p0 in (torch.ones(6), torch.eye(6)[4]):
        options = dict(shared=True, pieces=[(0, 2), (2, 6)], viterbi=True)
        expected = streamed(x, structure.to_dense()[None], p0, **options)[0][3]
        assert streamed(x, structure, p0, **options)[0][3].equal(expected)
        assert (expected[0, 1] == -1).any() and (expected[0, 0] >= 0).all()


@pytest.mark.parametrize("name", ["banded", "low rank"])
def test_values_without_influence(name):
    """What leads into the first variable, and what lies behind all ends, may be NaN, and gradients are not."""
    structure = structure_of(name, 1, V)
    dirty = [one.clone() for one in structure.parameters]
    for one in dirty:
        one[:, 0], one[:, 12:] = math.nan, math.nan
        one.requires_grad_()
    x, p0, ends = drawn(*BATCH, V, 6), drawn(6), torch.full(BATCH, 12)
    options = dict(shared=False, pieces=[(0, 5), (5, V)], lag=2, lengths=ends, validate=True)
    found, _ = streamed(x, structure.with_parameters(*dirty), p0, **options)
    expected, _ = streamed(x, structure.to_dense(), p0, **options)
    assert_same(found, expected)
    grads = torch.autograd.grad(found[0].sum(), dirty)
    assert all(grad.isfinite().all() and (grad[:, 0] == 0).all() and (grad[:, 12:] == 0).all() for grad in grads)


@pytest.mark.parametrize("name", STRUCTURES)
def test_goes_on_from_a_state_with_the_same_bits(name):
    index = list(STRUCTURES).index(name)
    structure, x, p0 = structure_of(name, V), drawn(*BATCH, V, 6), drawn(6)
    pieces, options = division(V, index), dict(lag=4, viterbi=name in WITH_PATHS)
    stream, found = Stream(None, p0, **options), []
    for start, stop in pieces:
        found.append(stream.update(x[..., start:stop, :], parts_of(structure, start, stop)))
        file, other = io.BytesIO(), Stream(None, p0, **options)
        torch.save(stream.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=False))
        stream = other
    # also if nothing follows but the end
    found.append(copy.deepcopy(stream).flush())
    expected, _ = streamed(x, structure, p0, shared=False, pieces=pieces, **options)
    assert found[-1].log_norm.equal(expected[0])
    for field in range(1, 4):
        one = joined(found, field)
        assert (one is None and expected[field] is None) or one.equal(expected[field])


def test_updates_may_bring_different_matrices_without_a_lag():
    x, p0 = drawn(*BATCH, V, 6), drawn(6)
    stream, dense = Stream(None, p0, viterbi=True), Stream(None, p0, viterbi=True)
    for start, name in enumerate([*WITH_PATHS, *WITH_PATHS]):
        structure = structure_of(name, 1)
        piece = x[..., start : start + 1, :]
        bulk = structure.to_dense() if start % 3 == 2 else structure
        assert_same(stream.update(piece, bulk), dense.update(piece, structure.to_dense()))
    assert_same(stream.flush(), dense.flush())


@pytest.mark.parametrize(
    "other",
    [
        Banded(torch.ones(1, 2, 6), [0, 2]),
        Sparse(torch.tensor([[0], [1]]), torch.ones(1, 1), 6),
        torch.ones(1, 6, 6),
    ],
    ids=["other diagonals", "another structure", "dense"],
)
def test_a_lag_holds_structures_of_one_kind(other):
    first, x = Banded(torch.ones(1, 2, 6), [0, 1]), torch.zeros(2, 1, 6)
    stream = Stream(None, torch.ones(6), lag=2)
    stream.update(x, first)
    before = stream.log_norm
    with pytest.raises(ValueError, match=r"bulk_piece: expected that of the last update, Banded, .* got another"):
        stream.update(x, other)
    assert stream.log_norm.equal(before)  # nothing has happened
    stream.update(x, Banded(torch.full((1, 2, 6), 2.0), [0, 1]))


def test_a_lag_tells_graphs_and_own_structures_apart():
    x, weight = torch.zeros(2, 1, 6), torch.ones(1, 2)
    stream = Stream(None, torch.ones(6), lag=2)
    stream.update(x, Sparse(torch.tensor([[0, 1], [1, 2]]), weight, 6))
    stream.update(x, Sparse(torch.tensor([[0, 1], [1, 2]]), weight, 6))
    with pytest.raises(ValueError, match="got another Sparse"):
        stream.update(x, Sparse(torch.tensor([[0, 1], [1, 3]]), weight, 6))
    stream = Stream(None, torch.ones(6), lag=2)
    stream.update(x, Shift(torch.ones(1, 6), torch.ones(1, 6)))
    stream.update(x, Shift(torch.ones(1, 6), torch.ones(1, 6)))
    with pytest.raises(ValueError, match="got another Shift"):
        stream.update(x, Shift(torch.ones(1, 6), torch.ones(1, 6), by=2))


def test_there_is_no_best_path_through_sums():
    structure, p0 = structure_of("low rank"), torch.ones(6)
    with pytest.raises(TypeError, match=r"^bulk: expected a structure whose entries are products, got LowRank"):
        Stream(structure, p0, viterbi=True)
    with pytest.raises(TypeError, match=r"^bulk_piece: expected a structure whose entries are products, got LowRank"):
        Stream(None, p0, viterbi=True).update(torch.zeros(2, 1, 6), structure)


def test_wrong_structures_raise():
    p0, x = torch.ones(6), torch.zeros(2, 3, 6)
    with pytest.raises(ValueError, match=r"^bulk: expected 5 states, got Banded\(\[3, 6\]\) of 6"):
        Stream(structure_of("banded"), torch.ones(5))
    with pytest.raises(ValueError, match=r"^bulk: expected 1 steps before the last 2 axes, got Banded\(\[4, 3, 6\]\)"):
        Stream(structure_of("banded", 4), p0)
    with pytest.raises(ValueError, match=r"^bulk: expected leading axes of 1 or as in \[2\]"):
        Stream(structure_of("banded", 5, 1), p0).update(x)
    with pytest.raises(ValueError, match=r"^bulk_piece: expected None"):
        Stream(structure_of("banded"), p0).update(x, structure_of("banded"))
    with pytest.raises(ValueError, match=r"^bulk_piece: expected 3 or 1 steps before the last 1 axes, got Sparse"):
        Stream(None, p0).update(x, structure_of("sparse", 2))
    with pytest.raises(ValueError, match=r"^bulk_piece: expected leading axes of 1 or as in \[2\]"):
        Stream(None, p0).update(x, structure_of("sparse", 3, 3))
    with pytest.raises(ValueError, match=r"^bulk\.\S+: expected non-negative weights, got -1"):
        Stream(
            structure_of("banded").map(torch.neg).map(torch.ceil).map(lambda one: one - 1), p0, validate=True
        ).update(x)
