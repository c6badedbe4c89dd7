"""The output folder while training: DIR.partial, which never looks like a finished head.

Holds a manifest with everything that decides the result, the texts, and the last saved state. DIR
itself appears at the end, by one rename.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from windlass.errors import EngineError
from windlass.tools import resumable
from windlass.tools.resumable import ResumableOutput

_STATE = "state.safetensors"
_FILES = (_STATE, "out", "texts.jsonl", "texts.prompts.jsonl")


@dataclass(frozen=True, slots=True)
class SavedState:
    """A training's tensors and progress after some step."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


class TrainingOutput(ResumableOutput):
    """Owns DIR.partial: the texts and the training's latest state."""

    def __init__(self, output: Path, fingerprint: Mapping[str, Any]) -> None:
        self._kept = "The texts are kept, and no training state is saved yet"
        super().__init__(output, fingerprint, _FILES)

    def _progress_text(self) -> str:
        return self._kept

    def _keep(self, about: Mapping[str, Any]) -> None:
        at = about["step"]
        self._kept = f"The texts and the training up to step {at} are kept in {self.folder}"

    def save_state(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Replace the saved state; the previous one stays until the new one is complete."""
        own = {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        data = save(own, metadata={"about": json.dumps(about)})
        self._write(self.folder / _STATE, data)
        self._keep(about)

    def load_state(self) -> SavedState | None:
        """The last saved state; None: there is none."""
        path = self.folder / _STATE
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads(file.metadata()["about"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{path}: is damaged: {error}. Remove it to restart the training."
            ) from error
        self._keep(about)
        return SavedState(tensors, about)

    def finish(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], report: Mapping[str, Any]
    ) -> None:
        """Write the head and rename the folder."""
        json_files = (("config.json", config), ("report.json", report))

        def write(made: Path) -> None:
            resumable.write_durably(
                made / "model.safetensors", save(dict(tensors), metadata={"format": "pt"})
            )
            for name, value in json_files:
                resumable.write_durably(made / name, json.dumps(value, indent=2).encode() + b"\n")

        self._publish(write)
