"""`logchain.plan` says what `product` then does, and the pick is as good as any schedule in the model's own cost."""

import itertools
import json
import re
import sys
from functools import partial

import numpy as np
import pytest
import torch

import logchain
from logchain.autograd.chain_operators import number_of
from logchain.memory import peak_bytes
from logchain.plan import plan
from logchain.schedules import choose, cost
from logchain.schedules.choose import MEETING, SEQUENTIAL, TREE, Schedule, Size, Where
from logchain.schedules.cost import BOTH, FORWARD, Constants, Work
from tests.benchmarks import fit_costs as fit

# the schedules with constants of their own
NAMES = ("sequential", "chunked", "tree", "overlapped")
SHAPES = [
    ((500, 1, 40, 200), (1, 1, 39, 200, 200), (1, 1, 200)),
    ((1, 10_000, 16), (9_999, 16, 16), (16,)),
    ((1, 100_000, 4), (1, 4, 4), (1, 4)),
    ((10, 6, 40), (1, 5, 40, 40), (40,)),
    ((8, 128, 64), (8, 127, 64, 64), (64,)),
    ((3, 2, 5, 2), (3, 1, 4, 2, 2), (2, 2)),
    ((7, 3), (6, 3, 3), (3,)),
    ((4, 1, 5), (1, 5, 5), (5,)),
    ((0, 9, 5), (8, 5, 5), (5,)),
    ((2, 2, 1), (1, 1, 1), (1,)),
]


def places():
    return [Where(entry.device, entry.threads) for entry in cost.read()]


def sizes(gpu):
    for g, m, v, c in itertools.product((1, 30), (1, 200), (2, 5, 60, 2_000, 100_000), (1, 4, 16, 64, 200)):
        for one, item, gradients in ((False, 4, True), (True, 4, False), (False, 8, False)):
            yield Size(v, g, m, c, one, item, False, one, gradients, gpu)


@pytest.mark.parametrize("place", places(), ids=str)
def test_the_pick_costs_at_most_1_3_times_the_best(place):
    costs = place.constants
    picks = set()
    for size in sizes(place.device == "cuda"):
        numbers = {round(1.1**power) for power in range(120)}
        cuts = [Schedule("chunked", k) for k in sorted(numbers) if 2 <= k <= (size.v - 1) // 2]
        cuts = [schedule for schedule in cuts if choose.within_contract(size, schedule)]
        cuts = cuts if choose.candidates(size, place) else []
        cuts += choose.worthwhile(size, place) + choose.meeting(size, place)
        best = min(choose.seconds(size, schedule, costs) for schedule in (SEQUENTIAL, TREE, *cuts))
        pick = choose.choose(size, place, "auto")
        assert choose.seconds(size, pick, costs) <= 1.3 * best, (size, pick)
        picks.add(pick.name)
    assert "sequential" in picks


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_shapes_give_the_plan_of_tensors(shapes, gradients):
    for dtype, strategy in ((torch.float32, "auto"), (torch.float64, "chunked")):
        if shapes[0][0] == 500 and gradients:
            continue
        tensors = [torch.empty(shape, dtype=dtype).requires_grad_(gradients) for shape in shapes]
        expected = plan(*tensors, strategy=strategy)
        assert plan(*shapes, gradients=gradients, dtype=dtype, strategy=strategy) == expected
        assert plan(tensors[0], *shapes[1:], gradients=gradients, dtype=dtype, strategy=strategy) == expected
    assert plan(*shapes, gradients=gradients) == plan(*shapes, gradients=gradients, device="cpu")


def test_gradients_are_those_that_tensors_require():
    shapes = SHAPES[1]
    tensors = [torch.empty(shape) for shape in shapes]
    assert plan(*tensors).peak_backward is None
    assert plan(*tensors, gradients=True) == plan(*shapes, gradients=True)
    tensors[2].requires_grad_()
    assert plan(*tensors).peak_backward is not None
    with torch.no_grad():
        assert plan(*tensors) == plan(*shapes)


@pytest.fixture
def prefer(monkeypatch):
    """Constants with which a schedule is the best, whatever the sizes."""

    def set_to(name):
        seconds = {other: dict.fromkeys((FORWARD, BOTH), (0.0 if other == name else 1.0,) * 5) for other in NAMES}
        preferred = Constants("cpu", 1, 1, True, "test", "", "", seconds)
        monkeypatch.setattr(choose, "constants", lambda *place: preferred)
        choose.choose.cache_clear()

    yield set_to
    choose.choose.cache_clear()


@pytest.fixture
def used(monkeypatch):
    """The schedules that `product` computes with."""
    seen = []
    module = sys.modules["logchain.product"]
    log_norm, named = module.log_norm, {number_of(one): one for one in (TREE, SEQUENTIAL, MEETING)}

    def watched(*args, segments, **others):
        cut = Schedule("chunked" if segments > 0 else "overlapped", abs(segments))
        seen.append(named.get(segments, cut))
        return log_norm(*args, segments=segments, **others)

    def at_once(*args):
        found = short_of(*args)
        if found is not None:
            seen.append(SEQUENTIAL)
        return found

    short_of = module.short_of
    monkeypatch.setattr(module, "short_of", at_once)
    monkeypatch.setattr(module, "log_norm", watched)
    return seen


def chain(n=2, v=40, c=3, gradients=False):
    generator = torch.Generator().manual_seed(0)
    shapes = ((n, v, c), (1, v - 1, c, c), (c,))
    return [torch.rand(shape, generator=generator).requires_grad_(gradients) for shape in shapes]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("strategy", choose.STRATEGIES)
@pytest.mark.parametrize("preferred", NAMES)
def test_product_does_what_is_planned(prefer, used, preferred, strategy, gradients, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # more threads would take more, and shorter, segments
    prefer(preferred)
    x, bulk, p0 = chain(v=100, c=20, gradients=gradients)
    operands = x, bulk[:, :1].detach().requires_grad_(gradients), p0
    planned = plan(*operands, strategy=strategy)
    out = logchain.product(*operands, strategy=strategy)
    assert used == [Schedule(planned.schedule, planned.segments)]
    assert planned.schedule == (preferred if strategy == "auto" else strategy)
    with torch.no_grad():
        torch.testing.assert_close(out.detach(), logchain.product(*operands, strategy="sequential"))


def test_product_plans_with_lengths_and_log_params(prefer, used):
    prefer("tree")
    x, bulk, p0 = chain()
    logchain.product(x, bulk.log(), p0.log(), log_params=True, lengths=[40, 3])
    assert used == [TREE]
    logchain.product(x[:, :1], bulk[:, :1], p0)
    assert used == [TREE, SEQUENTIAL]


@pytest.mark.parametrize("preferred", NAMES)
def test_a_memory_budget_keeps_to_vectors(prefer, used, preferred):
    prefer(preferred)
    operands = chain(gradients=True)
    assert plan(*operands, memory_budget=10**9).schedule == "sequential"
    logchain.product(*operands, memory_budget=10**9)
    assert used == [SEQUENTIAL]


@pytest.mark.parametrize("preferred", NAMES)
def test_traced_sizes_are_planned_for(prefer, used, preferred):
    prefer(preferred)
    operands = chain()
    torch._dynamo.reset()
    compiled = torch.compile(logchain.product, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*operands), logchain.product(*operands, strategy="sequential"))
    planned = plan(*operands)
    assert used[0] == (planned.schedule, planned.segments)


@pytest.mark.parametrize(
    ("strategy", "expected"), [("auto", "sequential"), *((name, name) for name in choose.STRATEGIES[2:])]
)
def test_sizes_that_are_unknown_when_traced_are_sequential(prefer, strategy, expected):
    prefer("tree")

    def planned(x, bulk, p0):
        name, segments = choose.of(x, bulk, p0, False, False, strategy)
        return x + segments if name == expected else x

    operands = chain()
    torch._dynamo.reset()
    compiled = torch.compile(planned, backend="eager", fullgraph=True, dynamic=True)
    assert (compiled(*operands) > operands[0]).all()


def test_mapped_sizes_are_planned_for(prefer, used):
    prefer("tree")
    x, bulk, p0 = chain()
    torch.testing.assert_close(
        torch.vmap(logchain.product, (0, None, None))(x, bulk[0], p0), logchain.product(x, bulk, p0)
    )
    assert used == [TREE, TREE]


def test_a_choice_is_made_once():
    operands = chain(v=41)
    logchain.product(*operands)
    before = choose.choose.cache_info()
    logchain.product(*operands)
    assert choose.choose.cache_info() == before  # a short call does not even ask
    product = partial(logchain.product, lengths=[41, 7])
    product(*operands)
    before = choose.choose.cache_info()
    product(*operands)
    after = choose.choose.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


def test_what_is_counted():
    found = plan((500, 1, 40, 200), (1, 1, 39, 200, 200), (1, 1, 200), strategy="sequential")
    assert (found.multiply_adds, found.exponentials, found.steps) == (500 * 39 * 200**2, 500 * 40 * 200, 40)
    long = plan((1, 1001, 16), (1, 16, 16), (16,), strategy="chunked")
    inside = long.segments * long.segment_size
    assert 1000 - long.segments < inside <= 1000
    assert long.multiply_adds == inside * 16**3 + (1000 - inside + long.segments) * 16**2
    shared, own = (plan((8, 9, 3), (sets, 8, 3, 3), (3,), strategy="sequential") for sets in (1, 8))
    assert shared.multiply_adds == own.multiply_adds == 8 * 8 * 9
    assert own.bytes - shared.bytes == 7 * 8 * 9 * 4
    tree = plan((1, 1001, 16), (1, 16, 16), (16,), strategy="tree")
    assert tree.multiply_adds == 1000 * 16**3
    assert tree.steps < long.steps < 1001
    assert plan((1, 2, 3), (1, 3, 3), (3,), strategy="chunked").schedule == "sequential"


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("strategy", choose.STRATEGIES[1:])
@pytest.mark.parametrize(("n", "v", "c"), [(1, 20_000, 16), (16, 100, 40), (2000, 40, 8), (4, 40, 100)])
def test_the_peak_is_predicted_within_a_factor_of_three(strategy, n, v, c, gradients):
    operands = chain(n, v, c, gradients)
    planned = plan(*operands, strategy=strategy)

    def run():
        out = logchain.product(*operands, strategy=strategy)
        return [out.detach(), *(torch.autograd.grad(out.sum(), operands) if gradients else ())]

    measured, predicted = peak_bytes(run), max(planned.peak_forward, planned.peak_backward or 0)
    assert predicted / 3 - 2**20 <= measured <= 3 * predicted + 2**20


def test_a_budget_says_how_far_apart_messages_are_kept():
    shapes = ((1, 100_000, 16), (1, 16, 16), (16,))
    assert plan(*shapes, gradients=True, memory_budget=10**9).checkpoint_every is None
    found = plan(*shapes, gradients=True, memory_budget=5_000_000)
    assert found.schedule == "sequential" and 1 < found.checkpoint_every < 100_000
    assert found.peak_backward <= 5_000_000
    assert found.multiply_adds == 4 * 99_999 * 16**2
    assert f"every {found.checkpoint_every} transitions" in str(found)
    with pytest.raises(ValueError, match="memory_budget: expected at least"):
        plan(*shapes, gradients=True, memory_budget=1)


def test_wrong_arguments_are_refused():
    shapes = SHAPES[3]
    for error, message, changes in [
        (
            ValueError,
            "strategy: expected 'auto' or 'sequential' or 'chunked' or 'tree' or 'overlapped' or 'meeting', got 'fast'",
            {"strategy": "fast"},
        ),
        (
            ValueError,
            "strategy: expected 'auto' or 'sequential' with memory_budget, got 'tree'",
            {"strategy": "tree", "memory_budget": 10**9},
        ),
        (TypeError, "memory_budget: expected a number of bytes or None, got 1.5", {"memory_budget": 1.5}),
        (TypeError, "gradients: expected True, False or None, got 1", {"gradients": 1}),
        (TypeError, "dtype: expected float32", {"dtype": torch.int64}),
        (TypeError, "x: expected a torch.Tensor or a shape, got 3", {"x": 3}),
        (ValueError, "bulk: expected shape [1 or 10, 5 or 1, 40, 40]", {"bulk": (2, 5, 40, 40)}),
        (ValueError, "lengths: expected values from 1 to v = 6", {"lengths": [7] * 10}),
    ]:
        with pytest.raises(error, match="^" + re.escape(message)):
            plan(**{**dict(zip(("x", "bulk", "p0"), shapes, strict=True)), **changes})


RANKS = ((1000, 16), (1, 16, 16), (16,))


@pytest.mark.parametrize("world_size", [np.int64(2), torch.tensor(2)], ids=["numpy", "torch"])
def test_a_number_of_ranks_is_any_integer(world_size):
    assert plan(*RANKS, world_size=world_size) == plan(*RANKS, world_size=2)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_rank_alone_sends_nothing(gradients):
    alone = plan((8, *RANKS[0]), *RANKS[1:], gradients=gradients, lengths=[1000] * 8, world_size=1)
    assert alone.cuts and not any(cut.bytes for cut in alone.cuts)
    assert not alone.advice
    assert plan((8, *RANKS[0]), *RANKS[1:], world_size=8).advice


@pytest.mark.parametrize("world_size", [None, 2])
@pytest.mark.parametrize(
    ("error", "message", "wrong"),
    [
        (TypeError, "bandwidth: expected a number, got True", {"bandwidth": True}),
        (TypeError, "latency: expected a number, got True", {"latency": True}),
        (TypeError, "bandwidth: expected a number, got None", {"bandwidth": None}),
        (TypeError, "latency: expected a number, got None", {"latency": None}),
        (ValueError, "bandwidth: expected more than 0, got 0", {"bandwidth": 0}),
        (ValueError, "latency: expected more than 0, got nan", {"latency": float("nan")}),
        (ValueError, "latency: expected a finite number, got inf", {"latency": float("inf")}),
        (TypeError, "world_size: expected a number of ranks or None, got True", {"world_size": True}),
        (TypeError, "world_size: expected a number of ranks or None, got 2.0", {"world_size": 2.0}),
        (TypeError, "world_size: expected a number of ranks or None, got [2]", {"world_size": [2]}),
        (ValueError, "world_size: expected 1 to 1048576, got 0", {"world_size": 0}),
        (ValueError, f"world_size: expected 1 to 1048576, got {2**70}", {"world_size": 2**70}),
    ],
)
def test_wrong_ranks_are_refused(error, message, wrong, world_size):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        plan(*RANKS, **{"world_size": world_size, **wrong})


@pytest.mark.parametrize("strategy", choose.STRATEGIES[2:])
def test_schedules_of_segments_go_alone(strategy):
    x, bulk, p0 = chain()
    alone = [
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 40])}),
        ("memory_budget", {"memory_budget": 10**9}),
    ]
    for name, options in alone:
        message = f"strategy: expected 'auto' or 'sequential' with {name}, got '{strategy}'"
        with pytest.raises(ValueError, match="^" + message):
            logchain.product(x, bulk, p0, strategy=strategy, **options)


def test_the_table():
    found = plan((1, 10_000, 16), (1, 16, 16), (16,), gradients=True)
    lines = str(found).splitlines()
    assert lines[0] == "product of x [1, 10000, 16] and bulk [1, 16, 16]: forward and backward, cpu"
    assert lines[1].split() == ["*", found.schedule, *(other.schedule for other in found.alternatives)]
    assert {line.split("  ")[0] for line in lines[2:10]} >= {"multiply-adds", "exponentials", "bytes", "steps"}
    assert found.why in lines
    assert lines[-1] == f"constants: {found.constants}"
    assert max(map(len, lines)) < 120
    numbers = (0, 999, 1000, 999_600, 25_600_000, 3 * 10**18)
    assert [sys.modules["logchain.plan"]._short(n) for n in numbers] == ["0", "999", "1 k", "1 M", "25.6 M", "3e+03 P"]
    assert [sys.modules["logchain.plan"]._time(s) for s in (2.5, 0.25, 1e-6)] == ["2.5 s", "250 ms", "1 us"]


def test_a_gpu_is_planned_for_without_one():
    found = plan((1, 100_000, 16), (1, 16, 16), (16,), device="cuda")
    assert found.measured or "not measured" in str(found)
    # a sequence alone leaves all but one of the processors idle
    assert found.schedule != "sequential"
    assert plan((4096, 64, 64), (1, 64, 64), (64,), device="cuda").schedule == "sequential"


def test_every_constant_has_its_date_and_hardware():
    raw = json.loads(cost.FILE.read_text())
    assert raw["command"] == "python -m tests.benchmarks.fit_costs"
    assert {entry["device"] for entry in raw["constants"]} == {"cpu", "cuda"}
    for entry in cost.read():
        assert set(entry.seconds) == set(NAMES)
        for passes in entry.seconds.values():
            assert set(passes) == {FORWARD, BOTH}
            for row in passes.values():
                assert len(row) == len(Work._fields) and min(row) >= 0 and max(row) > 0
        assert entry.hardware
        if entry.measured:
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry.date) and "torch" in entry.versions


def test_constants_of_the_nearest_number_of_threads(tmp_path):
    path, one = tmp_path / "costs.json", fit.h200()
    fit.write([one, *(one._replace(device="cpu", threads=threads) for threads in (2, 4, 16))], path)
    for threads, expected in ((1, 2), (2, 2), (3, 2), (4, 4), (15, 4), (64, 16)):
        assert cost.constants("cpu", threads, path).threads == expected
    assert cost.constants("mps", 4, path).device == "cuda"


def test_fit_recovers_constants_from_the_times_they_make(tmp_path):
    place = Where("cpu", 1)
    true = (3e-10, 5e-9, 2e-10, 4e-7, 3e-6)
    seconds = {name: dict.fromkeys((FORWARD, BOTH), true) for name in NAMES}
    about = {"hardware": "a machine", "versions": "torch", "date": "2026-01-01"}
    model = Constants(*place, 1, True, **about, seconds=seconds)

    def measure(size, schedule, call):
        if size.v < 10:
            call()
        return choose.seconds(size, schedule, model)

    sweep = [
        (1, 3, 4, 1),
        (2, 300, 4, 0),
        (1, 2000, 2, 1),
        (30, 30, 30, 1),
        (4, 40, 60, 0),
        (1, 20, 100, 1),
        (1, 900, 30, 0),
        (1, 3000, 4, 0),
        (1, 700, 20, 1),
        (1, 30_000, 20, 0),
    ]
    found = list(fit.samples(place, sweep, measure))
    fitted = fit.fitted(place, found, about)
    for sample in found:
        predicted = choose.seconds(sample.size, sample.schedule, fitted)
        assert predicted == pytest.approx(sample.seconds, rel=0.01)
    assert fitted.seconds["sequential"][FORWARD] == pytest.approx(true, rel=0.01)
    assert "sequential: off by 1.00 x" in fit.text(fitted, found)
    path = tmp_path / "costs.json"
    fit.write([fitted], path)
    fit.write([fitted, fit.h200()], path)
    assert cost.read(path) == (fitted, fit.h200())
