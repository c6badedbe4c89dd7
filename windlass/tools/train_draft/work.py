"""Work in progress beside the output: DIR.partial, which never looks like a finished head.

Holds a manifest with everything that decides the result, the texts, and the training's last state.
DIR itself appears at the end, by one rename.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from windlass.errors import ConfigError, EngineError
from windlass.models.json_file import read_json
from windlass.tools.quantize.partial import check_output, partial_of

_MANIFEST = "manifest.json"
_STATE = "state.safetensors"
_LOCK = "lock"
_OWN = (_LOCK, _MANIFEST, _STATE, "out", "texts.jsonl", "texts.prompts.jsonl")


@dataclass(frozen=True, slots=True)
class SavedState:
    """A training as it was after some step."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


class Work:
    """Owns DIR.partial. One process at a time."""

    def __init__(self, output: Path, fingerprint: Mapping[str, Any]) -> None:
        check_output(output)
        self.folder = partial_of(output)
        self._output = output
        self._kept = "nothing is trained yet"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"-o {output}: {error.strerror or error}.") from error
        self._lock = FileLock(self.folder / _LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(f"{self.folder}: another run is working there.") from None
        wanted = json.loads(json.dumps(fingerprint))
        try:
            if (self.folder / _MANIFEST).is_file():
                self._compare(read_json(self.folder / _MANIFEST)["fingerprint"], wanted)
            else:
                self._begin(wanted)
        except EngineError:
            self._lock.release()
            raise

    def _begin(self, fingerprint: dict[str, Any]) -> None:
        names = {file.name.removesuffix(".tmp") for file in self.folder.iterdir()}
        strange = sorted(names - set(_OWN))
        if strange:
            raise ConfigError(
                f"{self.folder}: is needed for work in progress, but holds other files "
                f"({', '.join(strange[:3])}). Remove it, or choose another -o."
            )
        data = json.dumps({"fingerprint": fingerprint}, indent=1).encode()
        self._write(self.folder / _MANIFEST, data)

    def _compare(self, before: dict[str, Any], wanted: dict[str, Any]) -> None:
        names = sorted(before.keys() | wanted.keys())
        changes = "; ".join(
            f"{name} was {before.get(name)!r:.80}, is {wanted.get(name)!r:.80}"
            for name in names
            if before.get(name) != wanted.get(name)
        )
        if changes:
            raise ConfigError(
                f"{self.folder} was begun with other options: {changes}. Run the same command to "
                "go on, or remove that folder, or choose another -o."
            )

    def save_state(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Keep a training's state in place of the one before, which stays until this one is whole."""
        own = {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        data = save(own, metadata={"about": json.dumps(about)})
        self._write(self.folder / _STATE, data)
        self._kept = f"the training up to step {about['step']} is kept in {self.folder}"

    def load_state(self) -> SavedState | None:
        """The state that was saved last; None: there is none."""
        path = self.folder / _STATE
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads(file.metadata()["about"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{path}: is damaged: {error}. Remove it to train anew.") from error
        self._kept = f"the training up to step {about['step']} is kept in {self.folder}"
        return SavedState(tensors, about)

    def finish(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], report: Mapping[str, Any]
    ) -> None:
        """Write the head and give it its name."""
        made = self.folder / "out"
        shutil.rmtree(made, ignore_errors=True)
        try:
            made.mkdir()
            write_whole(made / "model.safetensors", save(dict(tensors), metadata={"format": "pt"}))
            for name, value in (("config.json", config), ("report.json", report)):
                write_whole(made / name, json.dumps(value, indent=2).encode() + b"\n")
            with suppress(FileNotFoundError):
                self._output.rmdir()  # an empty one was allowed
            os.rename(made, self._output)
        except OSError as error:
            raise self._cannot_write(self._output, error) from error
        self._lock.release()
        shutil.rmtree(self.folder)

    def close(self) -> None:
        self._lock.release()

    def _write(self, path: Path, data: bytes) -> None:
        try:
            write_whole(path, data)
        except OSError as error:
            raise self._cannot_write(path, error) from error

    def _cannot_write(self, path: Path, error: OSError) -> EngineError:
        return EngineError(
            f"{path}: cannot be written: {error.strerror or error}. The texts and {self._kept}. "
            "Make room, then run the same command again to go on."
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
