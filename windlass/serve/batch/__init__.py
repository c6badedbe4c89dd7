"""Files and batches: JSONL requests that run behind live ones, and survive a restart."""
