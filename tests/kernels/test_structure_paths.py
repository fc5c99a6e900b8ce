"""Messages, best paths and draws of bands, arcs and durations by the exact scan in C, against dense matrices."""

import numpy as np
import pytest
import torch

import logchain
from logchain import reference, transitions
from logchain.kernels.cpu import sparse
from logchain.memory import peak_bytes
from tests.expected import assert_drawn
from tests.families import Chain
from tests.kernels import structures
from tests.kernels.structures import F32, F64, INF, KINDS, draw, hub

NAN = float("nan")
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])


def with_dense(kind, **options):
    """A chain of sequences of different lengths, and its operands with dense matrices."""
    chain = draw(kind, (2, 3), (2, 1), log=True, zeros=0.1, ends=True, **options)
    return chain, dense_operands(chain)


def dense_operands(chain):
    matrices = structures.dense(chain.kind.make(*(one.double() for one in chain.parameters)))
    return [chain.x.double(), matrices, chain.p0.double()]


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 300.0, 1e7])
def test_messages_are_those_of_dense_matrices_at_each_level(scale, dtype, level):
    """In each entry, however far below the others."""
    for kind in (structures.bands(19, 0, 2, -1, 18), structures.random_arcs(37), structures.durations(3, 17)):
        for steps in (1, 5):
            chain, dense = with_dense(kind, v=6, steps=steps, dtype=dtype, scale=scale)
            lengths = chain.lengths.numpy()
            wanted = reference.forward_backward(*(one.numpy() for one in dense), log_params=True, lengths=lengths)
            computed, near = chain.call(logchain.forward_backward), 1e-13 * (1 + scale)
            for one, other in zip(computed, wanted, strict=True):
                rounding = 1e-15 if dtype == F64 else 2.0**-24
                torch.testing.assert_close(one.double(), torch.from_numpy(np.asarray(other)), rtol=rounding, atol=near)
            states, log_norm = chain.call(logchain.filtered)
            shares = torch.from_numpy(np.asarray(wanted.forward)).softmax(-1).nan_to_num(0.0)
            torch.testing.assert_close(states.double(), shares, rtol=0, atol=1e-5 if dtype == F32 else near)
            exact = torch.from_numpy(np.asarray(wanted.log_norm))
            torch.testing.assert_close(log_norm.double(), exact, rtol=1e-6 if dtype == F32 else 1e-15, atol=near)


def test_draws_of_detours_of_ten_million_nats_have_their_posteriors():
    """In float32, whose exponents are whole numbers up to 2^24 only."""
    x = torch.tensor([[0.0, -3e7], [0.0, 0.0], [-3e7, 0.125]])
    chain = x, transitions.Banded(torch.full((1, 2), 0.5), [0]), torch.ones(2)
    drawn = logchain.sample(*chain, 4000, generator=torch.Generator().manual_seed(0))
    frequencies = torch.nn.functional.one_hot(drawn, 2).double().mean(0)
    torch.testing.assert_close(frequencies, logchain.marginals(*chain).states.double(), rtol=0, atol=0.04)
    assert 0.4 < frequencies[1, 0] < 0.6


@pytest.mark.parametrize(("steps", "dtype"), [(1, F32), (3, F64)], ids=str)
def test_draws_are_those_of_dense_matrices_at_each_level(steps, dtype, level):
    segments = structures.durations(3, 4), structures.durations(7, 1)
    for kind in (structures.bands(7, 0, 2, -1), structures.random_arcs(6), structures.arcs(70, hub(70)), *segments):
        chain, dense = with_dense(kind, v=4, steps=steps, dtype=dtype, scale=3.0)
        drawn = chain.call(logchain.sample, 4000, generator=torch.Generator().manual_seed(0))
        assert_drawn(Chain(*dense, log_params=True), drawn, chain.lengths)


@DTYPES
@pytest.mark.parametrize("steps", [1, 8])
def test_equal_paths_pass_the_lowest_states_at_each_level(steps, dtype, level):
    """Of whole numbers, whose sums are exact; also where a state has more arcs than a row."""
    shapes = structures.bands(41, 3, -2, 0, 40, 1, -1, 2, 5, 7), structures.bands(5, 1), structures.random_arcs(37)
    segments = [structures.durations(*sizes) for sizes in ((17, 2), (2, 17), (3, 1), (1, 5), (2, 33))]
    for kind in (*shapes, *segments, structures.arcs(210, hub(200))):
        chain, _ = with_dense(kind, v=9, steps=steps, dtype=dtype)
        for operand in chain.operands:
            operand.round_()
        dense = [one.numpy() for one in dense_operands(chain)]
        wanted = reference.viterbi(*dense, log_params=True, lengths=chain.lengths.numpy())
        computed = chain.call(logchain.viterbi)
        assert not computed.score.isnan().any() and (computed.states == torch.from_numpy(wanted.states)).all()


@DTYPES
@pytest.mark.parametrize("v", [1, 2, 40])
def test_best_paths_from_checkpoints_are_the_same(v, dtype, level, monkeypatch):
    for kind in (structures.bands(41, 3, -2, 0, 40, 1, -1), structures.random_arcs(37), KINDS["durations"]):
        for steps in {1, max(1, v - 1)}:
            chain, _ = with_dense(kind, v=v, steps=steps, dtype=dtype)
            for operand in chain.operands:  # tenths, so that rounding chooses among paths
                operand.mul_(3).round_().div_(10)
            monkeypatch.setattr(sparse, "_POINTERS", 4 * v * kind.c)
            whole = chain.call(logchain.viterbi)
            monkeypatch.setattr(sparse, "_POINTERS", 0)
            assert (whole.states >= 0).any()
            assert all(map(torch.equal, whole, chain.call(logchain.viterbi)))


def test_best_path_of_a_long_chain_takes_little_memory():
    v, c = 30_000, 1000
    x, chain = torch.randn(v + c).as_strided((v, c), (1, 1)), transitions.Banded(torch.rand(3, c), (0, 1, 2))
    assert peak_bytes(lambda: logchain.viterbi(x, chain, torch.rand(c))) < v * c / 10


@DTYPES
@pytest.mark.parametrize("name", ["arcs", "bands", "durations"])
def test_no_path_is_known_where_a_number_is_infinite_or_none(name, dtype):
    chain = draw(KINDS[name], (4,), (4,), steps=4, dtype=dtype)
    states = chain.call(logchain.viterbi).states
    for number in (NAN, INF):
        for operand in (chain.x[:, 4], chain.p0, *(one[:, 3] for one in chain.parameters)):
            operand, restored = operand.flatten(1), operand.flatten(1)[:, 0].clone()
            operand[1, 0] = number
            computed, score = chain.call(logchain.viterbi)
            assert score.isnan().tolist() == [False, True, False, False] and (computed[1] == -1).all()
            assert torch.equal(computed[2:], states[2:])
            operand[:, 0] = restored
    chain.parameters[0][0, 0] = -1.0
    assert chain.call(logchain.viterbi).score.isnan().tolist() == [True, False, False, False]
