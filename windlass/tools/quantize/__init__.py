"""Making quantised checkpoints: the methods, the calibration, the files."""
