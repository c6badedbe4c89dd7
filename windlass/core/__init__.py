"""What to do next: pure Python, no torch, no clock, no thread."""
