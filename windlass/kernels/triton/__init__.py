"""Triton kernels for CUDA. Tests compare each with its reference implementation."""
