"""Chains passed to a `Stream` in pieces."""

import torch

from logchain.stream import Stream, StreamUpdate
from tests.families import Chain
from tests.subjects import each_step, steps_from


def streamed(chain: Chain, pieces, *, lengths=None, homogeneous=False, **options) -> tuple[Stream, StreamUpdate]:
    """The stream after all pieces and a flush, and what it returned, concatenated."""
    stream = Stream(chain.bulk if homogeneous else None, chain.p0, log_params=chain.log_params, **options)
    into = None if homogeneous else each_step(chain.bulk, chain.x.shape[-2])
    found = []
    for start, stop in pieces:
        ends = None if lengths is None else (torch.as_tensor(lengths) - start).clamp(0, stop - start)
        matrices = None if into is None else steps_from(into, start, stop)
        found.append(stream.update(chain.x[..., start:stop, :], matrices, lengths=ends))
    found.append(stream.flush())
    return stream, StreamUpdate(found[-1].log_norm, *(joined(found, field) for field in range(1, 4)))


def joined(found: list[StreamUpdate], field: int) -> torch.Tensor | None:
    parts = [update[field] for update in found]
    return None if parts[0] is None else torch.cat(parts, -1 if field == 3 else -2)
