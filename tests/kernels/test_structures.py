"""Scans of structures of each kind, in C and in torch operations, against dense chains in log space."""

import math

import pytest
import torch

import logchain
from logchain.kernels.cpu import arguments, team
from logchain.memory import peak_bytes
from logchain.transitions import Sparse
from tests.kernels import structures
from tests.kernels.structures import F32, F64, INF, KINDS, check, draw, hub, results, single
from tests.layouts import STRANGE, relaid

NAN = float("nan")
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "plain"])
LOG = pytest.mark.parametrize("log", [False, True], ids=["linear", "logs"])
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
FACTORS = [name for name, kind in KINDS.items() if kind.is_product]

# every kind in C, and those that differ most in torch operations
IN_TORCH = ["arcs", "bands", "durations", "low_rank", "monarch"]
CASES = pytest.mark.parametrize(
    ("backend", "name"), [*(("cpu", name) for name in KINDS), *(("plain", name) for name in IN_TORCH)]
)


# more arcs of one state, more bands, more states and more steps than loops take at a time
SIZES = [
    *((structures.arcs(210, hub(count)), {"v": 3}, 4e-5) for count in (64, 65, 200)),
    (structures.bands(1, 0), {"v": 1}, None),
    (structures.bands(19, 0, 1, 2), {"v": 9}, None),
    (structures.bands(33, 0, 1, 2, 3), {"steps": 4}, None),
    (structures.bands(41, -2, 0, 40), {"scale": 300.0}, None),
    (structures.bands(17, 1, -1, 0, 16, -16), {"scale": 20.0}, None),
    (structures.bands(21, 0, 1, 2, -1, -2, 3), {"steps": 4}, None),
    (structures.bands(16, 0, 1, 2, -1, -2, 3, 4), {"scale": 1e4}, None),
    (structures.bands(32, 0, 1, 2, -1, -2, 3, 4, 5), {"scale": 9.0}, None),
    (structures.bands(35, *range(-9, 10)), {"steps": 4, "scale": 50.0}, None),
    (structures.durations(1, 1), {"v": 3}, None),
    (structures.durations(1, 40), {"steps": 4}, None),
    (structures.durations(17, 1), {"steps": 4, "scale": 20.0}, None),
    (structures.durations(9, 2), {"scale": 300.0}, None),
    (structures.durations(3, 15), {"v": 9}, None),
    (structures.durations(2, 16), {"scale": 1e4}, None),
    (structures.durations(2, 17), {"steps": 4}, None),
    (structures.durations(2, 33), {"scale": 9.0}, None),
    (structures.low_rank(70, 5), {"v": 3}, 5e-6),
    (structures.monarch(20, 36, 18), {"v": 3}, 5e-6),
    (structures.block_diagonal(2, 33), {"v": 3}, 5e-6),
    (structures.kronecker(33, 5), {"v": 3}, 5e-6),
    (KINDS["low_rank"], {"v": 300}, 3e-5),
    (KINDS["monarch"], {"v": 40}, None),
]


@pytest.mark.parametrize(("kind", "options", "near"), SIZES, ids=map(str, range(len(SIZES))))
def test_sizes_beyond_what_loops_take_at_a_time(kind, options, near):
    """In C, and bands in torch operations, too: these are exact."""
    banded = len(kind.sizes[0]) == 2 and not kind.is_product
    for backend in ("cpu", "plain") if banded else ("cpu",):
        for log in (False, True):
            computed = check(backend, draw(kind, (2, 3), (2, 1), log=log, zeros=0.1, ends=not log, **options), near)
            assert not (banded and computed.recomputed)
    check("cpu", draw(kind, (2,), dtype=F64, **options), near=None if options.get("v", 0) < 40 else 1e-11)


@CASES
@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_emissions_of_any_size(backend, name, scale):
    loose = KINDS[name].is_product
    check(backend, draw(KINDS[name], scale=scale, seed=2), near=(1e-3 if scale > 1e3 else 1e-5) if loose else None)
    check(backend, draw(KINDS[name], scale=scale, dtype=F64, log=True), near=1e-9 if loose else None)


@CASES
@pytest.mark.parametrize("far", [1e-30, 1e25])
def test_parameters_far_from_one(backend, name, far):
    chain = draw(KINDS[name])
    computed = check(backend, chain._replace(parameters=(chain.parameters[0] * far, *chain.parameters[1:])), near=2e-5)
    assert not computed.recomputed or len(chain.parameters) == 3  # with a diagonal
    logs = draw(KINDS[name], log=True)
    shifted = [one + shift for one, shift in zip(logs.parameters, (-1e4, 9e3, 10), strict=False)]
    check(backend, logs._replace(parameters=tuple(shifted)), near=3e-3)


@CASES
def test_nan_of_weight_zero_is_not_counted(backend, name):
    chain, weight = draw(KINDS[name]), torch.tensor([1.0, 0.0, 2.0], dtype=F64)
    clean = results(backend, chain, weight).gradients
    chain.x[1, 4, 0] = NAN
    computed = results(backend, chain, weight)
    assert computed.log_norm[1].isnan() and not computed.gradients[0][1].any()
    torch.testing.assert_close(computed.gradients[1:], clean[1:])


@BACKENDS
@pytest.mark.parametrize("name", ["arcs", "bands", "durations", "low_rank", "monarch"])
@pytest.mark.parametrize("how", STRANGE)
def test_layouts_change_nothing(backend, name, how):
    chain = draw(KINDS[name], (2, 3), (2, 1), steps=4, dtype=F64)
    x, *parameters, p0 = (relaid(operand, how) for operand in chain.operands)
    wanted, computed = (
        results(backend, one) for one in (chain, chain._replace(x=x, parameters=tuple(parameters), p0=p0))
    )
    torch.testing.assert_close(computed.log_norm, wanted.log_norm, rtol=1e-14, atol=0)
    torch.testing.assert_close(computed.gradients, wanted.gradients, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", ["arcs", "bands", "durations", "low_rank"])
def test_each_level_is_near_dense_chains(name, level):
    kinds = {"arcs": structures.random_arcs(37), "bands": structures.bands(37, 0, 1, -2)}
    kind = (kinds | {"durations": structures.durations(2, 19)}).get(name)
    for scale in (1.0, 300.0):
        for dtype in (F32, F64):
            chain = draw(kind or structures.low_rank(37, 3), (2,), v=4, scale=scale, dtype=dtype, zeros=0.1)
            check("cpu", chain, near=2e-4)


@pytest.mark.parametrize("name", ["arcs", "bands", "durations", "low_rank"])
@pytest.mark.parametrize(("owned", "steps"), [(1, 1), (1, 9), (7, 1)], ids=["one", "steps", "own"])
def test_threads_share_sequences(name, owned, steps, monkeypatch):
    chain = draw(KINDS[name], (7,), (owned,), v=10, steps=steps)
    wanted = results("cpu", chain).gradients
    monkeypatch.setattr(arguments, "WORTH_A_THREAD", 1)
    for threads, python in ((2, False), (3, True)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        if python:
            monkeypatch.setattr(team, "_parallel", lambda: None)  # Python's threads
        check("cpu", chain, near=1e-5)
        computed, again = (results("cpu", chain).gradients for _ in range(2))
        assert all(map(torch.equal, computed, again))
        torch.testing.assert_close(computed, wanted, rtol=1e-5, atol=1e-5)


NARROW, BOTH = {F32}, {F32, F64}

# two states without transitions between them: x, the weight of the second into each step, and the dtypes in which
# factors are recomputed
RARE = {
    "raised emissions": ([[0, -600], [0, -700], [-INF, 0]], [1, 1], BOTH),
    "a sum that the last raised emission may change": ([[0, -658], [-2000, 0]], [1], BOTH),
    "a product that is 0": ([[0, -620], [0, -664], [0, 0], [-INF, 0]], [1, 2.0**-125, 1], BOTH),
    "a message that is 0 after a weight": ([[0, -50], [0, -75], [0, 0], [-INF, 0]], [1, 2.0**-85, 1], NARROW),
    "a weight that is lost": ([[0, 0], [-INF, 0]], [1e-44], NARROW),
    "the largest that a double holds": ([[0, -620], [-600, 0], [-INF, 0]], [1, 1], NARROW),
    "emissions that matter later": ([[0, -200], [-INF, 0], [0, 0]], [1, 1], NARROW),
}
TWO_STATES = {
    "arcs": structures.arcs(2, [(0, 0), (1, 1)]),
    "bands": structures.bands(2, 0),
    "durations": structures.durations(2, 1),
    "factors": structures.monarch(2, 1, 1),
}
IDENTITY = [[[[1.0, 0.0], [0.0, 1.0]]]]  # the second factor of two states


@BACKENDS
@DTYPES
@pytest.mark.parametrize("name", TWO_STATES)
@pytest.mark.parametrize("rare", RARE)
def test_paths_far_below_others(rare, name, backend, dtype):
    rows, weights, of_factors = RARE[rare]
    parameter, kind = torch.stack([torch.ones(len(weights)), torch.tensor(weights)], -1), TWO_STATES[name]
    if name == "durations":
        parameter = parameter[:, None] * torch.eye(2)
    parameter = parameter.view(-1, *kind.sizes[0])
    second = [[[1.0], [1.0]]] if name == "durations" else IDENTITY
    parameters = [parameter.tolist(), second][: len(kind.sizes)]
    chain = single(kind, parameters, rows, [1.0, 1.0], dtype)
    recomputed = [check(backend, one).recomputed for one in (chain, chain.logs())]
    if backend == "cpu":
        assert recomputed == [name == "factors" and dtype in of_factors] * 2


@BACKENDS
@DTYPES
def test_ranges_that_change_from_step_to_step(backend, dtype):
    """Emissions that are raised, sums that are too small, and backward messages that underflow on their own."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.tensor([1.0, 200.0, 340.0, 600.0, 2000.0, 2e4])
    for seed in range(16 if backend == "cpu" else 4):
        options = {"v": 1 + seed % 7, "steps": max(seed % 7, 1), "log": seed % 2 == 0, "dtype": dtype, "zeros": 0.1}
        chain = draw(structures.random_arcs(2 + seed % 6), (12,), (12,), ends=True, seed=seed, **options)
        scales = sizes[torch.randint(6, (12, chain.x.shape[-2], 1), generator=generator)]
        check(backend, chain._replace(x=chain.x * scales.to(dtype)))


@BACKENDS
def test_messages_of_arcs_that_underflow_alone_are_not_recomputed(backend):
    """A backward message; and a message of which nearly all is in a state that no arc leaves."""
    steps = [[0.0, 0.0]] * 4
    both, away = TWO_STATES["arcs"], structures.arcs(2, [(1, 0), (1, 1)])
    for chain in (
        single(both, [[[0.3, 0.3]]], [*steps, [0.0, -700.0]], [1.0, 1.0]),
        single(away, [[[1.0, 2.0**-120]]], [*[[0.0, -650.0]] * 3, [-INF, 0.0]], [1.0, 1.0]),
    ):
        for one in (chain, chain.logs()):
            assert not check(backend, one).recomputed


@BACKENDS
@LOG
@DTYPES
@pytest.mark.parametrize("name", ["arcs", "bands", "durations"])
def test_structures_of_any_weight(name, backend, log, dtype):
    chain = draw(KINDS[name], (2,), (2,), steps=4, dtype=dtype, log=log)
    low, high = (-1e4, 1e4) if log else (1e-44, 1e38) if dtype == F32 else (1e-300, 1e300)
    for sizes in ([low] * 4, [high] * 4, [low, high, 1.0, high], [low, 1.0]):
        *parameters, p0 = (
            torch.tensor(sizes, dtype=dtype).repeat(operand.numel())[: operand.numel()].view_as(operand)
            for operand in chain.operands[1:]
        )
        check(backend, chain._replace(parameters=tuple(parameters), p0=p0), near=1e-12 if dtype == F64 else None)


@BACKENDS
def test_few_arcs_and_impossible_chains(backend):
    for pairs in ([(0, 1)], [(1, 0), (2, 0)]):
        for c, v in ((3, 1), (3, 2), (40, 3)):
            chain = draw(structures.arcs(c, pairs), (2,), v=v, scale=300.0)
            check(backend, chain)
            check(backend, chain._replace(x=torch.full_like(chain.x, -INF)))
            check(backend, chain._replace(p0=torch.zeros_like(chain.p0)))
    log_norm, (_, values, _), _ = results(backend, chain._replace(x=chain.x[:0]))
    assert log_norm.shape == (0,) and not values.any()


def test_long_chains_of_arcs():
    v = 50_000
    for spread in (0.0, 300.0):
        x = spread * torch.tensor([1.0, -1.0])[torch.arange(2 * v).view(v, 2) % 2]
        every = structures.arcs(2, [(0, 0), (0, 1), (1, 0), (1, 1)])
        log_norm, (states, values, _), _ = results("cpu", single(every, [[[0.25] * 4]], x.tolist(), [1.0, 1.0]))
        truth = v * spread + (v - 1) * math.log(0.25) + math.log(2) * v * (spread == 0)
        torch.testing.assert_close(log_norm.double().item(), truth, rtol=2.0**-23, atol=0)
        torch.testing.assert_close(states.sum(-1), torch.ones(1, v))
        torch.testing.assert_close(values.sum() * 0.25, torch.tensor(v - 1.0))


def test_arcs_of_a_structure_are_those_it_was_made_of():
    indices = torch.tensor([[0, 1], [1, 0]])
    chain = draw(structures.arcs(2, [(0, 1), (1, 0)]), (1,), v=3)
    for target in ([1, 0], [1, 1], [0, 0]):
        indices[1] = torch.tensor(target)
        made = chain.kind._replace(make=lambda values: Sparse(indices, values, 2))
        check("cpu", chain._replace(kind=made))


def test_exponents_of_long_chains_of_bands():
    """Independent states whose weights differ by millions of nats on the way, and by nothing in the end."""
    v = 100_000
    x = (1e4 * torch.randn(v, generator=torch.Generator().manual_seed(0))).round()
    x = torch.stack([x, x.flip(0), x.roll(v // 2)], -1)
    chain = single(structures.bands(3, 0), [[[[0.5] * 3]]], [[0.0] * 3], [0.125, 0.25, 0.5])._replace(x=x[None])
    log_norm, (states, _, _), _ = results("cpu", chain)
    truth = x[:, 0].double().sum() + math.log(0.875) + (v - 1) * math.log(0.5)
    torch.testing.assert_close(log_norm, truth[None].float(), rtol=2.0**-23, atol=2e-3)
    for step in (0, v // 2, v - 1):
        torch.testing.assert_close(states[0, step], torch.tensor([1, 2, 4]) / 7, rtol=5e-3, atol=0.0)


@DTYPES
def test_numbers_beyond_exponents_of_bands(dtype):
    """Potentials of -1e30 matter only where all paths have them, which is computed in logarithms."""
    x = torch.randn(4, 9, 5, dtype=dtype, generator=torch.Generator().manual_seed(1))
    x[0, 3:5, 1:] = x[1, 4] = -1e30
    x[2, :, 0], x[3, 2] = -1e30, torch.tensor([0.0, -1e30, -1e30, -1e30, -1e30])
    # the first state is left at once
    chain = single(structures.bands(5, 0, 1), [[[[0.0, *[0.5] * 4], [0.5] * 5]]], [[0.0] * 5], [1.0, 0, 0, 0, 0], dtype)
    for rows in (x, x[1:2]):
        computed, wanted = (results(backend, chain._replace(x=rows)) for backend in ("cpu", "plain"))
        torch.testing.assert_close(computed.log_norm, wanted.log_norm, rtol=1e-7, atol=1e-5)
        torch.testing.assert_close(computed.gradients[0], wanted.gradients[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(computed.gradients[1:], wanted.gradients[1:], rtol=1e-5, atol=1e-5)


@BACKENDS
def test_detours_of_ten_million_nats_are_exact(backend):
    """In float32, whose exponents are whole numbers up to 2^24 only."""
    x = [[0.0, -3e7], [0.0, 0.0], [-3e7, 0.125]]
    halves = {"bands": [[[[0.5, 0.5]]]], "durations": [[[[0.5, 0.0], [0.0, 0.5]]], [[[1.0], [1.0]]]]}
    for name, parameters in halves.items():
        check(backend, single(TWO_STATES[name], parameters, x, [1.0, 1.0]), near=1e-7)


@pytest.mark.parametrize("low", [-11_780_001.0, -11_780_002.0])
def test_detours_by_both_parameters_of_durations_are_exact(low):
    """In float32, whose exponents are whole numbers up to 2^24 only, a state rises by both parameters."""
    parameters = [[[0.0, -INF], [-INF, 2e5]]], [[[0.0], [2e5]]]
    x = [[0.0, low], *[[0.0, 0.0]] * 30, [0.0, -low - 31 * 4e5]]
    chain = single(structures.durations(2, 1), parameters, x, [0.0, 0.0])._replace(log_params=True)
    computed = check("cpu", chain, near=1e-4)
    torch.testing.assert_close(computed.log_norm, torch.tensor([math.log(2)]), rtol=0, atol=1e-4)


@DTYPES
@pytest.mark.parametrize("name", ["arcs", "bands", "durations"])
def test_masks_that_do_not_matter_stay_in_the_dtype(name, dtype):
    """Potentials of -1e30 in some states give what -inf gives; a step without any possible state is impossible."""
    chain = draw(KINDS[name], (300,), v=90, dtype=dtype)
    mask = torch.zeros_like(chain.x, dtype=torch.bool)
    mask[:, ::2, :2] = True
    chain.x[2, 5] = -INF
    masked, never = (chain._replace(x=chain.x.masked_fill(mask, low)) for low in (-1e30, -INF))
    computed, wanted = results("cpu", masked), results("cpu", never)
    assert computed.log_norm[2] == -INF
    torch.testing.assert_close(computed.log_norm, wanted.log_norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(computed.gradients, wanted.gradients)
    peaks = [peak_bytes(lambda one=one: results("cpu", one).gradients) for one in (masked, never)]
    assert peaks[0] <= 1.01 * peaks[1]


@LOG
@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_some_sequences_keep_near_dense_chains(name, log):
    chain = draw(KINDS[name], (2, 3), (2, 1), log=log, ends=True)
    first, *rest = draw(KINDS[name], (2, 3), (1, 3), log=log, seed=1).parameters
    steps = draw(KINDS[name], (2, 3), (2, 1), log=log, steps=4, seed=2).parameters[0]
    far = chain.parameters[0] - 200 if log else chain.parameters[0] * 1e-30
    for one, others in ((first, [one[:, :1] for one in rest]), (chain.parameters[0], rest), (steps, rest)):
        check("cpu", chain._replace(parameters=(one, *others)))
    check("cpu", chain._replace(parameters=(far, *(one[:, :1] for one in rest))), near=1e-4)


def test_sums_of_factors_that_underflow_to_zero_are_recomputed():
    """State 2 is left with a weight of 1e-60, and all others die; zeros that are no path are no reason."""
    sides, p0 = [[[[1.0, 0], [1.0, 0], [0, 1e-30]]]] * 2, [1.0, 1, 1]
    for x, recomputed in (
        ([[0.0, 0, -60], [-INF, -INF, 0]], True),
        ([[0.0, 0, -INF], [0.0, 0, 0], [0.0, -1, 0]], False),
    ):
        computed = check("cpu", single(structures.low_rank(3, 2, False), sides, x, p0), near=1e-5)
        assert computed.recomputed == recomputed


def test_states_without_path_through_factors_do_not_overflow_backward():
    parameters = [[[[1.0]], [[1.0]]]], IDENTITY
    chain = single(TWO_STATES["factors"], parameters, [[0.0, 0], [-200.0, 0]], [1.0, 0])
    assert check("cpu", chain, near=1e-5).recomputed == 1
    chain = single(TWO_STATES["factors"], parameters, [*[[0.0, 45]] * 12, [0.0, 0]], [1.0, 0])
    assert check("cpu", chain, near=1e-5).recomputed == 0


@pytest.mark.parametrize("name", ["low_rank", "monarch", "kronecker", "bands", "arcs", "durations"])
def test_structures_take_two_messages(name):
    kinds = {"low_rank": structures.low_rank(64, 8), "monarch": structures.monarch(8, 8, 8)}
    kinds |= {"kronecker": structures.kronecker(4, 4, 4), "bands": structures.bands(64, 0, 1, -2)}
    kinds |= {"durations": structures.durations(4, 16)}
    chain = draw(kinds.get(name, structures.random_arcs(64, 0.1)), (200,), v=40)
    chain = chain._replace(parameters=tuple(one.requires_grad_() for one in chain.parameters))
    peak = peak_bytes(lambda: torch.autograd.grad(chain.call(logchain.product).sum(), chain.parameters))
    assert peak <= 2.2 * chain.x.nbytes + 2**20


@DTYPES
def test_a_long_chain_of_factors_overflows_nothing(dtype):
    chain = draw(structures.low_rank(3, 2), (1,), v=1000, dtype=dtype)
    one, other = (results("cpu", chain._replace(x=x)).log_norm for x in (chain.x, chain.x + 3000.0))
    torch.testing.assert_close(other - one, torch.full_like(one, 3e6), rtol=1e-9 if dtype == F64 else 2.0**-23, atol=0)
