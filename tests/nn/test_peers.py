"""Circuits and hidden Markov models of other libraries have the log-likelihoods of the same ones here."""

import numpy as np
import pytest
import torch

from logchain import nn

DATA = torch.randint(3, (50, 7), generator=torch.Generator().manual_seed(1))


def of_cirkit(circuit: nn.ChainCircuit):
    """The same circuit, layer by layer, as cirkit's own module."""
    pytest.importorskip("cirkit")
    from cirkit.pipeline import PipelineContext
    from cirkit.symbolic.circuit import Circuit
    from cirkit.symbolic.initializers import ConstantTensorInitializer
    from cirkit.symbolic.layers import CategoricalLayer, HadamardLayer, SumLayer
    from cirkit.symbolic.parameters import Parameter, TensorParameter
    from cirkit.utils.scope import Scope

    def given(probabilities):
        initializer = ConstantTensorInitializer(probabilities)
        return Parameter.from_input(TensorParameter(*probabilities.shape, initializer=initializer, learnable=False))

    t, v, c = circuit.units
    table, bulk, p0, mixing = (
        part().exp().detach().double().numpy()
        for part in (circuit.input.weights, circuit.bulk, circuit.p0, circuit.mixing)
    )
    layers, inputs, roots = [], {}, []
    for r in range(t):
        below = None
        for i in reversed(range(v)):
            leaf = CategoricalLayer(Scope([i]), c, num_categories=table.shape[2], probs=given(table[r, i].T))
            layers.append(leaf)
            if below is not None:
                both = HadamardLayer(c, 2)
                layers.append(both)
                inputs[both], leaf = [below, leaf], both
            weight = bulk[r, i - 1] if i else p0[r, None]
            below = SumLayer(c, len(weight), weight=given(weight))
            layers.append(below)
            inputs[below] = [leaf]
        roots.append(below)
    root = SumLayer(1, 1, arity=t, weight=given(mixing[None]))
    layers.append(root)
    inputs[root] = roots
    return PipelineContext(backend="torch", semiring="lse-sum").compile(Circuit(layers, inputs, [root]))


@pytest.mark.parametrize("repetitions", [1, 3])
def test_cirkit_computes_the_same_circuit(repetitions):
    circuit = nn.ChainCircuit(7, 4, repetitions, num_categories=3, generator=torch.Generator().manual_seed(0))
    theirs = of_cirkit(circuit)(DATA)[:, 0, 0]
    np.testing.assert_allclose(circuit.log_prob(DATA).detach(), theirs.detach(), atol=2e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no device")
def test_pyjuice_computes_the_same_hidden_markov_model():
    """It compiles for a GPU alone."""
    juice = pytest.importorskip("pyjuice")
    model = nn.HMM(4, "categorical", num_categories=3, generator=torch.Generator().manual_seed(0))
    alpha, beta, gamma = (
        part.exp().detach() for part in (model.transition()[0], model.emission.log_probabilities(), model.initial())
    )
    theirs = juice.compile(juice.structures.HMM(7, 4, 3, alpha=alpha, beta=beta, gamma=gamma)).to("cuda")
    found = theirs(DATA.cuda())[:, 0].cpu()
    np.testing.assert_allclose(model.log_prob(DATA).detach(), found, atol=1e-4)
