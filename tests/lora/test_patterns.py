"""Regular expressions of adapters: results equal re, and hostile patterns cannot block the server."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.lora.folders import ALL, SPEC, write_adapter
from windlass.errors import CheckpointError
from windlass.lora import patterns
from windlass.lora.modules import linear_shapes
from windlass.lora.patterns import MatchError, match_names, suffix_pattern
from windlass.lora.peft import read_adapter

NAMES = list(linear_shapes(SPEC))
HOSTILE = r"(.*)*(.*)*(.*)*x"  # exponential time
SIMPLE = [r".*\.(q_proj|v_proj)", r"model\.layers\.1\.mlp\.up_proj", r".*", "lm_head", "nothing"]
HARD = [
    r"^(?!.*mlp).*(?:q_proj|v_proj)$",
    r"(?:.*?(?:text|layers).*?(?:self_attn|mlp).*?(?:k_proj|q_proj).*?)|(?:\bmodel\.[\d]{1,}\.x)",
    r"(?i)MODEL\.(.*)\.(self_attn)\.[qk]_proj",
    r"model\.(layers)\.(\d+)\.(mlp|self_attn)\.(up|down)_proj",
    r"(a|b)(c|d)?e",
]


@pytest.mark.parametrize("pattern", [*SIMPLE, *HARD])
def test_matches_equal_re_fullmatch(pattern: str) -> None:
    (found,) = match_names([pattern], NAMES)
    assert found == {name for name in NAMES if re.fullmatch(pattern, name)}


def test_suffix_patterns_match_as_in_peft() -> None:
    keys = ["q_proj", r"1\.mlp\.up_proj", "proj", r"[qk]_(proj|x)+", "q_proj|k_proj"]
    found = match_names([suffix_pattern(key) for key in keys], NAMES)
    for key, fits in zip(keys, found, strict=True):
        assert fits == {name for name in NAMES if re.match(rf"(.*\.)?({key})$", name)}, key


def test_cheap_patterns_need_no_subprocess(monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("another process"))
    keys = [
        suffix_pattern(key) for key in ("q_proj", r"model.layers.0.mlp.up_proj", r"[01]\.mlp\..*")
    ]
    assert all(match_names([*SIMPLE[:4], *keys], NAMES))


def test_subprocess_results_are_cached(monkeypatch) -> None:
    patterns._match_in_child.cache_clear()
    started, run = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **b: started.append(a) or run(*a, **b))
    for _ in range(3):
        match_names([*HARD, *SIMPLE], NAMES)
    assert len(started) == 1


@pytest.mark.parametrize(
    ("changes", "processes", "message"),
    [
        ({"target_modules": HOSTILE}, 1, "matching target_modules against .* more than 1 s of CPU"),
        ({"exclude_modules": r"(\w+\.?)+x"}, 1, "matching exclude_modules against the module"),
        ({"rank_pattern": {HOSTILE: 2}}, 1, "matching rank_pattern against"),
        ({"alpha_pattern": {"q_proj": 2, HOSTILE: 2}}, 1, "matching alpha_pattern against"),
        ({"target_modules": "a|" * 4000}, 0, "which has 8,000 characters; the limit is 4,096"),
        ({"target_modules": "(" * 2000 + ")" * 2000}, 0, "not a valid regular expression: max"),
        ({"exclude_modules": "a{99999999999}"}, 0, "not a valid regular expression: the repetit"),
        ({"rank_pattern": {"(?i)q_proj": 2}}, 0, "not a valid regular expression: global flags"),
    ],
)
def test_hostile_patterns_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    processes: int,
    message: str,
) -> None:
    """Before they are matched, or by the CPU limit of the one process that matches them."""
    patterns._match_in_child.cache_clear()
    started, run = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **b: started.append(b) or run(*a, **b))
    folder = write_adapter(tmp_path / "a", **({"targets": ALL} | changes))
    with pytest.raises(CheckpointError, match=message):
        read_adapter(folder, "a", SPEC, 64)
    assert [options["timeout"] for options in started] == [patterns._WALL_S] * processes


@pytest.mark.parametrize(
    ("executable", "message"),
    [("/nowhere/python", "cannot be started"), ("/bin/false", "failed: ")],
)
def test_subprocess_failures_are_reported(monkeypatch, executable: str, message: str) -> None:
    patterns._match_in_child.cache_clear()
    monkeypatch.setattr("sys.executable", executable)
    with pytest.raises(MatchError, match=message):
        match_names(HARD[:1], NAMES)
