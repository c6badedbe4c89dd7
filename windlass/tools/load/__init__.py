"""Benchmark of a server over HTTP: `windlass bench serve`."""
