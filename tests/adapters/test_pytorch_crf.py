"""`adapters.from_pytorch_crf` gives that layer's log-likelihoods, best paths and gradients."""

import pytest
import torch

import logchain
from logchain import adapters
from tests.adapted import NATS, distance, gradients, normal, peer, seeded
from tests.contract import assert_values, of_steps, ulp

F32, F64 = torch.float32, torch.float64


def log_weight(arguments, states):
    """The log-weight of given paths [n, v]: the chain with every other state forbidden."""
    chosen = torch.nn.functional.one_hot(states, arguments.x.shape[-1]).bool()
    return logchain.product(**arguments._replace(x=arguments.x.masked_fill(~chosen, -torch.inf))._asdict())


TORCHCRF = pytest.mark.filterwarnings("ignore:where received a uint8 condition tensor")


def crf_layer(batch_first, dtype=F64):
    torchcrf = peer("torchcrf")
    crf = torchcrf.CRF(4, batch_first=batch_first).to(dtype)
    for seed, parameter in enumerate(crf.parameters()):
        with torch.no_grad():
            parameter.copy_(normal(*parameter.shape, seed=seed))
    emissions = (2 * normal(3, 6, 4, dtype=dtype, seed=8)).requires_grad_()
    tags = torch.randint(4, (3, 6), generator=seeded())
    mask = torch.arange(6) < torch.tensor([[6], [1], [4]])
    return crf, emissions, tags, mask


@TORCHCRF
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["steps first", "batch first"])
def test_pytorch_crf(batch_first, masked):
    crf, emissions, tags, mask = crf_layer(batch_first)
    turn = (lambda tensor: tensor) if batch_first else (lambda tensor: tensor.transpose(0, 1))
    given = turn(mask) if masked else None
    arguments = adapters.from_pytorch_crf(crf, turn(emissions), given)
    ours = log_weight(arguments, tags) - logchain.product(**arguments._asdict())
    theirs = crf(turn(emissions), turn(tags), given, reduction="none")
    assert distance(ours, theirs) <= NATS
    leaves = [emissions, *crf.parameters()]
    for mine, peers in gradients(leaves, ours, theirs):
        assert distance(mine, peers) <= NATS


@TORCHCRF
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_pytorch_crf_best_path(masked):
    crf, emissions, _, mask = crf_layer(True)
    given = mask if masked else None
    best = logchain.viterbi(**adapters.from_pytorch_crf(crf, emissions.detach(), given)._asdict())
    for states, theirs in zip(best.states, crf.decode(emissions, given), strict=True):
        assert states[: len(theirs)].tolist() == theirs


def test_pytorch_crf_in_float32_and_with_a_mask_of_bytes():
    crf, emissions, tags, mask = crf_layer(True, F32)
    arguments = adapters.from_pytorch_crf(crf, emissions, mask.to(torch.uint8))
    weight, norm = log_weight(arguments, tags), logchain.product(**arguments._asdict())
    exact = crf.double()(emissions.double(), tags, mask, reduction="none")
    bound = sum(ulp(part.detach().numpy(), F32) for part in (weight, norm)) + of_steps(*emissions.shape[-2:], dtype=F32)
    assert_values(weight.double() - norm.double(), exact.detach().numpy(), bound)
