"""Where Windlass keeps what it made or fetched: one folder per user.

Says only where. What lies in it belongs to whoever put it there.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$WINDLASS_CACHE`, else `$XDG_CACHE_HOME/windlass`, else `~/.cache/windlass`; not created."""
    own = os.environ.get("WINDLASS_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared).expanduser() if shared else Path.home() / ".cache"
    return base / "windlass"
