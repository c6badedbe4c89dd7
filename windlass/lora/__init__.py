"""Adapters: small changes to a model's weights, one for each request if need be."""
