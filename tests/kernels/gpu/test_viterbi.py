"""The best paths of the kernels: none is better, by more than the contract allows, and ties go to the lowest states."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from logchain.kernels import chain as kernel_chain
from logchain.layout import Layout
from tests.contract import of_steps, poisoned_memory, value_bound
from tests.families import FAMILIES, Chain, Draw

forward_chain = pytest.importorskip("logchain.kernels.gpu.forward_chain")
from logchain.kernels.gpu import backtrack  # noqa: E402
from logchain.kernels.gpu import viterbi as max_product  # noqa: E402

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")

# one set of matrices for all sequences, or a set for each
BOTH = pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])

# sequences that share a matrix take it row by row; one alone takes it whole, or in tiles
CUTS = pytest.mark.parametrize("each, c", [(False, 17), (True, 6), (True, 70)], ids=["rows", "whole", "tiles"])


def few(each: bool) -> dict:
    """Three sequences that share matrices, or two that do not."""
    return {"each": each, "n": 2 if each else 3, "t": 1}


class Best(NamedTuple):
    """Of one sequence: its logarithms, its max-plus messages (v, c) and its best path, the lowest from the end."""

    x: np.ndarray
    bulk: np.ndarray
    p0: np.ndarray
    messages: np.ndarray
    states: list[int]
    weight: float

    def weigh(self, states) -> float:
        """The log-weight of a path."""
        weight = self.p0[states[0]] + self.x[0, states[0]]
        for i in range(1, len(states)):
            weight += self.bulk[i - 1, states[i - 1], states[i]] + self.x[i, states[i]]
        return weight

    def deepest(self) -> float:
        """D: how far the best path runs below its messages' maxima."""
        return max(row.max() - row[z] for row, z in zip(self.messages, self.states, strict=True))

    def largest_logarithm(self) -> float:
        """What is added to a message may round as its size is, not as the sum's."""
        return np.abs(self.bulk[np.isfinite(self.bulk)]).max(initial=0.0)


def viterbi(x: np.ndarray, bulk: np.ndarray, p0: np.ndarray) -> Best:
    """Of logarithms (v, c), (v - 1, c, c) and (c)."""
    messages = [p0 + x[0]]
    for i in range(1, len(x)):
        messages.append((messages[-1][:, None] + bulk[i - 1]).max(0) + x[i])
    states = [int(messages[-1].argmax())]
    for i in reversed(range(1, len(x))):
        states.append(int((messages[i - 1] + bulk[i - 1][:, states[-1]]).argmax()))
    return Best(x, bulk, p0, np.array(messages), states[::-1], messages[-1].max())


def sequences(chain: Chain, lengths=None) -> list[Best]:
    """The truth of each sequence of a batch, in order; in more than float64, which is under test too."""
    x, bulk, p0 = (operand.double().numpy().astype(np.longdouble) for operand in chain[:3])
    if not chain.log_params:
        with np.errstate(divide="ignore"):
            bulk, p0 = np.log(bulk), np.log(p0)
    *batch, v, c = x.shape
    bulk, p0 = np.broadcast_to(bulk, (*batch, v - 1, c, c)), np.broadcast_to(p0, (*batch, c))
    ends = np.full(batch, v) if lengths is None else np.broadcast_to(lengths, batch)
    return [viterbi(x[n][: ends[n]], bulk[n][: ends[n] - 1], p0[n]) for n in np.ndindex(*batch)]


def as_kernels_take(chain: Chain, device: str, lengths=None) -> kernel_chain.Chain:
    """All steps, as on a device, where lengths are not looked at."""
    x, bulk, p0 = (operand.to(device) for operand in chain[:3])
    layout = Layout.of(x, bulk)
    ends = None if lengths is None else layout.sequences(lengths.expand(x.shape[:-2]).to(device))[..., None]
    dtype = F64 if F64 in (x.dtype, bulk.dtype, p0.dtype) else F32
    operands = (layout.steps_first(x), layout.matrices(bulk)[: x.shape[-2] - 1], layout.weights(p0))
    return kernel_chain.Chain(*operands, ends, chain.log_params, dtype)


class Found:
    """What the kernels say of a chain, on the CPU. Its batch is in the order that they walk."""

    def __init__(self, chain: Chain, device: str, lengths=None):
        self.chain, self.lengths = chain, lengths
        problem = as_kernels_take(chain, device, lengths)
        x, bulk, start, ends = max_product.operands(problem)
        options = {"log_params": chain.log_params, "dtype": problem.dtype, "semiring": "max", "keep": True}
        weight, messages = forward_chain.forward(x, bulk, start, ends, **options)
        states = backtrack.paths(messages, bulk, ends, log_params=chain.log_params)
        assert states.dtype == torch.int64 and messages.dtype == problem.dtype
        self.states = states.flatten(0, 1).cpu().numpy()  # (n, v)
        self.weight = weight.flatten().cpu().numpy()  # (n)
        self.messages = messages.flatten(1, 2).movedim(0, 1).cpu().double().numpy()  # (n, v, c)
        self.dtype = problem.dtype

    def assert_contract(self) -> "Found":
        truth = sequences(self.chain, self.lengths)
        assert len(truth) == len(self.states)
        for states, weight, messages, best in zip(self.states, self.weight, self.messages, truth, strict=True):
            self._assert_sequence(states, weight, messages, best)
        return self

    def _assert_sequence(self, states, weight, messages, best: Best) -> None:
        end = len(best.x)
        assert (states[end:] == -1).all()
        assert (messages[end:] == -INF).all()
        top = best.messages.max(-1, keepdims=True)
        expected = best.messages - np.where(np.isneginf(top), 0.0, top)
        np.testing.assert_array_equal(np.isneginf(messages[:end]), np.isneginf(expected))
        possible = np.isfinite(expected)
        c = expected.shape[-1]
        depth = max(-expected[possible].min(initial=0.0), best.largest_logarithm())
        allowed = of_steps(end, c, depth, dtype=self.dtype)
        assert (np.abs(messages[:end][possible] - expected[possible]) <= allowed).all()
        if best.weight == -INF:
            assert weight == -INF and (states == -1).all()
            return
        bound = value_bound(np.array(best.weight), end, c, best.deepest(), dtype=self.dtype)
        assert abs(weight - best.weight) <= bound
        assert ((states[:end] >= 0) & (states[:end] < best.x.shape[-1])).all()
        assert best.weight - best.weigh(states[:end]) <= bound


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "c301"])
def test_families(device, name):
    each = len(name) % 2 == 0
    sizes = {"n": 1 if each else 3, "t": 1, "each": each, "v": min(FAMILIES[name](n=1, t=1).x.shape[-2], 4)}
    Found(FAMILIES[name](dtype=F32, **sizes), device).assert_contract()


@BOTH
@pytest.mark.parametrize("c", [1, 17, 33, 65])
def test_sizes(device, c, each):
    """Linear with one matrix for each step, and logarithms with one for all."""
    chain = FAMILIES["sparse" if c > 1 else "dense"](dtype=F32, v=3, c=c, **few(each))
    Found(chain, device).assert_contract()
    Found(chain.logs()._replace(bulk=chain.logs().bulk[..., :1, :, :]), device).assert_contract()


@pytest.mark.parametrize("v", [1, 2, 7])
@BOTH
def test_steps(device, v, each):
    Found(FAMILIES["sharp"](dtype=F32, v=v, c=3, **few(each)), device).assert_contract()


@pytest.mark.parametrize("m, c", [(2, 17), (17, 2), (33, 5)])
def test_blocks_of_sequences(device, m, c):
    """Of eight in the recursion, and of as many as fill a warp on the way back."""
    Found(FAMILIES["dense"](dtype=F32, n=m, t=1, v=3, c=c), device).assert_contract()


@BOTH
@pytest.mark.parametrize("name, c", [("detour", 6), ("tiny_transitions", 17)])
def test_float64(device, name, c, each):
    Found(FAMILIES[name](dtype=F64, v=5, c=c, **few(each)), device).assert_contract()


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(device, dtype, each):
    chain = FAMILIES["dense"](dtype=F32, v=4, c=6, **few(each))
    Found(Chain(chain.x.to(dtype), chain.bulk.to(dtype), chain.p0), device).assert_contract()


@CUTS
def test_one_linear_matrix_for_all_steps(device, c, each):
    chain = FAMILIES["left_to_right"](dtype=F32, v=5, c=c, **few(each))
    Found(chain._replace(bulk=chain.bulk[..., 1:2, :, :]), device).assert_contract()


@CUTS
@pytest.mark.parametrize("log_params", [False, True])
def test_columns_of_any_size(device, c, log_params, each):
    """From denormal numbers to the largest, which x makes up for: nothing is lost to the size of a logarithm."""
    chain = FAMILIES["dense"](dtype=F64, v=5, c=c, **few(each))
    scale = torch.tensor([1e-40, 1e-36, 1.0, 1e30, 0.0], dtype=F64).repeat(c)[:c]
    chain.bulk[:] *= scale
    chain.x[..., 1:, :] -= torch.where(scale > 0, scale, 1.0).log()
    chain = chain.to(F32)
    found = Found(chain.logs() if log_params else chain, device).assert_contract()
    assert (found.states[:, 1:] % 5 < 4).all()


@CUTS
def test_large_logarithms_cancel(device, c, each):
    """Weights of 1e4 in one matrix and of -1e4 in the next leave no rounding of their size behind."""
    chain = FAMILIES["dense"](dtype=F64, v=7, c=c, **few(each)).logs()
    noise = torch.randint(-1000, 1000, chain.bulk.shape, generator=torch.Generator().manual_seed(0)) / 512
    chain.bulk[:] = noise - 8192 * (-1.0) ** torch.arange(6)[:, None, None]
    Found(chain.to(F32), device).assert_contract()


@CUTS
@pytest.mark.parametrize("lengths", [[3, 1], [5, 4]])
def test_nothing_behind_an_end_matters(device, lengths, c, each):
    chain = FAMILIES["dense"](dtype=F32, v=5, c=c, each=each, n=2, t=1)
    for n, length in enumerate(lengths):
        chain.x[n, :, length:] = NAN
        if each:
            chain.bulk[n, :, max(length - 1, 0) :] = NAN
    Found(chain, device, torch.tensor(lengths)[:, None]).assert_contract()


@pytest.mark.parametrize("bad", [0, -3, 6, 2**40])
def test_a_length_out_of_range_has_no_path(device, bad):
    chain = FAMILIES["dense"](dtype=F32, v=5, c=3, n=3, t=1)
    problem = as_kernels_take(chain, device, torch.tensor([[5], [bad], [2]]))
    states = max_product.paths(problem, 5)[0].flatten(0, 1).cpu()
    assert (states[1] == -1).all() and ((states >= 0).sum(-1) == torch.tensor([5, 0, 2])).all()


@BOTH
def test_the_answer_of_a_chain(device, each):
    """Kernels one after the other, also without lengths; and the weight alone needs no messages."""
    chain = FAMILIES["sparse"](dtype=F32, v=4, c=6, **few(each))
    for lengths in (None, torch.tensor([[4], [2], [1]])[: len(chain.x)]):
        problem, found = as_kernels_take(chain, device, lengths), Found(chain, device, lengths)
        states, _ = max_product.paths(problem, 4)
        assert states.shape == (problem.g, problem.m, 4)
        assert (states.flatten(0, 1).cpu().numpy() == found.states).all()
        x, bulk, start, ends = max_product.operands(problem)
        weight, none = forward_chain.forward(x, bulk, start, ends, log_params=False, keep=False, semiring="max")
        assert none is None and (weight.flatten().cpu().numpy() == found.weight).all()


@CUTS
def test_ties_go_to_the_lowest_state(device, c, each):
    chain = FAMILIES["dense"](dtype=F32, v=4, c=c, **few(each))
    flat = Chain(torch.zeros_like(chain.x), torch.full_like(chain.bulk, 0.3), torch.full_like(chain.p0, 0.2))
    assert (Found(flat, device).states == 0).all()
    open_ = c // 2
    flat.x[..., :open_] = -INF
    flat.bulk[..., 1, open_, :] = 0.0
    assert (Found(flat, device).states == [open_, open_ + 1, open_, open_]).all()


@CUTS
@pytest.mark.parametrize("place", ["x", "last x", "bulk", "p0"])
def test_nan_stays_in_its_sequence(device, place, c, each):
    """Also where no path could go anyway."""
    chain = FAMILIES["dense"](dtype=F32, v=4, c=c, each=each, n=2, t=1)
    chain = chain._replace(p0=chain.p0.expand(2, 1, c).clone())
    clean = Found(chain, device)
    chain.p0[1, 0, c // 2] = 0.0
    if place == "bulk":
        chain.bulk[-1, 0, 0, c // 2, 0] = NAN
    elif place == "p0":
        chain.p0[1, 0, c // 2] = NAN
    else:
        chain.x[1, 0, -1 if place == "last x" else 0, c // 2] = NAN
    found = Found(chain, device)
    spoilt = np.array([place == "bulk" and not each, True])
    assert np.isnan(found.weight[spoilt]).all()
    assert (found.states[spoilt] == -1).all()
    assert (found.states[~spoilt] == clean.states[~spoilt]).all()
    assert (found.weight[~spoilt] == clean.weight[~spoilt]).all()


@CUTS
def test_strange_strides(device, c, each):
    """Transposed, sliced and offset operands."""
    chain = FAMILIES["dense"](dtype=F32, v=4, c=c, **few(each))
    wide = torch.full((*chain.bulk.shape[:-2], c + 3, c + 1), NAN)
    wide[..., 1 : c + 1, 1 : c + 1] = chain.bulk.mT
    strange = Chain(
        chain.x.mT.contiguous().mT, wide[..., 1 : c + 1, 1 : c + 1].mT, chain.p0.expand_as(chain.x[:, :, 0])
    )
    found, plain = Found(strange, device), Found(chain, device)
    assert (found.states == plain.states).all() and (found.weight == plain.weight).all()


def test_expanded_matrices_and_starts(device):
    chain = FAMILIES["sharp"](dtype=F32, n=3, t=1, v=5, c=6)
    step = chain.bulk[..., :1, :, :]
    expanded = chain._replace(bulk=step.expand(3, 1, 4, 6, 6), p0=chain.p0.expand(3, 1, 6))
    assert (Found(expanded, device).states == Found(chain._replace(bulk=step), device).states).all()


@CUTS
def test_nothing_is_read_before_it_is_written(device, c, each):
    chain = FAMILIES["sparse"](dtype=F32, v=4, c=c, **few(each))
    lengths = torch.tensor([3, 2, 1][: chain.x.shape[0]])[:, None]
    with poisoned_memory():
        Found(chain, device, lengths).assert_contract()


def test_a_path_of_given_messages(device):
    """The messages decide, not what they were made of; sequences of several sets in one program."""
    draw = Draw(0, 1, 1, 4, 5, False)
    messages = draw.normal(4, 3, 2, 5).to(device, F32)
    bulk = draw.normal(3, 3, 5, 5).to(device, F32)
    ends = torch.tensor([[4, 2], [1, 4], [3, 3]], device=device)
    found = backtrack.paths(messages, bulk, ends, log_params=True).cpu()
    for z, y in np.ndindex(3, 2):
        end, state, expected = int(ends[z, y]), None, []
        for i in reversed(range(end)):
            terms = messages[i, z, y].double()
            terms = terms if state is None else terms + bulk[i, z, :, state].double()
            state = int(terms.argmax())
            expected.insert(0, state)
        assert found[z, y].tolist() == expected + [-1] * (4 - end)


def test_tiny_entries_of_doubles(device):
    """Of two ways to state 0 the one through the smaller entry weighs more, by 1e-6."""
    bulk = torch.tensor([[1e-31, 1.0], [1e-29, 1.0]], dtype=F64, device=device)
    better = np.log(1e-31) - np.log(1e-29) - 1e-6
    messages = torch.tensor([[0.0, better], [0.0, -INF]], dtype=F64, device=device)[:, None, None]
    ends = torch.full((1, 1), 2, device=device)
    assert backtrack.paths(messages, bulk[None, None], ends, log_params=False).flatten().tolist() == [0, 0]
