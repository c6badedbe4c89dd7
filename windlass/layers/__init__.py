"""Layers of a network."""
