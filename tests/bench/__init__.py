"""Benchmarks, each a ratio inside one run."""
