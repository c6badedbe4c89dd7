"""Keeps retired words out of code and prose; docs/words.md has the vocabulary.

Identifiers are split at underscores and capitals, so that `num_guesses` and `GuessRunner` count too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
AREAS = ("windlass", "tests", "docs", "benchmarks/scripts", "README.md", "Makefile")
SUFFIXES = {".py", ".md", ".cpp", ".h", ".toml", ".js", ".css", ".html", ""}

# What to write instead.
RETIRED = {
    r"(un)?guess(es|ed|er|ers|ing)?": "draft token",
    r"wish(es|ed|ing)?": "sampling params, option, requested",
    r"stor(y|ies)": "trace",
    r"chronicles?": "accounting",
    r"told|telling": "report, log, print",
    r"brains?": "bf16",
    r"dearness": "overhead",
    r"hopeless": "never profitable",
    r"in vain": "back-off, or for nothing",
    r"whoever|somebody|nobody": "the noun",
    r"trails?": "target tokens",
    r"taps?": "aux hidden states",
    r"(tokens?|requests?|steps?|rows|bytes|bits|times|answers|calls|images|tok|[kmgt]i?b|[gt]flops?|\d+) a second": "per second",
}
# Places where a retired word is right, with the reason.
ALLOWED = {
    "tests/test_words.py": "lists the words",
    "tests/models/tokenizer_strings.py": "text to tokenize",
    "windlass/speculative/exits.py": "prompts to measure exits with",
    "windlass/tools/eval/short_texts.py": "prose to measure with",
}

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_ANY = re.compile(rf"\b({'|'.join(RETIRED)})\b")  # one search of a text is quicker than many
_PATTERNS = {re.compile(rf"\b({pattern})\b"): word for pattern, word in RETIRED.items()}


def files() -> Iterator[Path]:
    for area in AREAS:
        path = ROOT / area
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (
            file
            for file in found
            if file.is_file() and file.suffix in SUFFIXES and "__pycache__" not in file.parts
        )


def words_of(text: str) -> str:
    """The text in lower case, with identifiers split into words."""
    return _CAMEL.sub(" ", text.replace("_", " ")).lower()


def retired_in(text: str) -> Iterator[str]:
    words = words_of(text)
    if _ANY.search(words) is None:
        return
    for number, line in enumerate(words.splitlines(), start=1):
        for pattern, replacement in _PATTERNS.items():
            for match in pattern.finditer(line):
                yield f"line {number}: {match[0]!r} (write: {replacement})"


def test_identifiers_are_split() -> None:
    text = "num_guesses = GuessRunner(wishesOf)  # 30 tokens a second, a second time; trailing"
    found = [item.split("'")[1] for item in retired_in(text)]
    assert found == ["guesses", "guess", "wishes", "tokens a second"]


def test_no_retired_word_comes_back() -> None:
    found = []
    for file in files():
        name = file.relative_to(ROOT).as_posix()
        if name in ALLOWED:
            continue
        found += [f"{name}, {item}" for item in retired_in(file.read_text(encoding="utf-8"))]
        found += [f"{name}: the file's name, {item}" for item in retired_in(name)]
    assert found == []


def test_the_exceptions_exist() -> None:
    assert [name for name in ALLOWED if not (ROOT / name).is_file()] == []
