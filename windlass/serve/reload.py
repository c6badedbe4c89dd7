"""What a running server reads again on SIGHUP: certificates, keys.

Each part adds one reloader. A reloader that fails leaves its part as it was, and the others run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from windlass.errors import EngineError

_log = logging.getLogger("windlass.serve")

# Returns what is used now, for the log. Raises EngineError for a bad file; the old state stays.
Reload = Callable[[], Awaitable[str]]


class Reloads:
    """The reloaders of one process, by name. They run one at a time, in the order they were added."""

    def __init__(self) -> None:
        self._reloads: dict[str, Reload] = {}
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, name: str, reload: Reload) -> None:
        """Run `reload` at every SIGHUP. It runs in the event loop: reads of files belong in a thread."""
        assert name not in self._reloads, f"two reloaders are called {name}"
        self._reloads[name] = reload

    def request(self) -> None:
        """Run all reloaders soon. Call it in the event loop."""
        task = asyncio.create_task(self.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> None:
        """Run all reloaders, and log what each has done."""
        async with self._lock:
            if not self._reloads:
                _log.info("nothing to read again: the server has no files that may change")
            for name, reload in list(self._reloads.items()):
                await run_reload(name, reload)


async def run_reload(name: str, reload: Reload) -> bool:
    """Run one reloader and log the outcome; False: it failed."""
    try:
        _log.info("%s: %s", name, await reload())
    except EngineError as error:
        _log.error("%s: not changed, the new files cannot be used. %s", name, error)
    except Exception:  # border between parts: the others are read in any case
        _log.exception("%s: not changed, reading it again failed", name)
    else:
        return True
    return False
