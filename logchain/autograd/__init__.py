"""Operators of torch with their derivatives and rules for vmap, and the differentiable scan."""
