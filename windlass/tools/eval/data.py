"""Reads the text to measure on: one running text, or labelled documents.

Every line is checked before a model is loaded. windows.py tokenizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.errors import ConfigError, DownloadError, RequestError
from windlass.folders import cache_dir
from windlass.tools.common.jsonl import check_messages, parse_object
from windlass.tools.eval.short_texts import TEXTS

WIKITEXT2 = "wikitext2"
UNLABELLED = "unlabelled"

_REPO = "Salesforce/wikitext"
_REPO_FILE = "wikitext-2-raw-v1/test-00000-of-00001.parquet"
_KINDS = (".parquet", ".raw", ".txt", ".jsonl")
# An empty line in WikiText's own file; in its Parquet and JSONL versions the row is empty.
_EMPTY_LINE = " \n"
_SHORT = "eight short built-in texts"


@dataclass(frozen=True, slots=True)
class Document:
    """A text or a conversation. `where`: its file and line, for errors."""

    where: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    label: str = UNLABELLED


@dataclass(frozen=True, slots=True)
class Corpus:
    """The text to measure on. `running`: one document that may be cut anywhere."""

    name: str
    documents: list[Document]
    running: bool

    @property
    def labelled(self) -> bool:
        return any(document.label != UNLABELLED for document in self.documents)


def short_corpus() -> Corpus:
    """A small built-in corpus for a rough quality estimate."""
    return Corpus(_SHORT, [Document(_SHORT, "\n\n".join(TEXTS))], running=True)


def read_corpus(data: str) -> Corpus:
    """Read `wikitext2`, a folder with its test split, or a JSONL, Parquet or text file."""
    path = Path(data).expanduser()
    if data == WIKITEXT2 and not path.exists():
        return _running(WIKITEXT2, _wikitext2())
    if path.is_dir():
        return _running(path.name, _test_split(path))
    if not path.is_file():
        raise ConfigError(
            f"{data}: there is no such file or folder. Give a .jsonl, .parquet or .txt file, a "
            f"folder with WikiText-2's test split, or {WIKITEXT2}."
        )
    if path.suffix == ".jsonl":
        return Corpus(path.name, list(documents_of(path)), running=False)
    return _running(path.name, path)


def documents_of(path: Path) -> Iterator[Document]:
    """Parse the lines of a JSONL file; an error names the line."""
    found = False
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if line.strip():
            found = True
            yield _document(line, f"{path}, line {number}")
    if not found:
        raise ConfigError(f"{path}: is empty.")


def _document(line: str, where: str) -> Document:
    try:
        record = parse_object(line, '{"text": "..."}')
        if ("text" in record) == ("messages" in record):
            raise RequestError(
                f'expected {{"text": "..."}} or {{"messages": [...]}}, got {line:.80}'
            )
        if "messages" in record:
            check_messages(record["messages"])
    except RequestError as error:
        raise ConfigError(f"{where}: {error}.") from error
    label = record.get("label", UNLABELLED)
    if not isinstance(label, str) or not label:
        raise ConfigError(f"{where}: label must be a string, got {label!r}.")
    text, messages = record.get("text"), record.get("messages")
    if messages is None and (not isinstance(text, str) or not text):
        raise ConfigError(f"{where}: text must be a string that is not empty, got {text!r}.")
    return Document(where=where, text=text, messages=messages, label=label)


def _running(name: str, path: Path) -> Corpus:
    if path.suffix == ".parquet":
        text = _joined(_parquet_rows(path))
    elif path.suffix == ".jsonl":
        text = _joined(_jsonl_rows(path))
    else:
        text = _read(path)
    if not text.strip():
        raise ConfigError(f"{path}: is empty.")
    return Corpus(name, [Document(str(path), text)], running=True)


def _joined(rows: list[str]) -> str:
    """Join rows to one text, with the line breaks of WikiText's own file."""
    return "".join(
        (row if row.endswith("\n") else row + "\n") if row else _EMPTY_LINE for row in rows
    )


def _jsonl_rows(path: Path) -> list[str]:
    try:
        return [json.loads(line)["text"] for line in _read(path).split("\n") if line.strip()]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'{path}: expected lines such as {{"text": "..."}}: {error!r}.'
        ) from error


def _parquet_rows(path: Path) -> list[str]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading Parquet needs pyarrow: pip install 'windlass-llm[eval]'. "
            "Or give the text as a .txt or .jsonl file."
        ) from error
    try:
        column = parquet.read_table(path, columns=["text"])["text"].to_pylist()
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path}: has no readable column named text: {error}") from error
    return [row or "" for row in column]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}.") from error


def _test_split(folder: Path) -> Path:
    """Find the only file of a folder with 'test' in its name."""
    found = [
        path for path in sorted(folder.rglob("*test*")) if path.suffix in _KINDS and path.is_file()
    ]
    raw = [path for path in found if "wikitext-2-raw" in str(path.relative_to(folder))] or found
    if len(raw) == 1:
        return raw[0]
    names = ", ".join(str(path.relative_to(folder)) for path in raw) or "none"
    raise ConfigError(
        f"{folder}: expected one file with 'test' in its name, of {', '.join(_KINDS)}; "
        f"found: {names}. Give the path of the file."
    )


def _wikitext2() -> Path:
    """Find the test split in the user's cache, or download it."""
    cached = cache_dir() / "data" / WIKITEXT2
    if cached.is_dir():
        return _test_split(cached)
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    # Transport errors derive from the HTTP library's root, not from OSError.
    http_root: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        return Path(huggingface_hub.hf_hub_download(_REPO, _REPO_FILE, repo_type="dataset"))
    except (http_root, OSError, ValueError) as error:
        detail = " ".join(str(error).split())
        raise DownloadError(
            f"WikiText-2 could not be fetched from the hub ({_REPO}). Check the network, or put "
            f"its test split (wiki.test.raw, or a .parquet, .txt or .jsonl file with 'test' in its "
            f"name) into {cached}, or give the file with --data. ({type(error).__name__}: {detail})"
        ) from error
