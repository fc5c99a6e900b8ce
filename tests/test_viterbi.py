"""`logchain.viterbi` finds the best path and its weight, compiled and plain alike, whatever the layout."""

import functools
import math
import sys

import numpy as np
import pytest
import torch

from logchain import _device, reference
from logchain.kernels import max_product
from logchain.viterbi import Path, viterbi
from tests import oracle
from tests.contract import assert_values, poisoned_memory, rounding, ulp
from tests.families import FAMILIES, Chain, Draw, dense
from tests.layouts import BATCHES, STEPS, STRANGE, broadcast, poisoned, strange

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["compiled", "plain"])
def kernels(request, monkeypatch):
    """The loop that numba compiles, and torch's own operations."""
    if request.param == "compiled":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(_device, "native", lambda tensor: False)
    return request.param


def run(chain: Chain, lengths=None, **options) -> Path:
    return viterbi(*chain[:3], log_params=chain.log_params, lengths=lengths, **options)


def numbers(chain: Chain) -> list[np.ndarray]:
    return [operand.double().numpy() for operand in chain[:3]]


def weigh(chain: Chain, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The weight of each path of states [*B, v], added without rounding, and the sum of the logarithms' sizes."""
    (x, bulk, p0), batch = numbers(chain), states.shape[:-1]
    if not chain.log_params:
        with np.errstate(divide="ignore"):
            bulk, p0 = np.log(bulk), np.log(p0)
    c = x.shape[-1]
    bulk = np.broadcast_to(bulk, (*batch, states.shape[-1] - 1, c, c))
    p0, found, sizes = np.broadcast_to(p0, (*batch, c)), np.full(batch, -INF), np.zeros(batch)
    for b in np.ndindex(*batch):
        path = [z for z in states[b] if z >= 0]
        if path:
            taken = [p0[b][path[0]], *(bulk[b][i, z, y] for i, (z, y) in enumerate(zip(path, path[1:], strict=False)))]
            found[b] = math.fsum([*taken, *(x[b][i, z] for i, z in enumerate(path))])
            sizes[b] = 0.0 if chain.log_params else np.abs(taken).sum()
    return found, sizes


@functools.cache
def truth(name: str, dtype: torch.dtype, each: bool, log: bool, lengths=None):
    """A chain, its best paths by the reference, and how far a score may lie from theirs."""
    chain = FAMILIES[name](dtype, each=each)
    chain = chain.logs() if log else chain
    options = {"log_params": chain.log_params, "lengths": None if lengths is None else list(lengths)}
    found = reference.viterbi(*numbers(chain), **options)
    forward = reference.forward_backward(*numbers(chain), **options).forward
    inside = found.states >= 0
    own = np.take_along_axis(forward, np.maximum(found.states, 0)[..., None], -1)[..., 0]
    depth = (np.where(inside, forward.max(-1), 0.0) - np.where(inside, own, 0.0)).max(-1)
    score, sizes = weigh(chain, found.states)
    bound = rounding(dtype) * (2.0**-20 * math.sqrt(forward.shape[-2]) + 2.0**-22 * depth) + ulp(score, dtype)
    return chain, found.states, score, bound + 2.0**-52 * sizes


def assert_best(name, dtype, each, log, lengths=None):
    chain, states, score, bound = truth(name, dtype, each, log, lengths)
    found = run(chain, None if lengths is None else list(lengths))
    assert found.states.dtype == torch.int64 and found.states.shape == chain.x.shape[:-1]
    assert found.score.dtype == dtype
    np.testing.assert_array_equal(found.states.numpy() < 0, states < 0)
    assert_values(found.score, score, bound)
    # the score is that of just these states
    own, sizes = weigh(chain, found.states.numpy())
    assert_values(found.score, own, ulp(own, dtype) + 2.0**-50 * sizes)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_its_best_path(name, dtype, kernels):
    for each in (False, True):
        for log in (False, True):
            assert_best(name, dtype, each, log)


@pytest.mark.parametrize("name", ["dense", "sharp", "detour", "left_to_right", "one_dead", "sparse"])
@pytest.mark.parametrize("lengths", [(5, 1, 3), (2, 2, 4), (1, 1, 1)], ids=str)
def test_lengths(name, lengths, kernels):
    for dtype in (F32, F64):
        assert_best(name, dtype, False, False, lengths)
        assert_best(name, dtype, True, True, lengths)


def small(seed: int, zeros: float = 0.0, v: int = 5, c: int = 3) -> Chain:
    draw = Draw(seed, 1, 1, v, c, False)
    x, bulk, p0 = draw.normal(v, c), draw.bulk()[0, 0], draw.p0()[0, 0]
    x[draw.uniform(*x.shape) < zeros / 2] = -INF
    return Chain(x, bulk * (draw.uniform(*bulk.shape) >= zeros), p0 * (draw.uniform(*p0.shape) >= zeros))


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(6))
def test_no_path_is_better(seed, zeros, kernels):
    chain = small(seed, zeros)
    weights = oracle.paths(*numbers(chain))
    best = max(weights, key=weights.get)
    found = run(chain)
    if weights[best] == 0:
        assert found.score == -INF and (found.states == -1).all()
    else:
        assert tuple(found.states.tolist()) == best
        assert found.score.item() == pytest.approx(float(weights[best].ln()), rel=1e-14, abs=1e-14)
    assert tuple(run(chain.to(F32)).states.tolist()) == tuple(found.states.tolist())


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_ties_go_to_the_lowest_state_from_the_last_variable_back(dtype, kernels):
    for v, c in ((1, 5), (4, 3), (7, 1), (9, 17), (3, 33)):
        uniform = Chain(torch.zeros(2, v, c), torch.full((1, c, c), 0.25), torch.ones(c)).to(dtype)
        assert (run(uniform).states == 0).all()
    # integers, whose sums are exact: many ties
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x, bulk, p0 = (-torch.randint(3, shape, generator=generator) for shape in ((4, 3), (3, 3, 3), (3,)))
        weights = oracle.paths(x, bulk, p0, log_params=True)
        top = max(weights.values()) * (1 - oracle.Decimal(10) ** -20)
        expected = min((path for path, weight in weights.items() if weight >= top), key=lambda path: path[::-1])
        assert tuple(run(Chain(x, bulk, p0, True).to(dtype)).states.tolist()) == expected


@pytest.mark.parametrize("c", [1, 2, 3, 4, 5, 8, 17, 33, 64])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_compiled_and_plain_agree_exactly(c, dtype, monkeypatch):
    pytest.importorskip("numba")
    for each in (False, True):
        chain = FAMILIES["dense"](dtype, c, each=each, c=c, v=12, n=4)
        chain = chain._replace(bulk=chain.bulk[..., :1, :, :]) if c % 2 else chain
        for lengths in (None, [12, 1, 7, 2]):
            with monkeypatch.context() as patch:
                patch.setattr(_device, "native", lambda tensor: False)
                plain = run(chain, lengths)
            assert torch.equal(run(chain, lengths).states, plain.states)


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", ["dense", "sparse", "one_dead", "left_to_right"])
def test_blocks_and_threads_change_nothing(name, each, monkeypatch):
    pytest.importorskip("numba")
    from logchain.kernels import native_max_product, semiring_chain

    chain = FAMILIES[name](F32, each=each, v=11, n=7)
    lengths = [11, 3, 10, 1, 7, 8, 2]
    whole = run(chain), run(chain, lengths)
    threads = torch.get_num_threads()
    for block, share in ((1, 2**60), (1000, 2**60), (1000, 1), (2**18, 1)):
        monkeypatch.setattr(native_max_product, "_BLOCK", block)
        monkeypatch.setattr(native_max_product, "_SHARE", share)
        torch.set_num_threads(3)
        try:
            parts = run(chain), run(chain, lengths)
        finally:
            torch.set_num_threads(threads)
        for part, one in zip(parts, whole, strict=True):
            assert torch.equal(part.states, one.states) and torch.equal(part.score, one.score)
    monkeypatch.setattr(_device, "native", lambda tensor: False)
    for terms in (1, 40, 200, 2000):
        monkeypatch.setattr(semiring_chain, "_TERMS", terms)
        assert torch.equal(run(chain, lengths).states, whole[1].states)


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_batch_axes_broadcast(batches, steps, kernels):
    chain = broadcast(batches, steps)
    expected, found = reference.viterbi(*chain[:3]), run(chain)
    np.testing.assert_array_equal(found.states, expected.states)
    np.testing.assert_allclose(found.score, expected.score, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dense", "sparse", "bakis_jump"])
def test_dtypes(name, dtype, kernels):
    chain = FAMILIES[name](dtype)
    expected = run(Chain(*(operand.float() for operand in chain[:3])))
    found = run(chain)
    assert found.score.dtype == F32
    assert torch.equal(found.states, expected.states) and torch.equal(found.score, expected.score)
    for operand in ("x", "bulk", "p0"):
        mixed = run(chain._replace(**{operand: getattr(chain, operand).double()}))
        assert mixed.score.dtype == F64
        own, sizes = weigh(chain, mixed.states.numpy())
        assert_values(mixed.score, own, 2.0**-50 * sizes)


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_a_sequence_is_as_if_it_were_alone(each, log, kernels):
    lengths = [3, 5, 1]
    chain = dense(F32, v=5, each=each)
    dirty = poisoned(chain, lengths)
    found = run(dirty.logs() if log else dirty, lengths)
    for i, end in enumerate(lengths):
        bulk, p0 = (operand[i] if each else operand[0] for operand in (chain.bulk, chain.p0))
        one = Chain(chain.x[i, :, :end], bulk[:, : end - 1], p0)
        alone = run(one.logs() if log else one)
        assert torch.equal(found.states[i, :, :end], alone.states) and torch.equal(found.score[i], alone.score)
        assert (found.states[i, :, end:] == -1).all()


@pytest.mark.parametrize("operand", ["x", "bulk", "p0"])
@pytest.mark.parametrize("name", ["dense", "left_to_right", "impossible", "v1"])
def test_nan_stays_in_its_sequence(name, operand, kernels):
    chain = FAMILIES[name](F32, each=True)
    clean = run(chain)
    dirty = {key: getattr(chain, key).clone() for key in ("x", "bulk", "p0")}
    if dirty[operand].numel() == 0:
        return
    dirty[operand][1, 0].flatten()[-1] = NAN
    dirty["x"].requires_grad_()
    found = viterbi(**dirty)
    assert found.score[1, 0].isnan() and (found.states[1, 0] == -1).all()
    others = torch.ones(3, 2, dtype=torch.bool)
    others[1, 0] = False
    assert torch.equal(found.states[others], clean.states[others])
    assert torch.equal(found.score[others], clean.score[others])
    found.score[others].sum().backward()
    assert dirty["x"].grad.isfinite().all()


def test_nan_of_a_shared_matrix_reaches_who_gets_there(kernels):
    chain = dense(F32, v=5)
    clean = run(chain, [2, 5, 3])
    chain.bulk[..., 2, 1, 1] = NAN
    found = run(chain, [2, 5, 3])
    assert found.score[1].isnan().all() and (found.states[1] == -1).all()
    assert torch.equal(found.states[::2], clean.states[::2]) and torch.equal(found.score[::2], clean.score[::2])


def test_what_is_impossible(kernels):
    chain = FAMILIES["impossible"](F32)
    x = chain.x.clone().requires_grad_()
    found = viterbi(x, chain.bulk, chain.p0)
    assert (found.score == -INF).all() and (found.states == -1).all()
    found.score.sum().backward()
    assert (x.grad == 0).all()
    assert run(Chain(torch.full((2, 3, 4), -INF), torch.ones(1, 4, 4), torch.ones(4))).score.tolist() == [-INF, -INF]
    assert run(Chain(torch.zeros(3, 4), torch.ones(1, 4, 4), torch.zeros(4))).score == -INF
    assert run(Chain(torch.zeros(3, 4), torch.zeros(1, 4, 4), torch.ones(4))).score == -INF


@pytest.mark.parametrize("how", STRANGE)
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_strange_strides(how, each, kernels):
    for chain in (FAMILIES["dense"](F32, each=each), FAMILIES["detour"](F32, each=each)):
        views = strange(chain, how)
        assert torch.equal(run(views).states, run(chain).states) and torch.equal(run(views).score, run(chain).score)


def test_expanded_operands(kernels):
    one = dense(F32, n=1, t=1)
    expected = run(one)
    many = Chain(one.x.expand(3, 2, -1, -1), one.bulk.expand(3, 2, -1, -1, -1), one.p0.expand(3, 2, -1))
    found = run(many)
    assert (found.states == expected.states).all() and (found.score == expected.score).all()


def test_poisoned_memory(kernels):
    for name in ("dense", "sparse", "one_dead", "v1"):
        chain = FAMILIES[name](F32)
        expected = run(chain), run(chain, [1, chain.x.shape[-2], 1])
        with poisoned_memory():
            found = run(chain), run(chain, [1, chain.x.shape[-2], 1])
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.states, other.states) and torch.equal(one.score, other.score)


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log_params"])
def test_the_gradient_counts_what_the_path_passes(log, kernels):
    chain = dense(F64, v=5, c=3)
    chain = chain.logs() if log else chain
    x, bulk, p0 = (operand.clone().requires_grad_() for operand in chain[:3])
    found = viterbi(x, bulk, p0, log_params=log, lengths=[5, 2, 1])
    found.score.sum().backward()
    hot = torch.nn.functional.one_hot(found.states.clamp(min=0), 3) * (found.states >= 0)[..., None]
    assert torch.equal(x.grad, hot.double())
    counts = torch.einsum("ntvi,ntvj->vij", hot[..., :-1, :], hot[..., 1:, :]).double()
    scale = (1.0, 1.0) if log else (bulk.detach(), p0.detach())
    torch.testing.assert_close((bulk.grad * scale[0])[0, 0], counts)
    torch.testing.assert_close((p0.grad * scale[1])[0, 0], hot[..., 0, :].sum((0, 1)).double())


@pytest.mark.parametrize(
    ("name", "each"), [("dense", False), ("dense", True), ("one_dead", True), ("impossible", False), ("log_far", True)]
)
def test_on_the_gpu_kernels(name, each, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(_device, "on_gpu", lambda tensor: True)
    chain = FAMILIES[name](F64, each=each, v=5, c=3)
    chain.x[2, 1, 0, 0] = NAN
    for lengths in (None, torch.tensor([5, 1, 3])):
        found = viterbi(
            *(operand.to(device) for operand in chain[:3]),
            log_params=chain.log_params,
            lengths=None if lengths is None else lengths.to(device),
        )
        expected = reference.viterbi(*numbers(chain), log_params=chain.log_params, lengths=lengths)
        assert found.score[2, 1].isnan() and (found.states[2, 1] == -1).all()
        expected.states[2, 1], expected.score[2, 1] = -1, NAN
        np.testing.assert_array_equal(found.states.cpu(), expected.states)
        np.testing.assert_allclose(found.score.cpu(), expected.score, rtol=1e-13, atol=1e-13)


def test_without_numba(monkeypatch):
    chain = dense(F32)
    expected = run(chain)
    monkeypatch.setitem(sys.modules, "numba", None)
    _device._numba.cache_clear()
    try:
        assert _device.path_kernels(chain.x) is max_product
        found = run(chain)
    finally:
        _device._numba.cache_clear()
    assert torch.equal(found.states, expected.states) and torch.equal(found.score, expected.score)


def test_where_nothing_can_be_written_numba_compiles_again(monkeypatch):
    numba = pytest.importorskip("numba")
    from logchain.kernels import native, native_max_product

    njit, asked = numba.njit, []

    def unwritable(*args, cache=False, **options):
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*args, **options)

    monkeypatch.setattr(native.numba, "njit", unwritable)
    monkeypatch.setattr(native_max_product, "_compiled", native_max_product._compiled.__wrapped__)
    chain = FAMILIES["v5"](F32)
    np.testing.assert_array_equal(run(chain).states, reference.viterbi(*numbers(chain)).states)
    assert asked == [True, False, True, False]


CHAINS = [
    ("shared", dense(F64, v=4, c=3), None),
    ("each", dense(F64, v=4, c=3, each=True), None),
    ("lengths", dense(F64, v=4, c=3), torch.tensor([[4, 4], [1, 2], [3, 1]])),
    ("one variable", dense(F64, v=1, c=3), None),
]
IDS = [name for name, *_ in CHAINS]


@pytest.mark.parametrize(("name", "chain", "lengths"), CHAINS, ids=IDS)
def test_opcheck(name, chain, lengths, kernels):
    for k in (None, 2):
        arguments = (*chain[:3], lengths, chain.log_params, k)
        torch.library.opcheck(torch.ops.logchain.best_paths.default, arguments)


@pytest.mark.parametrize(
    ("name", "chain", "lengths", "dynamic"),
    [(*case, False) for case in CHAINS] + [(*case, True) for case in CHAINS[1:3]],
    ids=[*IDS, "each, dynamic", "lengths, dynamic"],
)
def test_compiles_into_one_graph(name, chain, lengths, dynamic):
    def function(x, bulk, p0):
        states, score = viterbi(x + 1, bulk * 2, p0, lengths=lengths)
        return states, score * 2

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    results = []
    for call in (compiled, function):
        operands = [operand.clone().requires_grad_() for operand in chain[:3]]
        states, score = call(*operands)
        results.append((states, score.detach(), *torch.autograd.grad(score.sum(), operands)))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_is_exported():
    class Decoder(torch.nn.Module):
        def forward(self, x, bulk, p0):
            return viterbi(x, bulk, p0)

    chain = dense(F32, v=4, c=3)
    program = torch.export.export(Decoder(), chain[:3])
    assert any("logchain.best_paths" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(*chain[:3]).states, run(chain).states)


@pytest.mark.parametrize(
    "in_dims", [(0, None, None), (0, 0, 0), (None, 0, None), (None, None, 0), (1, None, 1)], ids=str
)
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_vmap_is_a_loop(in_dims, each):
    chain = dense(F64, v=4, c=3, each=each)
    scale = torch.linspace(0.5, 2.0, 5, dtype=F64)
    stacked = [
        operand if dim is None else (operand[None] * scale.view(-1, *(1,) * operand.dim())).movedim(0, dim)
        for operand, dim in zip(chain[:3], in_dims, strict=True)
    ]

    def gradient(*operands):
        return torch.func.grad(lambda *o: viterbi(*o).score.sum(), argnums=(0, 1, 2))(*operands)

    found, slopes = torch.vmap(viterbi, in_dims=in_dims)(*stacked), torch.vmap(gradient, in_dims=in_dims)(*stacked)
    for i in range(5):
        one = [t if dim is None else t.select(dim, i) for t, dim in zip(stacked, in_dims, strict=True)]
        expected = viterbi(*one)
        assert torch.equal(found.states[i], expected.states) and torch.equal(found.score[i], expected.score)
        for slope, other in zip(slopes, gradient(*one), strict=True):
            torch.testing.assert_close(slope[i], other)


def test_vmap_over_lengths():
    chain = dense(F64, v=4, c=3)
    lengths = torch.tensor([[4, 1, 2], [3, 4, 1]])
    found = torch.vmap(lambda ends: viterbi(*chain[:3], lengths=ends))(lengths)
    for i, ends in enumerate(lengths):
        assert torch.equal(found.states[i], run(chain, ends).states)
        assert torch.equal(found.score[i], run(chain, ends).score)


def test_the_inputs_stay_as_they_are(kernels):
    chain = FAMILIES["sparse"](F32)
    before = [operand.clone() for operand in chain[:3]]
    run(chain, [17, 3, 5])
    assert all(torch.equal(one, other) for one, other in zip(before, chain[:3], strict=True))


def test_wrong_arguments_are_refused():
    chain = dense(F32, v=4, c=3)
    with pytest.raises(ValueError, match="lengths: expected values from 1 to v = 4, got 5 to 5"):
        run(chain, [5, 5, 5])
    with pytest.raises(ValueError, match="lengths: expected values from 1 to v = 4, got 0 to 5"):
        run(chain, torch.tensor([0, 5, 1]))
    with pytest.raises(ValueError, match="bulk: expected shape"):
        viterbi(chain.x, chain.bulk[..., :2], chain.p0)
    with pytest.raises(ValueError, match="x: expected no NaN"):
        viterbi(chain.x * NAN, chain.bulk, chain.p0, validate=True)
