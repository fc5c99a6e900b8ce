"""`adapters.from_torch_struct` gives that package's log-partitions, marginals and best paths."""

import pytest
import torch

import logchain
from logchain import adapters
from tests.adapted import NATS, SHARE, answers, distance, normal, peer

F32, F64 = torch.float32, torch.float64

TORCH_STRUCT = pytest.mark.filterwarnings("ignore:.*does not define `arg_constraints`")


@TORCH_STRUCT
@pytest.mark.parametrize("lengths", [None, [7, 2, 5]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "nats", "share"), [(F32, 2e-5, 1e-5), (F64, NATS, SHARE)], ids=["float32", "float64"]
)
def test_torch_struct(dtype, nats, share, lengths):
    torch_struct = peer("torch_struct")
    edges = (2 * normal(3, 6, 4, 4, dtype=dtype)).requires_grad_()
    ends = None if lengths is None else torch.tensor(lengths)
    crf = torch_struct.LinearChainCRF(edges, lengths=ends)
    arguments = adapters.from_torch_struct(crf)
    log_norm = logchain.product(**arguments._asdict())
    assert distance(log_norm, crf.partition) <= nats
    log_norm.sum().backward()
    assert distance(edges.grad, crf.marginals) <= share


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
