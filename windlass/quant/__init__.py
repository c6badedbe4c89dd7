"""How a weight is stored: one file per format."""
