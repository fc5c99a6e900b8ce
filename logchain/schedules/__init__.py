"""The order in which the steps of a chain are computed: segments and checkpoints."""
