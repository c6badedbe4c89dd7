"""`windlass doctor`: what the machine has, what Windlass will use, and known problems. Runs without torch."""
