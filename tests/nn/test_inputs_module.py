"""Input layers behave as modules: compilation, vmap, copies and states; one's own needs a density only."""

import copy
import math

import pytest
import torch

from logchain.nn import InputLayer
from tests.nn.input_layers import FAMILIES, drawn, seeded


@pytest.mark.parametrize("name", ["binomial", "poisson", "gaussian-full", "mixture", "gamma"])
def test_compiles_as_one_graph(name):
    torch._dynamo.reset()
    layer, data, _ = drawn(name, (4, 2))
    observed = torch.rand(7, 4, generator=seeded(3)) < 0.5
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(data, observed), layer(data, observed))
    found, expected = (
        torch.autograd.grad(call(data, observed).sum(), list(layer.parameters())) for call in (compiled, layer)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_each_observation_by_vmap(name):
    layer, data, _ = drawn(name, (4, 2))
    values = {at: value.detach() for at, value in layer.named_parameters()}

    def total(values, data):
        return torch.func.functional_call(layer, values, (data,)).sum()

    found = torch.func.vmap(torch.func.grad(total), (None, 0))(values, data)
    for row, one in enumerate(data):
        expected = torch.autograd.grad(layer(one).sum(), list(layer.parameters()))
        for got, wanted in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(got[row], wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_states_and_sizes(name):
    make = FAMILIES[name][0]
    layer, data, _ = drawn(name, (4, 2))
    other = copy.deepcopy(layer)
    assert torch.equal(other(data), layer(data))
    other.reset_parameters(seeded(5))
    assert not torch.equal(other(data), layer(data))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(data), layer(data))
    again = make((4, 2))
    for _ in range(2):
        again.reset_parameters(seeded(5))
    other.reset_parameters(seeded(5))
    assert torch.equal(other(data), again(data)), "a seed says everything"
    assert "(4, 2" in repr(layer)


def test_a_layer_of_ones_own_needs_a_density_only():
    class Laplace(InputLayer):
        def __init__(self):
            super().__init__(2)
            self.places = torch.nn.Parameter(torch.tensor([0.0, 1.0]))

        def log_density(self, data):
            return -(data - self.places).abs() - math.log(2)

    found = Laplace()(torch.tensor([0.0, torch.nan]))
    torch.testing.assert_close(found, torch.tensor([[0.0, -1.0], [math.log(2), math.log(2)]]) - math.log(2))
