"""Chains as probabilistic circuits, by cirkit, compiled before they are timed."""

from typing import Any

import torch

from tests.benchmarks.cases import ONE, STEP, Chain
from tests.benchmarks.peers import Provider, Run
from tests.benchmarks.results import FORWARD

# variables: longer circuits take more than a minute to compile
_MOST = 8192


def cirkit(case: Chain, mode: str) -> Run:
    """Logits of input units are x, a category for each sequence."""
    if (v := case.x.shape[1]) > _MOST:
        raise NotImplementedError(f"compiling a circuit of {v} variables takes minutes; not tried above {_MOST}")
    from cirkit.backend.torch.layers import TorchCategoricalLayer
    from cirkit.pipeline import PipelineContext

    (n, v, _), device = case.x.shape, case.x.device
    # it cannot fold layers that share a parameter
    context = PipelineContext("torch", semiring="lse-sum", fold=len(case.bulk[0]) > 1, optimize=True)
    model = context.compile(_symbolic(case)).to(device)
    data = torch.arange(n, device=device)[:, None].expand(n, v).contiguous()
    if mode == FORWARD:
        return torch.no_grad()(lambda: (model(data)[:, 0, 0], None))
    leaves = [layer for layer in model.layers if isinstance(layer, TorchCategoricalLayer)]
    tables = [table for leaf in leaves for table in leaf.logits.parameters()]  # one [v, c, categories] if folded
    order = torch.cat([leaf.scope_idx[:, 0] for leaf in leaves]).argsort()
    wanted = list(dict.fromkeys([*tables, *model.parameters()]))

    def run():
        out = model(data)[:, 0, 0]
        found = torch.autograd.grad(out.sum(), wanted)[: len(tables)]
        return out.detach(), torch.cat(found)[order].permute(2, 0, 1)[:n]

    return run


def _symbolic(case: Chain) -> Any:
    """A circuit of cirkit, from the last variable to the first; one matrix for all steps is shared by its layers."""
    from cirkit.symbolic.circuit import Circuit
    from cirkit.symbolic.initializers import ConstantTensorInitializer
    from cirkit.symbolic.layers import CategoricalLayer, HadamardLayer, SumLayer
    from cirkit.symbolic.parameters import Parameter, TensorParameter
    from cirkit.utils.scope import Scope

    def learned(table):
        initializer = ConstantTensorInitializer(table.cpu().numpy())
        return Parameter.from_input(TensorParameter(*table.shape, initializer=initializer))

    n, v, c = case.x.shape
    logits = case.x.expand(max(n, 2), v, c)  # it takes no single category
    steps = [learned(matrix) for matrix in case.bulk[0]]
    first, layers, inputs, below = steps[0], [], {}, []
    for i in reversed(range(v)):
        leaf = CategoricalLayer(Scope([i]), c, num_categories=len(logits), logits=learned(logits[:, i].T))
        layers.append(leaf)
        if below:
            layers.append(HadamardLayer(c))
            inputs[layers[-1]] = [*below, leaf]
        weight = learned(case.p0[None]) if i == 0 else steps.pop() if steps else first.ref()
        below = [SumLayer(c, weight.shape[0], weight=weight)]
        inputs[below[0]] = layers[-1:]
        layers += below
    return Circuit(layers, inputs, below)


PROVIDERS = [Provider("cirkit", cirkit, "libcirkit", (ONE, STEP))]
