"""Lists the requests that the engine is running, in a file that survives the engine process.

The engine process writes the file before each step; the HTTP process reads it when the engine has
died or hangs. A killed process can lose a message, but not a written file.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from windlass.core.types import SlotId, StepPlan
from windlass.serve.messages import Add

_log = logging.getLogger("windlass.engine")

FINGERPRINT_BYTES = 16
_COUNT = struct.Struct("<I")  # followed by this many fingerprints


class Journal:
    """Owns the file. A request is listed while it has a slot in the runner.

    A request with a grammar is listed from its arrival on, since the grammar may be compiled in a
    thread before the request gets a slot. Requests without a fingerprint are never listed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._failed = False
        self._fingerprints: dict[str, bytes] = {}
        self._slots: dict[SlotId, str] = {}
        self._grammars: set[str] = set()
        self._is_adding = False

    def adding(self, add: Add) -> None:
        """List this request alone while the engine adds it, until the next one or `added`."""
        if not add.fingerprint:
            self.added()
            return
        request_id = add.request.request_id
        self._fingerprints[request_id] = add.fingerprint
        if add.request.sampling.structured_outputs is not None:
            self._grammars.add(request_id)
        self._write([add.fingerprint])
        self._is_adding = True

    def added(self) -> None:
        """List the running requests again, after one or several were added."""
        if self._is_adding:
            self._is_adding = False
            self._write(self.running())

    def planned(self, plan: StepPlan) -> None:
        """Update the list for a plan that is about to run."""
        if not plan.admitted and not plan.freed:
            return
        for slot in plan.freed:
            self._slots.pop(slot, None)
        for admission in plan.admitted:
            self._slots[admission.slot] = admission.request_id
        self._write(self.running())

    def ended(self, request_ids: Iterable[str]) -> None:
        """Remove requests that have finished, failed or been aborted."""
        found = [self._fingerprints.pop(each, None) for each in request_ids]
        if any(found):
            self._grammars &= self._fingerprints.keys()
            self._write(self.running())

    def running(self) -> list[bytes]:
        """The fingerprints of the listed requests."""
        listed = {*self._slots.values(), *self._grammars}
        return [self._fingerprints[each] for each in listed if each in self._fingerprints]

    def close(self) -> None:
        os.close(self._file)

    def _write(self, fingerprints: list[bytes]) -> None:
        if self._failed:
            return
        try:
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, _COUNT.pack(len(fingerprints)) + b"".join(fingerprints))
        except OSError as error:  # a full disk must not fail the steps
            self._failed = True
            self._path.unlink(missing_ok=True)  # its list would be stale from now on
            _log.warning(
                "%s cannot be written (%s): until the engine restarts, a request that kills it "
                "will not be recognised",
                self._path,
                error,
            )


def read_journal(path: Path) -> frozenset[bytes]:
    """The fingerprints that an engine process listed last; empty if it wrote no file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return frozenset()
    if len(data) < _COUNT.size:
        return frozenset()
    end = _COUNT.size + _COUNT.unpack_from(data)[0] * FINGERPRINT_BYTES
    whole = min(end, len(data)) - FINGERPRINT_BYTES + 1
    starts = range(_COUNT.size, whole, FINGERPRINT_BYTES)
    return frozenset(data[start : start + FINGERPRINT_BYTES] for start in starts)
