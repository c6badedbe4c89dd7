"""Grammars of structured outputs: compiled in a sandbox, cached, and followed token by token."""
