"""Chains of explicit durations have the results of the sum over all segmentations, written out one by one."""

import itertools
import math
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import logchain
from logchain.transitions import Duration
from tests.nn import segmentations
from tests.transitions.structures import numbers

F32, F64 = torch.float32, torch.float64
V, C, D = 4, 2, 3
Segmentation = tuple[segmentations.Segment, ...]


def counting_path(segments: Segmentation, v: int, longest: int) -> list[int]:
    return [s * longest + duration - 1 - i for s, _, duration in segments for i in range(duration)][:v]


class Model(NamedTuple):
    """Weights of one sequence: x [v, c] in nats, p0 [c], the first durations [c, D], matrix and durations of steps."""

    x: Tensor
    p0: Tensor
    first: Tensor
    matrix: Tensor
    durations: Tensor

    @classmethod
    def random(cls, seed: int = 0, *, by_step: bool = False, v: int = V, c: int = C, longest: int = D) -> "Model":
        """Some weights are 0; separate weights for each step, and for the first segment, if `by_step`."""
        rand, lead = numbers(seed), (v - 1,) if by_step else ()
        x = torch.randn(v, c, generator=torch.Generator().manual_seed(seed), dtype=F64)
        matrix, durations = rand(*lead, c, c), rand(*lead, c, longest)
        return cls(x, rand(c) + 0.1, rand(c, longest) if by_step else durations, matrix, durations)

    def structure(self) -> Duration:
        return Duration(self.matrix, self.durations)

    def arguments(self, **options) -> dict:
        if self.first is not self.durations:
            options["first_durations"] = self.first
        return self.structure().arguments(self.x, self.p0, **options)._asdict()

    def steps(self, values: Tensor) -> Tensor:
        return values if values.dim() > 2 else values.expand(len(self.x) - 1, *values.shape)

    def log_weights(self, segmented: list[Segmentation]) -> Tensor:
        matrix, durations = self.steps(self.matrix), self.steps(self.durations)
        weights = []
        for segments in segmented:
            weight, before = 0.0, None
            for state, start, duration in segments:
                if before is None:
                    entry = self.p0[state].log() + self.first[state, duration - 1].log()
                else:
                    move, stay = matrix[start - 1, before, state], durations[start - 1, state, duration - 1]
                    entry = move.log() + stay.log()
                weight, before = weight + entry + self.x[start : start + duration, state].sum(), state
            weights.append(weight)
        return torch.stack(weights)


class Truth:
    """The segmentations of a model, the path of each, and their probabilities."""

    def __init__(self, model: Model, *, censored: bool = False) -> None:
        v, (c, longest) = len(model.x), model.first.shape
        self.segmented = list(segmentations.every(v, c, longest, censored))
        self.paths = torch.tensor([counting_path(segments, v, longest) for segments in self.segmented])
        self.weights = model.log_weights(self.segmented)
        self.log_norm = self.weights.logsumexp(0)
        self.chances = (self.weights - self.log_norm).exp()

    def visits(self, size: tuple[int, ...], places: Callable[[Segmentation], list[tuple[int, ...]]]) -> Tensor:
        """The expected number of visits [*size] to the places of each segmentation."""
        counts = torch.zeros(size, dtype=F64)
        for segments, chance in zip(self.segmented, self.chances, strict=True):
            for place in places(segments):
                counts[place] += chance
        return counts


CASES = pytest.mark.parametrize(
    ("by_step", "censored"), list(itertools.product([False, True], [False, True])), ids=["", "censored", "step", "both"]
)


def assert_close(computed, expected, rtol=1e-11, atol=1e-12):
    torch.testing.assert_close(computed, expected, rtol=rtol, atol=atol)


def follows(segments: Segmentation) -> list[tuple[int, int, int, int]]:
    """The step, state before, state and duration of all segments but the first."""
    return [(start, a[0], s, d) for a, (s, start, d) in itertools.pairwise(segments)]


@CASES
def test_posteriors_and_expected_counts_are_those_of_segmentations(by_step, censored):
    model = Model.random(by_step=by_step)
    truth, chain = Truth(model, censored=censored), model.arguments(right_censored=censored)
    counting = torch.nn.functional.one_hot(truth.paths, C * D).double()
    full, total = (logchain.marginals(**chain, transitions=how) for how in ("full", "sum"))
    assert_close(full.log_norm, truth.log_norm)
    assert_close(full.states, torch.einsum("p,pvs->vs", truth.chances, counting))
    matrix = truth.visits((V - 1, C, C), lambda segments: [(start - 1, a, s) for start, a, s, _ in follows(segments)])
    stays = truth.visits((V, C, D), lambda segments: [(start, s, d - 1) for s, start, d in segments])
    assert_close(full.transitions.matrix, matrix)
    assert_close(full.transitions.durations, stays[1:])
    assert_close(total.transitions.matrix, matrix.sum_to_size(model.matrix.shape))
    assert_close(total.transitions.durations, stays[1:].sum_to_size(model.durations.shape))
    segments = model.structure().marginal_segments(full)
    assert_close(segments.durations, stays)
    assert_close(segments.begins, stays.sum(-1))
    assert_close(segments.states, torch.einsum("p,pvs->vs", truth.chances, counting).unflatten(-1, (C, D)).sum(-1))


@CASES
def test_gradients_are_those_of_the_sum_over_segmentations(by_step, censored):
    model = Model.random(1, by_step=by_step)
    shared = model.first is model.durations
    model = model._replace(**{name: leaf.clone().requires_grad_() for name, leaf in model._asdict().items()})
    model = model._replace(first=model.durations) if shared else model
    leaves = list({id(leaf): leaf for leaf in model}.values())
    value = logchain.product(**model.arguments(right_censored=censored))
    # where a weight is 0 its gradient is 0 by definition
    possible = model._replace(
        **{
            name: leaf if name == "x" else torch.where(leaf == 0, torch.zeros_like(leaf), leaf)
            for name, leaf in model._asdict().items()
        }
    )
    expected = torch.autograd.grad(Truth(possible, censored=censored).log_norm, leaves)
    assert any((leaf == 0).any() for leaf in leaves)
    assert_close(torch.autograd.grad(value, leaves), expected)


@CASES
def test_best_paths_are_the_best_segmentations(by_step, censored):
    model = Model.random(3, by_step=by_step)
    truth, chain = Truth(model, censored=censored), model.arguments(right_censored=censored)
    best, first = logchain.topk_paths(**chain, k=5), logchain.viterbi(**chain)
    assert_close(best.scores, truth.weights.topk(5).values)
    # two segments of one state in either order have one weight
    places = (best.states[:, None] == truth.paths).all(-1).int().argmax(1)
    assert torch.equal(best.states, truth.paths[places]) and len(places.unique()) == 5
    assert_close(truth.weights[places], best.scores)
    assert_close(truth.weights[(first.states == truth.paths).all(-1)], best.scores[:1])
    for path, rank in zip(best.states, places.tolist(), strict=True):
        computed = model.structure().path_segments(path)
        starts = computed.begins.nonzero()[:, 0]
        segments = zip(computed.states[starts], starts, computed.durations[starts], strict=True)
        assert tuple(tuple(int(number) for number in one) for one in segments) == truth.segmented[rank]
        assert computed.states.tolist() == [state // D for state in path.tolist()]
        assert not computed.durations[~computed.begins].any()


def test_gradients_of_all_queries_pass_no_segment_that_goes_on():
    model = Model.random(9)
    x, paths = model.x.clone().requires_grad_(), Truth(model).paths[:3]
    chain = model._replace(x=x).arguments()
    masked = x.repeat_interleave(D, -1).masked_fill(chain["x"].isneginf(), -math.inf)
    assert torch.equal(masked, chain["x"])
    queries = {
        "posteriors": lambda **chain: logchain.marginals(**chain).states.square(),
        "messages": lambda **chain: torch.cat(logchain.forward_backward(**chain)[:2]),
        "filtered": lambda **chain: logchain.filtered(**chain).states.square(),
        "entropy": logchain.entropy,
        "best": lambda **chain: logchain.topk_paths(**chain, k=3).scores,
        "log_prob": lambda **chain: logchain.log_prob(**chain, states=paths),
    }
    for query in queries.values():
        values = [query(**{**chain, "x": potentials}) for potentials in (chain["x"], masked)]
        sums = [value.masked_fill(value == -math.inf, 0.0).sum() for value in values]
        assert_close(*(torch.autograd.grad(value, x, retain_graph=True)[0] for value in sums))


def results(chain: dict, structure: Duration) -> list[Tensor]:
    values = logchain.product(**chain)
    posterior = logchain.marginals(**chain, transitions="full")
    best = logchain.viterbi(**chain)
    offsets = chain["cu_seqlens"]
    return [values, *structure.marginal_segments(posterior, offsets), *structure.path_segments(best.states, offsets)]


@CASES
def test_sequences_of_a_batch_or_packed_have_their_separate_results(by_step, censored):
    ends = torch.tensor([V, 1, 3])
    models = [Model.random(seed, by_step=by_step) for seed in range(3)]
    alone = []
    for model, end in zip(models, ends.tolist(), strict=True):
        part = model._replace(x=model.x[:end])
        part = part._replace(matrix=model.matrix[: end - 1], durations=model.durations[: end - 1]) if by_step else part
        alone.append(results(part.arguments(right_censored=censored), part.structure()))
        assert_close(alone[-1][0], Truth(part, censored=censored).log_norm)
    x, p0, first, matrix, durations = (torch.stack(parts) for parts in zip(*models, strict=True))
    matrix, durations = (part if by_step else part[:, None] for part in (matrix, durations))
    options = {"first_durations": first if by_step else None, "right_censored": censored}
    structure, inside = Duration(matrix, durations), torch.arange(V) < ends[:, None]
    padded = x.masked_fill(~inside[..., None], math.nan)
    batched = results(structure.arguments(padded, p0, lengths=ends, **options)._asdict(), structure)
    assert all((one[~inside] <= 0).all() for one in batched[1:])  # past the end 0, or -1 for states
    # weights that lead into each row; those into first rows have no influence
    unread = [torch.full_like(part[:, :1], math.nan) for part in (matrix, durations)]
    wide = [part.expand(-1, V - 1, -1, -1) for part in (matrix, durations)]
    rows = Duration(*(torch.cat(pair, 1)[inside] for pair in zip(unread, wide, strict=True)))
    offsets = torch.tensor([0, 4, 5, 8])
    chain = rows.arguments(x[inside], p0, cu_seqlens=offsets, **(options | {"first_durations": first}))
    packed = results(chain._asdict(), rows)
    for i, (one, *others) in enumerate(zip(batched, packed, *alone, strict=True)):
        expected = torch.cat(others[1:]) if i else torch.stack(others[1:])
        assert_close(others[0], expected)
        assert_close(one[inside] if i else one, expected)


def test_shared_weights_serve_packed_sequences():
    model = Model.random(6)
    structure, offsets = model.structure(), torch.tensor([0, 1, 4])
    for censored in (False, True):
        options = {"right_censored": censored}
        chain = structure.arguments(model.x, model.p0, cu_seqlens=offsets, **options)._asdict()
        packed = results(chain, structure)
        parts = [model._replace(x=part) for part in model.x.split([1, 3])]
        alone = [results(part.arguments(**options), structure) for part in parts]
        for computed, *others in zip(packed, *alone, strict=True):
            assert_close(computed, torch.cat(others) if others[0].dim() else torch.stack(others))


@pytest.mark.parametrize("dtype", [F32, F64])
def test_logarithms_have_the_results_of_weights(dtype):
    model = Model.random(7, by_step=True)
    expected = logchain.product(**model.arguments())
    structure = model.structure().map(lambda values: values.log().to(dtype))
    first = model.first.log().to(dtype)
    x, p0 = model.x.to(dtype), model.p0.log().to(dtype)
    value = logchain.product(**structure.arguments(x, p0, first_durations=first, log_params=True)._asdict())
    assert value.dtype == dtype
    assert_close(value.double(), expected, rtol=1e-5 if dtype == F32 else 1e-11)


def test_products_of_small_weights_do_not_underflow():
    p0, durations = torch.tensor([1e-30]), torch.tensor([[0.0, 1e-30]])
    chain = Duration(torch.ones(1, 1), durations).arguments(torch.zeros(2, 1), p0)
    assert_close(logchain.product(**chain._asdict()), torch.tensor(-60 * math.log(10.0)), rtol=1e-6)
    half = Duration(torch.ones(1, 1).bfloat16(), durations.bfloat16()).arguments(torch.zeros(2, 1), p0.bfloat16())
    assert half.p0.dtype == F32 and half.bulk.dtype == F32


def test_chain_without_a_segmentation_is_impossible():
    structure = Duration(torch.ones(2, 2), torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]))
    x = torch.zeros(3, 2).requires_grad_()
    value = logchain.product(**structure.arguments(x, torch.ones(2))._asdict())
    assert value == -math.inf
    value.backward()
    assert not x.grad.any()
    path = logchain.viterbi(**structure.arguments(x, torch.ones(2))._asdict()).states
    segments = structure.path_segments(path)
    assert segments.states.tolist() == [-1] * 3 and not segments.begins.any() and not segments.durations.any()


@pytest.mark.parametrize("dtype", [F32, F64])
def test_rolls_of_a_die_add_up_to_six(dtype):
    """W. Feller, An introduction to probability theory, XIII: renewal times; a total of 6 has probability 7^5 / 6^6."""
    die = Duration(torch.ones(1, 1, dtype=dtype), torch.full((1, 6), 1 / 6, dtype=dtype))
    chain = die.arguments(torch.zeros(6, 1, dtype=dtype), torch.ones(1, dtype=dtype))
    assert math.isclose(logchain.product(**chain._asdict()).item(), math.log(7**5 / 6**6), rel_tol=1e-6)


def test_memory_of_a_step_is_that_of_its_counting_states():
    structure = Duration(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.full((2, 100_000), 1e-5))
    chain = structure.arguments(torch.zeros(3, 2), torch.ones(2), right_censored=True)._asdict()
    messages = logchain.forward_backward(**chain)  # a dense matrix would take 160 GB
    assert_close(messages.log_norm, torch.tensor(2.0).log(), rtol=1e-5, atol=1e-5)
    paths = logchain.sample(**chain, num_samples=2)
    assert logchain.log_prob(**chain, states=paths).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logarithms_of_half_precision_are_added_in_float32(dtype):
    model = Model.random(3)
    x, p0 = torch.zeros(V, C * D), torch.zeros(C * D)
    # the sum of two logarithms near -4e4 is beyond float16
    matrix, durations = (weights.log().to(dtype) - 4e4 for weights in (model.matrix, model.durations))
    half, single = (
        logchain.topk_paths(x.to(kind), Duration(matrix.to(kind), durations.to(kind)), p0.to(kind), 3, log_params=True)
        for kind in (dtype, F32)
    )
    assert_close(half.scores, single.scores, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("function", ["product", "viterbi", "entropy"])
def test_linear_weights_past_the_end_have_gradient_0(function):
    matrix = torch.ones(1, V - 1, C, C)
    matrix[:, 2:] = torch.nan
    structure = Duration(matrix.requires_grad_(), torch.ones(C, D))
    x = torch.linspace(0, 9, V * C * D).square().view(1, V, C * D)
    result = getattr(logchain, function)(x, structure, torch.ones(C * D), lengths=[3])
    (result.score if function == "viterbi" else result).sum().backward()
    assert matrix.grad[:, :2].any() and (matrix.grad[:, 2:] == 0).all()


@pytest.mark.parametrize("function", ["product", "viterbi", "topk_paths"])
def test_matrices_past_the_end_have_no_influence_on_gradients_of_shared_durations(function):
    v, c, longest, n = 6, 12, 3, 400
    matrix, durations = torch.zeros(1, v - 1, c, c), torch.zeros(c, longest, requires_grad=True)
    matrix[:, 3:] = torch.nan
    x, p0 = torch.zeros(n, v, c * longest), torch.zeros(c * longest)
    options = {"lengths": torch.full((n,), 4), "log_params": True} | ({"k": 2} if function == "topk_paths" else {})
    result = getattr(logchain, function)(x, Duration(matrix, durations), p0, **options)
    value = result if function == "product" else result[1]
    value.sum().backward()
    assert durations.grad.isfinite().all() and durations.grad.sum() > 0


x, p0 = torch.zeros(2, V, C), torch.ones(C)
shared, stepped = (Duration(torch.ones(*lead, C, C), torch.ones(*lead, C, D)) for lead in ((), (V - 1,)))
arguments, counting = shared.arguments, (torch.zeros(2, V, C * D), shared, torch.ones(C * D))
MINUS_1 = "expected non-negative weights, got -1 at [0, 0]; pass log_params=True for logarithms"
batch = partial(arguments, x, p0)
OFFSETS, FULL = torch.tensor([0, 4]), 'marginals: expected those of transitions="full", got transitions '
WRONG = {
    "x: expected [..., v, 2] to go with the matrix of 2 states, got [2, 4, 6]": partial(arguments, counting[0], p0),
    "x: expected a torch.Tensor, got list; pass torch.tensor(x)": partial(arguments, [0.0], p0),
    "p0: expected shape [2] to go with x [2, 4, 2], got [6]": partial(arguments, x, counting[2]),
    "p0: expected shape [1 or 2, 2] to go with x [2, 4, 2], got [3, 2]": partial(arguments, x, p0.expand(3, 2)),
    "first_durations: expected shape [2, 3] to go with x [2, 4, 2], got [2, 4]":
        partial(batch, first_durations=torch.ones(C, D + 1)),
    "first_durations: expected [..., c, D] where durations [3, 2, 3] differ by steps, got None; "
    "pass those of segments that begin at the first step": partial(stepped.arguments, x, p0),
    "lengths: expected values from 1 to v = 4, got 0 to 4": partial(batch, lengths=OFFSETS),
    "lengths: expected shape [2] to go with x [2, 4, 2], got [3]": partial(batch, lengths=[1, 2, 3]),
    "cu_seqlens: expected a torch.Tensor, got list; pass torch.tensor(cu_seqlens)":
        partial(arguments, x[0], p0, cu_seqlens=[0, 4]),
    "lengths: expected None with cu_seqlens, which holds them":
        partial(arguments, x[0], p0, cu_seqlens=OFFSETS, lengths=4),
    "cu_seqlens: expected [n + 1] to go with x [total, 2], got [1, 2] and [4, 2]":
        partial(arguments, x[0], p0, cu_seqlens=OFFSETS[None]),
    "x: expected at least one variable [..., v, 2], got [2, 0, 2]": partial(arguments, x[:, :0], p0),
    f"p0: {MINUS_1}": partial(arguments, x, -p0[None]),
    f"durations: {MINUS_1}": lambda: Duration(shared.matrix, -shared.durations).arguments(x, p0),
    f"matrix: {MINUS_1}": lambda: Duration(-shared.matrix, shared.durations).arguments(x, p0),
    f"first_durations: {MINUS_1}": partial(stepped.arguments, x, p0, first_durations=-shared.durations),
    "paths: expected states from -1 to c D - 1 = 5, got 6": partial(shared.path_segments, torch.tensor([0, 6])),
    "right_censored: expected True or False, got 1": partial(batch, right_censored=1),
    "log_params: expected True or False, got 'log'": partial(batch, log_params="log"),
    "paths: expected integers, got float32": partial(shared.path_segments, torch.zeros(3)),
    f"{FULL}none; pass cu_seqlens too where sequences are packed":
        lambda: shared.marginal_segments(logchain.marginals(*counting)),
    f"{FULL}Duration([2, 2], [2, 3]); pass cu_seqlens too where sequences are packed":
        lambda: shared.marginal_segments(logchain.marginals(*counting, transitions="sum")),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        WRONG[message]()
