"""LoRA adapters: low-rank weight deltas, chosen per request."""
