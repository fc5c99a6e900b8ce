"""An oracle for small chain circuits: the probability of every value of all variables, by sums over all paths.

A table has an axis of K values for each variable. With `best` the terms over hidden units are not added up, but the
largest one is taken. No line is shared with the library.
"""

import itertools
import math

import numpy as np
import torch

from logchain import nn

Weights = dict[str, np.ndarray]


def weights_of(circuit: torch.nn.Module) -> Weights:
    """The linear weights of each part, in float64, normalized here."""
    found = {}
    for name, part in circuit.named_modules():
        if isinstance(part, nn.LogWeights):
            linear = np.exp(part.logits.detach().double().numpy())
            found[name] = linear / linear.sum(part.dim, keepdims=True)
    return found


def joint(w: Weights, best: bool = False) -> np.ndarray:
    """The table of a chain circuit: every path of every repetition."""
    inputs, bulk, p0, mixing = w["input.weights"], w["bulk"], w["p0"], w["mixing"]
    t, v, k, c = inputs.shape
    table = np.zeros((k,) * v)
    for r, *path in itertools.product(range(t), *[range(c)] * v):
        weight = mixing[r] * p0[r, path[0]]
        weight *= math.prod(bulk[r, i, path[i], path[i + 1]] for i in range(v - 1))
        term = weight * outer([inputs[r, i, :, path[i]] for i in range(v)])
        table = np.maximum(table, term) if best else table + term
    return table


def outer(tables: list[np.ndarray]) -> np.ndarray:
    """The products of all their entries, with the axes of all."""
    found = np.ones(())
    for table in tables:
        found = np.multiply.outer(found, table)
    return found


def values(k: int, v: int) -> torch.Tensor:
    """All values of all variables (k^v, v), in the order of a flattened table."""
    return torch.tensor(list(itertools.product(range(k), repeat=v)))


def given(table: np.ndarray, data: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """The table, with zeros where a value differs from what is observed."""
    allowed = [np.arange(table.shape[0]) == value if seen else True for value, seen in zip(data, observed, strict=True)]
    return table * outer([np.broadcast_to(some, table.shape[0]) for some in allowed])
