"""Speculative decoding: proposers, their measured costs, and the governor."""
