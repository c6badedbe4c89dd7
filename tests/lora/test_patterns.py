"""Regular expressions of adapters: matched as re does it, and none takes the service with it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.lora.folders import ALL, SPEC, write_adapter
from windlass.errors import CheckpointError
from windlass.lora import patterns
from windlass.lora.patterns import NotMatched, ending, matching
from windlass.lora.peft import linear_shapes, read_adapter

NAMES = list(linear_shapes(SPEC))
HOSTILE = r"(.*)*(.*)*(.*)*x"  # takes longer than anybody lives
SIMPLE = [r".*\.(q_proj|v_proj)", r"model\.layers\.1\.mlp\.up_proj", r".*", "lm_head", "nothing"]
HARD = [
    r"^(?!.*mlp).*(?:q_proj|v_proj)$",
    r"(?:.*?(?:text|layers).*?(?:self_attn|mlp).*?(?:k_proj|q_proj).*?)|(?:\bmodel\.[\d]{1,}\.x)",
    r"(?i)MODEL\.(.*)\.(self_attn)\.[qk]_proj",
    r"model\.(layers)\.(\d+)\.(mlp|self_attn)\.(up|down)_proj",
    r"(a|b)(c|d)?e",
]


@pytest.mark.parametrize("pattern", [*SIMPLE, *HARD])
def test_matched_as_re_does_it(pattern: str) -> None:
    (found,) = matching([pattern], NAMES)
    assert found == {name for name in NAMES if re.fullmatch(pattern, name)}


def test_ends_are_matched_as_peft_does_it() -> None:
    keys = ["q_proj", r"1\.mlp\.up_proj", "proj", r"[qk]_(proj|x)+", "q_proj|k_proj"]
    found = matching([ending(key) for key in keys], NAMES)
    for key, fits in zip(keys, found, strict=True):
        assert fits == {name for name in NAMES if re.match(rf"(.*\.)?({key})$", name)}, key


def test_simple_patterns_need_no_other_process(monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("another process"))
    keys = [ending(key) for key in ("q_proj", r"model.layers.0.mlp.up_proj", r"[01]\.mlp\..*")]
    assert all(matching([*SIMPLE[:4], *keys], NAMES))


def test_other_processes_are_started_once_for_the_same_patterns(monkeypatch) -> None:
    patterns._elsewhere.cache_clear()
    started, run = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **b: started.append(a) or run(*a, **b))
    for _ in range(3):
        matching([*HARD, *SIMPLE], NAMES)
    assert len(started) == 1


@pytest.mark.parametrize(
    ("changes", "processes", "told"),
    [
        ({"target_modules": HOSTILE}, 1, "matching target_modules with .* more than 1 s of a proc"),
        ({"exclude_modules": r"(\w+\.?)+x"}, 1, "matching exclude_modules with the names"),
        ({"rank_pattern": {HOSTILE: 2}}, 1, "matching rank_pattern with"),
        ({"alpha_pattern": {"q_proj": 2, HOSTILE: 2}}, 1, "matching alpha_pattern with"),
        ({"target_modules": "a|" * 4000}, 0, "'a.*, which is 8,000 characters long, and up to 4"),
        ({"target_modules": "(" * 2000 + ")" * 2000}, 0, "is no regular expression: maximum rec"),
        ({"exclude_modules": "a{99999999999}"}, 0, "is no regular expression: the repetition"),
        ({"rank_pattern": {"(?i)q_proj": 2}}, 0, "is no regular expression: global flags not"),
    ],
)
def test_hostile_patterns_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    processes: int,
    told: str,
) -> None:
    """Before they are matched, or by the CPU limit of the one process that matches them."""
    patterns._elsewhere.cache_clear()
    started, run = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **b: started.append(b) or run(*a, **b))
    folder = write_adapter(tmp_path / "a", **({"targets": ALL} | changes))
    with pytest.raises(CheckpointError, match=told):
        read_adapter(folder, "a", SPEC, 64)
    assert [options["timeout"] for options in started] == [patterns._WALL_S] * processes


@pytest.mark.parametrize(
    ("executable", "told"),
    [("/nowhere/python", "cannot be started"), ("/bin/false", "failed: ")],
)
def test_a_process_that_fails_is_told_of(monkeypatch, executable: str, told: str) -> None:
    patterns._elsewhere.cache_clear()
    monkeypatch.setattr("sys.executable", executable)
    with pytest.raises(NotMatched, match=told):
        matching(HARD[:1], NAMES)
