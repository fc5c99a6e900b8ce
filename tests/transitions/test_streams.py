"""What streams of structures alone do: states of streams, changing structures, and their errors.

That a stream of a structure has the results of its dense matrices is a row of `tests.transitions.test_queries`.
"""

import pytest
import torch

from logchain.stream import Stream
from logchain.transitions import Banded, Sparse
from tests.subjects import division, streamed
from tests.transitions.structures import MAKE, WITH_PATHS, C, Shift, numbers

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
V, BATCH = 17, (2, 3)


def operands(kind, *lead, dtype=F64):
    rand = numbers(3, dtype)
    return rand(*BATCH, V, C), MAKE[kind](rand, *lead), rand(C)


@pytest.mark.parametrize("kind", ["banded", "kronecker"])
def test_half_precision_is_computed_in_float64(kind):
    x, structure, p0 = operands(kind, V - 1, dtype=BF16)
    options = {"pieces": division(V, 1), "lag": 2, "viterbi": True}
    found = streamed(x, structure, p0, **options)[1]
    expected = streamed(x.double(), structure.to(F64).to_dense(), p0.double(), **options)[1]
    for one, other in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(one, other.to(F32), rtol=2.0**-22, atol=2.0**-22)
    assert found[3].equal(expected[3])


@pytest.mark.parametrize("kind", ["banded", "sparse", "blocks", "duration", "user's"])
def test_equal_paths_pass_the_lowest_states(kind):
    x, structure, _ = operands(kind, V - 1)
    structure, x = structure.map(torch.ones_like), torch.zeros_like(x)
    x[0, 1, 4], x[1, 2, 3] = -torch.inf, torch.nan  # an impossible sequence, and one that is unknown
    x[1, 1, 2, ::2] = -torch.inf
    for p0 in (torch.ones(C), torch.eye(C)[4]):
        options = {"pieces": [(0, 2), (2, V)], "viterbi": True}
        expected = streamed(x, structure.to_dense(), p0, **options)[1].states
        assert streamed(x, structure, p0, **options)[1].states.equal(expected)
        assert (expected[0, 1] == -1).any() and (expected[0, 0] >= 0).all()


def test_updates_may_bring_different_matrices_without_a_lag():
    x, _, p0 = operands("banded")
    stream, dense = Stream(None, p0, viterbi=True), Stream(None, p0, viterbi=True)
    for start, kind in enumerate([*WITH_PATHS, *WITH_PATHS]):
        structure = operands(kind, 1)[1]
        piece = x[..., start : start + 1, :]
        bulk = structure.to_dense() if start % 3 == 2 else structure
        found, expected = stream.update(piece, bulk), dense.update(piece, structure.to_dense())
        torch.testing.assert_close(found.log_norm, expected.log_norm)
        torch.testing.assert_close(found.filtered, expected.filtered)
        assert found.states.equal(expected.states)
    assert stream.flush().states.equal(dense.flush().states)


ONE_ARC, ARCS = torch.tensor([[0], [1]]), torch.tensor([[0, 1], [1, 2]])
ONES, TWO = torch.ones(1, C), torch.ones(1, 2)
CHANGES = {
    "other diagonals": (Banded(torch.ones(1, 2, C), [0, 1]), Banded(torch.ones(1, 2, C), [0, 2])),
    "another structure": (Banded(torch.ones(1, 2, C), [0, 1]), Sparse(ONE_ARC, torch.ones(1, 1), C)),
    "dense": (Banded(torch.ones(1, 2, C), [0, 1]), torch.ones(1, C, C)),
    "other arcs": (Sparse(ARCS, TWO, C), Sparse(torch.tensor([[0, 1], [1, 3]]), TWO, C)),
    "another option": (Shift(ONES), Shift(ONES, by=2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_lag_holds_structures_of_one_kind(change):
    first, other = CHANGES[change]
    stream, x = Stream(None, torch.ones(C), lag=2), torch.zeros(2, 1, C)
    stream.update(x, first)
    before = stream.log_norm
    name = type(first).__name__
    with pytest.raises(ValueError, match=rf"bulk_piece: expected that of the last update, {name}.* got another"):
        stream.update(x, other)
    assert stream.log_norm.equal(before)  # nothing has happened
    stream.update(x, first.map(lambda weight: 2 * weight))


BANDED, LOW_RANK = (operands(kind)[1] for kind in ("banded", "low_rank"))
P0, X, AXES = torch.ones(C), torch.zeros(2, 3, C), r"expected leading axes of 1 or as in \[2\]"
SUMS = "expected a structure whose entries are products, got LowRank"
NEGATIVE = BANDED.map(lambda weight: -torch.ones_like(weight))
WRONG = {
    r"bulk: expected 5 states, got Banded\(\[4, 12\]\) of 12": lambda: Stream(BANDED, torch.ones(5)),
    r"bulk: expected Banded of shape \[..., 1, 4, 12\], got \[5, 4, 12\]; pass matrices that change to update":
        lambda: Stream(operands("banded", 5)[1], P0),
    f"bulk: {AXES}": lambda: Stream(operands("banded", 5, 1)[1], P0).update(X),
    "bulk_piece: expected None": lambda: Stream(BANDED, P0).update(X, BANDED),
    r"bulk_piece: expected Sparse of shape \[..., 3 or 1, \d+\], got \[2, \d+\]":
        lambda: Stream(None, P0).update(X, operands("sparse", 2)[1]),
    f"bulk_piece: {AXES}": lambda: Stream(None, P0).update(X, operands("sparse", 3, 3)[1]),
    r"bulk\.\S+: expected non-negative weights, got -1": lambda: Stream(NEGATIVE, P0, validate=True).update(X),
    f"bulk: {SUMS}": lambda: Stream(LOW_RANK, P0, viterbi=True),
    f"bulk_piece: {SUMS}": lambda: Stream(None, P0, viterbi=True).update(X, LOW_RANK),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_structures_are_named(message):
    with pytest.raises(TypeError if "products" in message else ValueError, match=f"^{message}"):
        WRONG[message]()
