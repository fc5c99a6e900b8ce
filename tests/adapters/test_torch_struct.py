"""`adapters.from_torch_struct` gives that package's log-partitions, marginals and best paths."""

import pytest
import torch

import logchain
from logchain import adapters
from tests.adapted import NATS, SHARE, answers, distance, normal, peer
from tests.contract import assert_values, gradient_bound, value_bound

F32, F64 = torch.float32, torch.float64

TORCH_STRUCT = pytest.mark.filterwarnings("ignore:.*does not define `arg_constraints`")


@TORCH_STRUCT
@pytest.mark.parametrize("lengths", [None, [7, 2, 5]], ids=str)
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_torch_struct(dtype, lengths):
    torch_struct = peer("torch_struct")
    edges = (2 * normal(3, 6, 4, 4, dtype=dtype)).requires_grad_()
    ends = None if lengths is None else torch.tensor(lengths)
    exact = torch_struct.LinearChainCRF(edges.detach().double(), lengths=ends)
    log_norm = logchain.product(
        **adapters.from_torch_struct(torch_struct.LinearChainCRF(edges, lengths=ends))._asdict()
    )
    assert log_norm.dtype == dtype
    truth = exact.partition.detach().numpy()
    assert_values(log_norm, truth, NATS if dtype == F64 else value_bound(truth, 7, 4, dtype=F32))
    log_norm.sum().backward()
    assert distance(edges.grad, exact.marginals) <= (SHARE if dtype == F64 else gradient_bound(1.0, 7, 4, dtype=F32))


@TORCH_STRUCT
def test_torch_struct_takes_the_log_potentials_alone():
    torch_struct = peer("torch_struct")
    edges = normal(2, 8, 3, 3)
    assert distance(answers(adapters.from_torch_struct(edges))[0], torch_struct.LinearChainCRF(edges).partition) <= NATS


@TORCH_STRUCT
@pytest.mark.parametrize("lengths", [None, [7, 2, 5]], ids=str)
def test_torch_struct_best_path(lengths):
    torch_struct = peer("torch_struct")
    ends = None if lengths is None else torch.tensor(lengths)
    crf = torch_struct.LinearChainCRF(2 * normal(3, 6, 4, 4), lengths=ends)
    best = logchain.viterbi(**adapters.from_torch_struct(crf)._asdict())
    assert distance(best.score, crf.max) <= NATS
    theirs, _ = crf.from_event(crf.argmax)
    for sequence, end in enumerate(lengths or [7, 7, 7]):
        assert best.states[sequence, :end].tolist() == theirs[sequence, :end].tolist()
