"""Values that a client sent, short enough for an error message.

`f"{value!r:.100}"` would first make the whole text of a value that may have megabytes.
"""

from __future__ import annotations

_MAX_CHARS = 100


def shown(value: object) -> str:
    """`value` in at most about 100 characters; arrays and objects by their size."""
    if isinstance(value, str):
        cut = value[:_MAX_CHARS]
        return repr(cut) if cut == value else f"{cut!r}… ({len(value):,} characters)"
    if isinstance(value, list):
        return f"an array of {len(value):,} values" if value else "[]"
    if isinstance(value, dict):
        return f"an object of {len(value):,} fields" if value else "{}"
    return repr(value)[:_MAX_CHARS]
