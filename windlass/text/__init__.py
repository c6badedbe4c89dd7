"""Text on both sides of the engine: chat templates, tokenising, detokenising, output grammars, requests."""
