"""Models in DistributedDataParallel and FSDP2 on two processes learn what one process learns from the whole batch."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from logchain.nn import HMM, ChainCircuit, LinearChainCRF

F64 = torch.float64
STEPS, SEQUENCES = 4, 6

# float64 sums in another order, over a few steps of an optimiser that divides by their size
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


class Losses:
    """A model by name, and its mean loss over some sequences of a batch."""

    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.kind, self.lengths = kind, torch.tensor([9, 5, 1, 7, 9, 3])
        self.categories = torch.randint(0, 4, (SEQUENCES, 9), generator=generator)
        self.numbers = torch.randn(SEQUENCES, 9, 4, generator=generator, dtype=F64)
        self.mask = torch.arange(9) < self.lengths[:, None]

    def model(self) -> torch.nn.Module:
        """The model, the same in every process."""
        torch.manual_seed(1)
        models = {
            "gaussian": lambda: HMM(3, "gaussian", num_features=4),
            "categorical": lambda: HMM(3, "categorical", num_categories=4),
            "crf": lambda: LinearChainCRF(4, batch_first=True),
            "circuit": lambda: ChainCircuit(9, 3, 2, num_categories=4),
        }
        model: torch.nn.Module = models[self.kind]().double()
        return model

    def loss(self, model: torch.nn.Module, part: slice) -> torch.Tensor:
        """The mean over a part of the batch, by the model's `forward`."""
        if self.kind == "gaussian":
            return -model(self.numbers[part], lengths=self.lengths[part]).mean()
        if self.kind == "categorical":
            return -model(self.categories[part], lengths=self.lengths[part]).mean()
        if self.kind == "crf":
            return -model(self.numbers[part], self.categories[part], self.mask[part], reduction="mean")
        return -model(self.categories[part]).mean()


def trained(model: torch.nn.Module, losses: Losses, part: slice, optimiser: str) -> list[torch.Tensor]:
    kinds = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), 0.1),
        "adam": lambda: torch.optim.Adam(model.parameters()),
    }
    steps, found = kinds[optimiser](), []
    for _ in range(STEPS):
        steps.zero_grad()
        loss = losses.loss(model, part)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        steps.step()
        found.append(loss.detach())
    return found


def of_rank(rank: int, kind: str, optimiser: str, wrapper: str):
    """The mean of both ranks' losses, and the parameters after all steps."""
    losses = Losses(kind)
    model, half = losses.model(), SEQUENCES // 2
    if wrapper == "ddp":
        wrapped: torch.nn.Module = torch.nn.parallel.DistributedDataParallel(model)
    else:
        wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    found = torch.stack(trained(wrapped, losses, slice(half * rank, half * rank + half), optimiser))
    dist.all_reduce(found)
    if wrapper == "ddp":
        return found / 2, model.state_dict()
    whole = get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return found / 2, {name: value.clone() for name, value in whole.items()}


@pytest.mark.parametrize("kind", ["gaussian", "categorical", "crf", "circuit"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_two_processes_learn_what_one_does(teams, kind, wrapper, optimiser):
    losses = Losses(kind)
    model = losses.model()
    expected = torch.stack(trained(model, losses, slice(None), optimiser))
    assert expected[-1] < expected[0]
    for rank, (found, state) in enumerate(teams(2).values(of_rank, kind, optimiser, wrapper)):
        torch.testing.assert_close(found, expected, **CLOSE)
        if rank == 0 or wrapper == "ddp":  # the first rank gathers the parameters of FSDP2
            other = losses.model()
            other.load_state_dict(state)
            for one, two in zip(other.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(one, two, **CLOSE)


def written(rank: int, kind: str, method: str) -> None:
    losses = Losses(kind)
    model = fully_shard(losses.model(), mesh=init_device_mesh("cpu", (2,)))
    register_fsdp_forward_method(model, method)
    getattr(model, method)(losses.categories)


@pytest.mark.parametrize("kind", ["categorical", "circuit"])
@pytest.mark.parametrize("method", ["fit", "initialise"])
def test_parameters_that_are_sharded_are_not_written(teams, kind, method):
    """FSDP2 would drop what these methods write."""
    for outcome in teams(2).run(written, kind, method):
        assert isinstance(outcome.error, ValueError) and "expected one that is not sharded yet" in str(outcome.error)
