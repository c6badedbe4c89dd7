"""Searches the best settings for a load under an SLO: simulates many, and measures the best."""
