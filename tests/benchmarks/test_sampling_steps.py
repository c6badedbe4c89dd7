"""The speed of each kind of sampling parameters, on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sampling_steps import StepsConfig, differences, sampling_kinds, sampling_steps, table

from tests.tools.conftest import CONFIG


@pytest.fixture
def config(tmp_path: Path) -> StepsConfig:
    model = CONFIG | {"vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(model))
    return StepsConfig(
        model=str(tmp_path),
        num_requests=8,
        prompt_tokens=12,
        output_tokens=6,
        repeat=1,
        device="cpu",
    )


def test_every_kind_is_measured(config: StepsConfig) -> None:
    lines: list[str] = []
    record = sampling_steps(config, lines.append)
    assert [row["kind"] for row in record.rows] == list(sampling_kinds(6))
    assert all(row["tok_s_min"] > 0 and row["step_ms"] > 0 for row in record.rows)
    assert len(lines) == 1 + len(record.rows)
    assert len(set(record.settings["deterministic"])) == 20
    shown = table(record.rows, record).splitlines()
    assert len(shown) == 1 + len(record.rows)
    assert shown[1].split()[-2:] == ["1.000", "1.000"]


def test_deterministic_outputs_are_compared(config: StepsConfig) -> None:
    config = replace(config, kinds=("greedy",))
    old, new = (sampling_steps(config, lambda _: None) for _ in range(2))
    assert differences(old, new) == []
    digests = ["other", *new.settings["deterministic"][1:]]
    changed = replace(new, settings={**new.settings, "deterministic": digests})
    assert differences(old, changed) == ["deterministic outputs differ: 0."]
    changed = replace(new, settings={**new.settings, "num_requests": 7})
    assert differences(old, changed) == ["the records are not comparable: num_requests differ."]


def test_unknown_kinds_are_rejected(config: StepsConfig) -> None:
    with pytest.raises(SystemExit, match=r"no greddy\. Known: greedy, sampled"):
        sampling_steps(replace(config, kinds=("greddy",)), lambda _: None)


def test_an_output_that_ends_early_is_an_error(
    config: StepsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"greedy": sampling_kinds(2)["greedy"]}
    monkeypatch.setattr("sampling_steps.sampling_kinds", lambda _: short)
    with pytest.raises(SystemExit, match=r"outputs have \[2\] tokens, not 6"):
        sampling_steps(config, lambda _: None)
