"""Token lists by number, in a JSONL file that grows: what was written stays after a kill.

The first line says what the lists depend on; a file that was begun with anything else is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from windlass.errors import ConfigError, EngineError
from windlass.tools.resumable import describe_changes


class Ledger:
    """Owns the open file. `found` is what it holds already; a last line that was cut off is not."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.found: dict[int, list[int]] = {}
        wanted = json.loads(json.dumps(about))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            raw = path.read_bytes() if path.exists() else b""
            whole = raw[: raw.rfind(b"\n") + 1]
            lines = whole.splitlines()
            if lines:
                self._check(lines[0], wanted)
                for line in lines[1:]:
                    entry = json.loads(line)
                    self.found[entry["number"]] = entry["tokens"]
            self._file: BinaryIO = path.open("r+b" if raw else "wb")
            self._file.truncate(len(whole))
            self._file.seek(0, os.SEEK_END)
            if not lines:
                self._write(json.dumps({"about": wanted}))
                self.flush()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: is damaged, or no file of this program ({error!r}). Remove it."
            ) from error

    def _check(self, line: bytes, wanted: dict[str, Any]) -> None:
        changes = describe_changes(json.loads(line)["about"], wanted)
        if changes:
            raise ConfigError(
                f"{self.path} was begun with other options: {changes}. Run the same command to go "
                "on, or remove that file."
            )

    def add(self, number: int, tokens: list[int]) -> None:
        self.found[number] = tokens
        try:
            self._write(json.dumps({"number": number, "tokens": tokens}, separators=(",", ":")))
        except OSError as error:
            raise self._cannot_write(error) from error

    def flush(self) -> None:
        """From here on a kill takes nothing away."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._cannot_write(error) from error

    def close(self) -> None:
        self._file.close()

    def _write(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")

    def _cannot_write(self, error: OSError) -> EngineError:
        return EngineError(
            f"{self.path}: cannot be written: {error.strerror or error}. {len(self.found)} texts "
            "were made, and nearly all of them are kept there. Make room, then run the same "
            "command again to go on."
        )
