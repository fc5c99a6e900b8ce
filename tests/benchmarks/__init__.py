"""The figures that the README and the pages quote: `python -m tests.benchmarks` measures them and writes them out."""
