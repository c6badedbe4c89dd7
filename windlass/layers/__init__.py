"""The parts of a network."""
