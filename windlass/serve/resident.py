"""Lets go of the pages of program code that only the start needed: two thirds of torch's libraries.

The system has them in its file cache, and maps those that are used again when they are.
"""

from __future__ import annotations

from windlass.pages import give_back, mappings


def release_code() -> None:
    """Unmap the pages of all mapped code. Where the system tells no mappings, nothing happens."""
    for each in mappings():
        # Code alone: it was never written to, as parts of a library that only read may have been.
        if each.rights == "r-xp" and each.file.startswith("/"):
            give_back(each.first, each.end - each.first)
