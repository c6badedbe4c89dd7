"""Work in progress: finished layers beside the output, so that a killed run goes on where it was.

DIR.partial holds a file per finished layer, the hidden states for the next one, and a manifest with
everything that decides the result. DIR itself appears at the end, by one rename.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from windlass.errors import ConfigError, EngineError
from windlass.models.json_file import read_json
from windlass.models.source import INDEX
from windlass.tools.quantize.layer import Hidden

SHARD_BYTES = 2**30
_MANIFEST = "manifest.json"
_OUTER = "outer.safetensors"
_LOCK = "lock"
_BEFORE_MANIFEST = (_LOCK, f"{_MANIFEST}.tmp")


class Partial:
    """Owns DIR.partial. One process at a time."""

    def __init__(self, output: Path, fingerprint: Mapping[str, Any], num_layers: int) -> None:
        check_output(output)
        self.folder = partial_of(output)
        self._output = output
        self._num_layers = num_layers
        self.reports: list[dict[str, Any]] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"-o {output}: {error.strerror or error}.") from error
        self._lock = FileLock(self.folder / _LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(f"{self.folder}: another run is working there.") from None
        self._fingerprint = json.loads(json.dumps(fingerprint))
        if (self.folder / _MANIFEST).is_file():
            self._continue()
        else:
            self._begin()

    @property
    def num_done(self) -> int:
        return len(self.reports)

    def _begin(self) -> None:
        strange = [file.name for file in self.folder.iterdir() if file.name not in _BEFORE_MANIFEST]
        if strange:
            self._lock.release()
            raise ConfigError(
                f"{self.folder}: is needed for work in progress, but holds other files "
                f"({', '.join(sorted(strange)[:3])}). Remove it, or choose another -o."
            )
        self._write_manifest()

    def _continue(self) -> None:
        manifest = read_json(self.folder / _MANIFEST)
        before = manifest["fingerprint"]
        names = sorted(before.keys() | self._fingerprint.keys())
        other = [name for name in names if before.get(name) != self._fingerprint.get(name)]
        if other:
            self._lock.release()
            changes = "; ".join(
                f"{name} was {before.get(name)!r:.80}, is {self._fingerprint.get(name)!r:.80}"
                for name in other
            )
            raise ConfigError(
                f"{self.folder} was begun with other options: {changes}. Run the same command to "
                "go on, or remove that folder, or choose another -o."
            )
        self.reports = manifest["layers"]

    def add(
        self, tensors: Mapping[str, Tensor], report: dict[str, Any], next: Hidden | None
    ) -> None:
        """A layer is done. The manifest comes last: what it names is whole."""
        index = self.num_done
        self._save(_layer_file(index), tensors)
        if next is not None:
            lengths = torch.tensor(next.lengths)
            self._save(_hidden_file(index + 1), {"states": next.states, "lengths": lengths})
        self.reports.append(report)
        self._write_manifest()
        (self.folder / _hidden_file(index)).unlink(missing_ok=True)

    def start(self, hidden: Hidden) -> None:
        """Keep the first layer's inputs."""
        lengths = torch.tensor(hidden.lengths)
        self._save(_hidden_file(0), {"states": hidden.states, "lengths": lengths})

    def hidden(self) -> Hidden | None:
        """What goes into the next layer; None: nothing is computed yet."""
        path = self.folder / _hidden_file(self.num_done)
        if not path.is_file():
            if self.num_done and self._fingerprint.get("calibration"):
                raise EngineError(f"{path}: is gone. Remove {self.folder} and begin anew.")
            return None
        found = load_file(path)
        return Hidden(found["states"], tuple(found["lengths"].tolist()))

    def finish(self, outer: Mapping[str, Tensor], write_rest: Callable[[Path], None]) -> None:
        """Put the output together and give it its name."""
        self._save(_OUTER, outer)
        made = self.folder / "out"
        shutil.rmtree(made, ignore_errors=True)
        try:
            made.mkdir()
            files = [_layer_file(index) for index in range(self.num_done)]
            self._shards([self.folder / name for name in [_OUTER, *files]], made)
            write_rest(made)
            with suppress(FileNotFoundError):
                self._output.rmdir()  # an empty one was allowed
            os.rename(made, self._output)
        except OSError as error:
            raise self._cannot_write(self._output, error) from error
        self._lock.release()
        shutil.rmtree(self.folder)

    def close(self) -> None:
        self._lock.release()

    def _shards(self, files: list[Path], made: Path) -> None:
        """Join small files; the order stays."""
        groups: list[list[Path]] = [[]]
        size = 0
        for file in files:
            if groups[-1] and size + file.stat().st_size > SHARD_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(file)
            size += file.stat().st_size
        if len(groups) == 1:
            self._join(groups[0], made / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        total = 0
        for number, group in enumerate(groups, start=1):
            name = f"model-{number:05}-of-{len(groups):05}.safetensors"
            names, num_bytes = self._join(group, made / name)
            weight_map |= dict.fromkeys(names, name)
            total += num_bytes
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write(made / INDEX, json.dumps(index, indent=2).encode())

    def _join(self, files: Iterable[Path], target: Path) -> tuple[list[str], int]:
        tensors: dict[str, Tensor] = {}
        for file in files:
            try:
                tensors |= load_file(file)
            except SafetensorError as error:
                raise EngineError(
                    f"{file}: is damaged: {error}. Remove {self.folder} and begin anew."
                ) from error
        _write(target, save(tensors, metadata={"format": "pt"}))
        return list(tensors), sum(tensor.nbytes for tensor in tensors.values())

    def _save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        path = self.folder / name
        try:
            # Each in memory of its own: the library refuses tensors that share some.
            own = {
                name: tensor.cpu().clone(memory_format=torch.contiguous_format)
                for name, tensor in tensors.items()
            }
            _write(path, save(own))
        except OSError as error:
            raise self._cannot_write(path, error) from error

    def _write_manifest(self) -> None:
        manifest = {"fingerprint": self._fingerprint, "layers": self.reports}
        path = self.folder / _MANIFEST
        try:
            _write(path, json.dumps(manifest, indent=1).encode())
        except OSError as error:
            raise self._cannot_write(path, error) from error

    def _cannot_write(self, path: Path, error: OSError) -> EngineError:
        return EngineError(
            f"{path}: cannot be written: {error.strerror or error}. {self.num_done} of "
            f"{self._num_layers} layers are done and kept in {self.folder}. Make room, then run "
            "the same command again to go on."
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


def _layer_file(index: int) -> str:
    return f"layer-{index:05}.safetensors"


def _hidden_file(index: int) -> str:
    return f"hidden-{index:05}.safetensors"


def _write(path: Path, data: bytes) -> None:
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
