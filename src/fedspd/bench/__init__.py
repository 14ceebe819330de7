"""Benchmarks of `fedspd bench`: ratios between two timings that took turns on the same machine."""
