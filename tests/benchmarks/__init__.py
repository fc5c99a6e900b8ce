"""The figures that the README quotes: `python -m tests.benchmarks` measures them, `... report` only writes them out."""
