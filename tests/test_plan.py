"""`logchain.plan` reports the schedule that `product` follows, its work and memory; wrong arguments are raised."""

import re

import pytest
import torch

import logchain
from logchain.memory import peak_bytes

FORUM = (500, 1, 40, 200), (1, 1, 39, 200, 200), (1, 1, 200)
LONG = (1, 100_000, 16), (1, 16, 16), (16,)
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
    for dtype, strategy in ((torch.float32, "auto"), (torch.float64, "chunked")):
        tensors = [torch.empty(1, dtype=dtype).expand(shape).requires_grad_(gradients) for shape in shapes]
        expected = logchain.plan(*tensors, strategy=strategy)
        assert (expected.peak_backward is not None) == gradients
        for some in shapes, (tensors[0], *shapes[1:]):
            assert logchain.plan(*some, gradients=gradients, dtype=dtype, strategy=strategy) == expected
    with torch.no_grad():
        assert logchain.plan(*tensors, strategy=strategy) == logchain.plan(*shapes, dtype=dtype, strategy=strategy)


@pytest.mark.parametrize(
    ("threads", "v", "c", "one_matrix", "schedule", "other"),
    [
        (1, 50_000, 16, True, "sequential", "meeting"),
        (2, 50_000, 16, True, "meeting", "sequential"),
        (2, 1000, 100, False, "overlapped", "sequential"),
    ],
)
def test_product_follows_its_plan(threads, v, c, one_matrix, schedule, other):
    operands, before = chain(1, v, c, gradients=True, one_matrix=one_matrix), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert logchain.plan(*operands).schedule == schedule
        gradients, as_planned, otherwise = (results(operands, name)[1] for name in ("auto", schedule, other))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(gradients, as_planned) and not torch.equal(gradients, otherwise)


@pytest.mark.parametrize(
    ("strategy", "n", "v", "c", "gradients"),
    [
        ("sequential", 2000, 40, 8, True),
        ("sequential", 1, 20_000, 16, False),
        ("chunked", 1, 20_000, 16, True),
        ("chunked", 4, 40, 100, False),
        ("tree", 16, 40, 30, True),
        ("overlapped", 1, 20_000, 16, True),
        ("meeting", 1, 20_000, 16, True),
    ],
)
def test_peak_is_predicted_within_a_factor_of_three(strategy, n, v, c, gradients):
    operands = chain(n, v, c, gradients)
    planned = logchain.plan(*operands, strategy=strategy)
    measured = peak_bytes(lambda: results(operands, strategy, gradients))
    predicted = max(planned.peak_forward, planned.peak_backward or 0)
    assert predicted / 3 - 2**20 <= measured <= 3 * predicted + 2**20


def test_budget_sets_how_far_apart_messages_are_kept():
    assert logchain.plan(*LONG, gradients=True, memory_budget=10**9).checkpoint_every is None
    planned = logchain.plan(*LONG, gradients=True, memory_budget=5_000_000)
    assert planned.schedule == "sequential" and 1 < planned.checkpoint_every < 100_000
    assert planned.peak_backward <= 5_000_000
    assert planned.multiply_adds == 4 * 99_999 * 16**2
    assert f"every {planned.checkpoint_every} transitions" in str(planned)


def test_operations_bytes_and_dependent_steps_are_counted():
    forum = logchain.plan(*FORUM, strategy="sequential")
    assert (forum.multiply_adds, forum.exponentials, forum.steps) == (500 * 39 * 200**2, 500 * 40 * 200, 40)
    shapes = (1, 1001, 16), (1, 16, 16), (16,)
    chunked, tree = (logchain.plan(*shapes, strategy=strategy) for strategy in ("chunked", "tree"))
    inside = chunked.segments * chunked.segment_size
    assert 1000 - chunked.segments < inside <= 1000
    assert chunked.multiply_adds == inside * 16**3 + (1000 - inside + chunked.segments) * 16**2
    assert tree.multiply_adds == 1000 * 16**3 and tree.steps < chunked.steps < 1001
    shared, separate = (logchain.plan((8, 9, 3), (n, 8, 3, 3), (3,), strategy="sequential") for n in (1, 8))
    assert shared.multiply_adds == separate.multiply_adds == 8 * 8 * 9
    assert separate.bytes - shared.bytes == 7 * 8 * 9 * 4


def test_table_shows_all_schedules_and_where_constants_come_from():
    planned = logchain.plan((1, 10_000, 16), (1, 16, 16), (16,), gradients=True)
    lines = str(planned).splitlines()
    assert lines[0] == "product of x [1, 10000, 16] and bulk [1, 16, 16]: forward and backward, cpu"
    assert lines[1].split() == ["*", planned.schedule, *(other.schedule for other in planned.alternatives)]
    assert {line.split("  ")[0] for line in lines[2:10]} >= {"multiply-adds", "exponentials", "bytes", "steps"}
    assert planned.why in lines and lines[-1] == f"constants: {planned.constants}"
    assert planned.measured and re.search(r"\d{4}-\d\d-\d\d", planned.constants)
    assert max(map(len, lines)) < 120


@pytest.mark.parametrize(
    ("shapes", "options", "schedules"),
    [
        (FORUM, {}, {"sequential"}),
        (((1, 2, 3), (1, 3, 3), (3,)), {"strategy": "chunked"}, {"sequential"}),
        (((4096, 64, 64), (1, 64, 64), (64,)), {"device": "cuda"}, {"sequential"}),
        # one sequence alone leaves all but one of the processors idle
        (LONG, {"device": "cuda"}, {"chunked", "tree", "overlapped"}),
    ],
)
def test_schedule_suits_the_shapes(shapes, options, schedules):
    planned = logchain.plan(*shapes, **options)
    assert planned.schedule in schedules
    assert planned.measured or "not measured" in str(planned)


ERRORS = [
    (TypeError, "memory_budget: expected a number of bytes or None, got 1.5", {"memory_budget": 1.5}),
    (TypeError, "gradients: expected True, False or None, got 1", {"gradients": 1}),
    (TypeError, "dtype: expected float32", {"dtype": torch.int64}),
    (TypeError, "x: expected a torch.Tensor or a shape, got 3", {"x": 3}),
    (ValueError, "bulk: expected shape [1, 99999 or 1, 16, 16]", {"bulk": (2, 5, 16, 16)}),
    (ValueError, "lengths: expected values from 1 to v = 100000", {"lengths": [0]}),
    (ValueError, "memory_budget: expected at least", {"memory_budget": 1, "gradients": True}),
    (ValueError, "strategy: expected 'auto' or 'sequential' or 'chunked' or 'tree' or", {"strategy": "fast"}),
    *(
        (ValueError, f"strategy: expected 'auto' or 'sequential' with memory_budget, got '{name}'", options)
        for name in ("chunked", "overlapped")
        for options in [{"memory_budget": 10**9, "strategy": name}]
    ),
]


@pytest.mark.parametrize(("error", "message", "options"), ERRORS, ids=lambda value: str(value)[:40])
def test_wrong_arguments_are_raised(error, message, options):
    with pytest.raises(error, match="^" + re.escape(message)):
        logchain.plan(**{**dict(zip(("x", "bulk", "p0"), LONG, strict=True)), **options})
