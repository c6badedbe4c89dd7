"""Reads adapter_config.json as PEFT writes it.

Every field that changes the computation is supported or raises with the field's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from windlass.errors import CheckpointError, UnsupportedError
from windlass.lora.open_below import Opener
from windlass.lora.patterns import MatchError, match_names, pattern_error, suffix_pattern
from windlass.models.fields import LARGEST, Fields
from windlass.models.json_file import read_json

_N = TypeVar("_N", int, float)
# Fields that change the computation and are not supported; empty or false values are accepted.
_UNSUPPORTED = {
    "use_dora": "DoRA, which also rescales the columns of the weights",
    "fan_in_fan_out": "transposed weights",
    "lora_bias": "a bias of the LoRA output",
    "modules_to_save": "full modules in addition to LoRA weights",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "trained embeddings of single tokens",
    "target_parameters": "parameters outside of linear layers",
    "use_qalora": "QALoRA, which pools its inputs",
    "alora_invocation_tokens": "activated LoRA, which begins in the middle of a prompt",
    "arrow_config": "arrow routing between adapters",
    "use_bdlora": "block-diagonal matrices",
    "kasa_config": "KaSA, which scales each rank",
    "monteclora_config": "MonteCLoRA, which mixes several matrices",
}
# Initialisations that also change the base model's weights.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class ModuleSettings:
    """Rank and scaling of each module of a model, and the modules that the adapter changes."""

    targeted: frozenset[str]
    ranks: Mapping[str, int]
    scalings: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields of adapter_config.json for ranks, scaling and modules."""

    file: Path
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rslora: bool
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: frozenset[int]  # empty: all layers
    base: str  # name of the base model, for error messages only

    @classmethod
    def read(cls, file: Path, opener: Opener | None = None) -> PeftConfig:
        """Read the file. Raises for unsupported fields, by name."""
        fields = Fields(read_json(file, opener), str(file), "Save the adapter again with PEFT.")
        kind = fields.text("peft_type", None)
        if kind != "LORA":
            raise UnsupportedError(f"{file}: peft_type is {kind!r}; only 'LORA' is supported.")
        _check_supported(fields)
        return cls(
            file=file,
            rank=fields.positive_int("r"),
            alpha=_positive(fields, "lora_alpha", fields.number("lora_alpha")),
            rank_pattern=_pattern(fields, "rank_pattern", int),
            alpha_pattern=_pattern(fields, "alpha_pattern", (int, float)),
            rslora=fields.flag("use_rslora", False),
            targets=_names(fields, "target_modules"),
            excluded=_names(fields, "exclude_modules"),
            layers=_layers(fields),
            base=fields.text("base_model_name_or_path", ""),
        )

    def resolve(self, modules: Collection[str]) -> ModuleSettings:
        """Apply the config to these modules. Raises for patterns that take too long to match."""
        found = self._by_pattern("rank_pattern", self.rank_pattern, modules)
        ranks = {module: found.get(module, self.rank) for module in modules}
        alphas = self._by_pattern("alpha_pattern", self.alpha_pattern, modules)
        scalings = {
            module: alphas.get(module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)
            for module, rank in ranks.items()
        }
        return ModuleSettings(self._targeted(modules), ranks, scalings)

    def _targeted(self, modules: Collection[str]) -> frozenset[str]:
        """The modules that the adapter changes."""
        excluded = self._named("exclude_modules", self.excluded, modules)
        if self.targets == "all-linear":
            found = frozenset(modules) - {"lm_head"}  # PEFT excludes the head
        else:
            found = self._named("target_modules", self.targets, modules)
        if not isinstance(self.targets, str):
            found = frozenset(
                each for each in found if each in self.targets or self._in_layers(each)
            )
        return found - excluded

    def _in_layers(self, module: str) -> bool:
        """Whether layers_to_transform includes this module's layer."""
        found = re.search(r"\.layers\.(\d+)\.", module)
        return not self.layers or (found is not None and int(found[1]) in self.layers)

    def _named(
        self, field: str, names: str | tuple[str, ...], modules: Collection[str]
    ) -> frozenset[str]:
        """The modules that a list of names, or a regular expression, selects."""
        if isinstance(names, str):
            return self._matching(field, [names], modules)[0]
        return frozenset(
            module
            for module in modules
            if any(module == name or module.endswith(f".{name}") for name in names)
        )

    def _by_pattern(
        self, field: str, patterns: Mapping[str, _N], modules: Collection[str]
    ) -> dict[str, _N]:
        """Values by module. The first matching pattern applies, as in PEFT."""
        matched = self._matching(field, [suffix_pattern(key) for key in patterns], modules)
        found: dict[str, _N] = {}
        for value, names in zip(patterns.values(), matched, strict=True):
            for module in names:
                found.setdefault(module, value)
        return found

    def _matching(
        self, field: str, patterns: Sequence[str], modules: Collection[str]
    ) -> list[frozenset[str]]:
        try:
            return match_names(patterns, list(modules))
        except MatchError as error:
            raise CheckpointError(
                f"{self.file}: matching {field} against the module names {error}. Avoid nested "
                "repetitions, or list the modules."
            ) from error


def _check_supported(fields: Fields) -> None:
    for name, what in _UNSUPPORTED.items():
        value = _raw(fields, name)
        if value:
            raise UnsupportedError(
                f"{fields.source}: {name} is {value!r:.80}: {what}. This is not supported; train "
                "or convert the adapter without it."
            )
    bias = fields.text("bias", "none")
    if bias != "none":
        raise UnsupportedError(
            f"{fields.source}: bias is {bias!r}: the adapter has biases for the base model's "
            "layers. Only 'none' is supported."
        )
    init = _raw(fields, "init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise UnsupportedError(
            f"{fields.source}: init_lora_weights is {init!r}: the training changed the base "
            "model's weights too. Save the adapter with path_initial_model_for_weight_conversion, "
            "which converts it to a standard LoRA."
        )


def _raw(fields: Fields, name: str) -> Any:
    """A field's unchecked value; None if absent."""
    return fields.present(name).get(name)


def _positive(fields: Fields, name: str, value: float) -> float:
    if not 0 < value <= LARGEST:
        raise CheckpointError(f"{fields.source}: {name} must be above 0, got {value!r:.80}.")
    return float(value)


def _pattern(fields: Fields, name: str, kind: Any) -> dict[str, Any]:
    """Values by the regular expression of their modules."""
    patterns = dict(fields.mapping(name))
    for key, value in patterns.items():
        if isinstance(value, bool) or not isinstance(value, kind):
            raise CheckpointError(f"{fields.source}: {name} has {value!r} for {key!r}.")
        _positive(fields, f"{name}[{key!r}]", value)
        _check_pattern(fields, name, key)
        _check_pattern(fields, name, suffix_pattern(key))
    return patterns


def _names(fields: Fields, name: str) -> str | tuple[str, ...]:
    value = _raw(fields, name)
    if value is None:
        return ()
    if isinstance(value, str):
        if value != "all-linear":
            _check_pattern(fields, name, value)
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise CheckpointError(f"{fields.source}: {name} must be a string or a list of strings.")


def _check_pattern(fields: Fields, name: str, pattern: str) -> None:
    error = pattern_error(pattern)
    if error is not None:
        raise CheckpointError(f"{fields.source}: {name} has {pattern!r:.80}, which {error}.")


def _layers(fields: Fields) -> frozenset[int]:
    value = _raw(fields, "layers_to_transform")
    items = [] if value is None else [value] if isinstance(value, int) else value
    if not isinstance(items, list) or not all(type(item) is int for item in items):
        raise CheckpointError(
            f"{fields.source}: layers_to_transform must be an integer or a list of integers."
        )
    return frozenset(items)
