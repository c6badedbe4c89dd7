"""Implementations of each operation: a reference implementation in torch and faster kernels."""
