"""The functions of chains whose transition matrices are structures."""
