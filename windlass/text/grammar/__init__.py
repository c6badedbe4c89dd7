"""Grammars of structured outputs: compiles them in a sandbox, caches them, follows outputs token by token."""
