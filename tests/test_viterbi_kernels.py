"""Every loop finds the same best path: compiled, plain, in blocks, on threads and on a GPU."""

import sys

import numpy as np
import pytest
import torch

from logchain import kernels as devices
from logchain import reference
from logchain.kernels.plain import viterbi as max_product
from logchain.viterbi import viterbi
from tests.best_paths import numbers, run
from tests.families import FAMILIES, dense

F32, F64 = torch.float32, torch.float64
NAN = float("nan")


@pytest.mark.parametrize("c", [1, 2, 3, 4, 5, 8, 17, 33, 64])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_compiled_and_plain_agree_exactly(c, dtype, monkeypatch):
    pytest.importorskip("numba")
    for each in (False, True):
        chain = FAMILIES["dense"](dtype, c, each=each, c=c, v=12, n=4)
        chain = chain._replace(bulk=chain.bulk[..., :1, :, :]) if c % 2 else chain
        for lengths in (None, [12, 1, 7, 2]):
            with monkeypatch.context() as patch:
                patch.setattr(devices, "in_numba", lambda tensor: False)
                plain = run(chain, lengths)
            assert torch.equal(run(chain, lengths).states, plain.states)


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", ["dense", "sparse", "one_dead", "left_to_right"])
def test_blocks_and_threads_change_nothing(name, each, monkeypatch):
    pytest.importorskip("numba")
    from logchain.kernels import native_max_product
    from logchain.kernels.plain import semiring as semiring_chain

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
    monkeypatch.setattr(devices, "in_numba", lambda tensor: False)
    for terms in (1, 40, 200, 2000):
        monkeypatch.setattr(semiring_chain, "_TERMS", terms)
        assert torch.equal(run(chain, lengths).states, whole[1].states)


@pytest.mark.parametrize(
    ("name", "each"), [("dense", False), ("dense", True), ("one_dead", True), ("impossible", False), ("log_far", True)]
)
def test_on_the_gpu_kernels(name, each, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(devices, "on_gpu", lambda tensor: True)
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
    devices._numba.cache_clear()
    try:
        assert devices.path_kernels(chain.x) is max_product
        found = run(chain)
    finally:
        devices._numba.cache_clear()
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
