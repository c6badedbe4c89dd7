"""The log of a server: lines of text, or JSON objects with the same fields.

A record's `fields` (`extra={"fields": {...}}`) are keys of its JSON object; the text has them in words.
Messages may contain texts of clients: characters that are not printable are escaped, so that no client
can write lines of its own, or commands for a terminal.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

# Of this process and its children, which log in the same way.
_VARIABLE, _LEVEL_VARIABLE = "WINDLASS_LOG_FORMAT", "WINDLASS_LOG_LEVEL"
_MAX_REFUSALS_PER_S = 20
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def escaped(text: str) -> str:
    """Text in which control characters, line ends and invisible characters are escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return escaped(json.dumps(line, ensure_ascii=False, default=str))


class _AtMost(logging.Filter):
    """Passes a number of records per second, so that a client cannot fill the disk with refusals."""

    def __init__(self, per_second: int) -> None:
        super().__init__()
        self._per_second = per_second
        self._second = 0
        self._num_passed = 0
        self._num_dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if int(record.created) != self._second:
            self._second, self._num_passed = int(record.created), 0
        if self._num_passed >= self._per_second:
            self._num_dropped += 1
            return False
        self._num_passed += 1
        if self._num_dropped:
            record.msg = f"{record.getMessage()} ({self._num_dropped} more were not logged)"
            record.args = ()
            self._num_dropped = 0
        return True


def start_logging(log_format: str, log_level: str) -> None:
    """Log to stderr, in this process and in those that it starts."""
    os.environ[_VARIABLE] = log_format
    os.environ[_LEVEL_VARIABLE] = log_level
    inherit_logging()


def inherit_logging() -> None:
    """Log as the parent process does, if that has a log."""
    log_format = os.environ.get(_VARIABLE)
    if log_format is None:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter(_TEXT))
    logging.basicConfig(handlers=[handler])
    set_log_level(os.environ.get(_LEVEL_VARIABLE, "info"))
    logging.getLogger("windlass.refused").filters = [_AtMost(_MAX_REFUSALS_PER_S)]


def set_log_level(level: str) -> None:
    """Log lines of this level and above, in this process and in those that it starts later."""
    os.environ[_LEVEL_VARIABLE] = level
    logging.getLogger("windlass").setLevel(level.upper())
