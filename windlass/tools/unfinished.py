"""The output of a long run while it is made: in DIR.partial, which becomes DIR when it is whole.

A run that was interrupted goes on there, if it was begun with the same options.
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

from windlass.errors import ConfigError, EngineError
from windlass.models.json_file import read_json

_MANIFEST = "manifest.json"
_LOCK = "lock"


class Unfinished(ABC):
    """Owns DIR.partial. One process at a time."""

    def __init__(
        self, output: Path, fingerprint: Mapping[str, Any], before_manifest: tuple[str, ...] = ()
    ) -> None:
        """`before_manifest`: what may be there of a run that ended before it wrote one."""
        check_output(output)
        self.folder = partial_of(output)
        self._output = output
        self._fingerprint = json.loads(json.dumps(fingerprint))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"-o {output}: {error.strerror or error}.") from error
        self._lock = FileLock(self.folder / _LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(f"{self.folder}: another run is working there.") from None
        try:
            if (self.folder / _MANIFEST).is_file():
                manifest = read_json(self.folder / _MANIFEST)
                self._compare(manifest["fingerprint"])
                self._go_on(manifest)
            else:
                self._refuse_others({_LOCK, _MANIFEST, *before_manifest})
                self._write_manifest()
        except EngineError:
            self._lock.release()
            raise

    @abstractmethod
    def _done(self) -> str:
        """What is kept so far, as a part of a sentence."""

    def _go_on(self, manifest: dict[str, Any]) -> None:
        """Take over what the manifest of the run before says."""
        del manifest

    def _more(self) -> dict[str, Any]:
        """What the manifest says beside the fingerprint."""
        return {}

    def _refuse_others(self, own: set[str]) -> None:
        names = {file.name.removesuffix(".tmp") for file in self.folder.iterdir()}
        strange = sorted(names - own)
        if strange:
            raise ConfigError(
                f"{self.folder}: is needed for work in progress, but holds other files "
                f"({', '.join(strange[:3])}). Remove it, or choose another -o."
            )

    def _compare(self, before: dict[str, Any]) -> None:
        changes = changes_of(before, self._fingerprint)
        if changes:
            raise ConfigError(
                f"{self.folder} was begun with other options: {changes}. Run the same command to "
                "go on, or remove that folder, or choose another -o."
            )

    def _write_manifest(self) -> None:
        manifest = {"fingerprint": self._fingerprint, **self._more()}
        self._write(self.folder / _MANIFEST, json.dumps(manifest, indent=1).encode())

    def _write(self, path: Path, data: bytes) -> None:
        try:
            write_whole(path, data)
        except OSError as error:
            raise self._cannot_write(path, error) from error

    def _cannot_write(self, path: Path, error: OSError) -> EngineError:
        return EngineError(
            f"{path}: cannot be written: {error.strerror or error}. {self._done()}. Make room, "
            "then run the same command again to go on."
        )

    def _become(self, write: Callable[[Path], None]) -> None:
        """Let the output be written to a folder, and give that its name."""
        made = self.folder / "out"
        shutil.rmtree(made, ignore_errors=True)
        try:
            made.mkdir()
            write(made)
            with suppress(FileNotFoundError):
                self._output.rmdir()  # an empty one was allowed
            os.rename(made, self._output)
        except OSError as error:
            raise self._cannot_write(self._output, error) from error
        self._lock.release()
        shutil.rmtree(self.folder)

    def close(self) -> None:
        self._lock.release()


def changes_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The options in which a run differs from the one that it goes on from; empty: none."""
    return "; ".join(
        f"{name} was {before.get(name)!r:.80}, is {now.get(name)!r:.80}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    )


def partial_of(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def check_output(output: Path) -> None:
    """A folder with anything in it is never written to."""
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists():
        raise ConfigError(
            f"-o {output}: exists already. Remove it, or choose another folder; what a run that "
            f"was interrupted left lies in {partial_of(output).name} and is continued."
        )


def write_whole(path: Path, data: bytes) -> None:
    """Whole or not at all."""
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
