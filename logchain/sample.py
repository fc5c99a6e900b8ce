"""State paths drawn from their posterior."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .arguments import Lengths
from .autograd.operator import mapped_first, operator
from .chain import Chain
from .kernels.chain import Chain as Batch
from .operands import chain_of
from .queries.paths import drawn_paths
from .rescues import report_chains
from .schedules.packed import PackedChain
from .transitions import Transition


def sample(
    x: Tensor,
    bulk: Tensor | Transition,
    p0: Tensor,
    num_samples: int,
    *,
    generator: torch.Generator | None = None,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    r"""Independent draws of paths `z` from the posterior `p0(z_0) prod_i P_i(z_{i-1}, z_i) prod_i exp x_i(z_i) / Z`.

    The forward messages `a_i` are computed once; then `z_{v-1} ~ a_{v-1}` and, backwards, `z_{i-1} ~ a_{i-1}(k) P_i(k,
    z_i)`. Draws are exact and independent: this is no Markov chain Monte Carlo.

    Args:
        x: log-potentials `[*B, v, c]` in nats. All arguments that `logchain.product` has too are those.
        bulk: transition weights `[*B or ones, v-1 or 1, c, c]`, `[from, to]`.
        p0: initial weights `[*B or ones, c]`; there is no transition before the first variable.
        num_samples: the number of paths of each sequence.
        generator: the source of randomness, on the operands' device; by default torch's own. Equal states of the
            generator give equal paths for equal arguments on one machine. `torch.vmap` needs `randomness="different"`.
        log_params: `bulk` and `p0` are logarithms (nats).
        lengths: the number of variables of each sequence.
        cu_seqlens: the offsets of concatenated sequences; paths are `[num_samples, total]`.

    Returns:
        int64 `[num_samples, *B, v]`. Every path has positive weight. -1 stands for no state: behind a sequence's end,
        and everywhere in a sequence that is impossible or holds NaN. There is no gradient; for gradients of
        expectations, differentiate `logchain.log_prob` of the paths (score-function estimator).

    Probabilities are those of the messages, within their rounding; sequences that would underflow are drawn in log
    space (see `logchain.rescues`).

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, a length is out of range, `num_samples` is negative, or the generator is
            on another device.

    Cost: `v c^2` multiply-adds a sequence for the messages, of segments side by side where that is predicted to be
    faster; then `v c` a draw in `v` dependent steps, on a CPU a fraction of that for each draw beyond the first c.
    Memory: the messages `[*B, v, c]` and the paths.

    Source: S. L. Scott, "Bayesian methods for hidden Markov models", J. Am. Stat. Assoc. 97 (2002): forward filtering,
    backward sampling. Definition: the probability of a path is `exp` of `logchain.reference.log_prob`.

    >>> x = torch.zeros(3, 2)  # three variables, two states
    >>> bulk = torch.tensor([[[0.9, 0.1], [0.0, 1.0]]])  # one matrix for every step: state 1 is never left
    >>> sample(x, bulk, torch.tensor([0.5, 0.5]), 4, generator=torch.Generator().manual_seed(0))
    tensor([[0, 1, 1],
            [0, 0, 0],
            [1, 1, 1],
            [1, 1, 1]])
    """
    chain = Chain.of(x, bulk, p0, log_params, lengths, cu_seqlens)
    check_draws(num_samples, generator, x)
    if chain.in_place(one_matrix=True):
        with torch.no_grad(), kernels.arithmetic_on(x):
            return _drawn(PackedChain(chain).chain, (num_samples, len(x)), generator)
    return chain.by_variable(chain.map(partial(drawn_paths, count=num_samples, generator=generator)), 1)


def _sample(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    num_samples: int,
    generator: torch.Generator | None,
    log_params: bool,
) -> Tensor:
    states = _shape(x, bulk, p0, lengths, num_samples, generator, log_params)
    if states.numel() == 0:
        return states
    with torch.no_grad():
        layout, chain = chain_of(x.detach(), bulk.detach(), p0.detach(), lengths, log_params)
        states = _drawn(chain, (num_samples, chain.g, chain.m, x.shape[-2]), generator)
        return layout.states(states.view(num_samples, *chain.lead, x.shape[-2])).contiguous()


def _drawn(chain: Batch, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """States int64 of a shape that the kernels take; their memory first holds the uniform numbers they are drawn by."""
    residuals = kernels.chain_kernels(chain.x).forward(chain, keep=kernels.messages_of(chain, chain.v))[0]
    report_chains(residuals.redone)
    states = torch.empty(shape, dtype=torch.int64, device=chain.x.device)
    states.view(torch.float64).uniform_(generator=generator)
    kernels.module("sample", chain.x).draw(chain, residuals, states)
    return states


def _shape(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, num_samples: int, *_: Any) -> Tensor:
    return x.new_empty((num_samples, *x.shape[:-1]), dtype=torch.int64)


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    if info.randomness != "different":
        raise RuntimeError(f"sample: expected vmap(..., randomness='different'), got {info.randomness!r}")
    operands = mapped_first(info.batch_size, in_dims, args[:4], (False, True, True, False))
    return torch.ops.logchain.sample(*operands, *args[4:]), 1


def check_draws(num_samples: object, generator: object, x: Tensor) -> None:
    """Check the arguments of draws."""
    if not isinstance(num_samples, int) or isinstance(num_samples, bool):
        raise TypeError(f"num_samples: expected an int, got {type(num_samples).__name__}")
    if num_samples < 0:
        raise ValueError(f"num_samples: expected 0 or more, got {num_samples}")
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator or None, got {type(generator).__name__}")
    if generator.device.type != x.device.type or generator.device.index not in (None, x.device.index):
        raise ValueError(f"generator: expected device {x.device}, got {generator.device}")


# the tag of the operator keeps compilers from merging two calls with equal arguments, which are two draws
operator(
    "sample(Tensor x, Tensor bulk, Tensor p0, Tensor? lengths, SymInt num_samples, Generator? generator,"
    " bool log_params) -> Tensor",
    _sample,
    _shape,
    vmap=_vmap,
    tags=(torch.Tag.nondeterministic_seeded,),
)
