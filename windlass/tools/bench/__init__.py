"""Benchmarks of engines in this process: fixed seeds, warm-up, repeats, reproducible records."""
