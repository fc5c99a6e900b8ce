"""Chains passed to a `Stream` in pieces, and what it is to answer, from chains of their own and sums of NumPy."""

import math
import random

import numpy as np
import torch

from logchain import reference
from logchain.stream import Stream, StreamUpdate
from tests.families import Chain


def division(v: int, seed: int) -> list[tuple[int, int]]:
    """Pieces of random sizes, 0 among them, that make up v variables."""
    draw, found, start = random.Random(seed), [], 0
    while start < v:
        size = min(v - start, draw.choice([0, 1, 1, 2, 3, 5, 8]))
        found.append((start, start + size))
        start += size
    return found


def each_step(chain: Chain) -> torch.Tensor:
    """The matrices into each variable [*Bb, v, c, c]; what leads into the first one is NaN, and has no influence."""
    v = chain.x.shape[-2]
    into = chain.bulk.expand(*chain.bulk.shape[:-3], v - 1, -1, -1)
    first = chain.bulk.new_full((*chain.bulk.shape[:-3], 1, *chain.bulk.shape[-2:]), math.nan)
    return torch.cat([first, into], -3)


def streamed(chain: Chain, pieces, *, lengths=None, homogeneous=False, **options) -> tuple[Stream, StreamUpdate]:
    """The stream after all pieces and a flush, and what it returned, one behind the other."""
    stream = Stream(chain.bulk if homogeneous else None, chain.p0, log_params=chain.log_params, **options)
    into = None if homogeneous else each_step(chain)
    found = []
    for start, stop in pieces:
        ends = None if lengths is None else (torch.as_tensor(lengths) - start).clamp(0, stop - start)
        matrices = None if into is None else into[..., start:stop, :, :]
        found.append(stream.update(chain.x[..., start:stop, :], matrices, lengths=ends))
    found.append(stream.flush())
    return stream, StreamUpdate(found[-1].log_norm, *(joined(found, field) for field in range(1, 4)))


def joined(found: list[StreamUpdate], field: int) -> torch.Tensor | None:
    parts = [update[field] for update in found]
    return None if parts[0] is None else torch.cat(parts, -1 if field == 3 else -2)


def prefixes(chain: Chain, lag: int, lengths=None) -> np.ndarray:
    """The posterior of each state given `lag` variables more, each from a chain of its own that ends there."""
    x, bulk, p0 = (tensor.detach().double().numpy() for tensor in chain[:3])
    v, found = x.shape[-2], []
    ends = np.full(x.shape[:-2], v) if lengths is None else np.broadcast_to(lengths, x.shape[:-2])
    bulk = np.broadcast_to(bulk, (*bulk.shape[:-3], v - 1, *bulk.shape[-2:]))
    for i in range(v):
        stop = min(v, i + lag + 1)
        part = reference.marginals(
            x[..., :stop, :],
            bulk[..., : stop - 1, :, :],
            p0,
            log_params=chain.log_params,
            lengths=np.minimum(ends, stop),
        )
        found.append(part.states[..., i, :])
    return np.stack(found, -2)


def reachable(chain: Chain) -> Chain:
    """The same states are possible, and all that is possible is about as likely."""
    zero = -torch.inf if chain.log_params else 0.0
    x = chain.x.detach()
    bulk, p0 = (torch.where(operand > zero, 1.0, 0.0) for operand in chain[1:3])
    return Chain(torch.where(x.isneginf(), x, 0.0), bulk, p0)


def weight_of(chain: Chain, states: torch.Tensor, lengths=None) -> np.ndarray:
    """The log-weight of paths, by its own sum in NumPy."""
    x, bulk, p0 = (tensor.detach().double().numpy() for tensor in chain[:3])
    log = (lambda a: a) if chain.log_params else np.log
    batch, v = x.shape[:-2], x.shape[-2]
    bulk = np.broadcast_to(bulk, (*batch, v - 1, *bulk.shape[-2:]))
    p0 = np.broadcast_to(p0, (*batch, p0.shape[-1]))
    out = np.full(batch, -np.inf)
    with np.errstate(divide="ignore"):
        for index in np.ndindex(batch):
            path = states[index].numpy()
            end = v if lengths is None else int(np.broadcast_to(lengths, batch)[index])
            if (path[:end] < 0).any():
                continue
            terms = [log(p0[index][path[0]]), *x[index][range(end), path[:end]]]
            terms += [*log(bulk[index][range(end - 1), path[: end - 1], path[1:end]])]
            out[index] = -np.inf if -np.inf in terms else math.fsum(terms)
    return out


def assert_posteriors(found: torch.Tensor, truth: np.ndarray, bound: np.ndarray) -> None:
    error = np.abs(found.detach().double().numpy() - truth)
    assert found.shape == truth.shape
    assert (error <= bound).all(), f"error {error.max():.3g}, {np.nanmax(error / bound):.3g} times the bound"


def messages_of(chain: Chain) -> float:
    """The size of the reference's largest message."""
    forward = reference.forward_backward(chain.x.detach(), *chain[1:3], log_params=chain.log_params).forward
    return float(np.abs(forward[np.isfinite(forward)]).max(initial=1.0))
