"""Keeps measurements of earlier starts in a small JSON file of the cache folder.

A file that cannot be read or written is no error: the engine measures again, and `problem` has the
reason. A file that another user could have written is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from windlass.folders import check_private, make_private, write_atomically


class MeasurementCache:
    """Owns the contents of one file; without a path nothing is kept."""

    def __init__(self, path: Path | None = None) -> None:
        self.problem: str | None = None
        self._path = path
        self._values: dict[str, Any] = {}
        self._changed = False
        if path is None or not path.is_file():
            return
        check_private(path.parent, path)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            self.problem = f"{path} cannot be read ({error}), measured again"
            return
        if isinstance(found, dict):
            self._values = found
        else:
            self.problem = f"{path} holds no JSON object, measured again"

    def get(self, name: str) -> Any:
        """The kept value; None: there is none."""
        return self._values.get(name)

    def put(self, name: str, value: Any) -> None:
        self._values[name] = value
        self._changed = True

    def drop(self, name: str) -> None:
        """Remove a value."""
        self._changed |= self._values.pop(name, None) is not None

    def save(self) -> None:
        """Write the file if a value changed. Another process may write it at the same time."""
        if self._path is None or not self._changed:
            return
        try:
            make_private(self._path.parent)
            write_atomically(self._path, json.dumps(self._values))
        except OSError as error:
            self.problem = f"{self._path} cannot be written ({error}), measured at every start"
