"""Abbreviates values of clients for error messages.

`f"{value!r:.100}"` would first build the whole text of a value that may have megabytes.
"""

from __future__ import annotations

_MAX_CHARS = 100


def abbreviate(value: object) -> str:
    """Format `value` in about 100 characters; arrays and objects by their size."""
    if isinstance(value, str):
        start = value[:_MAX_CHARS]
        return repr(start) if start == value else f"{start!r}… ({len(value):,} characters)"
    if isinstance(value, list):
        return f"an array of {len(value):,} values" if value else "[]"
    if isinstance(value, dict):
        return f"an object of {len(value):,} fields" if value else "{}"
    return repr(value)[:_MAX_CHARS]
