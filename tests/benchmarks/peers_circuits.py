"""Chains as probabilistic circuits, by packages for these; what a package compiles is compiled before it is timed."""

import sys
from functools import partial
from typing import Any

import torch

from tests.benchmarks.cases import ONE, STEP, Chain
from tests.benchmarks.peers import CPU, GPU, Provider, Run
from tests.benchmarks.results import FORWARD


def _few(case: Chain, most: int) -> None:
    """Longer circuits take more than a minute to compile."""
    if (v := case.x.shape[1]) > most:
        raise NotImplementedError(f"compiling a circuit of {v} variables takes minutes; not tried above {most}")


def cirkit(case: Chain, mode: str) -> Run:
    """Logits of input units are x, a category for each sequence."""
    _few(case, 8192)
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


def pyjuice(case: Chain, mode: str, *, graph: bool = False, **precision: bool) -> Run:
    """Input units take x from outside; parameter flows are expected counts, for a sum's gradients times weights."""
    _few(case, 2048)
    import pyjuice as juice
    from pyjuice.nodes.distributions import External

    (n, v, c), x = case.x.shape, case.x.contiguous()
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 100 + 10 * v))  # its own walks over a circuit are recursive
    p0, steps = case.p0.cpu(), case.bulk[0].cpu()
    root = juice.structures.GeneralizedHMM(v, c, len(steps) == 1, alpha=steps[0], gamma=p0, input_dist=External())
    node = root
    for matrix in steps:
        node = node.chs[0].chs[1]
        node.set_params(matrix)
    model = juice.compile(root, verbose=False).to(x.device)
    data, gradients = torch.zeros(n, v, device=x.device), torch.empty_like(x)

    def run(**options):
        values = model(data, external_soft_evi=x, **precision, **options)[:, 0].detach()
        if mode == FORWARD:
            return values, None
        options = {"external_soft_evi_grad": gradients, "flows_memory": 0.0} | options  # of this batch alone
        model.backward(data, external_soft_evi=x, **precision, **options)
        return values, gradients.exp()

    if graph:
        run(record_cudagraph=True)  # its answer in that call counts the recording too
    return run


PROVIDERS = [
    Provider("cirkit", cirkit, "libcirkit", (ONE, STEP), devices=(CPU, GPU)),
    Provider("pyjuice", pyjuice, "pyjuice", (ONE, STEP), devices=(GPU,)),
    Provider("pyjuice, float32", partial(pyjuice, force_use_fp32=True), "pyjuice", (ONE, STEP), devices=(GPU,)),
    Provider("pyjuice, CUDA graph", partial(pyjuice, graph=True), "pyjuice", (ONE, STEP), devices=(GPU,)),
]
