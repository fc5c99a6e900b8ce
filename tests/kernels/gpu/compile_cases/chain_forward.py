"""The forward recursion with shared matrices: the widest tiles, odd sizes, logarithms, lengths and float64."""

from functools import partial

from logchain.kernels.gpu import chain_forward
from tests.kernels.gpu import calls
from tests.kernels.gpu.compiled import Case
from tests.kernels.gpu.recorded import recorded


def cases(target: str) -> list[Case]:
    choices = [(200, {}), (64, {}), (256, {}), (127, {})]
    choices += [(200, {"log_params": True, "lengths": True}), (200, {"dtype": calls.F64}), (200, {"half": True})]
    found = []
    for c, options in choices:
        name = " ".join([f"c={c}", *(f"{option}={value}" for option, value in options.items())])
        call = partial(calls.forward, chain_forward, 40, 500, c, **options)
        launched = recorded(target, name, call)
        found += launched if not found else launched[1:]  # the bounds of matrices come first
    return found
