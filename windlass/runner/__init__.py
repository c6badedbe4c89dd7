"""Turns a plan into tensors, runs it, samples."""
