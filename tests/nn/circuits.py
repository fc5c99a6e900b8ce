"""The truth about small circuits: the probability of every value of all variables, by plain sums of linear weights.

A table has an axis of K values for each variable. With `best` the terms over hidden units are not added up, but the
largest one is taken. No line is shared with the library.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch

from logchain import nn

Weights = dict[str, np.ndarray]
Table = Callable[[Weights, bool], np.ndarray]


def weights_of(circuit: torch.nn.Module) -> Weights:
    """The linear weights of each part, in float64, normalised here."""
    found = {}
    for name, part in circuit.named_modules():
        if isinstance(part, nn.LogWeights):
            linear = np.exp(part.logits.detach().double().numpy())
            found[name] = linear / linear.sum(part.dim, keepdims=True)
    return found


def chain(w: Weights, best: bool) -> np.ndarray:
    """Every path of every repetition."""
    inputs, bulk, p0, mixing = w["input.weights"], w["bulk"], w["p0"], w["mixing"]
    t, v, k, c = inputs.shape
    table = np.zeros((k,) * v)
    for r, *path in itertools.product(range(t), *[range(c)] * v):
        weight = mixing[r] * p0[r, path[0]]
        weight *= math.prod(bulk[r, i, path[i], path[i + 1]] for i in range(v - 1))
        table = _add(table, weight * outer([inputs[r, i, :, path[i]] for i in range(v)]), best)
    return table


def tree(w: Weights, best: bool) -> np.ndarray:
    """From the leaves to the root, with a table for each unit of each node."""
    inputs, mixing = w["input.weights"], w["mixing"]
    t, v, k, c = inputs.shape
    total = np.zeros((k,) * v)
    for r in range(t):
        nodes = [list(inputs[r, i].T) for i in range(v)]
        level = 0
        while len(nodes) > 1:
            part = f"layers.{level}"
            if f"{part}.sums.weights" in w:
                mixed = [_mix(node, w[f"{part}.sums.weights"][r, i], best) for i, node in enumerate(nodes)]
                nodes = [
                    [outer([factor[unit] for factor in mixed[i : i + 2]]) for unit in range(c)]
                    for i in range(0, len(mixed), 2)
                ]
            else:
                above = []
                for i in range(0, len(nodes) - 1, 2):
                    pairs = [outer([left, right]) for left in nodes[i] for right in nodes[i + 1]]
                    above.append(_mix(pairs, w[f"{part}.pairs.weights"][r, i // 2], best))
                if len(nodes) % 2:
                    above.append(_mix(nodes[-1], w[f"{part}.alone.weights"][r, 0], best))
                nodes = above
            level += 1
        (root,) = _mix(nodes[0], w["root.weights"][r, 0], best)
        total = _add(total, mixing[r] * root, best)
    return total


def outer(tables: list[np.ndarray]) -> np.ndarray:
    """The products of all their entries, with the axes of all."""
    found = np.ones(())
    for table in tables:
        found = np.multiply.outer(found, table)
    return found


def _mix(terms: list[np.ndarray], weights: np.ndarray, best: bool) -> list[np.ndarray]:
    found = []
    for column in weights.T:
        total = np.zeros_like(terms[0])
        for weight, term in zip(column, terms, strict=True):
            total = _add(total, weight * term, best)
        found.append(total)
    return found


def _add(total: np.ndarray, term: np.ndarray, best: bool) -> np.ndarray:
    return np.maximum(total, term) if best else total + term


def values(k: int, v: int) -> torch.Tensor:
    """All values of all variables (k^v, v), in the order of a flattened table."""
    return torch.tensor(list(itertools.product(range(k), repeat=v)))


def given(table: np.ndarray, data: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """The table, with zeros where a value differs from what is observed."""
    allowed = [np.arange(table.shape[0]) == value if seen else True for value, seen in zip(data, observed, strict=True)]
    return table * outer([np.broadcast_to(some, table.shape[0]) for some in allowed])


def expected_counts(table: Table, w: Weights, counts: np.ndarray) -> Weights:
    """How often each weight is expected to be used: `w dL/dw` of `L = sum counts log table`, by differences."""

    def total(changed: Weights) -> float:
        return float((counts * np.log(table(changed, False))).sum())

    found = {}
    for name, array in w.items():
        found[name] = np.empty_like(array)
        for index in np.ndindex(array.shape):
            ends = []
            for sign in (1, -1):
                changed = array.copy()
                changed[index] *= 1 + sign * 1e-5
                ends.append(total(w | {name: changed}))
            found[name][index] = (ends[0] - ends[1]) / 2e-5
    return found
