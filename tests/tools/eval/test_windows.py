"""Which tokens are scored, and which input is refused before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import ConfigError, DownloadError
from windlass.tools.eval.data import read_corpus
from windlass.tools.eval.windows import Cut, halves, strided


@given(st.integers(2, 60), st.integers(2, 20), st.data())
def test_strided_windows_score_every_token_once(
    count: int, context: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context - 1))
    tokens = list(range(count))
    scored = []
    for number, window in enumerate(strided(tokens, context, stride)):
        assert len(window.tokens) <= context
        if number:
            assert window.first + 1 >= context - stride
        scored += window.tokens[window.first + 1 :]
    assert scored == tokens[1:]


def test_stride_of_the_whole_context_skips_first_tokens() -> None:
    windows = list(strided(list(range(7)), 3, 3))
    assert [list(window.tokens) for window in windows] == [[0, 1, 2], [3, 4, 5]]
    assert [window.first for window in windows] == [0, 0]


def test_llama_cpp_scores_second_halves_and_drops_the_tail() -> None:
    windows = list(halves(list(range(19)), 8, []))
    assert [list(window.tokens) for window in windows] == [list(range(8)), list(range(8, 16))]
    assert [window.tokens[window.first + 1 :] for window in windows] == [[5, 6, 7], [13, 14, 15]]
    with_bos = list(halves(list(range(16)), 8, [99]))
    assert [window.tokens[:2] for window in with_bos] == [[99, 1], [99, 9]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "hf"}, "--method must be one of strided, llama.cpp"),
        ({"context": 1}, "--context must be at least 2"),
        ({"context": 8, "stride": 9}, "--stride must be between 1 and --context"),
        ({"method": "llama.cpp", "stride": 8}, "--stride has no meaning"),
        ({"max_windows": 0}, "--max-windows must be at least 1"),
    ],
)
def test_invalid_cut(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cut(**settings)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ('{"text": "good"}\n{"text": ', "line 2: is not JSON"),
        ('{"text": "good"}\n\n[1]', "line 3: expected"),
        ('{"prompt": "x"}', "line 1: expected"),
        ('{"text": "x", "messages": []}', "line 1: expected"),
        ('{"text": ""}', "line 1: text must be a string that is not empty"),
        ('{"text": 3}', "line 1: text must be"),
        ('{"messages": []}', "line 1: messages must be a list"),
        ('{"messages": [{"role": "user"}]}', "line 1: a message needs role and content"),
        ('{"text": "x", "label": 3}', "line 1: label must be a string"),
    ],
)
def test_invalid_lines_are_reported_by_number(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(lines)
    with pytest.raises(ConfigError, match=message):
        read_corpus(str(path))


def test_files_that_are_not_text(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is empty"):
        read_corpus(str(empty))
    with pytest.raises(ConfigError, match="cannot be read as UTF-8"):
        read_corpus(str(binary))
    with pytest.raises(ConfigError, match="no such file or folder"):
        read_corpus(str(tmp_path / "absent.txt"))


def test_wikitext_in_a_folder_equals_its_raw_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = " \n = A title = \n \n Some words . \n"
    folder = tmp_path / "data" / "wikitext2"
    folder.mkdir(parents=True)
    rows = ["", " = A title = \n", "", " Some words . \n"]
    (folder / "test.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    assert read_corpus(str(folder)).documents[0].text == raw
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path))
    assert read_corpus("wikitext2").documents[0].text == raw
    (folder / "wiki.test.raw").write_text(raw)
    with pytest.raises(ConfigError, match="expected one file with 'test' in its name"):
        read_corpus("wikitext2")
    (folder / "test.jsonl").unlink()
    assert read_corpus("wikitext2").documents[0].text == raw
    assert read_corpus("wikitext2").running


def test_missing_wikitext_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", _unreachable)
    with pytest.raises(DownloadError, match="put its test split"):
        read_corpus("wikitext2")


def _unreachable(*_: object, **__: object) -> str:
    raise OSError("no route to the hub")
