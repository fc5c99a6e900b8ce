"""State paths drawn from their posterior."""

from functools import partial

import torch
from torch import Tensor

from .arguments import Lengths, check_integer
from .autograd.draws import drawn_paths
from .chain import Chain
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
    r"""Returns paths `z` drawn from the posterior `p0(z_0) prod_i P_i(z_{i-1}, z_i) prod_i exp x_i(z_i) / Z`.

    The forward messages `a_i` are computed once; then `z_{v-1} ~ a_{v-1}` and, backwards, `z_{i-1} ~ a_{i-1}(k) P_i(k,
    z_i)`. Draws are exact and independent: this is no Markov chain Monte Carlo.

    `x` `[*B, v, c]` in nats, `bulk` `[*B or ones, v-1 or 1, c, c]`, `p0` `[*B or ones, c]` and the options are those of
    `logchain.product`; with `cu_seqlens`, paths are `[num_samples, total]`.

    `num_samples`: the number of paths of each sequence. `generator`: the source of randomness, on the operands' device;
    by default that of torch. Equal states of the generator give equal paths for equal arguments on one machine.
    `torch.vmap` needs `randomness="different"`.

    Returns:
        int64 `[num_samples, *B, v]`. Every path has positive weight. -1 is no state: past a sequence's end,
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
    chain = Chain.of(x, bulk, p0, log_params, lengths, cu_seqlens).in_place(one_matrix=True)
    check_draws(num_samples, generator, x)
    return chain.by_variable(chain.map(partial(drawn_paths, count=num_samples, generator=generator)), 1)


def check_draws(num_samples: object, generator: object, x: Tensor) -> None:
    """Check the arguments of draws."""
    check_integer("num_samples", num_samples, 0)
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator or None, got {type(generator).__name__}")
    if generator.device.type != x.device.type or generator.device.index not in (None, x.device.index):
        raise ValueError(f"generator: expected device {x.device}, got {generator.device}")
