"""Makes quantised checkpoints: methods, calibration, file layouts."""
