"""Every backend keeps the accuracy contract in every schedule: torch's operations, loops in C, Triton's kernels."""

import functools
import sys
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch

import logchain
from logchain import kernels, reference
from logchain.schedules import budget, checkpoints, choose, chunked, meeting, overlapped, tree_leaves
from tests import contract
from tests.conftest import INTERPRETED
from tests.contract import TENSOR_CORES, Truth, assert_contract, drawn, poisoned_memory, value_bound
from tests.families import FAMILIES, PAIRS, Chain, Draw, dense
from tests.kernels.cpu import adversary
from tests.layouts import BATCHES, STEPS, STRANGE, broadcast, strange

F32, F64 = torch.float32, torch.float64
BACKENDS = ("cpu", "plain", "gpu")
SCHEDULES = ("sequential", "chunked", "overlapped", "meeting", "tree", "pieces", "checkpoints")

# what shifted sums get wrong, or is impossible
HARD = ["dense", "detour", "left_to_right", "one_dead", "sparse", "log_far"]

EACH = pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])


class Where(NamedTuple):
    """A backend, a schedule, and the options of the contract for them."""

    backend: str
    schedule: str
    options: dict

    def assert_contract(self, chain: Chain, lengths=None, **options) -> None:
        assert_contract(chain, lengths, **self.options, **options)

    def family(self, name: str, dtype=F32, each: bool = False, log: bool = False) -> tuple[Chain, Truth]:
        """A family's chain, of few small sequences where kernels are interpreted, and its truth."""
        if self.backend != "gpu":
            return drawn(name, dtype, each, log)
        sizes = {"n": 2, "t": 1} | ({} if name[-1].isdigit() else {"v": 5, "c": 4})
        chain = FAMILIES[name](dtype, each=each, **sizes)
        chain = chain.logs() if log else chain
        return chain, Truth(chain)


def options_of(schedule: str, monkeypatch: pytest.MonkeyPatch, size: int | None = None) -> dict:
    """The options of `product` for a schedule: of 3 segments, or of 2 steps each, or of another size."""
    if schedule == "chunked":
        monkeypatch.setattr(choose, "of", lambda *_: choose.Schedule("chunked", size or 3))
        return {}
    if schedule == "overlapped":  # too few steps to forget: most boundaries are refused
        monkeypatch.setattr(choose, "of", lambda *_: choose.Schedule("overlapped", size or 3))
        monkeypatch.setattr(overlapped, "steps_to_forget", lambda *_: 2)
        return {}
    if schedule == "checkpoints":
        monkeypatch.setattr(budget, "every_within", lambda *_: size or 2)
        return {"memory_budget": 1}
    if schedule == "pieces":  # the leaves of a tree, a few transitions of a few sequences at a time
        monkeypatch.setattr(tree_leaves, "_LEAST", 0)
        monkeypatch.setattr(tree_leaves, "_SHORT", 3)
    return {"strategy": "tree" if schedule == "pieces" else schedule}


def on(backend: str, schedule: str, *values, slow: bool = False):
    """A parameter for the fixture below and others beside it."""
    marks = [pytest.mark.slow] * slow + [pytest.mark.gpu] * (backend == "gpu" and not INTERPRETED)
    return pytest.param((backend, schedule), *values, marks=marks, id="-".join(map(str, (backend, schedule, *values))))


# an interpreter takes its time: `tests.kernels.gpu.test_chains` has what is not here, and scans from one end
ON_DEVICE = ("sequential", "chunked", "tree", "checkpoints")
PAIRED = [pair for pair in product(BACKENDS, SCHEDULES) if pair[0] != "gpu" or pair[1] in ON_DEVICE]
EVERYWHERE = [on(*pair) for pair in PAIRED if pair[0] != "gpu" or pair[1] == "sequential"]


@pytest.fixture(params=EVERYWHERE)
def where(request, monkeypatch) -> Where:
    """Every schedule of every backend, or those of an indirect parameter."""
    backend, schedule = request.param
    options = options_of(schedule, monkeypatch)
    if backend == "gpu":
        pytest.importorskip("triton")
        monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)
        if schedule == "sequential":
            request.getfixturevalue("both_ends")
        options |= {"device": "cpu" if INTERPRETED else "cuda", "k": TENSOR_CORES}
    if backend == "plain":
        request.getfixturevalue("plain")
    return Where(backend, schedule, options)


def families() -> list:
    """All choices of dtype, `each` and `log` in C, or two where a tree is cut; elsewhere one for a family, in turn."""
    choices, found = PAIRS.args[1], []
    for (backend, schedule), (i, name) in product(PAIRED, enumerate(FAMILIES)):
        if backend == "gpu" and name not in (HARD if schedule == "sequential" else HARD[:2]):
            continue
        every = [1, 4][backend == "cpu"] if schedule != "pieces" else [1, 2][backend == "cpu"]
        for choice in [*choices, *choices][i % len(choices) :][:every]:
            found.append(on(backend, schedule, name, *choice))
    return found


@pytest.mark.parametrize(("where", "name", "dtype", "each", "log"), families(), indirect=["where"])
def test_every_family(where, name, dtype, each, log):
    chain, truth = where.family(name, dtype, each, log)
    where.assert_contract(chain, truth=truth)
    if where.backend != "gpu":
        assert_values_alone(chain, truth, **where.options)


def assert_values_alone(chain: Chain, truth: Truth, **options) -> None:
    """Values keep the contract where no gradient is wanted."""
    out = logchain.product(*chain[:3], log_params=chain.log_params, **options)
    contract.assert_values(out, truth.log_norm, truth.value_bound())


SIZES = [
    ("chunked", 2),
    ("chunked", 7),
    ("chunked", 100),
    ("overlapped", 2),
    ("overlapped", 100),
    ("checkpoints", 1),
    ("checkpoints", 5),
]


@pytest.mark.parametrize(("schedule", "size"), SIZES)
@pytest.mark.parametrize("name", FAMILIES)
def test_segments_of_other_sizes(schedule, size, name, monkeypatch):
    options = options_of(schedule, monkeypatch, size)
    chain, truth = drawn(name, *PAIRS.args[1][len(name) % 4])
    assert_contract(chain, truth=truth, **options)
    assert_values_alone(chain, truth, **options)
    if chain.x.shape[-2] == 17:  # they end anywhere in a segment
        ends = {"lengths": torch.tensor([[1, 5], [17, 2], [11, 6]])}
        truth = Truth(chain, ends["lengths"])
        assert_contract(chain, truth=truth, **options, **ends)
        assert_values_alone(chain, truth, **options, **ends)


@pytest.mark.parametrize(
    ("schedule", "module", "name"),
    [
        ("chunked", chunked, "forward"),
        ("overlapped", overlapped, "forward"),
        ("meeting", meeting, "forward"),
        ("checkpoints", checkpoints, "Checkpoints"),
        ("pieces", tree_leaves, "Leaves"),
    ],
)
def test_a_schedule_is_what_runs(schedule, module, name, monkeypatch):
    """Otherwise all of these tests would be of the sequential one."""
    options = options_of(schedule, monkeypatch)

    def refuse(*_, **__):
        raise LookupError(schedule)

    for user in (module, *(one for one in sys.modules.values() if getattr(one, name, None) is getattr(module, name))):
        monkeypatch.setattr(user, name, refuse)
    with pytest.raises(LookupError, match=schedule):
        logchain.product(*(operand.requires_grad_() for operand in dense(F32, v=9)[:3]), **options)


@pytest.mark.parametrize(
    ("schedule", "size"), [("sequential", None), ("chunked", 5), ("chunked", 8), ("overlapped", 4), ("meeting", None)]
)
@pytest.mark.parametrize("name", ["left_to_right", "bakis_jump", "banded", "sparse", "sharp", "one_dead", "dense"])
@EACH
def test_other_draws_and_many_sequences(name, each, schedule, size, monkeypatch):
    options = options_of(schedule, monkeypatch, size)
    for seed in (1, 2):
        assert_contract(FAMILIES[name](F32, seed, each=each, n=8, t=1, v=50, c=17), **options)


@pytest.mark.parametrize(
    ("schedule", "size", "v"),
    [
        ("sequential", None, 16384),
        ("chunked", 64, 16384),
        ("overlapped", 64, 16384),
        ("meeting", None, 16384),
        ("tree", None, 4096),
    ],
)
def test_posteriors_of_a_long_chain(schedule, size, v, monkeypatch):
    options, draw = options_of(schedule, monkeypatch, size), Draw(0, 1, 1, v, 8, False)
    chain = Chain(draw.x() - 2**19 / v, draw.bulk()[..., :1, :, :], draw.p0()).to(F32)
    truth = reference.marginals(*chain[:3])
    assert -6e5 < truth.log_norm.item() < -5e5
    x = chain.x.requires_grad_()
    out = logchain.product(*chain[:3], **options)
    contract.assert_values(out, truth.log_norm, value_bound(truth.log_norm, v, 8, dtype=F32))
    out.backward()
    assert np.abs(x.grad.double().numpy() - truth.states).max() < 1e-5


@pytest.mark.parametrize("lengths", [None, [5, 2]], ids=str)
@pytest.mark.parametrize("schedule", ["chunked", "overlapped", "meeting", "tree", "pieces"])
def test_second_derivatives_and_maps_are_those_of_the_sequential_schedule(schedule, lengths, monkeypatch):
    chain = dense(F64, n=2, t=2, v=5, c=2)

    def answers(**options):
        def value(*operands):
            out = logchain.product(*operands, lengths=lengths, **options)
            return (out * torch.arange(4.0).view(2, 2)).sum()

        every = {"argnums": (0, 1, 2)}
        gradient = torch.func.grad(lambda x: value(x, *chain[1:3]))
        found = [
            torch.func.hessian(value, **every)(*chain[:3]),  # forward over reverse, mapped
            torch.func.jacrev(torch.func.jacrev(value, **every), **every)(*chain[:3]),
            torch.vmap(gradient)(torch.stack([chain.x, chain.x.flip(-1)])),
        ]
        return torch.cat([tensor.flatten() for tensor in torch.utils._pytree.tree_leaves(found)])

    expected = answers(strategy="sequential")
    torch.testing.assert_close(answers(**options_of(schedule, monkeypatch)), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["sparse", "detour", "dense", "one_dead"])
def test_one_matrix_for_every_step(name, where):
    chain, _ = where.family(name, F32)
    where.assert_contract(chain._replace(bulk=chain.bulk[..., 1:2, :, :]))


@functools.cache
def broadcasting(batches, steps: tuple[int, int], log: bool) -> tuple[Chain, Truth]:
    """A chain whose batch axes broadcast, which nobody may change, and its truth."""
    chain = broadcast(batches, steps).to(F32)
    chain = chain.logs() if log else chain
    return chain, Truth(chain)


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_batch_axes_broadcast(steps, where):
    for i, batches in enumerate(BATCHES):
        if where.backend == "gpu" and i % 5 != steps[0] % 5:
            continue
        for log in (False, True) if where.backend == "cpu" else (i % 2 > 0,):
            chain, truth = broadcasting(batches, steps, log)
            where.assert_contract(chain, truth=truth)


@functools.cache
def ending(name: str, dtype: torch.dtype, each: bool, ends: tuple, **sizes: int) -> tuple[Chain, Truth]:
    """A family's chain, which nobody may change, and its truth where sequences end."""
    chain = FAMILIES[name](dtype, each=each, v=5, **sizes)
    return chain, Truth(chain, np.array(ends))


@pytest.mark.parametrize("ends", [(5, 1, 3), ((5, 5), (1, 2), (4, 3)), (2, 2, 2)], ids=str)
@EACH
def test_lengths(ends, each, where):
    lengths = torch.tensor(ends)
    for name in HARD[:2] if where.backend == "gpu" else HARD:
        chain, truth = ending(name, F32, each, ends, c=4)
        where.assert_contract(chain, lengths.tolist(), truth=truth)
        if where.backend != "gpu":
            chain, truth = ending(name, F64, each, ends, c=3)
            where.assert_contract(chain, lengths, truth=truth)


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
@EACH
def test_nan_behind_an_end_has_no_influence(log, each, where):
    chain = dense(F32, v=6, c=3, each=each)
    contract.assert_nothing_behind_matters(chain.logs() if log else chain, [3, 5, 1], **where.options)


@pytest.mark.parametrize("operand", ["x", "bulk", "p0"])
def test_nan_stays_in_its_sequence(operand, where):
    for name in ["sparse"] if where.backend == "gpu" else ["dense", "left_to_right", "sparse"]:
        contract.assert_nan_stays(where.family(name, F32, each=True), operand, **where.options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_exact_on_their_rounded_inputs(dtype, where):
    chain, _ = where.family("sharp", dtype)
    for same in (chain, chain.logs(), chain._replace(bulk=chain.bulk[..., :1, :, :].float(), p0=chain.p0.float())):
        where.assert_contract(same)


@pytest.mark.parametrize("operand", ["x", "bulk", "p0"])
def test_one_float64_operand_makes_the_arithmetic_wide(operand, where):
    chain, _ = where.family("dense", F32)
    where.assert_contract(chain._replace(**{operand: getattr(chain, operand).double()}), wanted=operand)


@pytest.mark.parametrize("wanted", ["x", "bulk", "p0", "x p0"])
@EACH
def test_only_wanted_gradients(wanted, each, where):
    for name in ["one_dead"] if where.backend == "gpu" else ["dense", "bakis_jump", "one_dead"]:
        chain, truth = where.family(name, F32, each)
        where.assert_contract(chain, wanted=wanted, truth=truth)


@EACH
def test_nothing_is_read_before_it_is_written(each, where):
    for name in ["sparse"] if where.backend == "gpu" else HARD:
        chain, truth = where.family(name, F32, each)
        with poisoned_memory():
            where.assert_contract(chain, truth=truth)
            chain, truth = ending(name, F32, each, (1, 5), n=2, c=4)
            where.assert_contract(chain, [1, 5], truth=truth)


@EACH
def test_strange_strides(each, where):
    for how in STRANGE[:1] if where.backend == "gpu" else STRANGE:
        chain, truth = where.family("sparse", F32, each)
        where.assert_contract(strange(chain, how), truth=truth)


def test_expanded_operands(where):
    chain = dense(F32, n=1, t=1, v=5, c=3)
    where.assert_contract(chain._replace(x=chain.x.expand(3, 2, -1, -1), p0=chain.p0.expand(3, 2, -1)))
    where.assert_contract(chain._replace(bulk=chain.bulk[..., :1, :, :].expand(-1, -1, 4, -1, -1)))


def search(where: Where, dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch) -> adversary.Search:
    """What random chains at the edges of a format show, four sequences at a time."""
    monkeypatch.setattr(adversary, "BATCHES", [(4,), (2, 2)])
    seen = adversary.Search()
    for number in range(count):
        random = np.random.default_rng((7, number))
        adversary.judge(adversary.draw(random, dtype), seen, f"7 {number}", **where.options)
    return seen


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_random_chains(dtype, where, monkeypatch):
    # where a tree is cut does not depend on what is in it
    count = {"cpu": 60, "plain": 25, "gpu": 6}[where.backend] // (3 if where.schedule == "pieces" else 1)
    seen = search(where, dtype, count, monkeypatch)
    assert not seen.wrong, "\n".join(seen.wrong)
