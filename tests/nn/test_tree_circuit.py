"""A tree-shaped circuit is put together from layers; `test_nn_circuit` asks it what every circuit can be asked."""

import pytest
import torch

from logchain import nn
from logchain.nn.layers import CPLayer, TuckerLayer


def made(v, c=3, t=2, layer="cp", **options):
    generator = torch.Generator().manual_seed(0)
    return nn.TreeCircuit(v, c, t, layer=layer, generator=generator, **(options or {"num_categories": 4}))


@pytest.mark.parametrize("layer, kind", [("cp", CPLayer), ("tucker", TuckerLayer)])
@pytest.mark.parametrize("v, depth", [(1, 0), (2, 1), (5, 3), (8, 3), (9, 4)])
def test_it_is_as_deep_as_a_binary_tree(v, depth, layer, kind):
    circuit = made(v, layer=layer)
    assert len(circuit.layers) == depth and all(isinstance(each, kind) for each in circuit.layers)
    nothing = torch.zeros(1, v, dtype=torch.bool)
    total = circuit.log_prob(torch.zeros(1, v, dtype=torch.int64), nothing)
    assert total.abs().item() < 1e-6 * (v + 1)


@pytest.mark.parametrize("layer", ["cp", "tucker"])
def test_the_scale_of_long_data_is_kept_apart(layer):
    """Densities of e-30 at each of 500 variables: float32 alone would be 1e-3 off, and its posteriors too."""
    v = 500
    circuit = made(v, layer=layer)
    x = torch.randn(1, 2, v, 3, generator=torch.Generator().manual_seed(1)) - 30
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    found = circuit._mixed(circuit.components(leaf))
    exact = circuit.double()._mixed(circuit.components(wide))
    assert exact.item() < -14_000 and abs(found.item() - exact.item()) < 1e-4
    (posterior,), (truth,) = torch.autograd.grad(found, leaf), torch.autograd.grad(exact, wide)
    assert (posterior - truth).abs().max() < 2e-5


def test_its_variables_depend_on_each_other():
    """Copies of one coin: the tree learns that all are equal."""
    data = torch.randint(2, (60, 1), generator=torch.Generator().manual_seed(0)).expand(60, 5)
    for layer in ("cp", "tucker"):
        circuit = made(5, 2, 1, layer, input="bernoulli")
        circuit.fit(data, max_iterations=200, tolerance=1e-4, restarts=3, generator=torch.Generator().manual_seed(1))
        drawn = circuit.sample(200, torch.Generator().manual_seed(2))
        assert (drawn == drawn[:, :1]).all() and 0.2 < drawn.double().mean() < 0.8
        some = circuit.conditionals(torch.ones(1, 5), torch.tensor([[False, False, False, True, False]]))
        assert (some[0, :, 1] > 0.999).all()


def test_an_unknown_layer_raises():
    with pytest.raises(ValueError, match=r"^layer: expected 'cp' or 'tucker', got 'ring'$"):
        made(3, layer="ring")
