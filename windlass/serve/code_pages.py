"""Releases the code pages that only start-up needed: two thirds of torch's libraries.

The pages stay in the system's file cache; those used again are mapped again on access.
"""

from __future__ import annotations

from windlass.pages import give_back, mappings


def release_code() -> None:
    """Release the pages of all mapped code; does nothing where mappings cannot be listed."""
    for each in mappings():
        # Only code: it was never written, unlike read-only data, which relocation may have changed.
        if each.rights == "r-xp" and each.file.startswith("/"):
            give_back(each.first, each.end - each.first)
