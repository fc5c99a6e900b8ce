"""The conditional random field as a module: half precision, compilation, export, vmap, derivatives."""

import copy

import pytest
import torch

from logchain import kernels as devices
from logchain import operands
from tests.kernels.gpu.steps import waiting_raises
from tests.nn.crfs import F32, HOLES, batch, gradients, layer, seeded


@pytest.mark.parametrize(("half", "parameters"), [(torch.bfloat16, "half"), (torch.float16, "float32")], ids=str)
def test_half_precision_is_computed_in_float32(half, parameters):
    crf = layer(dtype=half)
    emissions, tags, mask = batch(dtype=half)
    wide, exact = copy.deepcopy(crf).float(), emissions.float().requires_grad_()
    crf = copy.deepcopy(wide) if parameters == "float32" else crf
    out, expected = crf(emissions.requires_grad_(), tags, mask, "none"), wide(exact, tags, mask, "none")
    assert out.dtype == F32 and torch.equal(out, expected)
    for mine, theirs in zip(gradients(crf, emissions, out), gradients(wide, exact, expected), strict=True):
        torch.testing.assert_close(mine.float(), theirs, rtol=torch.finfo(half).eps, atol=0)
    assert crf.marginals(emissions, mask).dtype == F32
    assert crf.decode(emissions, mask) == wide.decode(exact, mask)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(crf(emissions, tags, mask, "none"), out)


def test_first_step_off_is_nan_on_a_gpu(device, monkeypatch):
    """There the host does not look at the mask; the other sequences are as they are without."""
    emissions, tags, mask = batch(3, 4, dtype=F32)
    mask[0, 0] = False
    expected = layer(dtype=F32)(emissions, tags, mask, "none")
    for module in (devices, operands):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: True)
    emissions, tags, mask = (tensor.to(device) for tensor in (emissions, tags, mask))
    for strict in (True, False):
        crf = layer(dtype=F32, strict_mask=strict).to(device)
        found = crf(emissions, tags, mask, "none").cpu()
        assert found[0].isnan() == strict
        torch.testing.assert_close(found[1:], expected[1:])
        assert crf.log_partition(emissions, mask)[0].isnan() == strict
        assert (crf.viterbi(emissions, mask).states[0] == -1).all() == strict


def test_first_step_off_is_refused_where_masks_are_traced():
    torch.compiler.reset()
    crf = layer(strict_mask=True)
    emissions, tags, mask = batch(6, 4)
    calls = [
        torch.compile(crf, backend="eager", fullgraph=True),
        torch.export.export(crf, (emissions, tags, mask)).module(),
        torch.func.vmap(lambda *one: crf(*(part[None] for part in one))),
    ]
    for call in calls:
        torch.testing.assert_close(call(emissions, tags, mask).sum(), crf(emissions, tags, mask))
        with pytest.raises(ValueError, match="lengths: expected values from 1 to v = 4, got 0 to"):
            call(emissions, tags, ~mask)


@pytest.mark.parametrize("strict", [False, True], ids=["any mask", "strict"])
def test_masks_compile_as_one_graph_and_vmap(strict):
    crf = layer(strict_mask=strict)
    emissions, tags, ends = batch(6, 4)
    mask = ends if strict else HOLES
    leaf = emissions.requires_grad_()
    compiled = torch.compile(crf, fullgraph=True, backend="aot_eager")
    out, expected = compiled(leaf, tags, mask, "none"), crf(leaf, tags, mask, "none")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    for found, truth in zip(gradients(crf, leaf, out), gradients(crf, leaf, expected), strict=True):
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-13)
    by_vmap = torch.func.vmap(lambda *one: crf(*(tensor[None] for tensor in one)))
    torch.testing.assert_close(by_vmap(emissions, tags, mask), expected)


def test_first_and_second_derivatives_equal_finite_differences():
    crf = layer(2)
    emissions, tags, _ = batch(3, 3, 2)
    mask = HOLES[1:4, :3]

    def likelihood(emissions, start, end, transitions):
        parameters = {"start_transitions": start, "end_transitions": end, "transitions": transitions}
        return torch.func.functional_call(crf, parameters, (emissions, tags, mask, "none"))

    leaves = [tensor.detach().requires_grad_() for tensor in (emissions, *crf.parameters())]
    assert torch.autograd.gradcheck(likelihood, leaves) and torch.autograd.gradgradcheck(likelihood, leaves)


class Tagger(torch.nn.Module):
    """A network with the layer at its end, whose methods are all called."""

    def __init__(self):
        super().__init__()
        self.network, self.crf = torch.nn.Linear(6, 4, dtype=torch.float64), layer()

    def forward(self, words, tags, mask):
        emissions = self.network(words)
        methods = self.crf.viterbi, self.crf.marginals, self.crf.log_partition
        return self.crf(emissions, tags, mask), *(method(emissions, mask) for method in methods)


def test_export_serves_any_number_of_sentences_and_words():
    model = Tagger()

    def inputs(n, v):
        words = torch.randn(n, v, 6, generator=seeded(n), dtype=torch.float64)
        return words, *batch(n, v)[1:]

    axes = {0: torch.export.Dim("n", min=2, max=64), 1: torch.export.Dim("v", min=3, max=512)}
    exported = torch.export.export(model, inputs(4, 6), dynamic_shapes=(axes,) * 3).module()
    for example in (inputs(4, 6), inputs(7, 11)):
        torch.testing.assert_close(exported(*example), model(*example), rtol=0, atol=1e-13)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device")
def test_loss_does_not_wait_for_the_device():
    crf = layer(dtype=F32)
    emissions, tags, ends = batch(6, 4, dtype=F32)
    device = copy.deepcopy(crf).cuda()
    for mask in (None, ends, HOLES):
        expected = crf(emissions, tags, mask)
        inputs = [None if tensor is None else tensor.cuda() for tensor in (emissions, tags, mask)]
        device(*inputs).backward()  # whatever happens once
        torch.cuda.synchronize()
        with waiting_raises():
            found = device(*inputs)
            found.backward()
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-4)
