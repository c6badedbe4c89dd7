"""The console script. It imports nothing at first: the engine's process imports this file again."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the `windlass` command."""
    try:
        from windlass.cli.main import app

        app()
    except KeyboardInterrupt:  # outside of a command: while modules are imported
        sys.exit(130)
