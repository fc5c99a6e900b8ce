"""The vectors of compiled loops: rows that do not fill them, NaN and infinity, numbers beside vectors."""

import numba
import numpy as np
import pytest

from logchain.kernels import native_vectors as vectors

REALS = [np.float32, np.float64]
LENGTHS = [1, 4, 7, 8, 9, 20]


@numba.njit
def combine(a, b, out, c):
    for j in range(0, c, vectors.LANES):
        x, y = vectors.load(a, j, c - j, 0.0), vectors.load(b, j, c - j, 0.0)
        vectors.store(out, j, c - j, 2.0 * x * y + (x - 1.0))


@numba.njit
def combine_few(a, b, out, c):
    for j in range(0, c, vectors.LANES):
        vectors.fetch(a, j + 10**6)
        x, y = vectors.load_few(a, j, c - j, 0.0), vectors.load_few(b, j, c - j, 0.0)
        vectors.store_few(out, j, c - j, 2.0 * x * y + (x - 1.0))


@numba.njit
def powers(whole, rounded, out, one):
    vectors.store(out, 0, vectors.LANES, vectors.two_to(vectors.load(rounded, 0, vectors.LANES, 0.0)))
    for i in range(len(rounded)):
        one[i] = vectors.flushed(vectors.two_to(rounded[i]), whole[i], -4.0)


@numba.njit
def extremes(a, c):
    high, low = vectors.everywhere(a, -np.inf), vectors.everywhere(a, np.inf)
    sums = vectors.everywhere(a, 0.0)
    for j in range(0, c, vectors.LANES):
        high = vectors.larger(high, vectors.load(a, j, c - j, -np.inf))
        low = vectors.smaller(low, vectors.load(a, j, c - j, np.inf))
        sums = sums + vectors.load(a, j, c - j, 0.0)
    return vectors.largest(high), vectors.least(low), vectors.total(sums)


@numba.njit
def chosen(reached, a, flush, out, c):
    for j in range(0, c, vectors.LANES):
        some, wide = vectors.load(reached, j, c - j, 0.0), vectors.wide(vectors.load(a, j, c - j, 0.0))
        found = vectors.where(some, wide)
        vectors.store(out, j, c - j, vectors.flushed(found, found, flush))


@numba.njit
def sixth_and_columns(matrix, sixth, out):
    load = vectors.load
    low = load(matrix, 0, 8, 0.0), load(matrix, 8, 8, 0.0), load(matrix, 16, 8, 0.0), load(matrix, 24, 8, 0.0)
    high = load(matrix, 32, 8, 0.0), load(matrix, 40, 8, 0.0), load(matrix, 48, 8, 0.0), load(matrix, 56, 8, 0.0)
    columns = vectors.turned(low + high)
    vectors.store(sixth, 0, 8, vectors.lane(low[0], 5))
    for j in range(8):
        vectors.store(out, 8 * j, 8, columns[j])


@numba.njit
def sum_without_a_share(a, times):
    total = 0.0
    for _ in range(times):
        total += vectors.borrowed(a)[1:].sum()
    return total


@numba.njit
def sum_of_entries(a):
    found = 0.0
    for k in range(len(a)):
        found += (k + 1) * vectors.entry(a, k)
    return found


@pytest.mark.parametrize("real", REALS)
def test_entries(real):
    assert sum_of_entries(np.array([2, 3, 5], real)) == 23


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("c", LENGTHS)
@pytest.mark.parametrize("combine", [combine, combine_few])
def test_arithmetic_stays_within_the_row(combine, c, real):
    a, b, out = np.arange(c, dtype=real) + 1, np.full(c + 8, 3, real), np.full(c + 8, np.nan, real)
    padded = np.concatenate([a, np.full(8, np.nan, real)])
    combine(padded, b, out, c)
    np.testing.assert_array_equal(out[:c], 6 * a + (a - 1))
    assert np.isnan(out[c:]).all()


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("c", LENGTHS)
def test_extremes_and_sum_of_a_row(c, real):
    generator = np.random.default_rng(c)
    a = np.concatenate([generator.standard_normal(c), np.full(8, np.nan)]).astype(real)
    high, low, total = extremes(a, c)
    assert (high, low) == (a[:c].max(), a[:c].min())
    np.testing.assert_allclose(total, a[:c].astype(np.float64).sum(), rtol=0, atol=c * np.finfo(real).eps * 4)


@pytest.mark.parametrize("place", [0, 3, 8])
def test_infinity_is_found_wherever_it_is(place):
    a = np.zeros(9)
    a[place] = np.inf
    assert extremes(a, 9)[0] == np.inf
    assert extremes(-a, 9)[1] == -np.inf


@pytest.mark.parametrize("out", REALS)
def test_what_is_not_reached_or_too_small_is_zero(out):
    reached = np.array([1, 0, -2, np.nan, 0, 1, 1, 1, 1], np.float32)
    a = np.array([5, np.nan, 3, 4, np.inf, 1e-3, np.nan, 2, 0], np.float32)
    found = np.full(9, -1, out)
    chosen(reached, a, 1e-2, found, 9)
    np.testing.assert_array_equal(found, np.array([5, 0, 3, 4, 0, 0, np.nan, 2, 0], out))


def test_powers_of_two():
    whole = np.array([-1022.0, -5.0, -4.0, -1.0, 0.0, 1.0, 52.0, 1023.0])
    out, one = np.zeros(8), np.zeros(8)
    powers(whole, whole + 1.5 * 2.0**52, out, one)
    np.testing.assert_array_equal(out, 2.0**whole)
    np.testing.assert_array_equal(one, np.where(whole < -4, 0, 2.0**whole))


def test_a_borrowed_array_leaves_its_owner_the_memory():
    a = np.arange(5.0)
    before = a.copy()
    assert sum_without_a_share(a, 1000) == 10_000
    np.testing.assert_array_equal(a, before)


@pytest.mark.parametrize("real", REALS)
def test_an_entry_in_all_lanes_and_the_columns_of_rows(real):
    matrix, sixth, out = np.arange(64, dtype=real), np.zeros(8, real), np.zeros(64, real)
    sixth_and_columns(matrix, sixth, out)
    np.testing.assert_array_equal(sixth, np.full(8, 5, real))
    np.testing.assert_array_equal(out.reshape(8, 8), matrix.reshape(8, 8).T)
