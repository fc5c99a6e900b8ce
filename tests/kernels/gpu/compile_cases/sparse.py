"""Chains of bands and of arcs: few states and many, linear and logarithms, gradients of one parameter and of each."""

from functools import partial
from unittest import mock

import torch

from logchain.kernels.gpu import arcs, bands
from logchain.kernels.structured import Arcs, Structured
from tests.kernels.gpu.calls import F32, F64, _new
from tests.kernels.gpu.compiled import Case
from tests.kernels.gpu.recorded import recorded


def call(
    module, c: int, *, v: int = 100, n: int = 8, dtype: torch.dtype = F32, half: bool = False, each: bool = False,
    log_params: bool = False, lengths: bool = False, by_log: bool = False,
) -> None:  # fmt: skip
    """Log-partitions and all gradients, with a parameter for `each` step and sequence."""
    given = torch.bfloat16 if half else dtype
    own = (4, c) if module is bands else (10 * c,)
    p = _new(*((n, v - 1) if each else (1, 1)), *own, dtype=given)
    pattern = (0, 1, 2, 7) if module is bands else Arcs(*(_new(10 * c, dtype=torch.int64) for _ in range(2)))
    ends = _new(n, dtype=torch.int64) if lengths else None
    x, p0 = _new(n, v, c, dtype=given), _new(1, c, dtype=given)
    chain = Structured(x, (p,), p0, pattern, ends, log_params, dtype, by_log)
    walk = module.forward(chain, True)
    module.backward(chain, walk, _new(n, dtype=F64), (True, True, True))


def cases(target: str) -> list[Case]:
    found: dict[str, Case] = {}

    def case(module, c: int, **options) -> None:
        words = [f"{name}={value}" for name, value in options.items()]
        name = " ".join([module.__name__.split(".")[-1], f"c={c}", *words])
        with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor):
            made = recorded(target, name, partial(call, module, c, **options))
        # the launches of parts of a chain are alike
        found.update((one.name, one) for one in made)

    case(bands, 300, lengths=True, log_params=True)
    case(bands, 2048, each=True)
    case(arcs, 1000, half=True, by_log=True)
    case(arcs, 10_000, dtype=F64, log_params=True)
    return [*found.values()]
