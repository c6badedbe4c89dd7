"""How ranks talk."""
