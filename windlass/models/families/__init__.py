"""Families of architectures: how their checkpoints describe a decoder."""
