"""The layer is pytorch-crf's where that has an answer, and the sum over all tags everywhere."""

import copy
import itertools
import math
import pickle

import pytest
import torch

from logchain.nn import LinearChainCRF
from tests.contract import ulp

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")
REDUCTIONS = ["none", "sum", "mean", "token_mean"]

# what pytorch-crf itself provokes
TORCHCRF = pytest.mark.filterwarnings("ignore:where received a uint8 condition tensor")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def layer(num_tags=4, dtype=F64, batch_first=True, size=1.0, seed=0):
    crf = LinearChainCRF(num_tags, batch_first=batch_first).to(dtype)
    with torch.no_grad():
        for parameter in crf.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, generator=seeded(seed), dtype=F64))
            seed += 1
    return crf


def batch(n=5, v=7, c=4, dtype=F64, seed=8):
    """Emissions, tags, and a mask whose sequences have v, 1, v - 2, v - 3, ... variables, at least one."""
    emissions = (2 * torch.randn(n, v, c, generator=seeded(seed), dtype=F64)).to(dtype)
    tags = torch.randint(c, (n, v), generator=seeded(seed))
    lengths = (v - torch.arange(n)).clamp(min=1)
    lengths[1:2] = 1
    return emissions, tags, torch.arange(v) < lengths[:, None]


def turned(crf, *tensors):
    """Tensors (n, v, ...) in the layer's layout."""
    return [tensor if crf.batch_first or tensor is None else tensor.transpose(0, 1) for tensor in tensors]


def peer(crf):
    torchcrf = pytest.importorskip("torchcrf", exc_type=ImportError)
    other = torchcrf.CRF(crf.num_tags, batch_first=crf.batch_first).to(crf.transitions.dtype)
    other.load_state_dict(crf.state_dict())
    return other


def gradients(crf, emissions, out):
    return torch.autograd.grad(out.sum(), [emissions, *crf.parameters()])


# masks that leave the same variables wherever they stand, and none

HOLES = torch.tensor(
    [[1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool
)


def all_weights(crf, emissions, inside):
    """Every tagging of what one mask leaves, with its log-weight: start, transitions, emissions and end, added up."""
    start, end, transitions = (t.tolist() for t in (crf.start_transitions, crf.end_transitions, crf.transitions))
    rows = emissions[inside].tolist()
    weights = {}
    for path in itertools.product(range(crf.num_tags), repeat=len(rows)):
        terms = [row[tag] for row, tag in zip(rows, path, strict=True)]
        terms += [transitions[a][b] for a, b in itertools.pairwise(path)]
        terms += [start[path[0]], end[path[-1]]] if path else []
        weights[path] = math.fsum(terms) if -INF not in terms else -INF
    return weights


def log_sum(values):
    top = max(values)
    return top + math.log(math.fsum(math.exp(value - top) for value in values)) if top > -INF else -INF


# drop-in


@TORCHCRF
@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("batch_first", [False, True], ids=["steps first", "batch first"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_the_log_likelihood_of_pytorch_crf(dtype, batch_first, mask_dtype):
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
        allowed = size * (2.0**-20 * 7**0.5 + ulp(torch.tensor(64.0).numpy(), F32)) * (1 if dtype == F32 else 2.0**-29)
        assert (ours.double() - theirs).abs().max() <= allowed
        pairs = zip(gradients(crf, emissions, ours), gradients(exact, wide, theirs), strict=True)
        for mine, expected in pairs:
            assert mine.dtype == dtype and mine.shape == expected.shape
            assert (mine.double() - expected).abs().max() <= size * (1e-5 if dtype == F32 else 1e-12)


@TORCHCRF
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["steps first", "batch first"])
def test_the_best_tags_of_pytorch_crf(batch_first, masked):
    crf = layer(batch_first=batch_first)
    emissions, _, mask = batch()
    inputs = turned(crf, emissions, mask if masked else None)
    found = crf.decode(*inputs)
    assert found == peer(crf).decode(*inputs)
    assert [len(tags) for tags in found] == (mask.sum(1).tolist() if masked else [7] * 5)
    assert all(type(tag) is int for tags in found for tag in tags)


def test_parameters_of_pytorch_crf():
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
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours.transitions, theirs.transitions)


# against the sum over all tags


@pytest.fixture(scope="module")
def enumerated():
    """A layer, emissions, tags, the masks, and every path of each sequence with its weight."""
    crf = layer(3, batch_first=True)
    emissions, tags, _ = batch(len(HOLES), 4, 3)
    return crf, emissions, tags, [all_weights(crf, *pair) for pair in zip(emissions, HOLES, strict=True)]


@pytest.mark.parametrize("batch_first", [False, True], ids=["steps first", "batch first"])
def test_likelihood_and_partition_wherever_the_mask_is_off(enumerated, batch_first):
    crf, emissions, tags, weights = enumerated
    crf = copy.deepcopy(crf)
    crf.batch_first = batch_first
    inputs = turned(crf, emissions, tags, HOLES)
    norms = [log_sum(of_one.values()) for of_one in weights]
    chosen = [of_one[tuple(row[inside].tolist())] for of_one, row, inside in zip(weights, tags, HOLES, strict=True)]
    norms, chosen = torch.tensor(norms, dtype=F64), torch.tensor(chosen, dtype=F64)
    torch.testing.assert_close(crf.log_partition(inputs[0], inputs[2]), norms, rtol=0, atol=1e-13)
    torch.testing.assert_close(crf(*inputs, reduction="none"), chosen - norms, rtol=0, atol=1e-13)
    total = (chosen - norms).sum()
    torch.testing.assert_close(crf(*inputs, reduction="token_mean"), total / 12, rtol=0, atol=1e-13)
    torch.testing.assert_close(crf(*inputs, reduction="mean"), total / 6, rtol=0, atol=1e-13)


@pytest.mark.parametrize("batch_first", [False, True], ids=["steps first", "batch first"])
def test_marginals_wherever_the_mask_is_off(enumerated, batch_first):
    crf, emissions, _, weights = enumerated
    crf = copy.deepcopy(crf)
    crf.batch_first = batch_first
    found = crf.marginals(*turned(crf, emissions, HOLES))
    assert found.shape == turned(crf, emissions)[0].shape
    expected = torch.zeros_like(emissions)
    for i, of_one in enumerate(weights):
        steps, norm = HOLES[i].nonzero()[:, 0].tolist(), log_sum(of_one.values())
        for path, weight in of_one.items():
            for step, tag in zip(steps, path, strict=True):
                expected[i, step, tag] += math.exp(weight - norm)
    torch.testing.assert_close(*turned(crf, expected), found, rtol=0, atol=1e-13)
    assert (found[~turned(crf, HOLES)[0]] == 0).all()


@pytest.mark.parametrize("batch_first", [False, True], ids=["steps first", "batch first"])
def test_best_tags_wherever_the_mask_is_off(enumerated, batch_first):
    crf, emissions, _, weights = enumerated
    crf = copy.deepcopy(crf)
    crf.batch_first = batch_first
    emissions, mask = turned(crf, emissions, HOLES)
    ordered = [sorted(of_one.items(), key=lambda pair: -pair[1]) for of_one in weights]
    best = [list(pairs[0][0]) for pairs in ordered]
    assert crf.decode(emissions, mask) == best
    states, scores = crf.viterbi(emissions, mask)
    assert states.shape == mask.shape and (states[~mask] == -1).all()
    rows = states if batch_first else states.T
    assert [row[inside].tolist() for row, inside in zip(rows, HOLES, strict=True)] == best
    torch.testing.assert_close(scores, torch.tensor([pairs[0][1] for pairs in ordered], dtype=F64))
    tags, scores = crf.topk(emissions, 4, mask)
    for found, weight, pairs in zip(tags, scores.tolist(), ordered, strict=True):
        there = len(pairs[:4])
        assert found[:there] == [list(path) for path, _ in pairs[:4]]
        assert weight[:there] == pytest.approx([w for _, w in pairs[:4]], abs=1e-13)
        assert weight[there:] == [-INF] * (4 - there)
        assert all(set(path) <= {-1} and len(path) == len(found[0]) for path in found[there:])


@pytest.mark.parametrize("batch_first", [False, True], ids=["steps first", "batch first"])
def test_draws_wherever_the_mask_is_off(enumerated, batch_first):
    crf, emissions, _, _ = enumerated
    crf = copy.deepcopy(crf)
    crf.batch_first = batch_first
    emissions, mask = turned(crf, emissions, HOLES)
    draws = 4000
    drawn = crf.sample(emissions, draws, mask, generator=seeded())
    assert drawn.shape == (draws, *mask.shape) and (drawn[:, ~mask] == -1).all()
    assert torch.equal(drawn, crf.sample(emissions, draws, mask, generator=seeded()))
    frequencies = torch.stack([(drawn == tag).double().mean(0) for tag in range(3)], -1)
    assert (frequencies - crf.marginals(emissions, mask)).abs().max() < 5 * 0.5 / draws**0.5


def test_what_is_masked_has_no_influence():
    crf = layer()
    emissions, tags, ends = batch(6, 4, dtype=F64)
    for mask in (ends, HOLES):
        outside = emissions.masked_fill(~mask[..., None], NAN).requires_grad_()
        inside = emissions.clone().requires_grad_()
        found = crf(outside, tags.masked_fill(~mask, -100), mask, "none")
        expected = crf(inside, tags, mask, "none")
        assert torch.equal(found, expected)
        ours = gradients(crf, outside, found)
        assert all(torch.equal(*pair) for pair in zip(ours, gradients(crf, inside, expected), strict=True))
        assert (ours[0][~mask] == 0).all() and (ours[0][mask] != 0).any()
        assert crf.decode(outside, mask) == crf.decode(inside, mask)
        assert torch.equal(crf.marginals(outside, mask), crf.marginals(inside, mask))
        assert torch.equal(crf.log_partition(outside, mask), crf.log_partition(inside, mask))


# -inf


def test_forbidden_tags_and_transitions():
    crf = layer(3)
    emissions, _, _ = batch(2, 4, 3)
    with torch.no_grad():
        crf.transitions[2, 0] = crf.start_transitions[1] = crf.end_transitions[2] = -INF
        emissions[0, 1, 0] = -INF
    emissions.requires_grad_()
    tags = torch.tensor([[0, 1, 1, 0], [0, 2, 0, 1]])  # the second takes the forbidden transition
    out = crf(emissions, tags, reduction="none")
    weights = [all_weights(crf, of_one, torch.ones(4, dtype=torch.bool)) for of_one in emissions]
    expected = weights[0][0, 1, 1, 0] - log_sum(weights[0].values())
    assert out[0].item() == pytest.approx(expected, abs=1e-13) and out[1] == -INF
    found = gradients(crf, emissions, out)
    assert all(gradient.isfinite().all() for gradient in found)
    assert found[0][0, 1, 0] == found[1][1] == found[2][2] == found[3][2, 0] == 0
    assert (found[0][1] == 0).all() and (found[0][0] != 0).any()
    assert crf.decode(emissions)[0] == list(max(weights[0], key=weights[0].get))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW], ids=lambda o: o.__name__)
def test_a_forbidden_transition_stays_so(optimizer):
    crf = layer(3, F32)
    emissions, tags, mask = batch(c=3, dtype=F32)
    with torch.no_grad():
        crf.transitions[2, 0] = -INF
    steps = optimizer(crf.parameters(), lr=0.1)
    possible = torch.where((tags[:, 1:] == 0) & (tags[:, :-1] == 2), 1, tags[:, 1:])
    tags = torch.cat([tags[:, :1], possible], 1)
    losses = []
    for _ in range(3):
        steps.zero_grad()
        loss = -crf(emissions, tags, mask, "mean")
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert crf.transitions[2, 0] == -INF and crf.transitions.isneginf().sum() == 1
    assert losses[2] < losses[1] < losses[0] < INF


def test_where_every_path_is_impossible():
    crf = layer(3)
    emissions, tags, _ = batch(2, 3, 3)
    emissions[0, 1] = -INF
    out = crf(emissions.requires_grad_(), tags, reduction="none")
    assert out[0] == -INF and out[1].isfinite() and crf.log_partition(emissions)[0] == -INF
    assert all(gradient.isfinite().all() for gradient in gradients(crf, emissions, out))
    assert crf.decode(emissions)[0] == [-1, -1, -1]


# sizes at the edge


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_one_variable(masked):
    crf = layer()
    emissions, tags, mask = batch(3, 1)
    given = mask if masked else None
    weights = emissions[:, 0] + crf.start_transitions + crf.end_transitions
    expected = weights.log_softmax(-1).gather(-1, tags)[:, 0]
    out = crf(emissions.requires_grad_(), tags, given, "none")
    torch.testing.assert_close(out, expected)
    assert (gradients(crf, emissions, out)[-1] == 0).all()  # of the transitions: each has one, for DDP
    torch.testing.assert_close(crf.marginals(emissions, given)[:, 0], weights.softmax(-1))
    assert crf.decode(emissions, given) == weights.argmax(-1, keepdim=True).tolist()


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_no_sequences(masked):
    crf = layer()
    emissions, tags, mask = batch(0, 5)
    given = mask if masked else None
    for reduction in REDUCTIONS:
        out = crf(emissions.requires_grad_(), tags, given, reduction)
        assert out.shape == ((0,) if reduction == "none" else ()) and (out == 0).all()
        assert all((gradient == 0).all() for gradient in gradients(crf, emissions, out))
    assert crf.decode(emissions, given) == [] and crf.marginals(emissions, given).shape == (0, 5, 4)
    assert crf.topk(emissions, 2, given)[0] == [] and crf.sample(emissions, 3, given).shape == (3, 0, 5)


def test_only_empty_sequences():
    crf = layer()
    emissions, tags, mask = batch(2, 3)
    out = crf(emissions.requires_grad_(), tags, torch.zeros_like(mask), "token_mean")
    assert out == 0 and all((gradient == 0).all() for gradient in gradients(crf, emissions, out))
    assert crf.decode(emissions, torch.zeros_like(mask)) == [[], []]


def test_one_tag():
    crf = layer(1)
    emissions, tags, mask = batch(c=1)
    torch.testing.assert_close(crf(emissions, tags, mask, "none"), torch.zeros(5, dtype=F64), rtol=0, atol=1e-12)


# a module like others


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("parameters", ["half", "float32"])
def test_half_precision_is_float32_inside(half, parameters):
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


def test_autocast_changes_nothing():
    crf = layer(dtype=F32)
    emissions, tags, mask = batch(dtype=F32)
    with torch.autocast("cpu", torch.bfloat16):
        found = crf(emissions, tags, mask)
    assert torch.equal(found, crf(emissions, tags, mask))


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_compiled_without_a_break(masked):
    crf = layer()
    emissions, tags, ends = batch(6, 4)
    for mask in (ends, HOLES) if masked else (None,):
        leaf = emissions.clone().requires_grad_()
        compiled = torch.compile(crf, fullgraph=True, backend="aot_eager")
        out, expected = compiled(leaf, tags, mask, "none"), crf(leaf, tags, mask, "none")
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
        pairs = zip(gradients(crf, leaf, out), gradients(crf, leaf, expected), strict=True)
        assert all((mine - theirs).abs().max() < 1e-13 for mine, theirs in pairs)


def test_under_vmap():
    crf = layer()
    emissions, tags, _ = batch(6, 4)
    likelihood = torch.func.vmap(lambda *one: crf(*(tensor[None] for tensor in one)))
    torch.testing.assert_close(likelihood(emissions, tags, HOLES), crf(emissions, tags, HOLES, "none"))


def test_derivatives():
    crf = layer(2)
    emissions, tags, _ = batch(3, 3, 2)
    mask = HOLES[1:4, :3]

    def likelihood(emissions, start, end, transitions):
        parameters = {"start_transitions": start, "end_transitions": end, "transitions": transitions}
        return torch.func.functional_call(crf, parameters, (emissions, tags, mask, "none"))

    leaves = [tensor.detach().requires_grad_() for tensor in (emissions, *crf.parameters())]
    assert torch.autograd.gradcheck(likelihood, leaves)
    assert torch.autograd.gradgradcheck(likelihood, leaves)


def test_copies_and_pickles():
    crf = layer(5, batch_first=True)
    emissions, tags, mask = batch(c=5)
    expected = crf(emissions, tags, mask)
    for other in (copy.deepcopy(crf), pickle.loads(pickle.dumps(crf))):
        assert torch.equal(other(emissions, tags, mask), expected) and other.batch_first
        assert not {p.data_ptr() for p in other.parameters()} & {p.data_ptr() for p in crf.parameters()}
    assert crf.to(F32)(emissions.float(), tags, mask).dtype == F32


def test_repr():
    assert repr(LinearChainCRF(5, batch_first=True)) == "LinearChainCRF(num_tags=5, batch_first=True)"


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: LinearChainCRF(0), ValueError, "num_tags: expected at least 1, got 0"),
        (lambda: LinearChainCRF(2.0), TypeError, "num_tags: expected an integer, got 2.0"),
        (lambda: LinearChainCRF(2, batch_first=1), TypeError, "batch_first: expected True or False, got 1"),
        (lambda: wrong(emissions=[0]), TypeError, "emissions: expected a torch.Tensor, got list"),
        (lambda: wrong(emissions=torch.zeros(2, 3, 4)), ValueError, r"emissions: .*\[n, v, 5\], got \[2, 3, 4\]"),
        (lambda: wrong(emissions=torch.zeros(2, 0, 5)), ValueError, r"emissions: .*at least one step.*\[2, 0, 5\]"),
        (lambda: wrong(tags=[0]), TypeError, "tags: expected a torch.Tensor, got list"),
        (lambda: wrong(tags=torch.zeros(2, 3)), TypeError, "tags: expected integers, got float32"),
        (lambda: wrong(tags=torch.zeros(3, 2).long()), ValueError, r"tags: expected shape \[2, 3\], got \[3, 2\]"),
        (lambda: wrong(tags=torch.full((2, 3), 5)), ValueError, "tags: expected values from 0 to 4, got 5 to 5"),
        (lambda: wrong(tags=torch.full((2, 3), -1)), ValueError, "tags: expected values from 0 to 4, got -1 to -1"),
        (lambda: wrong(mask=[[1]]), TypeError, "mask: expected a torch.Tensor, got list"),
        (lambda: wrong(mask=torch.ones(3, 2).bool()), ValueError, r"mask: expected shape \[2, 3\], got \[3, 2\]"),
        (lambda: wrong(mask=torch.ones(2, 3)), TypeError, "mask: expected bool or integers, got float32"),
        (lambda: wrong(mask=torch.ones(2, 3, device="meta").bool()), ValueError, "mask: expected device cpu, got meta"),
        (lambda: wrong(tags=torch.ones(2, 3, device="meta").int()), ValueError, "tags: expected device cpu, got meta"),
        (lambda: wrong(reduction="max"), ValueError, "reduction: expected 'none' or .*, got 'max'"),
    ],
)
def test_wrong_arguments(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def wrong(**changed):
    arguments = {"emissions": torch.zeros(2, 3, 5), "tags": torch.zeros(2, 3, dtype=torch.int64), "mask": None}
    return LinearChainCRF(5, batch_first=True)(**{**arguments, **changed})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device")
def test_the_loss_does_not_wait_for_the_device():
    crf = layer(dtype=F32)
    emissions, tags, ends = batch(6, 4, dtype=F32)
    device = copy.deepcopy(crf).cuda()
    for mask in (None, ends, HOLES):
        expected = crf(emissions, tags, mask)
        inputs = [None if tensor is None else tensor.cuda() for tensor in (emissions, tags, mask)]
        device(*inputs).backward()  # whatever happens once
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = device(*inputs)
            found.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-4)
