"""Arithmetic by torch operations, for any device: the definitions that kernels/cpu and kernels/gpu are tested by."""
