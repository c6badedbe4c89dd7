"""The console script. Imports little, because the engine process imports this module again."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the `windlass` command."""
    try:
        from windlass.cli.main import app

        app()
    except KeyboardInterrupt:  # during imports; commands handle it themselves
        sys.exit(130)
