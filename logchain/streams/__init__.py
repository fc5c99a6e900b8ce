"""Chains of unbounded length, a piece at a time."""
