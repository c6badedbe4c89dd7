"""Shows on stderr what a command is doing until its model is ready."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from windlass.start_log import start_log


@contextmanager
def starting(model: str, shown: bool = True) -> Iterator[None]:
    """Show a line with the current phase of the start, which disappears at the end of the block.

    Without a terminal it is one line that stays.
    """
    if not shown:
        yield
        return
    if not sys.stderr.isatty():
        sys.stderr.write(f"loading {model}\n")
        yield
        return
    handler = _OneLine(model, sys.stderr)
    level = start_log.level
    start_log.addHandler(handler)
    start_log.setLevel(logging.INFO)
    try:
        handler.show("import")
        yield
    finally:
        start_log.removeHandler(handler)
        start_log.setLevel(level)
        handler.clear()


class _OneLine(logging.Handler):
    """Rewrites one line of a terminal. A record without text clears it, before a progress bar."""

    def __init__(self, model: str, stream: TextIO) -> None:
        super().__init__()
        self._model = model
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text:
            self.show(text)
        else:
            self.clear()

    def show(self, text: str) -> None:
        self._stream.write(f"\r\x1b[Kloading {self._model}: {text} …")
        self._stream.flush()

    def clear(self) -> None:
        self._stream.write("\r\x1b[K")
        self._stream.flush()
