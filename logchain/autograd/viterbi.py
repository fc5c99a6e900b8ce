"""The best paths of a chain as operators of torch: integers, which have no gradient."""

from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain
from ..kernels.plain import topk_paths as k_best_paths
from ..operands import chain_of
from .operator import operator, with_batch_first
from .paths import log_weight


def best_paths(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, k: int | None
) -> tuple[Tensor, Tensor]:
    """The best path [*B, v], or the k best [*B, k, v], and which sequences hold NaN or +inf [*B].

    -1 behind the end, for a path that does not exist, and in all of a sequence with NaN. Arguments have been checked.
    """
    states, unknown = _best_paths(x.detach(), bulk.detach(), p0.detach(), lengths, log_params, k)
    return states, unknown


def best_weight(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool) -> tuple[Tensor, Tensor]:
    """The best path [*B, v] and its log-weight [*B] in float64, NaN for a sequence that holds NaN or +inf."""
    states, unknown = best_paths(x, bulk, p0, lengths, log_params, None)
    return states, log_weight(x, bulk, p0, states, lengths, log_params).masked_fill(unknown, torch.nan)


def _forward(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, k: int | None
) -> tuple[Tensor, Tensor]:
    states, unknown = _shapes(x, bulk, p0, lengths, log_params, k)
    if x.numel() == 0:
        return states, unknown
    layout, chain = chain_of(x, bulk, p0, lengths, log_params)
    if k is None:
        found = kernels.path_kernels(x).paths(chain, x.shape[-2])[:, :, None]
        lasts = states[..., None, :]
    else:
        found, lasts = k_best_paths.paths(chain, x.shape[-2], k), states
    for rank in range(found.shape[2]):
        lasts[..., rank, :] = layout.states(found[:, :, rank].reshape(*chain.lead, -1))
    if kernels.on_gpu(x) or (lasts[..., 0] < 0).any():
        unknown.copy_(layout.batched(_unknown(chain)))
    else:
        unknown.zero_()
    return states, unknown


def _shapes(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, k: int | None
) -> tuple[Tensor, Tensor]:
    *batch, v, _ = x.shape
    shape = (*batch, v) if k is None else (*batch, k, v)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(batch, dtype=torch.bool)


def _unknown(chain: Chain) -> Tensor:
    """Which sequences (g, m) hold NaN or +inf before their end."""
    g, m = chain.g, chain.m
    steps = torch.arange(chain.v, device=chain.x.device).view(-1, 1, 1)
    found = ~(chain.x.amax(-1) < torch.inf).reshape(-1, g, m)
    into = ~(chain.bulk.flatten(-2).amax(-1) < torch.inf).reshape(-1, g, 1)
    first = ~(chain.p0.amax(-1) < torch.inf).expand(chain.lead).reshape(g, m)
    if chain.v == 1:
        into = into[:0]
    elif len(into) == 1:
        into = into.expand(chain.v - 1, g, 1)
    if chain.ends is not None:
        found = found & (steps < chain.ends[..., 0])
        into = into & (steps[1:] < chain.ends[..., 0])
    return found.any(0) | into.any(0) | first


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    operands = with_batch_first(info.batch_size, in_dims, *args[:4])
    return _best_paths(*operands, *args[4:]), (0, 0)


_best_paths = operator(
    "best_paths(Tensor x, Tensor bulk, Tensor p0, Tensor? lengths, bool log_params, int? k) -> (Tensor, Tensor)",
    _forward,
    _shapes,
)
torch.library.register_vmap("logchain::best_paths", _vmap)
