"""Arithmetic by a C library, for a CPU; the library is loaded when one of its functions is first called."""
