"""The log of the phases of a start. A server logs them, and commands show the current one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

start_log = logging.getLogger("windlass.start")

# Opens a phase of the start by its name.
Phase = Callable[[str], AbstractContextManager[None]]


def untimed(name: str) -> AbstractContextManager[None]:
    """A phase without a log and a clock."""
    del name
    return nullcontext()


@contextmanager
def start_bar(text: str, total: int) -> Iterator[Callable[[], None]]:
    """Show `text` and a progress bar on stderr; the yielded function advances it by one.

    Without a terminal, `text` is a line of the log, or of stderr where there is no log.
    """
    if not sys.stderr.isatty():
        start_log.warning(text)
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    start_log.info("")  # a line of `starting` makes room
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)
