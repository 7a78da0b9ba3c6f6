"""Benchmarks: what the library promises, measured. `python -m eval.bench` runs all of them."""
