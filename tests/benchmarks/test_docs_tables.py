"""The tables of the docs are those of the stored results."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs_tables import PAGES, fill, main, update

from windlass.errors import ConfigError
from windlass.tools.common.record import Record

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", PAGES)
def test_docs_match_the_stored_results(page: str) -> None:
    assert update([ROOT / page], ROOT / "benchmarks", check=True) == []


def test_stale_tables_are_found_and_filled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"variant": "continuous", "output_tok_s": 12.0}]
    Record(name="batching", rows=rows, notes="The notes.").save(tmp_path / "batching.json")
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- table:batching -->\nold\n<!-- end -->\nb\n<!-- table:x -->\n<!-- end -->"
    )
    where = ["--page", str(page), "--results", str(tmp_path)]
    assert main([*where, "--check"]) == 1
    assert "tables are stale" in capsys.readouterr().err
    assert main(where) == 0
    assert main([*where, "--check"]) == 0
    text = page.read_text()
    assert "| batching | output tok/s | speedup over none |" in text
    assert "| continuous | 12 | - |" in text
    assert "The notes." in text
    assert "Not measured yet: there is no `x.json`." in text
    assert text.startswith("a\n<!-- table:batching -->\n")
    assert "old" not in text


def test_errors_name_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--page", "nowhere.md"])
    assert "--page nowhere.md: No such file" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="has no <!-- table:NAME -->"):
        fill("a page", tmp_path)
    Record(name="other", rows=[]).save(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="results of 'other' have no table"):
        fill("<!-- table:x -->\n<!-- end -->", tmp_path)
