"""A chain of one matrix whose columns lie on several ranks has the results of the dense matrix."""

import pytest
import torch

import logchain
from logchain.distributed import Columns
from tests.distributed.chains import chain

pytestmark = pytest.mark.xdist_group("ranks")


def results(matrix, x, bulk, p0, options):
    """Results that are the same on all ranks, and the gradient of the matrix."""
    value = logchain.product(x, bulk, p0, **options)
    *gradients, of_matrix = torch.autograd.grad(value.sum(), [x, p0, matrix])
    found = {
        "log-partition": value.detach(),
        "gradients": gradients,
        "entropy": logchain.entropy(x, bulk, p0, **options),
    }
    found |= {"posteriors": logchain.marginals(x, bulk, p0, **options).states}
    found |= {"best path": logchain.viterbi(x, bulk, p0, **options)._asdict()}
    found |= {"best paths": logchain.topk_paths(x, bulk, p0, 3, **options)._asdict()}
    return found | {"log-weight": logchain.log_prob(x, bulk, p0, found["best path"]["states"], **options)}, of_matrix


def compare(rank, sizes, options):
    """Compare the results of this rank's columns with those of the dense matrix; returns samples."""
    case = chain((5,), 12, batch=(2, 3), zeros=0.0, **options)
    x, dense, p0 = (operand.requires_grad_() for operand in case[:3])
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    columns = dense[0, :, own].detach().clone().requires_grad_()
    bulk = Columns(columns)
    ours, of_columns = results(columns, x, bulk, p0, case.options)
    expected, of_matrix = results(dense, x, dense, p0, case.options)
    rtol, atol = (1e-10, 1e-11) if x.dtype == torch.float64 else (1e-4, 1e-5)
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(of_columns, of_matrix[0, :, own], rtol=rtol, atol=atol)
    torch.manual_seed(rank)
    return logchain.sample(x, bulk, p0, 10, **case.options)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((5, 7), {"lengths": True}),
        ((4, 0, 8), {"log_params": True}),
        ((5, 7), {"dtype": torch.float32, "scale": 200.0}),
    ],
    ids=str,
)
def test_columns_equal_the_dense_matrix(teams, sizes, options):
    first, *others = teams(len(sizes)).values(compare, sizes, options)
    assert all(torch.equal(first, other) for other in others)
