"""Models whose sequences lie on several ranks, wrapped in DDP or FSDP2, learn what one process learns."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from logchain.nn import HMM, Categorical, ChainCircuit, Gaussian, LinearChainCRF

STEPS, SEQUENCES, V = 4, 6, 9
LENGTHS = torch.tensor([9, 5, 1, 7, 9, 3])
CATEGORIES = torch.randint(0, 4, (SEQUENCES, V), generator=torch.Generator().manual_seed(0))
VECTORS = torch.randn(SEQUENCES, V, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
# by kind: the model, and its log-likelihoods of some sequences of a batch
MODELS = {
    "hmm": (lambda: HMM(3, Gaussian(3, 4)), lambda model, i: model(VECTORS[i], lengths=LENGTHS[i])),
    "crf": (
        lambda: LinearChainCRF(4, batch_first=True),
        lambda model, i: model(VECTORS[i], CATEGORIES[i], torch.arange(V) < LENGTHS[i, None], "none"),
    ),
    "circuit": (lambda: ChainCircuit(V, 3, 2, Categorical((2, V, 3), 4)), lambda model, i: model(CATEGORIES[i])),
}
WRAPPERS = {"ddp": DistributedDataParallel, "fsdp2": lambda of: fully_shard(of, mesh=init_device_mesh("cpu", (2,)))}


def model_of(kind):
    torch.manual_seed(1)
    return MODELS[kind][0]().double()


def trained(model, kind, sequences=slice(None)):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(-MODELS[kind][1](model, sequences).mean())
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return torch.stack(losses).detach()


def trained_on_rank(rank, kind, wrapper):
    """The mean of both ranks' losses, and the parameters after all steps."""
    wrapped, half = WRAPPERS[wrapper](model_of(kind)), SEQUENCES // 2
    losses = trained(wrapped, kind, slice(half * rank, half * rank + half))
    dist.all_reduce(losses)
    whole = get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True))
    return losses / 2, {name: value.clone() for name, value in whole.items()}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", MODELS)
def test_wrapped_models_learn_what_one_process_learns(teams, kind, wrapper):
    model = model_of(kind)
    expected = trained(model, kind)
    assert expected[-1] < expected[0]
    for losses, state in teams(2).values(trained_on_rank, kind, wrapper):
        torch.testing.assert_close((losses, state), (expected, dict(model.state_dict())), rtol=1e-9, atol=1e-11)


def write_sharded(rank, kind, method):
    model = WRAPPERS["fsdp2"](model_of(kind))
    register_fsdp_forward_method(model, method)
    getattr(model, method)(CATEGORIES if kind == "circuit" else VECTORS)


@pytest.mark.parametrize(("kind", "method"), [("hmm", "fit"), ("circuit", "initialize")])
def test_sharded_parameters_are_not_written(teams, kind, method):
    """FSDP2 would drop what these methods write."""
    for error in teams(2).errors(write_sharded, kind, method):
        assert isinstance(error, ValueError) and "expected one that is not sharded yet" in str(error)
