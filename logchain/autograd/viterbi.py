"""The best paths of a chain, as an operator of torch; its states are integers, which have no gradient."""

import torch
from torch import Tensor

from .. import kernels
from ..chain import Chain
from ..operands import chain_of
from ..schedules.packed import PackedChain
from .operator import operator
from .paths import packed_log_weight


def best_paths(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, k: int | None
) -> tuple[Tensor, Tensor]:
    """The best path [*B, v], or the k best [*B, k, v], and whether a sequence is unknown [*B]: it has a NaN or +inf.

    States are -1 behind a sequence's end, in paths that do not exist, and in unknown sequences.
    """
    states, unknown = _best_paths(x.detach(), bulk.detach(), p0.detach(), lengths, log_params, k)
    return states, unknown


def packed_paths(packed: Chain, k: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The best path [total], or the k best [k, total], their log-weights [n] or [k, n], and which are unknown [n].

    Only for sequences that lie `in_place` with one matrix. Log-weights are float64.
    """
    detached = packed.of_tensors(*(tensor.detach() for tensor in packed.operands.tensors))
    chain = PackedChain(detached).chain
    with kernels.arithmetic_on(chain.x):
        if k is None:
            states, unknown = kernels.module("viterbi", chain.x).paths(chain, len(chain.x))
        else:
            states, unknown = kernels.module("topk_paths", chain.x).paths(chain, len(chain.x), k)
    unknown = unknown.view(-1)
    return states, packed_log_weight(packed, states).masked_fill(unknown, torch.nan), unknown


def _forward(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, k: int | None
) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        return _shapes(x, bulk, p0, lengths, log_params, k)
    v = x.shape[-2]
    layout, chain = chain_of(x, bulk, p0, lengths, log_params)
    if k is None:
        states, unknown = kernels.module("viterbi", x).paths(chain, v)
        states = layout.states(states.view(*chain.lead, v))
    else:
        ranked, unknown = kernels.module("topk_paths", x).paths(chain, v, k)
        states = layout.states(ranked.reshape(*chain.lead, k * v)).unflatten(-1, (k, v))
    return states.contiguous(), layout.batched(unknown).contiguous()


def _shapes(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, k: int | None
) -> tuple[Tensor, Tensor]:
    *batch, v, _ = x.shape
    shape = (*batch, v) if k is None else (*batch, k, v)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(batch, dtype=torch.bool)


_best_paths = operator(
    "best_paths(Tensor x, Tensor bulk, Tensor p0, Tensor? lengths, bool log_params, int? k) -> (Tensor, Tensor)",
    _forward,
    _shapes,
)
