"""Measures model quality: perplexity, divergence from a reference, lm-eval tasks."""
