"""What holds for every model of `logchain.nn`, as a user of torch expects of a module."""

import copy
import io

import pytest
import torch

from logchain import nn

MODELS = {
    "HMM": lambda: nn.HMM(3, "categorical", num_categories=4),
    "ChainCircuit": lambda: nn.ChainCircuit(6, 3, 2, num_categories=4),
    "TreeCircuit": lambda: nn.TreeCircuit(6, 3, 2, num_categories=4),
    "Tucker": lambda: nn.TreeCircuit(6, 3, layer="tucker", num_categories=4),
    "LinearChainCRF": lambda: nn.LinearChainCRF(4, batch_first=True),
}
DATA = torch.randint(4, (5, 6), generator=torch.Generator().manual_seed(0))


def loss(model, core=None):
    """Through `forward`, which is what wrappers call."""
    if isinstance(core or model, nn.LinearChainCRF):
        emissions = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(1))
        return -model(emissions, DATA)
    return -model(DATA).sum()


def gradients(model, core=None):
    model.zero_grad()
    loss(model, core).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]()


@pytest.fixture
def group(tmp_path):
    """One process that believes to be of a group."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_data_parallel_training_gives_the_same_gradients(model, group):
    alone = gradients(model)
    assert any(gradient.any() for gradient in alone)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    # twice: a parameter that took no part would raise in the second pass
    for _ in range(2):
        for found, expected in zip(gradients(wrapped, model), alone, strict=True):
            assert torch.equal(found, expected)


def test_copies_and_files_hold_the_same_model(model):
    other = copy.deepcopy(model)
    assert torch.equal(loss(other), loss(model))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not torch.equal(loss(other), loss(model))
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(loss(other), loss(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float64_is_computed_in_float64_and_half_in_float32(model, dtype):
    model = model.to(dtype)
    found, exact = loss(model), loss(copy.deepcopy(model).double())
    assert (found.dtype, exact.dtype) == (torch.float32, torch.float64)
    assert abs(found - exact) < 2e-5
    assert all(gradient.isfinite().all() for gradient in gradients(model))


@pytest.mark.parametrize(
    "make",
    [
        lambda generator: nn.HMM(3, "categorical", num_categories=4, generator=generator),
        lambda generator: nn.ChainCircuit(6, 3, num_categories=4, generator=generator),
        lambda generator: nn.TreeCircuit(6, 3, num_categories=4, generator=generator),
    ],
    ids=["HMM", "ChainCircuit", "TreeCircuit"],
)
def test_seeds_repeat(make):
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        model = make(generator)
        drawn = (
            model.sample(10, 6, generator=generator).data if isinstance(model, nn.HMM) else model.sample(10, generator)
        )
        return loss(model), drawn

    one, again, other = draw(3), draw(3), draw(4)
    assert torch.equal(one[0], again[0]) and torch.equal(one[1], again[1])
    assert one[0] != other[0] and not torch.equal(one[1], other[1])
