"""`logchain.plan` reports the schedule that `product` follows, and its memory; wrong arguments are raised."""

import re

import pytest
import torch

import logchain
from logchain.memory import peak_bytes

FORUM = (500, 1, 40, 200), (1, 1, 39, 200, 200), (1, 1, 200)
LONG = (1, 300_000, 16), (1, 16, 16), (16,)
SHAPES = [FORUM, LONG, ((3, 2, 5, 2), (3, 1, 4, 2, 2), (2, 2)), ((0, 9, 5), (8, 5, 5), (5,))]


def chain(n=2, v=40, c=3, gradients=False, one_matrix=False):
    generator = torch.Generator().manual_seed(0)
    shapes = ((n, v, c), (1, 1 if one_matrix else v - 1, c, c), (c,))
    return [torch.rand(shape, generator=generator).requires_grad_(gradients) for shape in shapes]


def results(operands, strategy, gradients=True):
    out = logchain.product(*operands, strategy=strategy)
    return [out.detach(), *(torch.autograd.grad(out.sum(), operands) if gradients else ())]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_shapes_have_the_plan_of_tensors(shapes, gradients):
    for dtype, strategy in ((torch.float32, "auto"), (torch.float64, "segments")):
        tensors = [torch.ones(1, dtype=dtype).expand(shape).requires_grad_(gradients) for shape in shapes]
        expected = logchain.plan(*tensors, strategy=strategy)
        for some in shapes, (tensors[0], *shapes[1:]):
            assert logchain.plan(*some, gradients=gradients, dtype=dtype, strategy=strategy) == expected
    with torch.no_grad():
        assert logchain.plan(*tensors, strategy=strategy) == logchain.plan(*shapes, dtype=dtype, strategy=strategy)


@pytest.mark.parametrize(
    ("count", "v", "c", "one_matrix", "schedule", "other"),
    [
        (1, 50_000, 16, True, "sequential", "segments"),
        (2, 300_000, 16, True, "segments", "sequential"),
        (2, 2000, 100, False, "segments", "sequential"),
        (1, 4500, 128, True, "segments", "sequential"),
    ],
)
def test_product_follows_its_plan(count, v, c, one_matrix, schedule, other, set_threads):
    set_threads(count)
    operands = chain(1, v, c, gradients=True, one_matrix=one_matrix)
    assert logchain.plan(*operands).schedule == schedule
    gradients, as_planned, otherwise = (results(operands, name)[1] for name in ("auto", schedule, other))
    assert torch.equal(gradients, as_planned) and not torch.equal(gradients, otherwise)


@pytest.mark.parametrize(
    ("count", "shapes", "options", "schedule", "reason"),
    [
        (2, FORUM, {}, "sequential", "too short for segments"),
        (1, LONG, {}, "sequential", "no thread is idle"),
        (2, LONG, {}, "segments", "threads are idle"),
        (2, ((1, 5000, 16), *LONG[1:]), {}, "sequential", "no thread is idle"),
        (1, ((1, 5000, 256), (1, 256, 256), (256,)), {}, "segments", "segments share a matrix of 256 states"),
        (1, ((500, 5000, 256), (1, 256, 256), (256,)), {}, "sequential", "no thread is idle"),
        (2, ((2, 30, 3), (1, 3, 3), (3,)), {"strategy": "segments"}, "sequential", "too short for segments"),
        (2, LONG, {"strategy": "segments:7"}, "segments", "strategy='segments:7'"),
        (2, LONG, {"strategy": "tree"}, "tree", "strategy='tree'"),
        (2, LONG, {"device": "cuda"}, "segments", "one long sequence of few states"),
        (2, LONG, {"device": "cuda", "lengths": [9]}, "sequential", "lengths on a GPU"),
        (2, ((4096, 64, 64), (1, 64, 64), (64,)), {"device": "cuda"}, "sequential", "too short for segments"),
    ],
)
def test_schedule_suits_the_shapes(count, shapes, options, schedule, reason, set_threads):
    set_threads(count)
    planned = logchain.plan(*shapes, **options)
    assert (planned.schedule, planned.reason) == (schedule, reason)
    assert (planned.segments > 1) == (schedule == "segments")
    assert str(planned).startswith(schedule) and f"{planned.bytes:,} bytes" in str(planned)


@pytest.mark.parametrize("name", ["chunked", "overlapped:4:20", "meeting"])
def test_former_strategies_warn_and_mean_today_s(name):
    operands, today = chain(v=200), name.replace("overlapped", "segments").replace("chunked", "segments")
    with pytest.warns(FutureWarning, match="^strategy: '") as seen:
        found = logchain.product(*operands, strategy=name)
    assert seen[0].filename == __file__
    assert torch.equal(found, logchain.product(*operands, strategy=today.replace("meeting", "auto")))


@pytest.mark.parametrize(
    ("strategy", "n", "v", "c", "gradients"),
    [
        ("sequential", 2000, 40, 8, True),
        ("sequential", 1, 20_000, 16, False),
        ("segments", 1, 20_000, 16, True),
        ("segments:8", 4, 2000, 100, False),
        ("tree", 16, 40, 30, True),
        ("tree", 16, 400, 30, False),
    ],
)
def test_peak_is_predicted_within_a_factor_of_three(strategy, n, v, c, gradients):
    operands = chain(n, v, c, gradients)
    predicted = logchain.plan(*operands, strategy=strategy).bytes
    measured = peak_bytes(lambda: results(operands, strategy, gradients))
    assert predicted / 3 - 2**20 <= measured <= 3 * predicted + 2**20


def test_budget_sets_how_far_apart_messages_are_kept():
    assert logchain.plan(*LONG, gradients=True, memory_budget=10**9).checkpoint_every is None
    planned = logchain.plan(*LONG, gradients=True, memory_budget=5_000_000)
    assert planned.schedule == "sequential" and 1 < planned.checkpoint_every < 300_000
    assert planned.bytes <= 5_000_000
    assert f"every {planned.checkpoint_every} steps" in str(planned)


ERRORS = [
    (ValueError, "cu_seqlens: expected None; pass the shapes of a batch", {"cu_seqlens": torch.tensor([0, 4])}),
    (TypeError, "memory_budget: expected a number of bytes or None, got 1.5", {"memory_budget": 1.5}),
    (TypeError, "gradients: expected True, False or None, got 1", {"gradients": 1}),
    (TypeError, "dtype: expected float32", {"dtype": torch.int64}),
    (TypeError, "x: expected a torch.Tensor or a shape, got 3", {"x": 3}),
    (ValueError, "bulk: expected shape [1, 299999 or 1, 16, 16]", {"bulk": (2, 5, 16, 16)}),
    (ValueError, "lengths: expected values from 1 to v = 300000", {"lengths": [0]}),
    (ValueError, "memory_budget: expected at least", {"memory_budget": 1, "gradients": True}),
    (ValueError, "strategy: expected one of 'auto', 'sequential', 'segments', 'tree', got", {"strategy": "fast"}),
    (ValueError, "strategy: expected 'auto' or 'sequential' with memory_budget, got 'segments'",
     {"memory_budget": 10**9, "strategy": "segments"}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "options"), ERRORS, ids=lambda value: str(value)[:40])
def test_wrong_arguments_are_raised(error, message, options):
    with pytest.raises(error, match="^" + re.escape(message)):
        logchain.plan(**{**dict(zip(("x", "bulk", "p0"), LONG, strict=True)), **options})
