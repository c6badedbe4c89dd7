"""Decides how many draft tokens to make and to verify. Pure Python, no clock."""
