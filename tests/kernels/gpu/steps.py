"""Training steps and questions, small, on any device; and a guard that nothing in them waits for the device."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

import logchain
from tests.families import FAMILIES, Chain, dense

F32 = torch.float32

Step = Callable[[list[Tensor]], list[Tensor]]


def on_device(chain: Chain, device: str = "cuda") -> list[Tensor]:
    return [tensor.to(device).requires_grad_() for tensor in chain[:3]]


def with_gradients(function: Callable[..., Tensor], operands: list[Tensor], **options) -> list[Tensor]:
    out = function(*operands, **options)
    return [out, *torch.autograd.grad(out.sum(), operands)]


def chain_step(operands: list[Tensor], **options) -> list[Tensor]:
    return with_gradients(logchain.product, operands, **options)


def values_step(operands: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [logchain.product(*operands, strategy="chunked")]


def marginals_step(operands: list[Tensor]) -> list[Tensor]:
    return [value.detach() for value in logchain.marginals(*operands, transitions="sum")]


def viterbi_step(operands: list[Tensor]) -> list[Tensor]:
    return [value.detach() for value in logchain.viterbi(*operands)]


overlapped_step: Step = partial(chain_step, strategy="overlapped")
matmul_step: Step = partial(with_gradients, logchain.matmul)
tree_step: Step = partial(with_gradients, logchain.matrix_product)
prefix_step: Step = partial(with_gradients, logchain.prefix_products)


def _leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def _one_matrix_each(evidence: float) -> list[Tensor]:
    """Chains by a sticky matrix of each one's own, that forget only by evidence; enough of them for two segments."""
    x, bulk, p0 = dense(F32, n=600, t=1, v=60, c=4, each=True)[:3]
    x[..., ::2, 1] += evidence
    return [x, 1e-3 * bulk[..., :1, :, :] + torch.eye(4), p0]


# name: the step, and what makes its operands
STEPS: dict[str, tuple[Step, Callable[[], list[Tensor]]]] = {
    "shared": (chain_step, lambda: dense(F32, n=40, t=1, v=9, c=70)[:3]),
    "each": (chain_step, lambda: dense(F32, each=True, v=9, c=33)[:3]),
    "left_to_right": (chain_step, lambda: FAMILIES["left_to_right"](F32)[:3]),
    "chunked": (partial(chain_step, strategy="chunked"), lambda: dense(F32, v=60, c=16)[:3]),
    "chunked values": (values_step, lambda: dense(F32, v=200, c=4)[:3]),
    "overlapped": (overlapped_step, lambda: _one_matrix_each(30.0)),
    "overlapped, remembered": (overlapped_step, lambda: _one_matrix_each(0.0)),
    "marginals": (marginals_step, lambda: dense(F32, n=40, t=1, v=9, c=70)[:3]),
    "viterbi": (viterbi_step, lambda: dense(F32, n=40, t=1, v=9, c=70)[:3]),
    "matmul": (matmul_step, lambda: _leaves((5, 1, 33, 65), (4, 65, 17))),
    "tree": (tree_step, lambda: _leaves((2, 9, 33, 33))),
    "large tree": (tree_step, lambda: _leaves((2, 5, 130, 130))),
    "prefixes": (prefix_step, lambda: _leaves((2, 9, 33, 33))),
}


def case(name: str, device: str = "cuda") -> tuple[Step, list[Tensor]]:
    """A step, and its operands on a device, with gradients."""
    step, operands = STEPS[name]
    return step, [operand.to(device).requires_grad_() for operand in operands()]


@contextmanager
def waiting_raises() -> Iterator[None]:
    """Whatever waits for the device in the body raises, and nothing after it does."""
    with warnings.catch_warnings():
        # the first use in a process says that it is a prototype: as an error that left the mode on
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
