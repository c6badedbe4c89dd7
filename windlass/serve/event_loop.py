"""The event loop of the server's processes."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Coroutine
from typing import Any


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run `main` in uvloop's event loop if it is installed, else in asyncio's."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)
