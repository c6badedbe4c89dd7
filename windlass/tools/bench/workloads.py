"""Workloads by name: token ids in, a fixed number of tokens out, the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

_SEED = 1234


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt, and how many tokens it wants, whatever they are."""

    prompt: list[int]
    num_output: int


def _ids(random: Random, count: int, vocab_size: int) -> list[int]:
    return [random.randrange(vocab_size) for _ in range(count)]


def ragged(count: int, vocab_size: int) -> list[Job]:
    """Short prompts with outputs of 8 to 256 tokens: what batching is about."""
    random = Random(_SEED)
    return [
        Job(_ids(random, random.randint(16, 64), vocab_size), random.randint(8, 256))
        for _ in range(count)
    ]


def shared(count: int, vocab_size: int, num_shared: int = 1000) -> list[Job]:
    """The same long start, such as a system prompt, and a little of their own."""
    random = Random(_SEED)
    start = _ids(random, num_shared, vocab_size)
    return [Job(start + _ids(random, 32, vocab_size), 16) for _ in range(count)]
