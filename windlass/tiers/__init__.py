"""KV tiers below the device: stores of the records of sealed blocks. No torch."""
