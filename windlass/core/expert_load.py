"""Recorded load of experts, and placements that balance it over ranks; their JSON files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.core.moe import ExpertPlacement
from windlass.core.types import ExpertStats
from windlass.errors import ConfigError

_LOAD, _PLACEMENT = "windlass expert load", "windlass expert placement"
Placements = Mapping[int, ExpertPlacement]


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Tokens that chose each expert, by layer."""

    layers: Mapping[int, tuple[int, ...]]

    @property
    def num_tokens(self) -> int:
        """Pairs of a token and one of its experts, in all layers."""
        return sum(map(sum, self.layers.values()))

    def imbalance(self, placements: Placements) -> dict[int, float]:
        """For each layer, the tokens of the rank with the most over the mean of the ranks; 1 is balanced.

        Layers without tokens are left out.
        """
        return {
            layer: _imbalance(counts, placements[layer])
            for layer, counts in self.layers.items()
            if sum(counts)
        }

    def balanced(self, num_ranks: int) -> dict[int, ExpertPlacement]:
        """Placements of equal numbers of experts: the most used expert first, each on the emptiest rank."""
        return {layer: _balanced(counts, num_ranks) for layer, counts in self.layers.items()}

    def spread(self, num_ranks: int) -> dict[int, ExpertPlacement]:
        """The placements that ranks have by default."""
        return {layer: _contiguous(counts, num_ranks) for layer, counts in self.layers.items()}

    def apart(self) -> dict[int, ExpertPlacement]:
        """Each expert on a rank of its own."""
        return {layer: _contiguous(counts, len(counts)) for layer, counts in self.layers.items()}

    def write(self, path: str) -> None:
        layers = {str(layer): list(counts) for layer, counts in self.layers.items()}
        _write(path, {"kind": _LOAD, "layers": layers})


class ExpertLoadMonitor:
    """Owns the last reading of the experts' load, and writes it to `path` if there is one."""

    def __init__(
        self, read: Callable[[], ExpertLoad], placements: Placements, path: str | None
    ) -> None:
        self._read = read
        self._placements = placements  # empty: one rank has all experts
        self._path = path
        self.stats = ExpertStats()

    def update(self) -> None:
        """Read the load. On a GPU this waits for the steps in progress."""
        load = self._read()
        self.stats = ExpertStats(
            expert_imbalance=load.imbalance(load.apart()),
            rank_imbalance=load.imbalance(self._placements) if self._placements else {},
        )
        if self._path is not None:
            load.write(self._path)


def _imbalance(counts: Sequence[int], placement: ExpertPlacement) -> float:
    loads = [sum(counts[expert] for expert in experts) for experts in placement.ranks]
    return max(loads) * len(loads) / sum(loads)


def _contiguous(counts: Sequence[int], num_ranks: int) -> ExpertPlacement:
    return ExpertPlacement.contiguous(len(counts), num_ranks)


def _balanced(counts: Sequence[int], num_ranks: int) -> ExpertPlacement:
    # The sizes that a contiguous placement has, and that its checks allow.
    rooms = [len(experts) for experts in _contiguous(counts, num_ranks).ranks]
    ranks: list[list[int]] = [[] for _ in rooms]
    loads = [0] * num_ranks
    for expert in sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert)):
        free = [rank for rank in range(num_ranks) if len(ranks[rank]) < rooms[rank]]
        emptiest = min(free, key=lambda rank: (loads[rank], len(ranks[rank]), rank))
        ranks[emptiest].append(expert)
        loads[emptiest] += counts[expert]
    return ExpertPlacement(tuple(tuple(sorted(experts)) for experts in ranks))


def read_load(path: str) -> ExpertLoad:
    """Read what --record-expert-load wrote."""
    layers: dict[int, tuple[int, ...]] = {}
    for layer, counts in _read(path, _LOAD).items():
        if not _is_list_of_ints(counts) or not counts or min(counts) < 0:
            raise ConfigError(f"{path}: layer {layer} must be a list of token counts.")
        layers[layer] = tuple(counts)
    return ExpertLoad(layers)


def write_placements(path: str, placements: Placements) -> None:
    layers = {str(layer): each.ranks for layer, each in placements.items()}
    _write(path, {"kind": _PLACEMENT, "layers": layers})


def read_placements(path: str) -> dict[int, ExpertPlacement]:
    """Read what `windlass balance-experts` wrote."""
    placements: dict[int, ExpertPlacement] = {}
    for layer, ranks in _read(path, _PLACEMENT).items():
        if not isinstance(ranks, list) or not ranks or not all(map(_is_list_of_ints, ranks)):
            raise ConfigError(f"{path}: layer {layer} must be a list of experts for each rank.")
        try:
            placements[layer] = ExpertPlacement(tuple(map(tuple, ranks)))
        except ConfigError as error:
            raise ConfigError(f"{path}: layer {layer}: {error}") from error
    return placements


def check_placements(
    path: str, placements: Placements, *, num_ranks: int, num_experts: Mapping[int, int]
) -> None:
    """Raise ConfigError unless the placements are for this many ranks and the model's experts by layer."""
    unknown = sorted(placements.keys() - num_experts.keys())
    if unknown:
        raise ConfigError(
            f"{path}: layer {unknown[0]} is not a mixture-of-experts layer of the model. The file "
            "is for another model."
        )
    for layer, placement in placements.items():
        if placement.num_experts != num_experts[layer]:
            raise ConfigError(
                f"{path}: layer {layer} has {placement.num_experts} experts, the model has "
                f"{num_experts[layer]}. The file is for another model."
            )
        if len(placement.ranks) != num_ranks:
            raise ConfigError(
                f"{path}: layer {layer} is spread over {len(placement.ranks)} ranks, but "
                f"--tensor-parallel-size is {num_ranks}. Make a placement for {num_ranks} ranks with "
                "windlass balance-experts."
            )


def _write(path: str, content: object) -> None:
    target = Path(path)
    beside = target.with_name(f"{target.name}.part")
    beside.write_text(json.dumps(content) + "\n", encoding="utf-8")
    beside.replace(target)  # a reader never sees half a file


def _read(path: str, kind: str) -> dict[int, Any]:
    """The layers of a file of this kind."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    found = content.get("kind") if isinstance(content, dict) else None
    if found != kind:
        raise ConfigError(f"{path}: is not a {kind!r} file; its kind is {found!r}.")
    layers = content.get("layers")
    if not isinstance(layers, dict) or not layers or not all(map(str.isdecimal, layers)):
        raise ConfigError(f"{path}: 'layers' must have an entry for each layer, by its number.")
    return {int(layer): value for layer, value in layers.items()}


def _is_list_of_ints(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)
