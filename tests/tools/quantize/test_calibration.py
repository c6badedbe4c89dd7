"""The choice of calibration samples: deterministic and diverse."""

from __future__ import annotations

import json
from pathlib import Path

from tests.serve.fakes import Bytes
from windlass.text.chat_template import ChatTemplate
from windlass.tools.quantize.calibration import (
    SampleOptions,
    calibrate,
    choose_diverse,
    features_of,
)


def no_template() -> ChatTemplate:
    raise AssertionError


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_every_kind_of_text_is_chosen(tmp_path: Path) -> None:
    kinds = ["the quick brown fox {}", "for i in range({}): print(i)", "12 + {} = 37, so x = 25"]
    texts = [kinds[0].format(i) * 3 for i in range(90)]
    texts += [kind.format(i) * 3 for kind in kinds[1:] for i in range(5)]
    path = write(tmp_path / "t.jsonl", texts)
    chosen = calibrate(
        path,
        SampleOptions(num_samples=6, sample_tokens=64, skip_bad_lines=False, seed=0),
        Bytes(),
        no_template,
    )
    decoded = [Bytes().decode(tokens) for tokens in chosen.samples]
    for start in ("the", "for", "12"):
        assert any(text.startswith(start) for text in decoded)
    again = calibrate(
        path,
        SampleOptions(num_samples=6, sample_tokens=64, skip_bad_lines=False, seed=0),
        Bytes(),
        no_template,
    )
    assert chosen == again
    assert all(len(tokens) <= 64 for tokens in chosen.samples)


def test_duplicates_are_chosen_last() -> None:
    samples = [[1, 2, 3, 4]] * 5 + [[7, 8, 9, 10]] + [[20, 21, 22, 23]]
    chosen = choose_diverse(features_of(samples), 7)
    assert set(chosen[:3]) == {0, 5, 6}
    assert sorted(chosen) == list(range(7))


def test_many_texts_are_subsampled_first(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [f"text number {i}" for i in range(4200)])
    chosen = calibrate(
        path,
        SampleOptions(num_samples=3, sample_tokens=64, skip_bad_lines=False, seed=0),
        Bytes(),
        no_template,
    )
    assert "4096 of 4200 texts considered" in chosen.notes[0]
    assert len(chosen.samples) == 3
