"""Calibration data: JSONL of texts or conversations, checked, and a choice of it that is diverse.

The choice is deterministic: texts are described by hashed pairs of tokens, and each pick is the text
that best covers what those before it left uncovered.
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
from windlass.tools.common.jsonl import Messages, check_messages, parse_lines, parse_object

SHORTEST = 8  # tokens; less says nothing about a network's inputs
DEFAULT_SAMPLES = 256
ADVISED = (128, 512)
_MOST_CANDIDATES = 4096  # every pair of candidates is compared
_FEATURES = 1024

Record = str | Messages


@dataclass(frozen=True, slots=True)
class Calibration:
    """The chosen samples as tokens, and what there is to say about the choice."""

    samples: list[list[int]]
    sha256: str  # of the file
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """How to read and choose."""

    num_samples: int | None  # None: DEFAULT_SAMPLES, or as many as there are
    sample_tokens: int  # of each text, from its start
    skip_broken: bool
    seed: int


def calibrate(
    path: Path, choice: SampleOptions, tokenizer: Tokenizer, template: Callable[[], ChatTemplate]
) -> Calibration:
    """Read, tokenise and choose. `template` is called when there are conversations."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--calibration {path}: {error.strerror or error}.") from error
    records, wrong = parse_lines(raw, read_record)
    broken = [f"{path.name}, line {number}: {why}" for number, why in wrong]
    notes = []
    if broken:
        if not choice.skip_broken:
            raise ConfigError(
                f"{path}: {len(broken)} of {len(broken) + len(records)} lines are broken. "
                f"{'; '.join(broken[:3])}. Correct them, or use --skip-broken-lines."
            )
        notes.append(f"{len(broken)} broken lines left out, the first: {broken[0]}")
    if not records:
        raise ConfigError(f"--calibration {path}: holds no texts. Give JSONL of text or messages.")
    if len(records) > _MOST_CANDIDATES:
        notes.append(f"{_MOST_CANDIDATES} of {len(records)} texts considered, drawn with the seed")
        records = random.Random(choice.seed).sample(records, _MOST_CANDIDATES)
    cut = choice.sample_tokens
    tokenised = [_encode(record, tokenizer, template)[:cut] for record in records]
    long = [tokens for tokens in tokenised if len(tokens) >= SHORTEST]
    if len(long) < len(tokenised):
        count = len(tokenised) - len(long)
        notes.append(f"{count} texts of less than {SHORTEST} tokens left out")
    num_samples = _how_many(path, choice.num_samples, len(long), len(tokenised), notes)
    chosen = [long[i] for i in choose_diverse(features_of(long), num_samples)]
    notes.append(f"{num_samples} of {len(long)} texts, {sum(map(len, chosen))} tokens")
    return Calibration(chosen, hashlib.sha256(raw).hexdigest(), tuple(notes))


def _how_many(path: Path, wish: int | None, usable: int, total: int, notes: list[str]) -> int:
    if usable == 0:
        raise ConfigError(
            f"--calibration {path}: all {total} texts have less than {SHORTEST} tokens."
        )
    if wish is not None and wish > usable:
        short = total - usable
        others = f"; {short} more have less than {SHORTEST} tokens" if short else ""
        raise ConfigError(
            f"--samples {wish}: {path} has only {usable} usable texts{others}. Lower --samples, or "
            "give more texts: only the start of a long one is taken, so cut it into several lines."
        )
    count = min(wish or DEFAULT_SAMPLES, usable)
    if count < ADVISED[0]:
        notes.append(f"only {count} samples; {ADVISED[0]} to {ADVISED[1]} are advised")
    return count


def read_record(line: bytes) -> Record:
    """A text or a conversation."""
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
    return tokenizer.encode(text, add_special=False)  # the template writes its special tokens


def features_of(samples: Sequence[Sequence[int]]) -> Tensor:
    """One unit vector per sample: how often each pair of neighbours occurs, hashed. [N, features]"""
    found = torch.zeros(len(samples), _FEATURES)
    for row, tokens in zip(found, samples, strict=True):
        ids = torch.tensor(tokens, dtype=torch.int64)
        pairs = (ids[:-1] * 1_000_003 + ids[1:]) * 2_654_435_761 >> 7
        row += torch.bincount(pairs % _FEATURES, minlength=_FEATURES).sqrt()
    return found / found.norm(dim=1, keepdim=True).clamp(min=1e-9)


def choose_diverse(features: Tensor, count: int) -> list[int]:
    """Pick `count` rows greedily so that all rows are near to one of them (facility location)."""
    likeness = features @ features.T
    covered = torch.zeros(len(features))
    open_rows = torch.ones(len(features), dtype=torch.bool)
    chosen: list[int] = []
    for _ in range(count):
        gain = (likeness - covered[:, None]).clamp_(min=0).sum(0)
        gain[~open_rows] = -1.0
        best = int(gain.argmax())
        chosen.append(best)
        open_rows[best] = False
        covered = torch.maximum(covered, likeness[:, best])
    return chosen
