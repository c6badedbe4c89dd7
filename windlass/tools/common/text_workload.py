"""Loads by name, made from a seed: what people send to servers, without a download.

chat           conversations that grow by a turn; a turn is sent when the last answer has come
shared_prefix  one long system prompt, a short question
rag            pieces of a small library, some of them in many requests, and a question
few_shot       the same examples, a text to put a label on, a few tokens out
long_document  a long text of its own, and a question
code_edit      a file of code, and what to change in it
random         words without a meaning, of given lengths
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from random import Random
from typing import NamedTuple

from windlass.config import flag
from windlass.errors import ConfigError
from windlass.tools.common.requests import Message, TextRequest
from windlass.tools.common.texts import LABELS, Writer, a_name

_LIBRARY = 16  # pieces of rag
_PIECES = 4  # of them in a request


@dataclass(frozen=True, slots=True)
class Sizes:
    """What may be set instead of a load's own numbers; None: its own."""

    num_prompts: int = 64
    input_len: int | None = None
    output_len: int | None = None
    prefix_len: int | None = None
    turns: int | None = None
    range_ratio: float = 0.0  # of random: lengths are drawn this far below and above

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "range_ratio" and value is not None and value < 1:
                raise ConfigError(f"{flag(item.name)} must be at least 1, got {value}.")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--range-ratio must be from 0 to below 1, got {self.range_ratio}.")


class _Desk(NamedTuple):
    """What a load is written with."""

    sizes: Sizes
    writer: Writer
    random: Random

    def user(self, *texts: str, system: str | None = None) -> tuple[Message, ...]:
        asked = {"role": "user", "content": "\n\n".join(texts)}
        return (asked,) if system is None else ({"role": "system", "content": system}, asked)

    def prose(self, num_tokens: int) -> str:
        return self.writer.prose(self.random, num_tokens)


def _chat(desk: _Desk) -> list[TextRequest]:
    """Conversations take turns: the first turn of each, then the second. Past answers are written
    here, not by the model, so that every engine is asked the same."""
    sizes = desk.sizes
    num_in, num_out = sizes.input_len or 64, sizes.output_len or 128
    turns = sizes.turns or 4
    count = -(-sizes.num_prompts // turns)
    system = desk.prose(sizes.prefix_len) if sizes.prefix_len else None
    histories: list[tuple[Message, ...]] = [()] * count
    requests: list[TextRequest] = []
    for index in range(sizes.num_prompts):
        which = index % count
        past = histories[which]
        if past:
            said = {"role": "assistant", "content": desk.prose(num_out)}
            asked = (*past, said, *desk.user(desk.prose(num_in)))
        else:
            asked = desk.user(desk.prose(num_in), system=system)
        histories[which] = asked
        requests.append(TextRequest(num_out, asked, follows=index - count if past else None))
    return requests


def _shared_prefix(desk: _Desk) -> list[TextRequest]:
    sizes = desk.sizes
    system = desk.prose(sizes.prefix_len or 1024)
    return [
        TextRequest(
            sizes.output_len or 64, desk.user(desk.prose(sizes.input_len or 64), system=system)
        )
        for _ in range(sizes.num_prompts)
    ]


def _rag(desk: _Desk) -> list[TextRequest]:
    """A piece's chance falls with its number, as with what people look for."""
    sizes = desk.sizes
    piece_len = max(1, (sizes.input_len or 1024) // _PIECES)
    library = [f"[{i + 1}] {desk.prose(piece_len)}" for i in range(_LIBRARY)]
    system = "Answer from the numbered pieces alone, and name the ones that you used."
    requests = []
    for _ in range(sizes.num_prompts):
        chosen: dict[int, None] = {}
        while len(chosen) < _PIECES:
            weights = [1 / (i + 1) for i in range(_LIBRARY)]
            chosen[desk.random.choices(range(_LIBRARY), weights)[0]] = None
        question = f"Question: {desk.prose(24)}"
        texts = [library[i] for i in chosen]
        requests.append(
            TextRequest(sizes.output_len or 96, desk.user(*texts, question, system=system))
        )
    return requests


def _few_shot(desk: _Desk) -> list[TextRequest]:
    sizes = desk.sizes
    count = 16
    length = max(4, (sizes.prefix_len or 768) // count)
    examples = "\n\n".join(
        f"Text: {desk.prose(length)}\nLabel: {desk.random.choice(LABELS)}" for _ in range(count)
    )
    head = f"Give each text one label of: {', '.join(LABELS)}."
    return [
        TextRequest(
            sizes.output_len or 4,
            desk.user(head, examples, f"Text: {desk.prose(sizes.input_len or 48)}\nLabel:"),
        )
        for _ in range(sizes.num_prompts)
    ]


def _long_document(desk: _Desk) -> list[TextRequest]:
    sizes = desk.sizes
    return [
        TextRequest(
            sizes.output_len or 128,
            desk.user(desk.prose(sizes.input_len or 4096), "Summarise the text above."),
        )
        for _ in range(sizes.num_prompts)
    ]


def _code_edit(desk: _Desk) -> list[TextRequest]:
    sizes = desk.sizes
    num_in = sizes.input_len or 512
    requests = []
    for _ in range(sizes.num_prompts):
        code = f"```python\n{desk.writer.code(desk.random, num_in)}\n```"
        wish = f"Rename {a_name(desk.random)} to {a_name(desk.random)}2; give the whole file again."
        requests.append(TextRequest(sizes.output_len or num_in, desk.user(code, wish)))
    return requests


def _random(desk: _Desk) -> list[TextRequest]:
    sizes = desk.sizes
    shared = desk.prose(sizes.prefix_len) + " " if sizes.prefix_len else ""

    def drawn(length: int) -> int:
        low, high = length * (1 - sizes.range_ratio), length * (1 + sizes.range_ratio)
        return max(1, desk.random.randint(round(low), round(high)))

    requests = []
    for _ in range(sizes.num_prompts):
        num_out = drawn(sizes.output_len or 128)
        requests.append(
            TextRequest(num_out, prompt=shared + desk.prose(drawn(sizes.input_len or 1024)))
        )
    return requests


class _Load(NamedTuple):
    make: Callable[[_Desk], list[TextRequest]]
    takes: tuple[str, ...]  # the sizes that mean something, beside those that all take


LOADS = {
    "chat": _Load(_chat, ("prefix_len", "turns")),
    "shared_prefix": _Load(_shared_prefix, ("prefix_len",)),
    "rag": _Load(_rag, ()),
    "few_shot": _Load(_few_shot, ("prefix_len",)),
    "long_document": _Load(_long_document, ()),
    "code_edit": _Load(_code_edit, ()),
    "random": _Load(_random, ("prefix_len", "range_ratio")),
}
_OPTIONAL = {"prefix_len": None, "turns": None, "range_ratio": 0.0}


def check_sizes(name: str, sizes: Sizes, takes: tuple[str, ...]) -> None:
    """A size that would change nothing is refused."""
    for key, unset in _OPTIONAL.items():
        if key not in takes and getattr(sizes, key) != unset:
            raise ConfigError(f"{flag(key)} means nothing for --dataset-name {name}. Leave it out.")


def make_load(name: str, sizes: Sizes, writer: Writer, seed: str = "0") -> list[TextRequest]:
    """The requests of a load. Another seed gives other texts of the same kind."""
    if name not in LOADS:
        raise ConfigError(f"the load {name!r} is not known. Known: {', '.join(LOADS)}.")
    check_sizes(name, sizes, LOADS[name].takes)
    return LOADS[name].make(_Desk(sizes, writer, Random(f"{name} {seed}")))
