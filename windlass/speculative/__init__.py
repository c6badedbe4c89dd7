"""Speculative decoding: proposers, the runner that owns one, and their measured costs."""
