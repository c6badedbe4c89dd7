"""Attacks on the service, each as a test of its defence."""
