"""Tests that kill, stop and starve the processes of a server, and check what its clients see."""
