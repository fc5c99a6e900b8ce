"""Triton kernels of chains and log-semiring matrix products, for CUDA and ROCm. No program waits for another one."""

import triton

# the first Triton with `triton.constexpr_function`
_OLDEST = (3, 5)

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < _OLDEST:
    raise ImportError(f"Triton 3.5 or later is needed, found {triton.__version__}: pip install --upgrade triton")
