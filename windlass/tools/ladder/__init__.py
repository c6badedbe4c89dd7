"""Every optimisation alone and stacked, at low load and at saturation: `windlass ladder`."""
