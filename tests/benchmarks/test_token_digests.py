"""Token digests: what a comparison reports, and a run of some modes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from digest_prompts import PROMPTS
from token_digests import (
    ENGINES,
    DigestConfig,
    all_modes,
    choose_modes,
    differences,
    problems,
    token_digests,
)

from windlass.tools.common.record import Record, read_record


def row(mode: str, prompts: list[str], **changes: Any) -> dict[str, Any]:
    counters = {"num_cached": 0, "num_accepted": 3, "same_as": None, "covers": None}
    return {"mode": mode, "total": "-".join(prompts), "prompts": prompts, **counters, **changes}


def record(*rows: dict[str, Any], **files: str) -> Record:
    return Record(
        "token_digests",
        list(rows),
        settings={"max_tokens": 4, "prompts": "p", "files": {"head": "h", **files}},
    )


def test_the_modes_are_complete() -> None:
    modes = all_modes(max_tokens=8)
    names = [mode.name for mode in modes]
    assert len(set(names)) == len(names)
    assert {mode.engine for mode in modes} == set(ENGINES)
    for index, mode in enumerate(modes):
        assert mode.same_as is None or mode.same_as in names[:index]
    assert len(set(PROMPTS)) == 20


def test_differing_prompts_are_reported() -> None:
    old = record(row("greedy", ["a", "b", "c"]), row("grammar", ["d"]))
    assert differences(old, old) == []
    new = record(row("greedy", ["a", "x", "y"]), row("ngram", ["d"]))
    assert differences(old, new) == [
        "grammar: is in one record only.",
        "greedy: prompts 1, 2 differ.",
        "ngram: is in one record only.",
    ]


def test_records_of_other_files_are_not_compared() -> None:
    old, new = record(row("greedy", ["a"])), record(row("greedy", ["a"]), head="other")
    assert differences(old, new) == ["the records are not comparable: head differ."]
    new = replace(old, settings={**old.settings, "max_tokens": 5})
    assert differences(old, new) == ["the records are not comparable: max_tokens differ."]


def test_modes_that_fail_by_themselves_are_reported() -> None:
    rows = [
        row("greedy", ["a"]),
        row("ngram", ["a"], same_as="greedy", covers="num_accepted"),
        row("eager", ["b"], same_as="greedy"),
        row("prefix hits", ["a"], same_as="greedy", covers="num_cached"),
    ]
    assert problems(rows) == [
        "eager: the tokens are not those of mode 'greedy'.",
        "prefix hits: num_cached is 0, so that the mode covers nothing.",
    ]


def test_unknown_modes_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no mode greddy\. Known: greedy, sampled"):
        choose_modes(DigestConfig(tmp_path, modes=("greddy",)))


@pytest.mark.slow
@pytest.mark.model
def test_some_modes_are_run(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    config = DigestConfig(
        work=tmp_path / "work",
        max_tokens=3,
        prompts=("The harbour was quiet in the morning. Two boats lay at the pier, and", "Hi"),
        modes=("greedy", "prefix hits", "adapters, greedy"),
        output=path,
    )
    lines: list[str] = []
    record = token_digests(config, lines.append)
    assert [each["mode"] for each in record.rows] == list(config.modes)
    assert len(lines) == len(config.modes) + 2
    assert problems(record.rows) == []
    found = {each["mode"]: each for each in record.rows}
    assert found["greedy"]["tokens"] == 6
    # The first prompt uses an adapter, the second none.
    assert found["adapters, greedy"]["prompts"][0] != found["greedy"]["prompts"][0]
    assert found["adapters, greedy"]["prompts"][1] == found["greedy"]["prompts"][1]
    assert set(record.settings["files"]) == {
        f"adapter-{name}/{file}"
        for name in "ab"
        for file in ("adapter_config.json", "adapter_model.safetensors")
    }
    assert differences(read_record(path), record) == []
