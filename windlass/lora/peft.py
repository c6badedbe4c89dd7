"""Reads an adapter's folder as PEFT writes it: adapter_config.json and adapter_model.safetensors.

Every field that changes what is computed is understood or refused by name, and every tensor is
accounted for. What becomes of an adapter once it is read is not known here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.errors import CheckpointError, UnsupportedError
from windlass.lora.base import Adapter, Low
from windlass.lora.mapped import TYPES, Array, MappedFile, Stored, StoredAdapter, not_finite
from windlass.models.checkpoint import SafetensorsCheckpoint
from windlass.models.fields import Fields
from windlass.models.json_file import read_json
from windlass.models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
# PEFT writes a copy of the base's own weight beside the change of a head.
_COPY = re.compile(r"base_model\.model\.(.+)\.base_layer\.weight")
# Fields that change what is computed in ways that are not known here; empty or false is harmless.
_REFUSED = {
    "use_dora": "DoRA, which also changes the length of the weights' columns",
    "fan_in_fan_out": "weights that are stored transposed",
    "lora_bias": "a bias of the low-rank product",
    "modules_to_save": "whole modules beside the low-rank ones",
    "layer_replication": "layers that are repeated",
    "trainable_token_indices": "new embeddings of single tokens",
    "target_parameters": "parameters that belong to no linear layer",
    "use_qalora": "QALoRA, which pools its inputs",
    "alora_invocation_tokens": "activated LoRA, which begins in the middle of a prompt",
    "arrow_config": "arrow routing between adapters",
    "use_bdlora": "block-diagonal matrices",
    "kasa_config": "KaSA, which scales each of the ranks",
    "monteclora_config": "MonteCLoRA, which mixes several matrices",
}
# Ways to begin the training that also change the base's weights.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def linear_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(out, in) of every module that an adapter may change."""
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, wide = spec.hidden_size, spec.intermediate_size
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
        for layer in range(spec.num_layers)
        for name, shape in in_layer.items()
    }
    return shapes | {"lm_head": (spec.vocab_size, hidden)}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What adapter_config.json says of ranks, scaling and modules."""

    file: Path
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rslora: bool
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: frozenset[int]  # empty: all
    base: str  # the model that it was trained on, for people only

    @classmethod
    def read(cls, file: Path) -> PeftConfig:
        """Read the file; what this version does not know is refused by name."""
        fields = Fields(read_json(file), str(file), "Save the adapter again with PEFT.")
        kind = fields.text("peft_type", None)
        if kind != "LORA":
            raise UnsupportedError(f"{file}: peft_type is {kind!r}; only 'LORA' is known.")
        _refuse_unknown(fields)
        return cls(
            file,
            fields.whole("r"),
            _positive(fields, "lora_alpha", fields.number("lora_alpha")),
            _pattern(fields, "rank_pattern", int),
            _pattern(fields, "alpha_pattern", (int, float)),
            fields.flag("use_rslora", False),
            _names(fields, "target_modules"),
            _names(fields, "exclude_modules"),
            _layers(fields),
            fields.text("base_model_name_or_path", ""),
        )

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(_key_for(module, self.rank_pattern), self.rank)

    def scaling_of(self, module: str) -> float:
        alpha = self.alpha_pattern.get(_key_for(module, self.alpha_pattern), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def targeted(self, module: str) -> bool:
        """Whether the adapter changes this module."""
        if self.excluded and _matches(module, self.excluded):
            return False
        if self.targets == "all-linear":
            return module != "lm_head"  # the head stays as it is, as PEFT has it
        if isinstance(self.targets, str) or module in self.targets:
            return _matches(module, self.targets)
        if not _matches(module, self.targets):
            return False
        if not self.layers:
            return True
        found = re.search(r"\.layers\.(\d+)\.", module)
        return found is not None and int(found[1]) in self.layers


def _refuse_unknown(fields: Fields) -> None:
    for name, what in _REFUSED.items():
        value = _raw(fields, name)
        if value:
            raise UnsupportedError(
                f"{fields.source}: {name} is {value!r:.80}: {what}. This version does not know "
                "that; train or convert the adapter without it."
            )
    bias = fields.text("bias", "none")
    if bias != "none":
        raise UnsupportedError(
            f"{fields.source}: bias is {bias!r}: the adapter brings biases of the base's layers. "
            "Only 'none' is known."
        )
    start = _raw(fields, "init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise UnsupportedError(
            f"{fields.source}: init_lora_weights is {start!r}: the training changed the base's "
            "weights too. Save the adapter with path_initial_model_for_weight_conversion, which "
            "makes a plain one of it."
        )


def _raw(fields: Fields, name: str) -> Any:
    """A field as it is written; None when it is absent."""
    return fields.present(name).get(name)


def _positive(fields: Fields, name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"{fields.source}: {name} must be above 0, got {value!r}.")
    return float(value)


def _pattern(fields: Fields, name: str, kind: Any) -> dict[str, Any]:
    """Numbers by the regular expressions of the modules that they hold for."""
    patterns = dict(fields.mapping(name))
    for key, value in patterns.items():
        if isinstance(value, bool) or not isinstance(value, kind):
            raise CheckpointError(f"{fields.source}: {name} has {value!r} for {key!r}.")
        _positive(fields, f"{name}[{key!r}]", value)
        _compiled(fields, name, key)
    return patterns


def _names(fields: Fields, name: str) -> str | tuple[str, ...]:
    value = _raw(fields, name)
    if value is None:
        return ()
    if isinstance(value, str):
        if value != "all-linear":
            _compiled(fields, name, value)
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise CheckpointError(f"{fields.source}: {name} must be a text or a list of them.")


def _compiled(fields: Fields, name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(
            f"{fields.source}: {name} has {pattern!r}, which is no regular expression: {error}."
        ) from error


def _layers(fields: Fields) -> frozenset[int]:
    value = _raw(fields, "layers_to_transform")
    items = [] if value is None else [value] if isinstance(value, int) else value
    if not isinstance(items, list) or not all(type(item) is int for item in items):
        raise CheckpointError(f"{fields.source}: layers_to_transform must be whole numbers.")
    return frozenset(items)


def _key_for(module: str, patterns: Mapping[str, object]) -> str:
    """The first pattern that fits the end of a module's name, as PEFT matches them."""
    fits = (key for key in patterns if re.match(rf"(.*\.)?({key})$", module))
    return next(fits, module)


def _matches(module: str, names: str | tuple[str, ...]) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


class AdapterFolder:
    """An adapter whose config and header were read and found to fit the model, but no weight."""

    def __init__(self, folder: Path, spec: ModelSpec, max_rank: int) -> None:
        weights = folder / WEIGHTS
        self.config = PeftConfig.read(_existing(folder, CONFIG))
        self._checkpoint = SafetensorsCheckpoint([_existing(folder, WEIGHTS)])
        self._weights = weights
        self._shapes = linear_shapes(spec)
        self._targeted = {module for module in self._shapes if self.config.targeted(module)}
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
        if module not in self._targeted:
            raise CheckpointError(
                f"{self._weights}: holds tensors of {module}, which is not among the target_modules "
                f"of {self.config.file.name}."
            )

    def _check_shapes(self, module: str, pair: Mapping[str, str], max_rank: int) -> None:
        rank = self.config.rank_of(module)
        if rank > max_rank:
            raise CheckpointError(
                f"{self.config.file}: {module} has rank {rank}, and this engine takes up to "
                f"{max_rank}. Start it with --max-lora-rank {rank}."
            )
        num_out, num_in = self._shapes[module]
        for letter, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            stored = self._checkpoint.stored(pair[letter]).shape
            if tuple(stored) != shape:
                raise CheckpointError(
                    f"{self._weights}: lora_{letter} of {module} has shape {list(stored)}; with "
                    f"rank {rank} and the model's weight of {[num_out, num_in]} it must be "
                    f"{list(shape)}. The adapter belongs to another base.{self._trained_on()}"
                )

    def _check_complete(self) -> None:
        absent = [
            module
            for module in self._shapes
            if module in self._targeted and module not in self._tensors
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
        """The weights in the file itself, for whoever packs them."""
        mapped = MappedFile(self._weights)
        modules = {
            module: Stored(
                self._array(mapped, pair["A"]),
                self._array(mapped, pair["B"]),
                self.config.scaling_of(module),
            )
            for module, pair in self._tensors.items()
        }
        return StoredAdapter(name, modules, str(self._weights))

    def _array(self, mapped: MappedFile, name: str) -> Array:
        stored = self._checkpoint.stored(name)
        if stored.format in TYPES:
            return mapped.array(name, stored.shape)
        values: Array = self._tensor(name).float().numpy()
        return values

    def read(self, name: str) -> Adapter:
        """The weights, scaled, in memory of their own; numbers that are not finite are refused."""
        return Adapter(name, dict(self._modules()))

    def _modules(self) -> Iterator[tuple[str, Low]]:
        for module, pair in self._tensors.items():
            down, up = self._tensor(pair["A"]), self._tensor(pair["B"])
            scaled = up * self.config.scaling_of(module)
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


def read_adapter(folder: Path, name: str, spec: ModelSpec, max_rank: int) -> Adapter:
    """Read an adapter's folder for a model; whatever does not fit raises with names and numbers."""
    return AdapterFolder(folder, spec, max_rank).read(name)
