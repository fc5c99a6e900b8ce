"""Arithmetic on plain tensors: no argument checks, no autograd, nothing of `logchain` imported."""
