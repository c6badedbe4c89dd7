"""Calibration data: reads JSONL of texts or conversations, and chooses a diverse sample.

The choice is deterministic: greedy facility location over feature vectors of hashed token bigrams.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from windlass.core.tokenizer import Tokenizer
from windlass.errors import ConfigError, RequestError
from windlass.text.chat_template import ChatTemplate
from windlass.tools.common.jsonl import (
    Messages,
    check_messages,
    parse_lines,
    parse_object,
    raise_problems,
    read_bytes,
)

MIN_TOKENS = 8  # shorter texts are skipped
DEFAULT_SAMPLES = 256
ADVISED_SAMPLES = (128, 512)
_MAX_CANDIDATES = 4096  # the cost is quadratic
_FEATURES = 1024

Record = str | Messages


@dataclass(frozen=True, slots=True)
class Calibration:
    """The chosen samples as tokens, and notes for the log."""

    samples: list[list[int]]
    sha256: str  # of the file
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """How to read and choose samples."""

    num_samples: int | None  # None: DEFAULT_SAMPLES, or all if there are fewer
    sample_tokens: int  # per text, from its start
    skip_bad_lines: bool
    seed: int


def calibrate(
    path: Path, options: SampleOptions, tokenizer: Tokenizer, template: Callable[[], ChatTemplate]
) -> Calibration:
    """Read, tokenize and choose samples. `template` is only called for conversations."""
    raw = read_bytes(path, "--calibration")
    records, invalid = parse_lines(raw, read_record)
    problems = [f"line {number}: {why}" for number, why in invalid]
    notes = []
    if not options.skip_bad_lines:
        raise_problems(path, problems)
    if problems:
        notes.append(f"{len(problems)} invalid lines skipped, the first: {problems[0]}")
    if not records:
        raise ConfigError(
            f"--calibration {path}: holds no texts. Give JSONL with text or messages."
        )
    if len(records) > _MAX_CANDIDATES:
        notes.append(
            f"{_MAX_CANDIDATES} of {len(records)} texts considered, a random choice by the seed"
        )
        records = random.Random(options.seed).sample(records, _MAX_CANDIDATES)
    cut = options.sample_tokens
    tokenised = [_encode(record, tokenizer, template)[:cut] for record in records]
    long = [tokens for tokens in tokenised if len(tokens) >= MIN_TOKENS]
    if len(long) < len(tokenised):
        count = len(tokenised) - len(long)
        notes.append(f"{count} texts of less than {MIN_TOKENS} tokens skipped")
    num_samples = _num_samples(
        path, options.num_samples, usable=len(long), total=len(tokenised), notes=notes
    )
    chosen = [long[i] for i in choose_diverse(features_of(long), num_samples)]
    notes.append(f"{num_samples} of {len(long)} texts, {sum(map(len, chosen))} tokens")
    return Calibration(chosen, hashlib.sha256(raw).hexdigest(), tuple(notes))


def _num_samples(
    path: Path, requested: int | None, *, usable: int, total: int, notes: list[str]
) -> int:
    if usable == 0:
        raise ConfigError(
            f"--calibration {path}: all {total} texts have less than {MIN_TOKENS} tokens."
        )
    if requested is not None and requested > usable:
        short = total - usable
        others = f"; {short} more have less than {MIN_TOKENS} tokens" if short else ""
        raise ConfigError(
            f"--samples {requested}: {path} has only {usable} usable texts{others}. Lower --samples, or "
            "give more texts: only the start of a long text is used, so split it into several lines."
        )
    count = min(requested or DEFAULT_SAMPLES, usable)
    if count < ADVISED_SAMPLES[0]:
        notes.append(
            f"only {count} samples; {ADVISED_SAMPLES[0]} to {ADVISED_SAMPLES[1]} are advised"
        )
    return count


def read_record(line: bytes) -> Record:
    value = parse_object(line, '{"text": "..."}')
    if ("text" in value) == ("messages" in value):
        raise RequestError("needs either text or messages")
    if "messages" in value:
        return check_messages(value["messages"])
    if not isinstance(value["text"], str):
        raise RequestError("text must be a string")
    return value["text"]


def _encode(
    record: Record, tokenizer: Tokenizer, template: Callable[[], ChatTemplate]
) -> list[int]:
    if isinstance(record, str):
        return tokenizer.encode(record)
    text = template().render(record, add_generation_prompt=False)
    return tokenizer.encode(text, add_special=False)  # the template contains them


def features_of(samples: Sequence[Sequence[int]]) -> Tensor:
    """Return unit vectors of hashed bigram counts: [N, features]."""
    found = torch.zeros(len(samples), _FEATURES)
    for row, tokens in zip(found, samples, strict=True):
        ids = torch.tensor(tokens, dtype=torch.int64)
        pairs = (ids[:-1] * 1_000_003 + ids[1:]) * 2_654_435_761 >> 7
        row += torch.bincount(pairs % _FEATURES, minlength=_FEATURES).sqrt()
    return found / found.norm(dim=1, keepdim=True).clamp(min=1e-9)


def choose_diverse(features: Tensor, count: int) -> list[int]:
    """Choose `count` rows that cover all rows best, by greedy facility location."""
    similarity = features @ features.T
    covered = torch.zeros(len(features))
    open_rows = torch.ones(len(features), dtype=torch.bool)
    chosen: list[int] = []
    for _ in range(count):
        gain = (similarity - covered[:, None]).clamp_(min=0).sum(0)
        gain[~open_rows] = -1.0
        best = int(gain.argmax())
        chosen.append(best)
        open_rows[best] = False
        covered = torch.maximum(covered, similarity[:, best])
    return chosen
