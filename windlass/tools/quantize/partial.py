"""Work in progress: finished layers beside the output, so that a killed run goes on where it was.

DIR.partial holds a file per finished layer, the hidden states for the next one, and a manifest with
everything that decides the result. DIR itself appears at the end, by one rename.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from windlass.errors import EngineError
from windlass.models.source import INDEX
from windlass.tools import resumable
from windlass.tools.quantize.layer import Hidden
from windlass.tools.resumable import ResumableOutput

SHARD_BYTES = 2**30
_OUTER = "outer.safetensors"


class Partial(ResumableOutput):
    """The layers that are done, each in a file, and what goes into the next."""

    def __init__(self, output: Path, fingerprint: Mapping[str, Any], num_layers: int) -> None:
        self._num_layers = num_layers
        self.reports: list[dict[str, Any]] = []
        super().__init__(output, fingerprint)

    @property
    def num_done(self) -> int:
        return len(self.reports)

    def _progress_text(self) -> str:
        return f"{self.num_done} of {self._num_layers} layers are done and kept in {self.folder}"

    def _resume(self, manifest: dict[str, Any]) -> None:
        self.reports = manifest["layers"]

    def _manifest_fields(self) -> dict[str, Any]:
        return {"layers": self.reports}

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
        files = [_layer_file(index) for index in range(self.num_done)]

        def write(made: Path) -> None:
            self._shards([self.folder / name for name in [_OUTER, *files]], made)
            write_rest(made)

        self._publish(write)

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
        resumable.write_durably(made / INDEX, json.dumps(index, indent=2).encode())

    def _join(self, files: Iterable[Path], target: Path) -> tuple[list[str], int]:
        tensors: dict[str, Tensor] = {}
        for file in files:
            try:
                tensors |= load_file(file)
            except SafetensorError as error:
                raise EngineError(
                    f"{file}: is damaged: {error}. Remove {self.folder} and begin anew."
                ) from error
        resumable.write_durably(target, save(tensors, metadata={"format": "pt"}))
        return list(tensors), sum(tensor.nbytes for tensor in tensors.values())

    def _save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        # Each in memory of its own: the library refuses tensors that share some.
        own = {
            name: tensor.cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        self._write(self.folder / name, save(own))


def _layer_file(index: int) -> str:
    return f"layer-{index:05}.safetensors"


def _hidden_file(index: int) -> str:
    return f"hidden-{index:05}.safetensors"
