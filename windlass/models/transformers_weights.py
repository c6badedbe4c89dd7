"""A checkpoint under the names of transformers' modules.

transformers renames and merges tensors of some checkpoints when it loads them: experts become one tensor,
old names become new ones, and some files lack the prefix of the base model. Its own rules are applied here.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from windlass.errors import CheckpointError
from windlass.models.checkpoint import Checkpoint, StoredTensor
from windlass.models.transformers_model import TransformersModel
from windlass.quant.shard import Region


@dataclass(frozen=True, slots=True)
class _Merged:
    """Tensors that a converter of transformers turns into others."""

    converter: Any
    first: str  # name of the first result
    sources: dict[str, list[str]] = field(default_factory=dict)  # by pattern of the converter


class TransformersCheckpoint:
    """The tensors of a checkpoint as transformers names and merges them."""

    def __init__(self, checkpoint: Checkpoint, found: TransformersModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

        self._checkpoint = checkpoint
        self._model = _on_meta(found)
        self._modules = {path for path, _ in self._model.named_modules()}
        rules = get_model_conversion_mapping(self._model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._sources: dict[str, str | _Merged] = {}
        self._results: dict[str, Tensor] = {}  # of the last converter, until they are read
        for name in sorted(checkpoint.names(), key=dot_natural_key):
            self._add(name)
        ignored = [
            re.compile(each) for each in self._model._keys_to_ignore_on_load_unexpected or ()
        ]
        own = self._model.state_dict()
        for name in list(self._sources):
            is_ignored = name not in own and any(each.search(name) for each in ignored)
            if is_ignored or (found.tied and name == f"{found.head}.weight"):
                del self._sources[name]

    def _add(self, name: str) -> None:
        from transformers.core_model_loading import apply_converters, apply_renamings

        own = self._model.state_dict()
        renamed = apply_renamings(name, self._renamings)
        target, pattern = apply_converters(renamed, self._converters)
        target, renamed = self._with_prefix(target), self._with_prefix(renamed)
        if pattern is None or (target not in own and renamed in own):
            self._sources[renamed] = name
            return
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        merged = self._sources.get(target)
        if not isinstance(merged, _Merged):
            merged = _Merged(converter, target)
            for result in converter.target_patterns:
                self._sources[target.replace(converter.target_patterns[0], result)] = merged
        merged.sources.setdefault(pattern, []).append(name)

    def _with_prefix(self, name: str) -> str:
        """The name with the base model's prefix, if only then its module exists."""
        prefix = f"{self._model.base_model_prefix}."
        if name.rpartition(".")[0] in self._modules:
            return name
        with_prefix = prefix + name
        return with_prefix if with_prefix.rpartition(".")[0] in self._modules else name

    def names(self) -> Collection[str]:
        return self._sources.keys()

    def stored(self, name: str) -> StoredTensor:
        source = self._sources.get(name, name)
        if isinstance(source, _Merged):
            source = next(iter(source.sources.values()))[0]
        return self._checkpoint.stored(source)

    def read(
        self, name: str, shape: tuple[int, ...], region: Region = (), *, raw: bool = False
    ) -> Tensor:
        source = self._sources.get(name, name)
        if isinstance(source, str):
            return self._checkpoint.read(source, shape, region, raw=raw)
        if name not in self._results:
            self._results = self._convert(source)
        tensor = self._results.pop(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"tensor {name}, made of {sum(map(len, source.sources.values()))} tensors, has shape "
                f"{list(tensor.shape)}, the network needs {list(shape)}. The weights and the config "
                "do not match."
            )
        return tensor[region] if region else tensor

    def _convert(self, merged: _Merged) -> dict[str, Tensor]:
        converter = deepcopy(merged.converter)
        for pattern, names in merged.sources.items():
            for name in names:
                tensor = self._checkpoint.read(name, self._checkpoint.stored(name).shape)
                converter.add_tensor(merged.first, name, pattern, tensor)
        made = converter.convert(merged.first, model=self._model, config=self._model.config)
        return {
            name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()
        }


def _on_meta(found: TransformersModel) -> Any:
    import transformers

    model_class = getattr(transformers, found.class_name)
    config = model_class.config_class.from_dict(dict(found.config))
    with torch.device("meta"):
        return model_class._from_config(config, dtype=torch.float32)
