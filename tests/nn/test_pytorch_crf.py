"""The conditional random field equals pytorch-crf: likelihoods, gradients, best tags, parameters."""

import copy

import pytest
import torch

from logchain.nn import LinearChainCRF
from tests.contract import of_steps, ulp
from tests.nn.crfs import F32, F64, REDUCTIONS, batch, gradients, layer, turned

# what pytorch-crf itself provokes
TORCHCRF = pytest.mark.filterwarnings("ignore:where received a uint8 condition tensor")


def peer(crf):
    torchcrf = pytest.importorskip("torchcrf", exc_type=ImportError)
    other = torchcrf.CRF(crf.num_tags, batch_first=crf.batch_first).to(crf.transitions.dtype)
    other.load_state_dict(crf.state_dict())
    return other


@TORCHCRF
@pytest.mark.parametrize(
    ("dtype", "batch_first", "mask_dtype"),
    [
        (F64, False, None),
        (F32, True, None),
        (F64, True, torch.bool),
        (F32, False, torch.bool),
        (F32, True, torch.uint8),
    ],
    ids=str,
)
def test_likelihood_and_gradients_equal_pytorch_crf(dtype, batch_first, mask_dtype):
    crf = layer(dtype=dtype, batch_first=batch_first)
    emissions, tags, mask = batch(dtype=dtype)
    mask = None if mask_dtype is None else mask.to(mask_dtype)
    inputs = turned(crf, emissions.requires_grad_(), tags, mask)
    exact, wide = peer(copy.deepcopy(crf).double()), emissions.detach().double().requires_grad_()
    truth = turned(crf, wide)
    for reduction in REDUCTIONS:
        ours, theirs = crf(*inputs, reduction=reduction), exact(*truth, *inputs[1:], reduction=reduction)
        assert ours.dtype == dtype and ours.shape == theirs.shape
        size = 5 if reduction == "sum" else 1
        allowed = size * (of_steps(7, 6, dtype=dtype) + ulp(torch.tensor(64.0).numpy(), dtype))
        assert (ours.double() - theirs).abs().max() <= allowed
        pairs = zip(gradients(crf, emissions, ours), gradients(exact, wide, theirs), strict=True)
        for mine, expected in pairs:
            assert mine.dtype == dtype and mine.shape == expected.shape
            assert (mine.double() - expected).abs().max() <= size * (1e-5 if dtype == F32 else 1e-12)


@TORCHCRF
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["steps first", "batch first"])
def test_best_tags_equal_pytorch_crf(batch_first, masked):
    crf = layer(batch_first=batch_first)
    emissions, _, mask = batch()
    inputs = turned(crf, emissions, mask if masked else None)
    found = crf.decode(*inputs)
    assert found == peer(crf).decode(*inputs)
    assert [len(tags) for tags in found] == (mask.sum(1).tolist() if masked else [7] * 5)
    assert all(type(tag) is int for tags in found for tag in tags)


@pytest.mark.parametrize("batch_first", [False, True], ids=["steps first", "batch first"])
def test_first_step_off_is_refused_as_by_pytorch_crf(batch_first):
    crf = layer(batch_first=batch_first, strict_mask=True)
    emissions, tags, mask = batch()
    mask[3] = mask[3].logical_not()
    emissions, tags, mask = turned(crf, emissions, tags, mask)
    arguments = {"forward": (emissions, tags), "topk": (emissions, 2), "sample": (emissions, 2)}
    for name in ("forward", "decode", "viterbi", "topk", "sample", "marginals", "log_partition"):
        operands = *arguments.get(name, (emissions,)), mask
        with pytest.raises(ValueError, match="mask: expected the first step of .* on, got it off in sequence 3;"):
            getattr(crf, name)(*operands)
        if name in ("forward", "decode"):
            with pytest.raises(ValueError, match="first timestep"):
                getattr(peer(crf), name)(*operands)
        getattr(layer(batch_first=batch_first), name)(*operands)
    # holes after the first step are allowed
    steps = emissions, tags, torch.ones_like(mask)
    steps[2][(slice(None), slice(2, 4)) if batch_first else slice(2, 4)] = False
    assert torch.equal(crf(*steps), layer(batch_first=batch_first)(*steps))


def test_parameters_equal_pytorch_crf():
    torchcrf = pytest.importorskip("torchcrf", exc_type=ImportError)
    torch.manual_seed(3)
    theirs = torchcrf.CRF(6)
    torch.manual_seed(3)
    ours = LinearChainCRF(6)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, expected)
    ours.reset_parameters()
    assert not torch.equal(ours.transitions, theirs.transitions) and ours.transitions.abs().max() <= 0.1
