"""Arithmetic by torch's operations: short and without tuning, for any device and to compare the others with."""
