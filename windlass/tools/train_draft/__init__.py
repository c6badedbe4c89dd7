"""`windlass train-draft`: Medusa and EAGLE heads, trained on what the model itself writes."""
