"""Named text workloads, generated from a seed without a download.

chat           multi-turn conversations; a turn is sent after the previous answer
shared_prefix  one long system prompt for all, and a short question
rag            passages of a small library, some of them in many requests, and a question
few_shot       the same examples for all, a text to label, a few tokens out
long_document  a long text per request, and a question
code_edit      a source file, and an edit instruction
random         random words of given lengths
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from windlass.errors import ConfigError
from windlass.settings import at_least
from windlass.tools.common.requests import Message, TextRequest
from windlass.tools.common.texts import LABELS, Writer, random_identifier

_LIBRARY_SIZE = 16  # passages of the rag workload
_PASSAGES = 4  # passages per rag request


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that replace a workload's defaults; None keeps the default."""

    num_prompts: int = 64
    input_len: int | None = None
    output_len: int | None = None
    prefix_len: int | None = None
    turns: int | None = None
    range_ratio: float = 0.0  # for random: lengths vary by this ratio below and above

    def __post_init__(self) -> None:
        at_least(self, 1, "num_prompts", "input_len", "output_len", "prefix_len", "turns")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--range-ratio must be from 0 to below 1, got {self.range_ratio}.")


class _Source(NamedTuple):
    """Inputs of a workload's generator."""

    sizes: Sizes
    writer: Writer
    random: Random

    def user(self, *texts: str, system: str | None = None) -> tuple[Message, ...]:
        message = {"role": "user", "content": "\n\n".join(texts)}
        return (message,) if system is None else ({"role": "system", "content": system}, message)

    def prose(self, num_tokens: int) -> str:
        return self.writer.prose(self.random, num_tokens)


def _chat(source: _Source) -> list[TextRequest]:
    """Interleave conversations: the first turn of each, then the second.

    Past answers are generated here, not by the model, so every engine gets the same requests.
    """
    sizes = source.sizes
    num_in, num_out = sizes.input_len or 64, sizes.output_len or 128
    turns = sizes.turns or 4
    count = -(-sizes.num_prompts // turns)
    system = source.prose(sizes.prefix_len) if sizes.prefix_len else None
    histories: list[tuple[Message, ...]] = [()] * count
    requests: list[TextRequest] = []
    for index in range(sizes.num_prompts):
        past = histories[index % count]
        if past:
            answer = {"role": "assistant", "content": source.prose(num_out)}
            messages = (*past, answer, *source.user(source.prose(num_in)))
        else:
            messages = source.user(source.prose(num_in), system=system)
        histories[index % count] = messages
        requests.append(TextRequest(num_out, messages, follows=index - count if past else None))
    return requests


def _shared_prefix(source: _Source) -> list[TextRequest]:
    sizes = source.sizes
    system = source.prose(sizes.prefix_len or 1024)
    return [
        TextRequest(
            sizes.output_len or 64, source.user(source.prose(sizes.input_len or 64), system=system)
        )
        for _ in range(sizes.num_prompts)
    ]


def _rag(source: _Source) -> list[TextRequest]:
    """Draw passages with Zipf weights: low numbers are more popular."""
    sizes = source.sizes
    passage_len = max(1, (sizes.input_len or 1024) // _PASSAGES)
    library = [f"[{i + 1}] {source.prose(passage_len)}" for i in range(_LIBRARY_SIZE)]
    system = "Answer from the numbered pieces alone, and name the ones that you used."
    weights = [1 / (i + 1) for i in range(_LIBRARY_SIZE)]
    requests = []
    for _ in range(sizes.num_prompts):
        chosen: dict[int, None] = {}
        while len(chosen) < _PASSAGES:
            chosen[source.random.choices(range(_LIBRARY_SIZE), weights)[0]] = None
        question = f"Question: {source.prose(24)}"
        texts = [library[i] for i in chosen]
        requests.append(
            TextRequest(sizes.output_len or 96, source.user(*texts, question, system=system))
        )
    return requests


def _few_shot(source: _Source) -> list[TextRequest]:
    sizes = source.sizes
    count = 16
    length = max(4, (sizes.prefix_len or 768) // count)
    examples = "\n\n".join(
        f"Text: {source.prose(length)}\nLabel: {source.random.choice(LABELS)}" for _ in range(count)
    )
    head = f"Give each text one label of: {', '.join(LABELS)}."
    return [
        TextRequest(
            sizes.output_len or 4,
            source.user(head, examples, f"Text: {source.prose(sizes.input_len or 48)}\nLabel:"),
        )
        for _ in range(sizes.num_prompts)
    ]


def _long_document(source: _Source) -> list[TextRequest]:
    sizes = source.sizes
    return [
        TextRequest(
            sizes.output_len or 128,
            source.user(source.prose(sizes.input_len or 4096), "Summarise the text above."),
        )
        for _ in range(sizes.num_prompts)
    ]


def _code_edit(source: _Source) -> list[TextRequest]:
    sizes = source.sizes
    num_in = sizes.input_len or 512
    requests = []
    for _ in range(sizes.num_prompts):
        code = f"```python\n{source.writer.code(source.random, num_in)}\n```"
        old, new = random_identifier(source.random), random_identifier(source.random)
        edit = f"Rename {old} to {new}2; give the whole file again."
        requests.append(TextRequest(sizes.output_len or num_in, source.user(code, edit)))
    return requests


def _random(source: _Source) -> list[TextRequest]:
    sizes = source.sizes
    shared = source.prose(sizes.prefix_len) + " " if sizes.prefix_len else ""

    def drawn(length: int) -> int:
        low, high = length * (1 - sizes.range_ratio), length * (1 + sizes.range_ratio)
        return max(1, source.random.randint(round(low), round(high)))

    requests = []
    for _ in range(sizes.num_prompts):
        num_out = drawn(sizes.output_len or 128)
        requests.append(
            TextRequest(num_out, prompt=shared + source.prose(drawn(sizes.input_len or 1024)))
        )
    return requests


class _TextWorkload(NamedTuple):
    make: Callable[[_Source], list[TextRequest]]
    takes: tuple[str, ...]  # optional sizes that this workload uses


TEXT_WORKLOADS = {
    "chat": _TextWorkload(_chat, ("prefix_len", "turns")),
    "shared_prefix": _TextWorkload(_shared_prefix, ("prefix_len",)),
    "rag": _TextWorkload(_rag, ()),
    "few_shot": _TextWorkload(_few_shot, ("prefix_len",)),
    "long_document": _TextWorkload(_long_document, ()),
    "code_edit": _TextWorkload(_code_edit, ()),
    "random": _TextWorkload(_random, ("prefix_len", "range_ratio")),
}


def make_requests(name: str, sizes: Sizes, writer: Writer, seed: str = "0") -> list[TextRequest]:
    """The requests of a workload. Another seed gives other texts of the same kind."""
    return TEXT_WORKLOADS[name].make(_Source(sizes, writer, Random(f"{name} {seed}")))
