"""The best paths of the kernels: none is better, by more than the contract allows, and ties go to the lowest states."""

import numpy as np
import pytest
import torch

from logchain.viterbi import viterbi
from tests.best_paths import assert_best, run
from tests.contract import poisoned_memory
from tests.families import FAMILIES, Chain, Draw, dense
from tests.layouts import poisoned, strange

backtrack = pytest.importorskip("logchain.kernels.gpu.backtrack")

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")

# one set of matrices for all sequences, or a set for each
BOTH = pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])

# sequences that share a matrix take it row by row; one alone takes it whole, or in tiles
CUTS = pytest.mark.parametrize("each, c", [(False, 17), (True, 6), (True, 70)], ids=["rows", "whole", "tiles"])


def few(each: bool) -> dict:
    """Three sequences that share matrices, or two that do not."""
    return {"each": each, "n": 2 if each else 3, "t": 1}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "c301"])
def test_families(kernels, name):
    each = len(name) % 2 == 0
    sizes = {"n": 1 if each else 3, "t": 1, "each": each, "v": min(FAMILIES[name](n=1, t=1).x.shape[-2], 4)}
    assert_best(FAMILIES[name](dtype=F32, **sizes), device=kernels)


@BOTH
@pytest.mark.parametrize("c", [1, 17, 33, 65])
def test_sizes(kernels, c, each):
    """Linear with one matrix for each step, and logarithms with one for all."""
    chain = FAMILIES["sparse" if c > 1 else "dense"](dtype=F32, v=3, c=c, **few(each))
    assert_best(chain, device=kernels)
    assert_best(chain.logs()._replace(bulk=chain.logs().bulk[..., :1, :, :]), device=kernels)


@pytest.mark.parametrize("m, c", [(2, 17), (17, 2), (33, 5)])
def test_blocks_of_sequences(kernels, m, c):
    """Of eight in the recursion, and of as many as fill a warp on the way back."""
    assert_best(dense(F32, n=m, t=1, v=3, c=c), device=kernels)


@BOTH
@pytest.mark.parametrize("name, c", [("detour", 6), ("tiny_transitions", 17), ("sharp", 3)])
def test_float64(kernels, name, c, each):
    assert_best(FAMILIES[name](dtype=F64, v=5, c=c, **few(each)), device=kernels)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(kernels, dtype, each):
    chain = dense(F32, v=4, c=6, **few(each))
    assert_best(Chain(chain.x.to(dtype), chain.bulk.to(dtype), chain.p0), device=kernels)


@CUTS
def test_one_linear_matrix_for_all_steps(kernels, c, each):
    chain = FAMILIES["left_to_right"](dtype=F32, v=5, c=c, **few(each))
    assert_best(chain._replace(bulk=chain.bulk[..., 1:2, :, :]), device=kernels)


@CUTS
@pytest.mark.parametrize("log", [False, True])
def test_columns_of_any_size(kernels, c, log, each):
    """From denormal numbers to the largest, which x makes up for: nothing is lost to the size of a logarithm."""
    chain = dense(F64, v=5, c=c, **few(each))
    scale = torch.tensor([1e-40, 1e-36, 1.0, 1e30, 0.0], dtype=F64).repeat(c)[:c]
    chain.bulk[:] *= scale
    chain.x[..., 1:, :] -= torch.where(scale > 0, scale, 1.0).log()
    chain = chain.to(F32)
    best = assert_best(chain.logs() if log else chain, device=kernels)
    assert (best.states[..., 1:] % 5 < 4).all()


@CUTS
def test_large_logarithms_cancel(kernels, c, each):
    """Weights of 1e4 in one matrix and of -1e4 in the next leave no rounding of their size behind."""
    chain = dense(F64, v=7, c=c, **few(each)).logs()
    noise = torch.randint(-1000, 1000, chain.bulk.shape, generator=torch.Generator().manual_seed(0)) / 512
    chain.bulk[:] = noise - 8192 * (-1.0) ** torch.arange(6)[:, None, None]
    assert_best(chain.to(F32), device=kernels)


@CUTS
@pytest.mark.parametrize("lengths", [[3, 1], [5, 4]])
def test_nothing_behind_an_end_matters(kernels, lengths, c, each):
    chain = dense(F32, v=5, c=c, each=each, n=2, t=1)
    clean, dirty = assert_best(chain, lengths, device=kernels), poisoned(chain, lengths)
    for one, other in zip(run(Chain(*(t.to(kernels) for t in dirty[:3])), lengths), clean, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [0, -3, 6, 2**40])
def test_a_length_out_of_range_has_no_path(kernels, bad):
    chain = dense(F32, v=5, c=3, n=3, t=1)
    lengths = torch.tensor([5, bad, 2], device=kernels)
    states = viterbi(*(tensor.to(kernels) for tensor in chain[:3]), lengths=lengths).states.cpu()[:, 0]
    assert (states[1] == -1).all() and ((states >= 0).sum(-1) == torch.tensor([5, 0, 2])).all()


@CUTS
def test_ties_go_to_the_lowest_state(kernels, c, each):
    chain = dense(F32, v=4, c=c, **few(each))
    flat = Chain(torch.zeros_like(chain.x), torch.full_like(chain.bulk, 0.3), torch.full_like(chain.p0, 0.2))
    assert (assert_best(flat, device=kernels).states == 0).all()
    lowest = c // 2
    flat.x[..., :lowest] = -INF
    flat.bulk[..., 1, lowest, :] = 0.0
    expected = torch.tensor([lowest, lowest + 1, lowest, lowest], device=kernels)
    assert (assert_best(flat, device=kernels).states == expected).all()


@CUTS
@pytest.mark.parametrize("place", ["x", "last x", "bulk", "p0"])
def test_nan_stays_in_its_sequence(kernels, place, c, each):
    """Also where no path could go anyway."""
    chain = dense(F32, v=4, c=c, each=each, n=2, t=1)
    chain = chain._replace(p0=chain.p0.expand(2, 1, c).clone())
    clean = assert_best(chain, device=kernels)
    chain.p0[1, 0, c // 2] = 0.0
    if place == "bulk":
        chain.bulk[-1, 0, 0, c // 2, 0] = NAN
    elif place == "p0":
        chain.p0[1, 0, c // 2] = NAN
    else:
        chain.x[1, 0, -1 if place == "last x" else 0, c // 2] = NAN
    best = run(Chain(*(tensor.to(kernels) for tensor in chain[:3])))
    spoilt = torch.tensor([place == "bulk" and not each, True])
    assert best.score[spoilt].isnan().all() and (best.states[spoilt] == -1).all()
    assert torch.equal(best.states[~spoilt], clean.states[~spoilt])
    assert torch.equal(best.score[~spoilt], clean.score[~spoilt])


@CUTS
def test_strange_strides(kernels, c, each):
    chain = dense(F32, v=4, c=c, **few(each))
    for how in ("transposed", "sliced"):
        assert_best(strange(chain, how), device=kernels)
    step = chain.bulk[..., :1, :, :]
    assert_best(
        chain._replace(bulk=step.expand(-1, -1, 3, c, c), p0=chain.p0.expand(len(chain.x), 1, c)), device=kernels
    )


@CUTS
def test_nothing_is_read_before_it_is_written(kernels, c, each):
    chain = FAMILIES["sparse"](dtype=F32, v=4, c=c, **few(each))
    with poisoned_memory():
        assert_best(chain, [3, 2, 1][: len(chain.x)], device=kernels)


def test_a_path_of_given_messages(device):
    """The messages decide, not what they were made of; sequences of several sets in one program."""
    draw = Draw(0, 1, 1, 4, 5, False)
    messages = draw.normal(4, 3, 2, 5).to(device, F32)
    bulk = draw.normal(3, 3, 5, 5).to(device, F32)
    ends = torch.tensor([[4, 2], [1, 4], [3, 3]], device=device)
    paths = backtrack.paths(messages, bulk, ends, log_params=True).cpu()
    for z, y in np.ndindex(3, 2):
        end, state, expected = int(ends[z, y]), None, []
        for i in reversed(range(end)):
            terms = messages[i, z, y].double()
            terms = terms if state is None else terms + bulk[i, z, :, state].double()
            state = int(terms.argmax())
            expected.insert(0, state)
        assert paths[z, y].tolist() == expected + [-1] * (4 - end)


def test_tiny_entries_of_doubles(device):
    """Of two ways to state 0 the one through the smaller entry weighs more, by 1e-6."""
    bulk = torch.tensor([[1e-31, 1.0], [1e-29, 1.0]], dtype=F64, device=device)
    better = np.log(1e-31) - np.log(1e-29) - 1e-6
    messages = torch.tensor([[0.0, better], [0.0, -INF]], dtype=F64, device=device)[:, None, None]
    ends = torch.full((1, 1), 2, device=device)
    assert backtrack.paths(messages, bulk[None, None], ends, log_params=False).flatten().tolist() == [0, 0]
