"""Each structure is its matrix: as its formula says, passed through in any arithmetic, transposed, and by entries."""

import re

import pytest
import torch

from logchain import transitions
from logchain.transitions import LINEAR, LOG, MAX
from tests.kernels.structures import dense
from tests.transitions.structures import MAKE, C, numbers

KINDS = pytest.mark.parametrize("kind", MAKE)
LEADS = pytest.mark.parametrize("lead", [(), (5,), (2, 1, 3)], ids=str)


@KINDS
def test_the_dense_matrix_is_that_of_the_formula(kind):
    structure = MAKE[kind](numbers(0))
    if kind == "user's":
        expected = structure.parameters[0].diag().roll(1, 1)
    else:
        expected = dense(structure.map(torch.log)).exp()
    torch.testing.assert_close(structure.to_dense(), expected, rtol=1e-14, atol=0)
    logs = structure.map(torch.log).to_dense(log_params=True)
    torch.testing.assert_close(logs.exp(), expected, rtol=1e-13, atol=0)
    assert torch.equal(logs == -torch.inf, expected == 0)


@KINDS
def test_logarithms_of_half_precision_are_multiplied_out_in_float32(kind):
    structure = MAKE[kind](numbers(0, torch.bfloat16)).map(torch.log)
    expected = structure.to(torch.float32).to_dense(log_params=True)
    # products of three factors are rounded twice on the way
    torch.testing.assert_close(structure.to_dense(log_params=True).float(), expected, rtol=2**-7, atol=2**-7)


@KINDS
@LEADS
def test_messages_pass_as_through_the_dense_matrices(kind, lead):
    structure = MAKE[kind](numbers(0), *lead)
    dense, message = structure.to_dense(), numbers(1)(*lead, 4, C)
    torch.testing.assert_close(structure.apply(message, LINEAR), message @ dense, rtol=1e-13, atol=0)
    torch.testing.assert_close(structure.mT.apply(message, LINEAR), message @ dense.mT, rtol=1e-13, atol=0)
    logs = structure.map(torch.log)
    torch.testing.assert_close(logs.apply(message.log(), LOG).exp(), message @ dense, rtol=1e-13, atol=0)
    if not structure.sums:
        best = (message[..., None] * dense[..., None, :, :]).amax(-2)
        torch.testing.assert_close(logs.apply(message.log(), MAX).exp(), best, rtol=1e-13, atol=0)


@KINDS
@LEADS
def test_entries_and_columns_are_those_of_the_dense_matrices(kind, lead):
    structure = MAKE[kind](numbers(0), *lead)
    generator = torch.Generator().manual_seed(2)
    source, target = torch.randint(C, (2, 40, *lead), generator=generator)
    dense = structure.to_dense()
    places = torch.meshgrid(*map(torch.arange, lead), indexing="ij") if lead else ()
    expected = dense[(*places, source, target)]
    torch.testing.assert_close(structure.entries(source, target), expected, rtol=1e-13, atol=0)
    logs = structure.map(torch.log)
    torch.testing.assert_close(logs.entries(source, target, LOG).exp(), expected, rtol=1e-13, atol=0)
    columns = logs.columns(target.movedim(0, -1)).exp()  # [*lead, 40, c]
    expected = dense.mT[(*(place[..., None] for place in places), target.movedim(0, -1))]
    torch.testing.assert_close(columns, expected, rtol=1e-13, atol=0)


@KINDS
def test_a_structure_of_float32_parameters_stays_float32(kind):
    structure = MAKE[kind](numbers(0, torch.float32), 2)
    assert structure.dtype == structure.to_dense().dtype == torch.float32
    assert structure.to(torch.float64).dtype == torch.float64
    assert structure.lead == (2,)
    elsewhere = structure.to("meta")
    assert elsewhere.device.type == "meta" and getattr(elsewhere, "indices", elsewhere.parameters[0]).is_meta


def test_values_of_bands_without_a_source_are_ignored():
    values = torch.tensor([[torch.nan, 2.0, 3.0], [4.0, 5.0, torch.nan]], requires_grad=True)
    dense = transitions.Banded(values, [1, -1]).to_dense()
    assert dense.tolist() == [[0, 2, 0], [4, 0, 3], [0, 5, 0]]
    dense.sum().backward()
    assert values.grad.tolist() == [[0, 1, 1], [1, 1, 0]]


ones, Banded, Sparse, LowRank = torch.ones, transitions.Banded, transitions.Sparse, transitions.LowRank
Duration, Kronecker, Monarch = transitions.Duration, transitions.Kronecker, transitions.Monarch
FROM, TO, ZEROS = torch.tensor([[0], [1]]), torch.tensor([[0], [2]]), torch.zeros(2, 2, dtype=torch.int64)
WRONG = {
    "values: expected a torch.Tensor, got list; pass torch.tensor(values)": lambda: Banded([[1.0]], [0]),
    "values: expected at least 2 axes, got shape [3]": lambda: Banded(ones(3), [0]),
    "offsets: expected one for each of 2 bands of values, got 1": lambda: Banded(ones(2, 3), [0]),
    "offsets: expected different integers from -2 to 2, got [0, 3]": lambda: Banded(ones(2, 3), [0, 3]),
    "offsets: expected different integers from -2 to 2, got [1, 1]": lambda: Banded(ones(2, 3), [1, 1]),
    "offsets: expected a sequence of integers, got [0.5]": lambda: Banded(ones(1, 3), [0.5]),
    "indices: expected [2, 3] to go with values, got [2, 2]": lambda: Sparse(ZEROS, ones(3)),
    "indices: expected integers, got float32": lambda: Sparse(ones(2, 3), ones(3)),
    "indices: expected values from 0 to c - 1 = 1, got 0 to 2": lambda: Sparse(TO, ones(1), 2),
    "indices: expected each pair of states once, got one twice": lambda: Sparse(ZEROS, ones(2)),
    "states: expected an integer or None, got 2.0": lambda: Sparse(FROM, ones(1), 2.0),
    "right: expected [..., 3, 2] to go with left, got [3, 4]": lambda: LowRank(ones(3, 2), ones(3, 4)),
    "diagonal: expected [..., 3] to go with left, got [2]": lambda: LowRank(ones(3, 2), ones(3, 2), ones(2)),
    "matrix: expected [..., c, c], got [2, 3]": lambda: Duration(ones(2, 3), ones(2, 4)),
    "durations: expected [..., 2, D] to go with matrix, got [3, 4]": lambda: Duration(ones(2, 2), ones(3, 4)),
    "durations: expected no empty axis among the last 2, got shape [2, 0]":
        lambda: Duration(ones(2, 2), ones(2, 0)),
    "blocks: expected square ones [..., A, B, B], got [2, 3, 4]": lambda: transitions.BlockDiagonal(ones(2, 3, 4)),
    "matrices: expected two or more, got 1": lambda: Kronecker(ones(2, 2)),
    "matrices: expected square ones [..., c, c], got [2, 3]": lambda: Kronecker(ones(2, 2), ones(2, 3)),
    "right: expected [..., 4, 3, 3] to go with left [3, 4, 4], got [4, 3, 2]":
        lambda: Monarch(ones(3, 4, 4), ones(4, 3, 2)),
    "right: expected [..., 5, 3, 2.4] to go with left [3, 4, 5], got [5, 3, 2]":
        lambda: Monarch(ones(3, 4, 5), ones(5, 3, 2)),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        WRONG[message]()
