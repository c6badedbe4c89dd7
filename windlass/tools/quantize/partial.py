"""DIR.partial of a quantisation: finished layers, so that an interrupted run can resume.

Holds a file per finished layer, the hidden states for the next layer, and a manifest with all options
that decide the result. DIR itself appears at the end, by one rename.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from windlass.errors import EngineError
from windlass.tools.quantize.checkpoint_files import write_shards
from windlass.tools.quantize.layer import Hidden
from windlass.tools.resumable import ResumableOutput

_OUTER = "outer.safetensors"


class PartialCheckpoint(ResumableOutput):
    """Owns the files of the finished layers, and the inputs of the next layer."""

    def __init__(self, output: Path, fingerprint: Mapping[str, Any], num_layers: int) -> None:
        self._num_layers = num_layers
        self.reports: list[dict[str, Any]] = []
        super().__init__(output, fingerprint)

    @property
    def num_done(self) -> int:
        return len(self.reports)

    def _progress_text(self) -> str:
        return f"{self.num_done} of {self._num_layers} layers are done and saved in {self.folder}"

    def _resume(self, manifest: dict[str, Any]) -> None:
        self.reports = manifest["layers"]

    def _manifest_fields(self) -> dict[str, Any]:
        return {"layers": self.reports}

    def add(
        self, tensors: Mapping[str, Tensor], report: dict[str, Any], next: Hidden | None
    ) -> None:
        """Save a finished layer. The manifest is written last, so the files it names are complete."""
        index = self.num_done
        self._save(_layer_file(index), tensors)
        if next is not None:
            self._save_hidden(index + 1, next)
        self.reports.append(report)
        self._write_manifest()
        (self.folder / _hidden_file(index)).unlink(missing_ok=True)

    def start(self, hidden: Hidden) -> None:
        """Save the inputs of the first layer."""
        self._save_hidden(0, hidden)

    def hidden(self) -> Hidden | None:
        """Load the inputs of the next layer; None if nothing is computed yet."""
        path = self.folder / _hidden_file(self.num_done)
        if not path.is_file():
            if self.num_done and self._fingerprint.get("calibration"):
                raise EngineError(f"{path}: is missing. Remove {self.folder} and start again.")
            return None
        found = load_file(path)
        return Hidden(found["states"], tuple(found["lengths"].tolist()))

    def finish(self, outer: Mapping[str, Tensor], write_rest: Callable[[Path], None]) -> None:
        """Join the layers' files to shards, write the other files, and publish the output."""
        self._save(_OUTER, outer)
        names = [_OUTER, *(_layer_file(index) for index in range(self.num_done))]
        files = [self.folder / name for name in names]

        def write(folder: Path) -> None:
            write_shards(folder, {file: file.stat().st_size for file in files}, self._load)
            write_rest(folder)

        self._publish(write)

    def _load(self, files: list[Path]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for file in files:
            try:
                tensors |= load_file(file)
            except SafetensorError as error:
                raise EngineError(
                    f"{file}: is damaged: {error}. Remove {self.folder} and start again."
                ) from error
        return tensors

    def _save_hidden(self, index: int, hidden: Hidden) -> None:
        lengths = torch.tensor(hidden.lengths)
        self._save(_hidden_file(index), {"states": hidden.states, "lengths": lengths})

    def _save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        # safetensors refuses tensors that share memory.
        own = {
            name: tensor.cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        self._write(self.folder / name, save(own))


def _layer_file(index: int) -> str:
    return f"layer-{index:05}.safetensors"


def _hidden_file(index: int) -> str:
    return f"hidden-{index:05}.safetensors"
