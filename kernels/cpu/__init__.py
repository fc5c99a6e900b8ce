"""Loops in C for a CPU; nothing of torch is imported until a library is loaded."""
