"""Every question of a chain, by its name: tuples of tensors, of which those of variables have these before other axes.

What is floating has gradients; states are integers, -1 where there are none.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

import logchain
from logchain.semirings import Semiring, total


def tempered(terms: Tensor, dim: int) -> Tensor:
    """A sum that is NaN on terms of -inf alone."""
    top = terms.amax(dim, keepdim=True)
    return (4 * (terms - top)).exp().sum(dim).log() / 4 + top.squeeze(dim)


SOFT = Semiring("soft maximum", tempered)


def ranked(*operands: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Scores [*B, k] and states [*B, v, k]."""
    states, scores = logchain.topk_paths(*operands, 3, **options)
    return scores, states.movedim(-2, -1)


QUESTIONS = {
    "marginals": lambda *o, **k: logchain.marginals(*o, **k)[::2],
    "sum": lambda *o, **k: logchain.marginals(*o, transitions="sum", **k),
    "full": lambda *o, **k: logchain.marginals(*o, transitions="full", **k),
    "messages": logchain.forward_backward,
    "entropy": lambda *o, **k: (logchain.entropy(*o, **k),),
    "divergence": lambda x, b, p, **k: (logchain.kl_divergence((x, b, p), (x.flip(-1) * 0.5, b.mT, p.flip(-1)), **k),),
    "log_prob": lambda x, b, p, **k: (logchain.log_prob(x, b, p, x.argmax(-1).detach(), **k),),
    "viterbi": lambda *o, **k: tuple(logchain.viterbi(*o, **k))[::-1],
    "topk_paths": ranked,
}
# what no operator of the library answers
ALL = QUESTIONS | {"total": lambda *o, **k: (total(*o, SOFT, **k),), "filtered": logchain.filtered}


def floating(found: Sequence[Tensor]) -> list[Tensor]:
    """What has gradients, with 0 for -inf."""
    return [torch.where(t == -torch.inf, 0.0, t) for t in found if t.is_floating_point()]
