"""Programs that measure: fixed seeds, a warm-up, repeats, and a JSON that says how it was made."""
