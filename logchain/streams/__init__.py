"""Chains without an end, one piece after the other."""
