"""The same chain in other layouts: batch axes that broadcast, strange strides, NaN past every sequence's end."""

import torch

from tests.families import NAN, Chain, Draw

# batch axes of x, of bulk and of p0
BATCHES = [
    ((3, 2), (1, 1), (1, 1)),
    ((3, 2), (3, 1), (1, 2)),
    ((3, 2), (1, 2), (3, 1)),
    ((3, 2), (3, 2), (3, 2)),
    ((3, 2), (), ()),
    ((3, 2), (2,), (1,)),
    ((), (), ()),
    ((4,), (1,), ()),
    ((4,), (4,), (4,)),
    ((2, 3, 2), (3, 1), (2, 1, 2)),
    ((2, 3, 2), (2, 1, 1), (1, 1, 2)),
    ((0, 2), (1, 2), (0, 1)),
    ((0, 2), (0, 2), ()),
]

# variables, and the matrices between them: one for each step, or one for every step
STEPS = [(1, 0), (1, 1), (2, 1), (5, 4), (5, 1)]

STRANGE = ["transposed", "reversed axes", "sliced", "offset rows", "negative view"]


def broadcast(batches: tuple[tuple[int, ...], ...], steps: tuple[int, int]) -> Chain:
    """A dense float64 chain of 4 states with one of `BATCHES` and one of `STEPS`."""
    (batch, bulk_batch, p0_batch), (v, matrices) = batches, steps
    draw = Draw(0, 1, 1, v, 4, False)
    bulk, p0 = 0.1 + draw.uniform(*bulk_batch, matrices, 4, 4), 0.1 + draw.uniform(*p0_batch, 4)
    return Chain(draw.normal(*batch, v, 4), bulk, p0)


def relaid(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in another layout."""
    if how == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "reversed axes":
        return tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim())))
    if how == "sliced":
        wide = torch.full([2 * size + 1 for size in tensor.shape], NAN, dtype=tensor.dtype)
        view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
        return view.copy_(tensor)
    if how == "negative view":
        return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag  # its memory holds the values times -1
    return torch.cat([tensor, torch.full_like(tensor, NAN)], dim=-1)[..., : tensor.shape[-1]]


def poisoned(chain: Chain, lengths) -> Chain:
    """The chain with NaN past the ends: in x, and in bulk where every sequence and step has a separate matrix."""
    batch, lengths = chain.x.shape[:-2], torch.as_tensor(lengths)
    ends = lengths.reshape(lengths.shape + (1,) * (len(batch) + 1 - lengths.dim()))
    after = (torch.arange(chain.x.shape[-2]) >= ends).expand(chain.x.shape[:-1])
    x, bulk = chain.x.masked_fill(after[..., None], NAN), chain.bulk
    if bulk.shape[:-2] == after[..., 1:].shape:
        bulk = bulk.masked_fill(after[..., 1:, None, None], NAN)
    return chain._replace(x=x, bulk=bulk)
