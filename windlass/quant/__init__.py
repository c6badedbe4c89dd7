"""Quantisation formats of weights: one file per format."""
