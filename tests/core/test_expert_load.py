"""Recorded load of experts, balanced placements, and their files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from windlass.core.expert_load import (
    ExpertLoad,
    ExpertLoadMonitor,
    check_placements,
    read_load,
    read_placements,
    write_placements,
)
from windlass.core.moe import ExpertPlacement
from windlass.errors import ConfigError

SKEWED = ExpertLoad({1: (90, 80, 10, 20, 0, 0, 0, 0), 3: (5, 5, 5, 5, 5, 5, 5, 5)})


def test_the_imbalance_is_the_busiest_rank_over_the_mean() -> None:
    assert SKEWED.imbalance(SKEWED.spread(2)) == {1: 2.0, 3: 1.0}
    assert SKEWED.imbalance(SKEWED.apart())[1] == 90 / 25
    assert SKEWED.num_tokens == 240
    assert ExpertLoad({0: (0, 0)}).imbalance({0: ExpertPlacement(((0,), (1,)))}) == {}


def test_the_most_used_experts_are_on_different_ranks() -> None:
    placements = SKEWED.balanced(2)
    assert placements[1].ranks == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert SKEWED.imbalance(placements) == {1: 1.0, 3: 1.0}


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_balanced_placements_are_close_to_the_best(num_ranks: int) -> None:
    """No rank exceeds the mean by more than the largest expert, and sizes differ by at most one."""
    generator = random.Random(num_ranks)
    for _ in range(50):
        counts = tuple(int(1000 * generator.random() ** 4) for _ in range(generator.randint(7, 60)))
        load = ExpertLoad({0: counts})
        placements = load.balanced(num_ranks)  # the placement checks itself
        spread = load.imbalance(load.spread(num_ranks))[0]
        mean = sum(counts) / num_ranks
        found = load.imbalance(placements)[0]
        assert found <= max(spread, 1 + 2 * max(counts) / mean)


def test_a_monitor_keeps_both_imbalances_and_writes_the_load(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    monitor = ExpertLoadMonitor(lambda: SKEWED, SKEWED.spread(2), str(path))
    assert monitor.stats.expert_imbalance == {}
    monitor.update()
    assert monitor.stats.expert_imbalance == {1: 3.6, 3: 1.0}
    assert monitor.stats.rank_imbalance == {1: 2.0, 3: 1.0}
    assert read_load(str(path)) == SKEWED
    alone = ExpertLoadMonitor(lambda: SKEWED, {}, None)
    alone.update()
    assert alone.stats.rank_imbalance == {}


def test_files_give_back_what_was_written(tmp_path: Path) -> None:
    path = str(tmp_path / "placement.json")
    write_placements(path, SKEWED.balanced(3))
    assert read_placements(path) == SKEWED.balanced(3)
    with pytest.raises(
        ConfigError, match="is not a 'windlass expert load' file; its kind is 'windlass exp"
    ):
        read_load(path)


def _write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ([1], "its kind is None"),
        ({"kind": "windlass expert load"}, "'layers' must have an entry for each layer"),
        ({"kind": "windlass expert load", "layers": {"x": [1]}}, "by its number"),
        (
            {"kind": "windlass expert load", "layers": {"0": [1, -1]}},
            "layer 0 must be a list of tok",
        ),
        ({"kind": "windlass expert load", "layers": {"2": [1, True]}}, "layer 2 must be a list"),
    ],
)
def test_bad_loads_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_load(_write(tmp_path / "load.json", content))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"0": [[0, 1], [1, 2]]}, "layer 0: an expert placement must have each of its 4 experts"),
        ({"0": [[0, 1, 2], [3]]}, r"layer 0: the ranks of an expert placement hold \[3, 1\]"),
        ({"4": [0, 1]}, "layer 4 must be a list of experts for each rank"),
        ({"4": []}, "layer 4 must be a list of experts for each rank"),
    ],
)
def test_bad_placements_are_refused(tmp_path: Path, layers: Any, message: str) -> None:
    content = {"kind": "windlass expert placement", "layers": layers}
    with pytest.raises(ConfigError, match=message):
        read_placements(_write(tmp_path / "placement.json", content))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.json: cannot be read as JSON: .*No such file"):
        read_placements(str(tmp_path / "gone.json"))


def test_placements_must_be_of_the_model_and_the_ranks() -> None:
    placements = SKEWED.balanced(2)
    check_placements("p.json", placements, num_ranks=2, num_experts={1: 8, 2: 8, 3: 8})
    with pytest.raises(ConfigError, match="layer 3 is not a mixture-of-experts layer"):
        check_placements("p.json", placements, num_ranks=2, num_experts={1: 8})
    with pytest.raises(ConfigError, match="has 8 experts, the model has 16"):
        check_placements("p.json", placements, num_ranks=2, num_experts={1: 16, 3: 16})
    with pytest.raises(ConfigError, match="over 2 ranks, but --tensor-parallel-size is 4"):
        check_placements("p.json", placements, num_ranks=4, num_experts={1: 8, 3: 8})
