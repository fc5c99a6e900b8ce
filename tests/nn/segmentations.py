"""The oracle of explicit durations: every segmentation of a sequence, one after the other."""

import itertools
import math
from collections.abc import Iterator

import numpy as np

# state, first step, duration
Segment = tuple[int, int, int]


def lengths_of_segments(v: int, longest: int, censored: bool) -> Iterator[tuple[int, ...]]:
    """Durations of segments that cover v steps; with `censored` the last may go on after them."""
    for first in range(1, longest + 1):
        if first == v or (censored and first > v):
            yield (first,)
        elif first < v:
            yield from ((first, *rest) for rest in lengths_of_segments(v - first, longest, censored))


def every(v: int, c: int, longest: int, censored: bool) -> Iterator[tuple[Segment, ...]]:
    for lengths in lengths_of_segments(v, longest, censored):
        firsts = [0, *itertools.accumulate(lengths[:-1])]
        for states in itertools.product(range(c), repeat=len(lengths)):
            yield tuple(zip(states, firsts, lengths, strict=True))


def log_weights(x, p0, matrix, durations, censored=False) -> dict[tuple[Segment, ...], float]:
    """The log-weight of each segmentation, for logarithms x [v, c], p0 [c], matrix [c, c] and durations [c, D]."""
    weights = {}
    for segments in every(*x.shape, durations.shape[1], censored):
        states = [state for state, _, _ in segments]
        terms = [p0[states[0]], *(matrix[pair] for pair in itertools.pairwise(states))]
        for state, first, d in segments:
            terms += [durations[state, d - 1], *x[first : first + d, state]]
        weights[segments] = sum(terms)
    return weights


def log_sum(weights) -> float:
    top = max(weights.values())
    return top + math.log(math.fsum(math.exp(weight - top) for weight in weights.values()))


def posterior(weights, v: int, c: int, longest: int) -> np.ndarray:
    """The probability that a segment of a state begins at a step and takes so many [v, c, D]."""
    norm, begins = log_sum(weights), np.zeros((v, c, longest))
    for segments, weight in weights.items():
        for state, first, d in segments:
            begins[first, state, d - 1] += math.exp(weight - norm)
    return begins


def of_states(begins: np.ndarray) -> np.ndarray:
    """The probability of each state at each step [v, c]."""
    states = np.zeros(begins.shape[:2])
    for first, d in itertools.product(range(len(begins)), range(1, begins.shape[2] + 1)):
        states[first : first + d] += begins[first, :, d - 1]
    return states


def steps_of(segments: tuple[Segment, ...], v: int) -> tuple[int, ...]:
    """The state at each step."""
    return tuple(state for state, _, d in segments for _ in range(d))[:v]
