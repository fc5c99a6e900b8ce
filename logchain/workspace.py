"""Memory that calls share, one after the other, so that a training loop makes its buffers once."""

import math

import torch
from torch import Tensor


class Workspace:
    """Where `product(..., workspace=)` keeps the forward messages for its backward pass.

    Each call writes over those of the call before, so the backward pass of one belongs before the next call: after it,
    torch raises its RuntimeError for tensors modified by an inplace operation. Two calls in flight want two workspaces.
    The memory grows to what the largest call needs (`v c` numbers a sequence) and is held until the workspace goes.
    Gradients and results are no part of it. A workspace is for one thread.

    >>> import torch, logchain
    >>> workspace = Workspace()
    >>> bulk, p0 = torch.full((1, 2, 2), 0.5).requires_grad_(), torch.tensor([0.5, 0.5])
    >>> for _ in range(3):  # steps of training
    ...     logchain.product(torch.zeros(8, 5, 2), bulk, p0, workspace=workspace).sum().backward()
    >>> workspace.nbytes  # 8 sequences, 5 variables, 2 states
    320
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(memory.nbytes for memory in self._memory.values())

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory of this shape; what was taken before is no longer valid, and autograd knows."""
        size, key = math.prod(shape), (dtype, device)
        memory = self._memory.get(key)
        if memory is None or memory.numel() < size:
            memory = torch.empty(size, dtype=dtype, device=device)
            self._memory[key] = memory
        else:
            # kernels write past autograd, which counts changes made in place
            memory[:0].zero_()
        return memory[:size].view(shape)
