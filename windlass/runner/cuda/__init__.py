"""Executors with captured CUDA graphs."""
