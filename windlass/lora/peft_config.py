"""What adapter_config.json says, as PEFT writes it.

Every field that changes what is computed is understood or refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from windlass.errors import CheckpointError, UnsupportedError
from windlass.lora.patterns import NotMatched, ending, fault_of, matching
from windlass.models.fields import LARGEST, Fields
from windlass.models.json_file import read_json

_N = TypeVar("_N", int, float)
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


@dataclass(frozen=True, slots=True)
class Modules:
    """What a config means for each of a model's modules."""

    targeted: frozenset[str]  # those that the adapter changes
    ranks: Mapping[str, int]
    scalings: Mapping[str, float]


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

    def over(self, modules: Collection[str]) -> Modules:
        """What it means for these modules. Patterns that take too long are refused."""
        found = self._by_pattern("rank_pattern", self.rank_pattern, modules)
        ranks = {module: found.get(module, self.rank) for module in modules}
        alphas = self._by_pattern("alpha_pattern", self.alpha_pattern, modules)
        scalings = {
            module: alphas.get(module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)
            for module, rank in ranks.items()
        }
        return Modules(self._targeted(modules), ranks, scalings)

    def _targeted(self, modules: Collection[str]) -> frozenset[str]:
        """The modules that the adapter changes."""
        excluded = self._named("exclude_modules", self.excluded, modules)
        if self.targets == "all-linear":
            found = frozenset(modules) - {"lm_head"}  # the head stays as it is, as PEFT has it
        else:
            found = self._named("target_modules", self.targets, modules)
        if not isinstance(self.targets, str):
            found = frozenset(each for each in found if each in self.targets or self._has(each))
        return found - excluded

    def _has(self, module: str) -> bool:
        """Whether the adapter is for this module's layer."""
        found = re.search(r"\.layers\.(\d+)\.", module)
        return not self.layers or (found is not None and int(found[1]) in self.layers)

    def _named(
        self, field: str, names: str | tuple[str, ...], modules: Collection[str]
    ) -> frozenset[str]:
        """The modules that a list means, or a regular expression."""
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
        """Numbers of the modules that a pattern fits, the first one that does, as PEFT has it."""
        fitting = self._matching(field, [ending(key) for key in patterns], modules)
        found: dict[str, _N] = {}
        for value, fits in zip(patterns.values(), fitting, strict=True):
            for module in fits:
                found.setdefault(module, value)
        return found

    def _matching(
        self, field: str, patterns: Sequence[str], modules: Collection[str]
    ) -> list[frozenset[str]]:
        try:
            return matching(patterns, list(modules))
        except NotMatched as error:
            raise CheckpointError(
                f"{self.file}: matching {field} with the names of modules {error}. Write it without "
                "repetitions inside of repetitions, or as a list of modules."
            ) from error


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
    if not 0 < value <= LARGEST:
        raise CheckpointError(f"{fields.source}: {name} must be above 0, got {value!r:.80}.")
    return float(value)


def _pattern(fields: Fields, name: str, kind: Any) -> dict[str, Any]:
    """Numbers by the regular expressions of the modules that they hold for."""
    patterns = dict(fields.mapping(name))
    for key, value in patterns.items():
        if isinstance(value, bool) or not isinstance(value, kind):
            raise CheckpointError(f"{fields.source}: {name} has {value!r} for {key!r}.")
        _positive(fields, f"{name}[{key!r}]", value)
        _compiled(fields, name, key)
        _compiled(fields, name, ending(key))
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
    fault = fault_of(pattern)
    if fault is not None:
        raise CheckpointError(f"{fields.source}: {name} has {pattern!r:.80}, which {fault}.")


def _layers(fields: Fields) -> frozenset[int]:
    value = _raw(fields, "layers_to_transform")
    items = [] if value is None else [value] if isinstance(value, int) else value
    if not isinstance(items, list) or not all(type(item) is int for item in items):
        raise CheckpointError(f"{fields.source}: layers_to_transform must be whole numbers.")
    return frozenset(items)
