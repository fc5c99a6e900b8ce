"""Triton kernels for CUDA and ROCm devices; nothing here is imported until a tensor lies on one."""
