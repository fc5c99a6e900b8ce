"""Arithmetic by Triton kernels, for CUDA and ROCm; no module is imported before a tensor lies on such a device."""
