"""Parsers of generated text: reasoning, content and tool calls."""
