"""Reads an adapter's folder as PEFT writes it: adapter_config.json and adapter_model.safetensors.

The config is read in peft_config.py; here every tensor is accounted for. What becomes of an adapter
once it is read is not known here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import CheckpointError, UnsupportedError
from windlass.lora.base import Adapter, Low
from windlass.lora.peft_config import PeftConfig
from windlass.lora.stored import (
    TYPES,
    Array,
    Stored,
    StoredAdapter,
    not_finite,
    read_arrays,
    version_of,
)
from windlass.lora_config import MAX_RANK
from windlass.models.checkpoint import SafetensorsCheckpoint
from windlass.models.hparams import HParams

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
# PEFT writes a copy of the base's own weight beside the change of a head.
_COPY = re.compile(r"base_model\.model\.(.+)\.base_layer\.weight")


def linear_shapes(hparams: HParams) -> dict[str, tuple[int, int]]:
    """(out, in) of every module that an adapter may change."""
    heads, kv_heads = hparams.num_heads * hparams.head_dim, hparams.num_kv_heads * hparams.head_dim
    hidden, wide = hparams.hidden_size, hparams.intermediate_size
    in_layer = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    shapes = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(hparams.num_layers)
        for name, shape in in_layer.items()
    }
    return shapes | {"lm_head": (hparams.vocab_size, hidden)}


class AdapterFolder:
    """An adapter whose config and header were read and found to fit the model, but no weight."""

    def __init__(self, folder: Path, hparams: HParams, max_rank: int) -> None:
        self._weights = folder / WEIGHTS
        self.version = version_of(folder / CONFIG, self._weights)
        self.config = PeftConfig.read(_existing(folder, CONFIG))
        self._checkpoint = SafetensorsCheckpoint([_existing(folder, WEIGHTS)])
        self._shapes = linear_shapes(hparams)
        self._modules = self.config.over(self._shapes)
        self._tensors = self._find()
        for module, pair in self._tensors.items():
            self._check_module(module)
            self._check_shapes(module, pair, max_rank)
        self._check_complete()

    def _find(self) -> dict[str, dict[str, str]]:
        """Tensor names by module and letter; a tensor of no known kind is an error."""
        found: dict[str, dict[str, str]] = {}
        for name in self._checkpoint.names():
            if self._is_copy(name):
                continue
            parts = _KEY.fullmatch(name)
            if parts is None and "embed_tokens" in name:
                raise UnsupportedError(
                    f"{self._weights}: tensor {name} belongs to embeddings, which adapters do not "
                    "change here. Train the adapter without embed_tokens, and without "
                    "ensure_weight_tying where lm_head is among its target_modules."
                )
            if parts is None:
                raise UnsupportedError(
                    f"{self._weights}: tensor {name} is of no known kind; expected are "
                    "base_model.model.MODULE.lora_A.weight and lora_B.weight."
                )
            if found.setdefault(parts[1], {}).setdefault(parts[2], name) != name:
                raise CheckpointError(
                    f"{self._weights}: module {parts[1]} has two tensors lora_{parts[2]}."
                )
        for module, pair in found.items():
            if len(pair) != 2:
                letter = "B" if "A" in pair else "A"
                raise CheckpointError(f"{self._weights}: module {module} has no lora_{letter}.")
        if not found:
            raise CheckpointError(f"{self._weights}: holds no tensor.")
        return found

    def _is_copy(self, name: str) -> bool:
        """Whether a tensor is the base's own weight, as large as this model's."""
        parts = _COPY.fullmatch(name)
        if parts is None:
            return False
        stored, shape = self._checkpoint.stored(name).shape, self._shapes.get(parts[1])
        if shape is not None and tuple(stored) != shape:
            raise CheckpointError(
                f"{self._weights}: tensor {name} has shape {list(stored)}, this model's weight "
                f"{list(shape)}: the adapter belongs to another base, or to a larger vocabulary."
            )
        return shape is not None

    def _check_module(self, module: str) -> None:
        if module not in self._shapes:
            raise CheckpointError(
                f"{self._weights}: the adapter changes {module}, which this model does not have as "
                f"a linear layer.{self._trained_on()}"
            )
        if module not in self._modules.targeted:
            raise CheckpointError(
                f"{self._weights}: holds tensors of {module}, which is not among the target_modules "
                f"of {self.config.file.name}."
            )

    def _check_shapes(self, module: str, pair: Mapping[str, str], max_rank: int) -> None:
        rank = self._modules.ranks[module]
        if rank > max_rank:
            largest = max(self._modules.ranks.get(each, 0) for each in self._tensors)
            advice = f"Start it with --max-lora-rank {largest}"
            if largest > MAX_RANK:
                advice = f"{MAX_RANK} is the most that can be had (--max-lora-rank)"
            raise CheckpointError(
                f"{self.config.file}: {module} has rank {rank}, and this engine takes up to "
                f"{max_rank}. {advice}."
            )
        num_out, num_in = self._shapes[module]
        for letter, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            stored = self._checkpoint.stored(pair[letter]).shape
            if tuple(stored) != shape:
                why = f"The adapter belongs to another base.{self._trained_on()}"
                if len(stored) == 2 and stored[letter == "A"] == shape[letter == "A"]:
                    why = f"The ranks in {self.config.file.name} are of another adapter."
                raise CheckpointError(
                    f"{self._weights}: lora_{letter} of {module} has shape {list(stored)}; with "
                    f"rank {rank} and the model's weight of {[num_out, num_in]} it must be "
                    f"{list(shape)}. {why}"
                )

    def _check_complete(self) -> None:
        absent = [
            module
            for module in self._shapes
            if module in self._modules.targeted and module not in self._tensors
        ]
        if absent:
            raise CheckpointError(
                f"{self._weights}: {len(absent)} modules that {self.config.file.name} targets have "
                f"no tensors: {', '.join(absent[:4])}{', …' if len(absent) > 4 else ''}. The file "
                "is incomplete, or of another base."
            )

    def _trained_on(self) -> str:
        return f" It was trained on {self.config.base}." if self.config.base else ""

    def stored(self, name: str) -> StoredAdapter:
        """The weights as the file has them, for whoever packs them."""
        names = [each for pair in self._tensors.values() for each in pair.values()]
        tensors = {each: self._checkpoint.stored(each) for each in names}
        known = {each: one for each, one in tensors.items() if one.format in TYPES}
        arrays = read_arrays(self._weights, known)
        arrays |= {each: self._converted(each) for each in names if each not in known}
        modules = {
            module: Stored(arrays[pair["A"]], arrays[pair["B"]], self._modules.scalings[module])
            for module, pair in self._tensors.items()
        }
        self._check_unchanged()
        return StoredAdapter(name, modules, str(self._weights))

    def _converted(self, name: str) -> Array:
        values: Array = self._tensor(name).float().numpy()
        return values

    def _check_unchanged(self) -> None:
        """What was read belongs to the header that was checked."""
        if version_of(self.config.file, self._weights) != self.version:
            raise CheckpointError(
                f"{self._weights.parent}: was changed while it was read. Load the adapter when its "
                "files are written, or write them elsewhere and move the folder here."
            )

    def read(self, name: str) -> Adapter:
        """The weights, scaled, in memory of their own; numbers that are not finite are refused."""
        return Adapter(name, dict(self._scaled()))

    def _scaled(self) -> Iterator[tuple[str, Low]]:
        for module, pair in self._tensors.items():
            down, up = self._tensor(pair["A"]), self._tensor(pair["B"])
            scaled = up * self._modules.scalings[module]
            if not (_finite(down) and _finite(scaled)):
                raise not_finite(str(self._weights), module)
            yield module, Low(down.clone(), scaled)

    def _tensor(self, name: str) -> Tensor:
        tensor = self._checkpoint.read(name, self._checkpoint.stored(name).shape)
        if not tensor.is_floating_point():
            raise UnsupportedError(
                f"{self._weights}: tensor {name} is stored as {tensor.dtype}; adapters are read "
                "from floating point."
            )
        return tensor


def _finite(values: Tensor) -> bool:
    """The least and the largest tell of all: both are NaN where any number is."""
    return all(math.isfinite(value) for value in values.aminmax())


def _existing(folder: Path, name: str) -> Path:
    file = folder / name
    if file.is_file():
        return file
    if not folder.is_dir():
        raise CheckpointError(f"adapter {folder}: there is no such folder.")
    if name == WEIGHTS and (folder / _PICKLE).is_file():
        raise UnsupportedError(
            f"{folder / _PICKLE}: pickle is never loaded, since it can run any code. Save the "
            f"adapter as {WEIGHTS} (PEFT does so by default)."
        )
    held = ", ".join(sorted(item.name for item in folder.iterdir())[:10]) or "nothing"
    raise CheckpointError(f"adapter {folder}: has no {name}; it holds {held}.")


def read_adapter(folder: Path, name: str, hparams: HParams, max_rank: int) -> Adapter:
    """Read an adapter's folder for a model; whatever does not fit raises with names and numbers."""
    return AdapterFolder(folder, hparams, max_rank).read(name)
