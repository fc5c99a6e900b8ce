"""The best state path, as `kernels.plain.viterbi` defines it, by the C library."""

import torch
from torch import Tensor

from ..chain import Chain
from .arguments import Call, function
from .library import in_large_pages


def paths(chain: Chain, steps: int) -> tuple[Tensor, Tensor]:
    """The states of the best paths, see `kernels.plain.viterbi`; those of packed sequences are (rows)."""
    states, unknown = best_paths(chain, steps, "viterbi", 1)
    return states[..., 0, :], unknown


def best_paths(chain: Chain, steps: int, name: str, ranks: int) -> tuple[Tensor, Tensor]:
    """The states (g, m, ranks, steps) by the function `name` of the library; whether sequences are unknown (g, m)."""
    g, m = chain.g, chain.m
    unknown = torch.empty(g, m, dtype=torch.uint8, device="cpu")
    call = Call(chain)
    if chain.starts is None:
        states = torch.empty(g, m, ranks, steps, dtype=torch.int64, device="cpu")
    else:
        states = torch.empty(ranks, steps, dtype=torch.int64, device="cpu")
    call.point(lossy=unknown)
    call.paths(states, ranks, steps, rank=steps, sequence=ranks * steps)
    call.run(name, call.spans())
    return states, unknown.view(torch.bool)


class Messages:
    """The max-plus messages of a chain, or of a stretch that a message enters, and the best paths through them.

    `leaving` (g, m, c), float64: the last message of each sequence, less its largest entry. `unknown` (g, m): whether a
    sequence holds NaN or +inf. `entering` (g, m, c): such a message, which is then step 0 of a path, or None.
    """

    def __init__(self, chain: Chain, entering: Tensor | None) -> None:
        g, m, entered = chain.g, chain.m, entering is not None
        self._call = call = Call(chain, entered=entered)
        self.leaving = torch.empty(g, m, chain.c, dtype=torch.float64, device="cpu")
        self._lossy = torch.empty(g, m, dtype=torch.uint8, device="cpu")
        width = max(chain.c, function("lanes", chain.dtype)())
        self._kept = in_large_pages(chain.new(chain.v + entered, g * m, width))
        before = None if entering is None else entering.to(chain.dtype).contiguous()
        call.point(entering=before, leaving=self.leaving)
        call.point(messages=self._kept, lossy=self._lossy)
        call.run("viterbi_forward", call.spans())

    @property
    def unknown(self) -> Tensor:
        """Whether a sequence holds a NaN or +inf, so that no path is known to be the best (g, m)."""
        return self._lossy.view(torch.bool)

    def follow(self, states: Tensor) -> None:
        """Write into `states` (g, m, steps) the best paths that end, at a sequence's end or after so many steps, there.

        The last entry of each is the state in which it ends, or negative for any. States are -1 behind a sequence's
        end, and everywhere if it is unknown or there is no path.
        """
        call, steps = self._call, states.shape[-1]
        call.paths(states, 1, steps, rank=steps, sequence=steps)
        call.set(steps=steps)
        if call.ends is not None:
            ends, each = call.ends.clamp(max=steps), states.flatten(0, 1)
            each[torch.arange(len(each), device="cpu"), ends.flatten() - 1] = each[:, -1].clone()
            call.point(ends=ends)
        call.run("viterbi_backward", call.spans())
