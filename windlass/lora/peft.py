"""Reads an adapter's folder in PEFT's format: adapter_config.json and adapter_model.safetensors.

peft_config.py reads the config. This file checks every tensor of the weights against it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from windlass.errors import CheckpointError, UnsupportedError
from windlass.lora.base import Adapter, LoraWeights
from windlass.lora.modules import AdaptedModules, rows_of
from windlass.lora.open_below import Opener
from windlass.lora.peft_config import PeftConfig
from windlass.lora.stored import (
    TYPES,
    Array,
    StoredAdapter,
    StoredWeights,
    not_finite,
    read_arrays,
    version_of,
)
from windlass.lora_config import MAX_RANK
from windlass.models.checkpoint import read_header
from windlass.models.hparams import HParams

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
# PEFT writes a copy of the base model's weight next to the LoRA weights of a head.
_BASE_COPY = re.compile(r"base_model\.model\.(.+)\.base_layer\.weight")
# torch's names of the types of safetensors that weights may have.
_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
}


class AdapterFolder:
    """An adapter on disk. The constructor checks config and header against the model.

    `stored` and `read` read the weights. `opener` opens every file; by default, `os.open`.
    """

    def __init__(
        self, folder: Path, modules: AdaptedModules, max_rank: int, opener: Opener | None = None
    ) -> None:
        self._weights = folder / WEIGHTS
        self._opener = opener
        self.version = version_of(folder / CONFIG, self._weights, opener=opener)
        self.config = PeftConfig.read(_existing(folder, CONFIG, opener), opener)
        self._stored = read_header(_existing(folder, WEIGHTS, opener), opener)
        self._adapted = modules
        self._tensors = self._group_tensors()
        self._check_known()
        self._expected = modules.alike(self._tensors)
        self._modules = self.config.resolve(self._expected)
        for module, pair in self._tensors.items():
            self._check_module(module)
            self._check_shapes(module, pair, max_rank)
        self._check_complete()

    def _group_tensors(self) -> dict[str, dict[str, str]]:
        """Tensor names by module and by letter, A or B. Raises for a tensor of an unknown kind."""
        found: dict[str, dict[str, str]] = {}
        for name in self._stored:
            if self._is_base_copy(name):
                continue
            parts = _KEY.fullmatch(name)
            if parts is None and "embed_tokens" in name:
                raise UnsupportedError(
                    f"{self._weights}: tensor {name} belongs to embeddings, which adapters cannot "
                    "change in this version. Train the adapter without embed_tokens, and without "
                    "ensure_weight_tying if lm_head is one of its target_modules."
                )
            if parts is None:
                raise UnsupportedError(
                    f"{self._weights}: tensor {name} is not a known LoRA tensor; expected "
                    "base_model.model.MODULE.lora_A.weight and lora_B.weight."
                )
            if found.setdefault(parts[1], {}).setdefault(parts[2], name) != name:
                raise CheckpointError(
                    f"{self._weights}: module {parts[1]} has two lora_{parts[2]} tensors."
                )
        for module, pair in found.items():
            if len(pair) != 2:
                letter = "B" if "A" in pair else "A"
                raise CheckpointError(f"{self._weights}: module {module} has no lora_{letter}.")
        if not found:
            raise CheckpointError(f"{self._weights}: contains no tensors.")
        return found

    def _is_base_copy(self, name: str) -> bool:
        """Whether a tensor is a copy of this base model's weight. Raises if its shape differs."""
        parts = _BASE_COPY.fullmatch(name)
        if parts is None:
            return False
        stored, shape = self._stored[name].shape, self._adapted.shape(parts[1])
        if shape is not None and tuple(stored) != shape:
            raise CheckpointError(
                f"{self._weights}: tensor {name} has shape {list(stored)}, this model's weight "
                f"{list(shape)}: the adapter is for another base model, or a larger vocabulary."
            )
        return shape is not None

    def _check_known(self) -> None:
        """Check that every module is one of the model, and that no two are the same."""
        found: dict[str, str] = {}
        for module in self._tensors:
            parts = self._adapted.parts(module)
            if not parts:
                raise CheckpointError(
                    f"{self._weights}: the adapter changes {module}, which is not a linear layer of "
                    f"this model.{self._trained_on()}"
                )
            for part in parts:
                if (other := found.setdefault(part.module, module)) != module:
                    raise CheckpointError(
                        f"{self._weights}: modules {other} and {module} are both {part.module}."
                    )

    def _check_module(self, module: str) -> None:
        if module not in self._modules.targeted:
            raise CheckpointError(
                f"{self._weights}: contains tensors of {module}, which is not in the target_modules "
                f"of {self.config.file.name}."
            )

    def _check_shapes(self, module: str, pair: Mapping[str, str], max_rank: int) -> None:
        rank = self._modules.ranks[module]
        if rank > max_rank:
            largest = max(self._modules.ranks.get(each, 0) for each in self._tensors)
            advice = f"Start the engine with --max-lora-rank {largest}"
            if largest > MAX_RANK:
                advice = f"--max-lora-rank is limited to {MAX_RANK}"
            raise CheckpointError(
                f"{self.config.file}: {module} has rank {rank}, above the engine's maximum of "
                f"{max_rank}. {advice}."
            )
        shape = self._adapted.shape(module)
        assert shape is not None
        num_out, num_in = shape
        for letter, needed in (("A", (rank, num_in)), ("B", (num_out, rank))):
            stored = self._stored[pair[letter]].shape
            if tuple(stored) != needed:
                why = f"The adapter is for another base model.{self._trained_on()}"
                if len(stored) == 2 and stored[letter == "A"] == needed[letter == "A"]:
                    why = f"The ranks in {self.config.file.name} do not match the weights."
                raise CheckpointError(
                    f"{self._weights}: lora_{letter} of {module} has shape {list(stored)}; with "
                    f"rank {rank} and the model's weight of {[num_out, num_in]} it must be "
                    f"{list(needed)}. {why}"
                )

    def _check_complete(self) -> None:
        missing = [
            module
            for module in self._expected
            if module in self._modules.targeted and module not in self._tensors
        ]
        if missing:
            raise CheckpointError(
                f"{self._weights}: {len(missing)} modules that {self.config.file.name} targets have "
                f"no tensors: {', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}. The "
                "file is incomplete, or for another base model."
            )

    def _trained_on(self) -> str:
        return f" It was trained on {self.config.base}." if self.config.base else ""

    def stored(self, name: str) -> StoredAdapter:
        """Read the weights as stored, unscaled, for Bank.pack."""
        arrays = self._arrays()
        for each, array in arrays.items():
            if self._stored[each].format not in TYPES:
                arrays[each] = self._tensor(each, array).float().numpy()
        modules: dict[str, StoredWeights] = {}
        for module, pair in self._tensors.items():
            scaling, up = self._modules.scalings[module], arrays[pair["B"]]
            for part in self._adapted.parts(module):
                modules[part.module] = StoredWeights(
                    arrays[pair["A"]], rows_of(part, up), scaling * part.factor
                )
        self._check_unchanged()
        return StoredAdapter(name, modules, str(self._weights))

    def _arrays(self) -> dict[str, Array]:
        names = [each for pair in self._tensors.values() for each in pair.values()]
        tensors = {each: self._stored[each] for each in names}
        return read_arrays(self._weights, tensors, self._opener)

    def _check_unchanged(self) -> None:
        """Raise if a file changed since its header was checked."""
        if version_of(self.config.file, self._weights, opener=self._opener) != self.version:
            raise CheckpointError(
                f"{self._weights.parent}: was changed while it was read. Load the adapter after its "
                "files are written, or write them elsewhere and move the folder here."
            )

    def read(self, name: str) -> Adapter:
        """Read the weights into new memory and scale them. Raises for values that are not finite."""
        return Adapter(name, dict(self._scaled()))

    def _scaled(self) -> Iterator[tuple[str, LoraWeights]]:
        arrays = self._arrays()
        for module, pair in self._tensors.items():
            down, up = (self._tensor(pair[letter], arrays[pair[letter]]) for letter in "AB")
            scaled = up * self._modules.scalings[module]
            if not (_finite(down) and _finite(scaled)):
                raise not_finite(str(self._weights), module)
            for part in self._adapted.parts(module):
                yield part.module, LoraWeights(down, rows_of(part, scaled) * part.factor)

    def _tensor(self, name: str, array: Array) -> Tensor:
        """A copy of a stored tensor."""
        import torch

        stored = self._stored[name]
        if stored.format not in _DTYPES:
            raise UnsupportedError(
                f"{self._weights}: tensor {name} is stored as {stored.format}; adapter weights must be "
                f"floating point ({', '.join(_DTYPES)})."
            )
        values = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
        return values.view(getattr(torch, _DTYPES[stored.format])).view(stored.shape)


def _finite(values: Tensor) -> bool:
    """Whether all values are finite. Minimum and maximum are both NaN if any value is NaN."""
    return all(math.isfinite(value) for value in values.aminmax())


def _existing(folder: Path, name: str, opener: Opener | None) -> Path:
    content = _content(folder, opener)
    if name in content:
        return folder / name
    if name == WEIGHTS and _PICKLE in content:
        raise UnsupportedError(
            f"{folder / _PICKLE}: pickle is never loaded, since it can run any code. Save the "
            f"adapter as {WEIGHTS} (PEFT does so by default)."
        )
    some = ", ".join(sorted(content)[:10]) or "nothing"
    raise CheckpointError(f"adapter {folder}: has no {name}; the folder contains {some}.")


def _content(folder: Path, opener: Opener | None) -> list[str]:
    """Names of the files in a folder. Raises CheckpointError for other paths."""
    try:
        if opener is None:
            return os.listdir(folder)
        descriptor = opener(str(folder), os.O_RDONLY)
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"adapter {folder}: no such folder.") from None
    except OSError as error:
        raise CheckpointError(
            f"adapter {folder}: cannot be read: {error.strerror or error}."
        ) from error


def read_adapter(folder: Path, name: str, hparams: HParams, max_rank: int) -> Adapter:
    """Read an adapter's folder for a model. Raises if the adapter does not fit the model."""
    return AdapterFolder(folder, AdaptedModules(hparams), max_rank).read(name)
