"""Conditional random fields of tags and of segments equal sums over all segmentations; of tags, pytorch-crf."""

import copy
import itertools

import numpy as np
import pytest
import torch

from logchain.nn import LinearChainCRF, SemiMarkovCRF, bio_constraints
from tests.contract import of_steps, ulp
from tests.kernels.gpu.steps import waiting_raises
from tests.nn import segmentations
from tests.nn.hmms import array, close
from tests.seeded import seeded

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")
REDUCTIONS = ["none", "sum", "mean", "token_mean"]
# masks that leave the same variables wherever they stand, and none
HOLES = torch.tensor(
    [[1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool
)
# a linear chain, and a semi-Markov field of segments of at most three steps
KINDS = pytest.mark.parametrize("longest", [None, 3], ids=["linear", "segments"])
STEPS_FIRST = pytest.mark.parametrize("batch_first", [False, True], ids=["steps first", "batch first"])


def layer(num_tags=4, dtype=F64, longest=None, **options):
    """A linear chain or, with the number of steps of the longest segment, a semi-Markov field."""
    options = {"batch_first": True, "strict_mask": False} | options
    crf = LinearChainCRF(num_tags, **options) if longest is None else SemiMarkovCRF(num_tags, longest, **options)
    crf = crf.to(dtype)
    with torch.no_grad():
        for seed, parameter in enumerate(crf.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=seeded(seed), dtype=F64))
    return crf


def batch(n=5, v=7, c=4, dtype=F64):
    """Emissions, tags, and a mask whose sequences have v, 1, v - 2, v - 3, ... variables, at least one."""
    emissions = (2 * torch.randn(n, v, c, generator=seeded(8), dtype=F64)).to(dtype)
    tags = torch.randint(c, (n, v), generator=seeded(8))
    lengths = (v - torch.arange(n)).clamp(min=1)
    lengths[1:2] = 1
    return emissions, tags, torch.arange(v) < lengths[:, None]


def turned(crf, *tensors):
    """Tensors (n, v, ...) in the layer's layout."""
    return [tensor if crf.batch_first or tensor is None else tensor.transpose(0, 1) for tensor in tensors]


def gradients(crf, emissions, out):
    return torch.autograd.grad(out.sum(), [emissions, *crf.parameters()])


def all_weights(crf, emissions):
    """The log-weight of each segmentation of emissions (v, c); segments of a linear chain take one step."""
    if not len(emissions):
        return {(): 0.0}
    x, durations = array(emissions).copy(), getattr(crf, "durations", torch.zeros(crf.num_tags, 1))
    x[-1] += array(crf.end_transitions)
    return segmentations.log_weights(x, *map(array, (crf.start_transitions, crf.transitions, durations)))


def tags_of(segments):
    return list(segmentations.steps_of(segments, HOLES.shape[1]))


# numbers of tags, what counts, and options of the layer
CASES = {
    "holes": (3, HOLES, {}),
    "holes, steps first": (3, HOLES, {"batch_first": False}),
    "holes, strict": (3, HOLES[[0, 2, 4]], {"strict_mask": True}),
    "ends": (3, HOLES[[0, 4]], {}),
    "one variable": (4, torch.ones(3, 1, dtype=torch.bool), {"batch_first": False}),
    "one tag": (1, HOLES[:3], {}),
    "forbidden": (3, HOLES, {}),
    "segments": (3, HOLES, {"longest": 3}),
    "segments, steps first": (3, HOLES, {"longest": 3, "batch_first": False}),
    "segments, strict": (3, HOLES[[0, 4]], {"longest": 5, "strict_mask": True}),
    "segments, forbidden": (3, HOLES, {"longest": 3}),
    "segments of one step": (3, HOLES, {"longest": 1}),
}


@pytest.fixture(scope="module", params=CASES)
def enumerated(request):
    """A layer, emissions that are poisoned where masked, a mask, and every segmentation of each sequence."""
    num_tags, mask, options = CASES[request.param]
    crf, (emissions, _, _) = layer(num_tags, **options), batch(*mask.shape, num_tags)
    if "forbidden" in request.param:
        with torch.no_grad():
            crf.transitions[2, 0] = crf.start_transitions[1] = crf.end_transitions[2] = emissions[0, 1, 0] = -INF
            if "longest" in options:
                crf.transitions.fill_diagonal_(-INF)
                crf.durations[1, 0] = -INF
    weights = [all_weights(crf, row[inside]) for row, inside in zip(emissions, mask, strict=True)]
    return crf, emissions.masked_fill(~mask[..., None], NAN), mask, weights


def test_likelihoods_equal_the_enumeration(enumerated):
    """Of all segmentations of each sequence, as a batch."""
    crf, emissions, mask, weights = enumerated
    for row, inside, table in zip(emissions, mask, weights, strict=True):
        n, steps = len(table), inside.nonzero()[:, 0]
        tags, begins = torch.full((n, len(row)), -100), torch.rand(n, len(row), generator=seeded()) < 0.5
        for i, segments in enumerate(table):
            tags[i, steps] = torch.tensor(tags_of(segments)[: len(steps)], dtype=torch.int64)
            begins[i, steps] = False
            begins[i, steps[[first for _, first, _ in segments]]] = True
        options = {"begins": turned(crf, begins)[0]} if isinstance(crf, SemiMarkovCRF) else {}
        values = row.expand(n, -1, -1)
        leaf = values.clone().requires_grad_()
        inputs = turned(crf, leaf, tags, inside.expand(n, -1))
        out, total = crf(*inputs, "none", **options), crf(*inputs, **options)
        close(out, np.array(list(table.values())) - segmentations.log_sum(table), 1e-13)
        assert total == out.sum()
        close(crf(*inputs, "mean", **options), array(total / n), 1e-13)
        close(crf(*inputs, "token_mean", **options), array(total / (n * max(len(steps), 1))), 1e-13)
        # masked and forbidden values have gradient zero
        for gradient, operand in zip(gradients(crf, leaf, out), (values, *crf.parameters()), strict=True):
            assert gradient.isfinite().all() and (gradient[~operand.isfinite()] == 0).all()


def test_partitions_and_marginals_equal_the_enumeration(enumerated):
    crf, emissions, mask, weights = enumerated
    inputs, (c, longest) = turned(crf, emissions, mask), getattr(crf, "durations", crf.transitions[:, :1]).shape
    close(crf.log_partition(*inputs), [segmentations.log_sum(table) for table in weights], 1e-13)
    found = [crf.marginals(*inputs)] + ([crf.segment_marginals(*inputs)] if isinstance(crf, SemiMarkovCRF) else [])
    assert all((marginals[~inputs[1]] == 0).all() for marginals in found)
    found = turned(crf, *found)
    for row, (inside, table) in enumerate(zip(mask, weights, strict=True)):
        begins = segmentations.posterior(table, int(inside.sum()), c, longest)
        for marginals, expected in zip(found, (segmentations.of_states(begins), begins), strict=False):
            close(marginals[row, inside], expected, 1e-13)


def test_best_tags_equal_the_enumeration(enumerated):
    crf, emissions, mask, weights = enumerated
    inputs = turned(crf, emissions, mask)
    possible = [{segments: weight for segments, weight in table.items() if weight > -INF} for table in weights]
    ordered = [sorted(table.items(), key=lambda pair: -pair[1]) for table in possible]
    best = [tags_of(pairs[0][0]) for pairs in ordered]
    assert crf.decode(*inputs) == best
    if isinstance(crf, SemiMarkovCRF):
        assert crf.decode_segments(*inputs) == [list(pairs[0][0]) for pairs in ordered]
    states, scores = crf.viterbi(*inputs)
    assert states.shape == inputs[1].shape and (states[~inputs[1]] == -1).all()
    assert [row[inside].tolist() for row, inside in zip(*turned(crf, states), mask, strict=True)] == best
    close(scores, [pairs[0][1] for pairs in ordered])
    tags, scores = crf.topk(inputs[0], 4, inputs[1])
    for found, weight, pairs in zip(tags, scores.tolist(), ordered, strict=True):
        there = len(pairs[:4])
        assert found[:there] == [tags_of(segments) for segments, _ in pairs[:4]]
        assert weight[:there] == pytest.approx([w for _, w in pairs[:4]], abs=1e-13)
        assert weight[there:] == [-INF] * (4 - there)
        assert all(set(path) <= {-1} and len(path) == len(found[0]) for path in found[there:])


def agrees(segments, tags, begins):
    """Whether segments have these tags, and begin where known neighbors differ and where `begins` is."""
    steps, firsts = segmentations.steps_of(segments, len(tags)), {first for _, first, _ in segments}
    for i, tag in enumerate(tags):
        if tag not in (-1, steps[i]) or (i and begins[i] and i not in firsts):
            return False
        if i and -1 not in (tag, tags[i - 1]) and not begins[i] and (i in firsts) != (tag != tags[i - 1]):
            return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_unknown_tags_give_the_sum_over_segmentations_that_agree(enumerated, seed):
    crf, emissions, mask, weights = enumerated
    tags, begins = torch.randint(-1, crf.num_tags, mask.shape, generator=seeded(seed)), mask & False
    begins[:, -1] = seed % 2 == 1
    tags[0, :2] = -1
    tags[0, 2:] = 0 if crf.num_tags == 1 else 1
    leaf = emissions.clone().requires_grad_()
    inputs, options = turned(crf, leaf, tags, mask), {"partial": True}
    if isinstance(crf, SemiMarkovCRF):
        options["begins"] = turned(crf, begins)[0]
    else:  # each step is a segment
        begins |= True
    result = crf(*inputs, "none", **options)
    for row, (inside, table) in enumerate(zip(mask, weights, strict=True)):
        known, starts = tags[row, inside].tolist(), begins[row, inside].tolist()
        agreeing = {one: weight for one, weight in table.items() if weight > -INF and agrees(one, known, starts)}
        close(result[row], segmentations.log_sum(agreeing) - segmentations.log_sum(table) if agreeing else -INF, 1e-13)
    assert all(gradient.isfinite().all() for gradient in gradients(crf, leaf, result))
    assert torch.equal(result, crf(*inputs, "none", **options | {"partial": False}))  # where values are read


def test_draws_have_the_marginals(enumerated):
    crf, emissions, unmasked, _ = enumerated
    emissions, mask = turned(crf, emissions, unmasked)
    draws = 4000
    drawn = crf.sample(emissions, draws, mask, generator=seeded())
    assert drawn.shape == (draws, *mask.shape) and (drawn[:, ~mask] == -1).all()
    assert torch.equal(drawn, crf.sample(emissions, draws, mask, generator=seeded()))
    frequencies = torch.stack([(drawn == tag).double().mean(0) for tag in range(crf.num_tags)], -1)
    assert (frequencies - crf.marginals(emissions, mask)).abs().max() < 5 * 0.5 / draws**0.5


@KINDS
def test_sequence_without_a_path_has_probability_zero(longest):
    crf, (emissions, tags, _) = layer(3, longest=longest), batch(2, 4, 3)
    emissions[0, 1] = -INF
    out = crf(emissions.requires_grad_(), tags, reduction="none")
    assert out[0] == crf.log_partition(emissions)[0] == -INF and out[1].isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(crf, emissions, out))
    assert crf.decode(emissions)[0] == [-1] * 4
    assert longest is None or [len(segments) > 0 for segments in crf.decode_segments(emissions)] == [False, True]


@KINDS
def test_first_and_second_derivatives_equal_finite_differences(longest):
    crf, (emissions, tags, _) = layer(2, longest=longest), batch(3, 3, 2)
    leaves = emissions.requires_grad_(), *crf.parameters()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *_: crf(emissions, tags, HOLES[1:4, :3], "none"), leaves)
    if longest:
        assert torch.autograd.gradcheck(lambda *_: crf.segment_marginals(emissions, HOLES[1:4, :3]), leaves)


def test_no_sequences_and_empty_sequences():
    crf = layer()
    emissions, tags, mask = batch(0, 5)
    for reduction in REDUCTIONS:
        out = crf(emissions.requires_grad_(), tags, mask, reduction)
        assert out.shape == ((0,) if reduction == "none" else ()) and (out == 0).all()
        assert all((gradient == 0).all() for gradient in gradients(crf, emissions, out))
    assert crf(emissions, tags) == 0
    assert crf.decode(emissions, mask) == [] and crf.marginals(emissions, mask).shape == (0, 5, 4)
    assert crf.topk(emissions, 2, mask)[0] == [] and crf.sample(emissions, 3, mask).shape == (3, 0, 5)
    emissions, tags, mask = batch(2, 3)
    out = crf(emissions.requires_grad_(), tags, torch.zeros_like(mask), "token_mean")
    assert out == 0 and all((gradient == 0).all() for gradient in gradients(crf, emissions, out))


def by_vmap(crf):
    return torch.func.vmap(lambda *one: crf(*(part[None] for part in one)))


def test_first_step_off_is_refused_where_masks_are_traced():
    torch.compiler.reset()
    crf, inputs = layer(strict_mask=True), batch(6, 4)
    exported = torch.export.export(crf, inputs).module()
    for call in (torch.compile(crf, backend="eager", fullgraph=True), exported, by_vmap(crf)):
        torch.testing.assert_close(call(*inputs).sum(), crf(*inputs))
        with pytest.raises(ValueError, match="lengths: expected values from 1 to v = 4, got 0 to"):
            call(*inputs[:2], ~inputs[2])


def test_masks_with_holes_compile_as_one_graph_and_vmap():
    crf, (emissions, tags, _) = layer(), batch(6, 4)
    leaf, unknown = emissions.requires_grad_(), tags.masked_fill(torch.arange(4) == 1, -1)
    compiled = torch.compile(crf, fullgraph=True, backend="aot_eager")
    for partial, known in ((False, tags), (True, unknown)):
        out, expected = (call(leaf, known, HOLES, "none", partial=partial) for call in (compiled, crf))
        for found, truth in zip(
            (out, *gradients(crf, leaf, out)), (expected, *gradients(crf, leaf, expected)), strict=True
        ):
            torch.testing.assert_close(found, truth, rtol=0, atol=1e-13)
    torch.testing.assert_close(by_vmap(crf)(emissions, tags, HOLES), crf(emissions, tags, HOLES, "none"))


class Methods(LinearChainCRF):
    """All methods of the layer as one function."""

    def forward(self, emissions, tags, mask):
        methods = self.viterbi, self.marginals, self.log_partition
        return super().forward(emissions, tags, mask), *(method(emissions, mask) for method in methods)


def test_export_serves_any_number_of_sentences_and_words():
    axes = {0: torch.export.Dim("n", min=2, max=64), 1: torch.export.Dim("v", min=3, max=512)}
    methods = Methods(4, batch_first=True).double()
    exported = torch.export.export(methods, batch(4, 6), dynamic_shapes=(axes,) * 3).module()
    for example in (batch(4, 6), batch(7, 11)):
        torch.testing.assert_close(exported(*example), methods(*example), rtol=0, atol=1e-13)


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
    # the host does not see that a first step is off
    ends[0, 0] = False
    strict = layer(dtype=F32, strict_mask=True).cuda()
    found = strict(*(tensor.cuda() for tensor in (emissions, tags, ends)), "none")
    assert found.isnan().tolist() == [True] + [False] * 5


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
    [(F64, False, None), (F64, True, torch.bool), (F32, False, torch.bool), (F32, True, torch.uint8)],
    ids=str,
)
def test_likelihood_gradients_and_best_tags_equal_pytorch_crf(dtype, batch_first, mask_dtype):
    crf = layer(dtype=dtype, batch_first=batch_first)
    emissions, tags, mask = batch(dtype=dtype)
    mask = None if mask_dtype is None else mask.to(mask_dtype)
    inputs = turned(crf, emissions.requires_grad_(), tags, mask)
    exact, wide = peer(copy.deepcopy(crf).double()), emissions.detach().double().requires_grad_()
    truth = turned(crf, wide)
    found = crf.decode(inputs[0], inputs[2])
    assert found == exact.decode(truth[0], inputs[2])
    assert [len(of_one) for of_one in found] == ([7] * 5 if mask is None else mask.sum(1).tolist())
    assert all(type(tag) is int for of_one in found for tag in of_one)
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


@STEPS_FIRST
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


def test_parameters_equal_pytorch_crf():
    torchcrf = pytest.importorskip("torchcrf", exc_type=ImportError)
    torch.manual_seed(3)
    theirs = torchcrf.CRF(6)
    torch.manual_seed(3)
    ours = LinearChainCRF(6)
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, expected)
    ours.reset_parameters()
    assert not torch.equal(ours.transitions, theirs.transitions) and ours.transitions.abs().max() <= 0.1


@STEPS_FIRST
@KINDS
def test_packed_rows_equal_a_mask(longest, batch_first):
    crf, padded = layer(longest=longest and 7, batch_first=batch_first), batch()
    emissions, tags, mask = turned(crf, *padded)
    packed = {"cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), padded[2].sum(1).cumsum(0)])}

    def rows(values):
        return turned(crf, values)[0][padded[2]]

    inputs, known, unknown = rows(emissions), rows(tags), padded[1].masked_fill(torch.arange(7) % 2 == 0, -1)
    for reduction in REDUCTIONS:
        found = crf(inputs, known, None, reduction, **packed)
        torch.testing.assert_close(found, crf(emissions, tags, mask, reduction))
    found = crf(inputs, unknown[padded[2]], reduction="none", **packed)
    torch.testing.assert_close(found, crf(emissions, *turned(crf, unknown), mask, "none"))
    torch.testing.assert_close(crf.log_partition(inputs, **packed), crf.log_partition(emissions, mask))
    torch.testing.assert_close(crf.marginals(inputs, **packed), rows(crf.marginals(emissions, mask)))
    best, expected = crf.viterbi(inputs, **packed), crf.viterbi(emissions, mask)
    assert torch.equal(best.states, rows(expected.states)) and crf.decode(inputs, **packed) == crf.decode(
        emissions, mask
    )
    torch.testing.assert_close(best.score, expected.score)
    (paths, scores), expected = crf.topk(inputs, 3, **packed), crf.topk(emissions, 3, mask)
    torch.testing.assert_close(scores, expected[1])
    found, expected = ([[path for path in each if -1 not in path] for each in some] for some in (paths, expected[0]))
    assert found == expected
    drawn = crf.sample(inputs, 4000, generator=seeded(), **packed)
    frequencies = torch.stack([(drawn == tag).double().mean(0) for tag in range(4)], -1)
    assert (frequencies - crf.marginals(inputs, **packed)).abs().max() < 5 * 0.5 / 4000**0.5
    if longest:
        assert crf.decode_segments(inputs, **packed) == crf.decode_segments(emissions, mask)
        expected = rows(crf.segment_marginals(emissions, mask))
        torch.testing.assert_close(crf.segment_marginals(inputs, **packed), expected)
        begins = torch.rand(mask.shape, generator=seeded()) < 0.5
        found = crf(inputs, known, begins=rows(begins), **packed)
        torch.testing.assert_close(found, crf(emissions, tags, mask, begins=begins))


def test_ignored_labels_have_to_be_masked():
    crf, (emissions, tags, _) = layer(), batch()
    tags[:, 0] = -100
    with pytest.raises(ValueError, match=r"tags: expected values from 0 to 3, got -100 to 3; .* mask=tags != -100"):
        crf(emissions, tags)
    torch.testing.assert_close(crf(emissions, tags, tags != -100), crf(emissions[:, 1:], tags[:, 1:]))


ALLOWED = {
    "allowed_transitions": torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1]]).bool(),
    "allowed_starts": torch.tensor([True, True, False]),
    "allowed_ends": torch.tensor([False, True, True]),
}


def forbidding(crf):
    """A copy without constraints whose parameters are -inf where the constraints are False."""
    other = LinearChainCRF(crf.num_tags, crf.batch_first).double()
    other.load_state_dict({name: value.detach().clone() for name, value in crf.named_parameters()})
    with torch.no_grad():
        for parameter, allowed in zip(other.parameters(), ("starts", "ends", "transitions"), strict=True):
            parameter[~ALLOWED[f"allowed_{allowed}"]] = -INF
    return other


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_constraints_survive_training_averaging_and_initialization(optimizer):
    crf, (emissions, tags, mask) = LinearChainCRF(3, True, **ALLOWED).double(), batch(c=3)
    tags[:] = 1
    tags[:, 1::2] = 0
    optimizer = optimizer(crf.parameters(), 0.1, weight_decay=0.1)
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averages = [torch.optim.swa_utils.AveragedModel(crf, multi_avg_fn=multi) for multi in (None, ema)]
    for _ in range(3):
        optimizer.zero_grad()
        crf(emissions, tags, mask, "token_mean").neg().backward()
        optimizer.step()
        for average in averages:
            average.update_parameters(crf)
    again = copy.deepcopy(crf)
    again.reset_parameters()
    for model in (crf, again, *(average.module for average in averages)):
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        expected = forbidding(model)
        assert torch.equal(model.log_partition(emissions, mask), expected.log_partition(emissions, mask))
        assert model.decode(emissions, mask) == expected.decode(emissions, mask)


def test_constraints_are_in_the_state_only_if_passed():
    torch.manual_seed(0)
    plain, crf = LinearChainCRF(3), LinearChainCRF(3, **ALLOWED)
    assert list(plain.state_dict()) == ["start_transitions", "end_transitions", "transitions"]
    assert set(crf.state_dict()) == {*plain.state_dict(), *ALLOWED}
    missing = crf.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert set(missing) == set(ALLOWED) and torch.equal(crf.transitions, plain.transitions)
    with pytest.raises(TypeError, match=r"allowed_starts: expected bool, got float32; pass its \.bool\(\)"):
        LinearChainCRF(3, allowed_starts=torch.ones(3))
    with pytest.raises(ValueError, match=r"allowed_transitions: expected shape \[3, 3\], got \[3\]"):
        LinearChainCRF(3, allowed_transitions=torch.ones(3).bool())


def is_valid(tags, scheme):
    """Whether the spans of a tagging are what its scheme says, read from left to right."""
    going_on = {"BIO": "I", "IOB1": "B", "BIOES": "IE"}[scheme]  # what needs a span of its type before it
    span = None  # the type of the span that may go on
    for tag in tags:
        prefix, _, kind = tag.partition("-")
        if (prefix in going_on and span != kind) or (scheme == "BIOES" and span and prefix not in going_on):
            return False
        span = kind if prefix in {*"BI"} else None
    return scheme != "BIOES" or span is None


@pytest.mark.parametrize("scheme", ["BIO", "IOB1", "BIOES"])
def test_taggings_of_bio_constraints_are_the_valid_ones(scheme):
    tags = ["O", *(f"{prefix}-{kind}" for kind in ("A", "B-C") for prefix in sorted({*scheme} & set("BIES")))]
    constraints = bio_constraints(tags, scheme)
    crf = LinearChainCRF(len(tags), True, **constraints._asdict())
    every = torch.tensor(list(itertools.product(range(len(tags)), repeat=3)))
    possible = crf(torch.zeros(len(every), 3, len(tags)), every, reduction="none") > -INF
    assert possible.tolist() == [is_valid([tags[tag] for tag in path], scheme) for path in every.tolist()]
    assert 0 < possible.sum() < len(every)


def test_bilou_is_bioes_with_other_letters():
    tags = ["O", "B-A", "I-A", "E-A", "S-A", "B-B", "E-B"]
    others = [tag.translate(str.maketrans("ES", "LU")) for tag in tags]
    torch.testing.assert_close(bio_constraints(tags, "BIOES"), bio_constraints(others, "BILOU"))
    for tag in ("S-A", "PER", "B", "O-A"):
        message = f"tags: expected 'O' or B, I with a type, .* got '{tag}'; pass the scheme"
        with pytest.raises(ValueError, match=message):
            bio_constraints(["O", tag])


def test_change_of_tag_begins_a_segment_without_begins():
    crf, (emissions, _, _) = layer(3, longest=3), batch(1, 5, 3)
    tags, begins = torch.tensor([[0, 0, 2, 2, 1]]), torch.tensor([[True, False, True, False, True]])
    assert crf(emissions, tags) == crf(emissions, tags, begins=begins) == crf(emissions, tags, begins=begins & False)
    begins[0, 3] = True
    assert crf(emissions, tags, begins=begins) != crf(emissions, tags)


def test_segment_that_is_too_long_is_refused_or_impossible_where_values_are_not_read():
    crf, (emissions, _, _), tags = layer(3, longest=3), batch(2, 5, 3), torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="tags: expected segments of at most 3 steps, got one of 5; pass a larger"):
        crf(emissions, tags)
    assert crf(emissions, tags, (torch.arange(5) < 3).expand(2, -1)).isfinite()
    with torch.no_grad():
        assert (torch.compile(crf, backend="eager")(emissions, tags, reduction="none") == -INF).all()
