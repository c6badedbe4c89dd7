"""Output of a long run that an interrupted run can resume.

A run writes to DIR.partial, which is renamed to DIR when it is complete. The same command with the
same options resumes an interrupted run.
"""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from windlass.errors import ConfigError, EngineError, file_errors
from windlass.models.json_file import read_json

_MANIFEST = "manifest.json"
_LOCK = "lock"


class ResumableOutput(ABC):
    """Owns DIR.partial. A file lock admits one process at a time."""

    def __init__(
        self, output: Path, fingerprint: Mapping[str, Any], allowed_files: tuple[str, ...] = ()
    ) -> None:
        """Open or create DIR.partial.

        `fingerprint`: all options that decide the result. `allowed_files`: files that a run may have
        written before its first manifest.
        """
        check_output(output)
        self.folder = partial_path(output)
        self._output = output
        self._fingerprint = json.loads(json.dumps(fingerprint))
        with file_errors(f"-o {output}"):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.folder / _LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(f"{self.folder}: another run is working there.") from None
        try:
            if (self.folder / _MANIFEST).is_file():
                manifest = read_json(self.folder / _MANIFEST)
                self._check_fingerprint(manifest["fingerprint"])
                self._resume(manifest)
            else:
                self._check_files({_LOCK, _MANIFEST, *allowed_files})
                self._write_manifest()
        except EngineError:
            self._lock.release()
            raise

    @abstractmethod
    def _progress_text(self) -> str:
        """Describe what is saved so far, as one sentence without a full stop."""

    def _resume(self, manifest: dict[str, Any]) -> None:
        """Restore the state that the manifest of an interrupted run describes."""
        del manifest

    def _manifest_fields(self) -> dict[str, Any]:
        """Return what the manifest stores besides the fingerprint."""
        return {}

    def _check_files(self, own: set[str]) -> None:
        names = {file.name.removesuffix(".tmp") for file in self.folder.iterdir()}
        foreign = sorted(names - own)
        if foreign:
            raise ConfigError(
                f"{self.folder}: is needed for partial output, but holds other files "
                f"({', '.join(foreign[:3])}). Remove it, or choose another -o."
            )

    def _check_fingerprint(self, before: dict[str, Any]) -> None:
        changes = describe_changes(before, self._fingerprint)
        if changes:
            raise ConfigError(
                f"{self.folder} was begun with other options: {changes}. Run the same command to "
                "resume, remove that folder, or choose another -o."
            )

    def _write_manifest(self) -> None:
        manifest = {"fingerprint": self._fingerprint, **self._manifest_fields()}
        self._write(self.folder / _MANIFEST, json.dumps(manifest, indent=1).encode())

    def _write(self, path: Path, data: bytes) -> None:
        try:
            write_durably(path, data)
        except OSError as error:
            raise self._write_error(path, error) from error

    def _write_error(self, path: Path, error: OSError) -> EngineError:
        return EngineError(
            f"{path}: cannot be written: {error.strerror or error}. {self._progress_text()}. Make "
            "room, then run the same command again to resume."
        )

    def _publish(self, write: Callable[[Path], None]) -> None:
        """Call `write` with a new folder, rename that folder to the output, and remove DIR.partial."""
        new = self.folder / "out"
        shutil.rmtree(new, ignore_errors=True)
        try:
            new.mkdir()
            write(new)
            with suppress(FileNotFoundError):
                self._output.rmdir()  # check_output allows an empty folder
            os.rename(new, self._output)
        except OSError as error:
            raise self._write_error(self._output, error) from error
        self._lock.release()
        shutil.rmtree(self.folder)

    def close(self) -> None:
        self._lock.release()


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """List the options that differ from the interrupted run; empty if none do."""
    return "; ".join(
        f"{name} was {before.get(name)!r:.80}, is {now.get(name)!r:.80}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    )


def partial_path(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def check_output(output: Path) -> None:
    """Refuse an output folder that exists and is not empty."""
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists():
        raise ConfigError(
            f"-o {output}: exists already. Remove it, or choose another -o. The partial output "
            f"of an interrupted run is in {partial_path(output).name}; the same command resumes it."
        )


def write_durably(path: Path, data: bytes) -> None:
    """Write to a temporary file, fsync it, and rename it to `path`."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
