"""Chains of unbounded length, computed a piece at a time."""
