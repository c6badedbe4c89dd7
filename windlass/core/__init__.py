"""The scheduler and its data types: pure Python, no torch, no clock, no threads."""
