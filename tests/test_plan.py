"""`logchain.plan` reports what `product` then does, and the pick is as good as any schedule in the model's own cost."""

import itertools
import json
import re
import sys

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
from logchain.transitions import Banded
from tests.benchmarks import fit_costs

# the schedules with separate constants
NAMES = ("sequential", "chunked", "tree", "overlapped")
SHAPES = [
    ((500, 1, 40, 200), (1, 1, 39, 200, 200), (1, 1, 200)),
    ((1, 10_000, 16), (9_999, 16, 16), (16,)),
    ((1, 100_000, 4), (1, 4, 4), (1, 4)),
    ((3, 2, 5, 2), (3, 1, 4, 2, 2), (2, 2)),
    ((4, 1, 5), (1, 5, 5), (5,)),
    ((0, 9, 5), (8, 5, 5), (5,)),
    ((2, 2, 1), (1, 1, 1), (1,)),
]
LONG = ((1, 100_000, 16), (1, 16, 16), (16,))


def chain(n=2, v=40, c=3, gradients=False):
    generator = torch.Generator().manual_seed(0)
    shapes = ((n, v, c), (1, v - 1, c, c), (c,))
    return [torch.rand(shape, generator=generator).requires_grad_(gradients) for shape in shapes]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_shapes_have_the_plan_of_tensors(shapes, gradients):
    for dtype, strategy in ((torch.float32, "auto"), (torch.float64, "chunked")):
        tensors = [torch.empty(1, dtype=dtype).expand(shape).requires_grad_(gradients) for shape in shapes]
        expected = plan(*tensors, strategy=strategy)
        assert (expected.peak_backward is not None) == gradients
        for some in shapes, (tensors[0], *shapes[1:]):
            assert plan(*some, gradients=gradients, dtype=dtype, strategy=strategy) == expected
    with torch.no_grad():
        assert plan(*tensors, strategy=strategy) == plan(*shapes, dtype=dtype, strategy=strategy, device="cpu")


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


def test_a_budget_sets_how_far_apart_messages_are_kept():
    assert plan(*LONG, gradients=True, memory_budget=10**9).checkpoint_every is None
    found = plan(*LONG, gradients=True, memory_budget=5_000_000)
    assert found.schedule == "sequential" and 1 < found.checkpoint_every < 100_000
    assert found.peak_backward <= 5_000_000
    assert found.multiply_adds == 4 * 99_999 * 16**2
    assert f"every {found.checkpoint_every} transitions" in str(found)


def test_operations_bytes_and_dependent_steps_are_counted():
    found = plan(*SHAPES[0], strategy="sequential")
    assert (found.multiply_adds, found.exponentials, found.steps) == (500 * 39 * 200**2, 500 * 40 * 200, 40)
    long = plan((1, 1001, 16), (1, 16, 16), (16,), strategy="chunked")
    inside = long.segments * long.segment_size
    assert 1000 - long.segments < inside <= 1000
    assert long.multiply_adds == inside * 16**3 + (1000 - inside + long.segments) * 16**2
    shared, separate = (plan((8, 9, 3), (sets, 8, 3, 3), (3,), strategy="sequential") for sets in (1, 8))
    assert shared.multiply_adds == separate.multiply_adds == 8 * 8 * 9
    assert separate.bytes - shared.bytes == 7 * 8 * 9 * 4
    tree = plan((1, 1001, 16), (1, 16, 16), (16,), strategy="tree")
    assert tree.multiply_adds == 1000 * 16**3
    assert tree.steps < long.steps < 1001
    assert plan((1, 2, 3), (1, 3, 3), (3,), strategy="chunked").schedule == "sequential"


def test_the_table_shows_all_schedules():
    found = plan((1, 10_000, 16), (1, 16, 16), (16,), gradients=True)
    lines = str(found).splitlines()
    assert lines[0] == "product of x [1, 10000, 16] and bulk [1, 16, 16]: forward and backward, cpu"
    assert lines[1].split() == ["*", found.schedule, *(other.schedule for other in found.alternatives)]
    assert {line.split("  ")[0] for line in lines[2:10]} >= {"multiply-adds", "exponentials", "bytes", "steps"}
    assert found.why in lines and lines[-1] == f"constants: {found.constants}"
    assert max(map(len, lines)) < 120


def test_a_gpu_is_planned_for_without_one():
    found = plan(*LONG, device="cuda")
    assert found.measured or "not measured" in str(found)
    # a sequence alone leaves all but one of the processors idle
    assert found.schedule != "sequential"
    assert plan((4096, 64, 64), (1, 64, 64), (64,), device="cuda").schedule == "sequential"


ERRORS = [
    (TypeError, "memory_budget: expected a number of bytes or None, got 1.5", {"memory_budget": 1.5}),
    (TypeError, "gradients: expected True, False or None, got 1", {"gradients": 1}),
    (TypeError, "dtype: expected float32", {"dtype": torch.int64}),
    (TypeError, "x: expected a torch.Tensor or a shape, got 3", {"x": 3}),
    (TypeError, "bandwidth: expected a number, got True", {"bandwidth": True}),
    (TypeError, "latency: expected a number, got None", {"latency": None}),
    (TypeError, "world_size: expected a number of ranks or None, got 2.0", {"world_size": 2.0}),
    (
        NotImplementedError,
        "world_size: expected None with a structure, got 2",
        {"bulk": Banded(torch.rand(1, 16), [0]), "world_size": 2},
    ),
    (ValueError, "bandwidth: expected more than 0, got 0", {"bandwidth": 0}),
    (ValueError, "latency: expected a finite number, got inf", {"latency": float("inf")}),
    (ValueError, "world_size: expected 1 to 1048576, got 0", {"world_size": 0}),
    (ValueError, "bulk: expected shape [1, 99999 or 1, 16, 16]", {"bulk": (2, 5, 16, 16)}),
    (ValueError, "lengths: expected values from 1 to v = 100000", {"lengths": [0]}),
    (ValueError, "memory_budget: expected at least", {"memory_budget": 1, "gradients": True}),
    (ValueError, "strategy: expected 'auto' or 'sequential' or 'chunked' or 'tree' or", {"strategy": "fast"}),
    *(
        (ValueError, f"strategy: expected 'auto' or 'sequential' with memory_budget, got '{strategy}'", options)
        for strategy in choose.STRATEGIES[2:]
        for options in [{"memory_budget": 10**9, "strategy": strategy}]
    ),
]


@pytest.mark.parametrize(("error", "message", "options"), ERRORS, ids=lambda value: str(value)[:40])
def test_wrong_arguments_are_raised(error, message, options):
    with pytest.raises(error, match="^" + re.escape(message)):
        plan(**{**dict(zip(("x", "bulk", "p0"), LONG, strict=True)), **options})


@pytest.mark.parametrize("world_size", [1, 2, np.int64(3), torch.tensor(3)], ids=str)
def test_sequences_for_every_rank_are_not_to_be_cut(world_size):
    found = plan((2, 20_000, 16), *LONG[1:], lengths=[1000, 20_000], world_size=world_size)
    assert found.cuts and (found.advice != "") == (world_size == 2)
    assert any(cut.bytes for cut in found.cuts) == (world_size > 1)


def test_cuts_over_ranks_are_compared():
    shapes = (3, 20_000, 16), (1, 16, 16), (16,)
    found = plan(*shapes, gradients=True, world_size=3, bandwidth=1e8, latency=1e-3)
    assert {cut.name for cut in found.cuts} == {"vectors", "products", "overlapped"}
    assert list(found.cuts) == sorted(found.cuts, key=lambda cut: cut.seconds)
    lines = str(found).splitlines()
    for cut, line in zip(found.cuts, lines[lines.index("over 3 ranks:") + 1 :], strict=False):
        assert cut.speedup == found.seconds / cut.seconds
        assert re.match(rf"  {cut.name}.*: .*, {cut.speedup:.2g} x, a rank sends .*B$", line)
    quick = plan(*shapes, gradients=True, world_size=3, bandwidth=1e12, latency=1e-9)
    assert quick.cuts[0].seconds < found.cuts[0].seconds
    assert "ranks" not in str(plan(*shapes)) and plan(*shapes).cuts == ()


def test_the_pick_costs_at_most_1_3_times_the_best():
    for entry in cost.read():
        place = Where(entry.device, entry.threads)
        for g, m, v, c in itertools.product((1, 30), (1, 200), (2, 60, 2_000, 100_000), (1, 16, 64, 200)):
            for one, item, gradients in ((False, 4, True), (True, 4, False), (False, 8, False)):
                size = Size(v, g, m, c, one, item, False, one, gradients, place.device == "cuda")
                numbers = [k for k in sorted({round(1.1**power) for power in range(120)}) if 2 <= k <= (v - 1) // 2]
                cuts = [cut for cut in (Schedule("chunked", k) for k in numbers) if choose.within_contract(size, cut)]
                cuts = cuts if choose.candidates(size, place) else []
                cuts += [SEQUENTIAL, TREE, *choose.worthwhile(size, place), *choose.meeting(size, place)]
                best = min(choose.seconds(size, cut, place.constants) for cut in cuts)
                pick = choose.choose(size, place, "auto")
                assert choose.seconds(size, pick, place.constants) <= 1.3 * best, (size, pick)


@pytest.fixture
def prefer(monkeypatch):
    """Constants with which a schedule is the best, whatever the sizes."""

    def set_to(name):
        seconds = {other: dict.fromkeys((FORWARD, BOTH), (0.0 if other == name else 1.0,) * 5) for other in NAMES}
        preferred = Constants("cpu", 1, 1, True, "test", "", "", seconds)
        monkeypatch.setattr(choose, "constants", lambda *place: preferred)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # more threads would take more, and shorter, segments
        choose.choose.cache_clear()

    yield set_to
    choose.choose.cache_clear()


@pytest.fixture
def used(monkeypatch):
    """The schedules that `product` computes with."""
    seen, module = [], sys.modules["logchain.product"]
    log_norm, short_of, numbered = (
        module.log_norm,
        module.short_of,
        {number_of(one): one for one in (TREE, SEQUENTIAL, MEETING)},
    )

    def watched(*args, segments, **others):
        seen.append(numbered.get(segments, Schedule("chunked" if segments > 0 else "overlapped", abs(segments))))
        return log_norm(*args, segments=segments, **others)

    def at_once(*args):
        found = short_of(*args)
        seen.extend([SEQUENTIAL] * (found is not None))
        return found

    monkeypatch.setattr(module, "short_of", at_once)
    monkeypatch.setattr(module, "log_norm", watched)
    return seen


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("strategy", choose.STRATEGIES)
@pytest.mark.parametrize("preferred", NAMES)
def test_product_does_what_is_planned(prefer, used, preferred, strategy, gradients):
    prefer(preferred)
    operands = chain(v=100, c=20, gradients=gradients)
    operands[1] = operands[1][:, :1].detach().requires_grad_(gradients)
    planned = plan(*operands, strategy=strategy)
    out = logchain.product(*operands, strategy=strategy)
    assert used == [Schedule(planned.schedule, planned.segments)]
    assert planned.schedule == (preferred if strategy == "auto" else strategy)
    torch.testing.assert_close(out, logchain.product(*operands, strategy="sequential"))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (logchain.product, [TREE]),
        (lambda *o: logchain.product(*o, lengths=[40, 3]), [TREE]),
        (lambda x, bulk, p0: logchain.product(x, bulk.log(), p0.log(), log_params=True), [TREE]),
        (lambda x, bulk, p0: logchain.product(x[:, :1], bulk[:, :1], p0), [SEQUENTIAL]),
        (lambda *o: logchain.product(*o, memory_budget=10**9), [SEQUENTIAL]),
        (lambda x, bulk, p0: torch.vmap(logchain.product, (0, None, None))(x, bulk[0], p0), [TREE]),
        (torch.compile(logchain.product, backend="eager", fullgraph=True), [TREE]),
        (torch.compile(logchain.product, backend="eager", fullgraph=True, dynamic=True), [SEQUENTIAL]),
    ],
    ids=["alone", "lengths", "logarithms", "one variable", "budget", "vmap", "compiled", "compiled of any size"],
)
def test_calls_are_planned(prefer, used, call, expected):
    prefer("tree")
    torch._dynamo.reset()
    call(*chain())
    assert used[:1] == expected


def test_every_constant_has_its_date_and_hardware():
    raw = json.loads(cost.FILE.read_text())
    assert raw["command"] == "python -m tests.benchmarks.fit_costs"
    assert {entry["device"] for entry in raw["constants"]} == {"cpu", "cuda"}
    for entry in cost.read():
        assert set(entry.seconds) == set(NAMES) and entry.hardware
        for row in (row for passes in entry.seconds.values() for row in passes.values()):
            assert len(row) == len(Work._fields) and min(row) >= 0 and max(row) > 0
        assert not entry.measured or (re.fullmatch(r"\d{4}-\d\d-\d\d", entry.date) and "torch" in entry.versions)


def test_fit_recovers_constants_from_the_times_they_make(tmp_path):
    place, true = Where("cpu", 1), (3e-10, 5e-9, 2e-10, 4e-7, 3e-6)
    about = {"hardware": "a machine", "versions": "torch", "date": "2026-01-01"}
    model = Constants(*place, 1, True, **about, seconds={name: dict.fromkeys((FORWARD, BOTH), true) for name in NAMES})
    sweep = [
        *[(1, 3, 4, 1), (2, 300, 4, 0), (1, 2000, 2, 1), (30, 30, 30, 1), (4, 40, 60, 0), (1, 20, 100, 1)],
        *[(1, 900, 30, 0), (1, 3000, 4, 0), (1, 700, 20, 1), (1, 30_000, 20, 0)],
    ]
    found = list(fit_costs.samples(place, sweep, lambda size, schedule, call: choose.seconds(size, schedule, model)))
    fitted = fit_costs.fitted(place, found, about)
    for sample in found:
        assert choose.seconds(sample.size, sample.schedule, fitted) == pytest.approx(sample.seconds, rel=0.01)
    assert fitted.seconds["sequential"][FORWARD] == pytest.approx(true, rel=0.01)
    fit_costs.write([fitted, fit_costs.h200()], tmp_path / "costs.json")
    assert cost.read(tmp_path / "costs.json") == (fitted, fit_costs.h200())
