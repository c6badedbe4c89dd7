"""The target's states of all texts, computed once for all epochs where there is room for them.

They are computed in steps that depend on the texts alone: a run that goes on after an interruption
has the same ones. Texts that are held out are seen once, and nothing is kept of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from windlass.runner.device import free_bytes
from windlass.tools.train_draft.batches import Batch, in_steps
from windlass.tools.train_draft.target import States, Target
from windlass.tools.train_draft.writing import Advance, Text

_SHARE = {"cuda": 0.5, "cpu": 0.25}  # of the free memory
_GIB = 2**30


class Source(Protocol):
    """Where a step has its states from: the target, or what is remembered of it."""

    def firsts(self, texts: Sequence[Text]) -> NDArray[Any]:
        """Where the states of each text begin."""
        ...

    def states(self, batch: Batch) -> States: ...


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that all states need, and that they may take."""

    needed: int
    allowed: int

    @classmethod
    def of(cls, target: Target, texts: list[Text]) -> Room:
        one = target.end_to_end(texts[:1])
        each = sum(
            part.nbytes for part in (one.last, one.aux_hidden_states) if part is not None
        ) / len(one.last)
        tokens = sum(len(text.tokens) for text in texts)
        share = _SHARE[target.device.type]
        return cls(int(each * tokens), int(free_bytes(target.device) * share))


def decide(room: Room, again: bool, before: bool | None) -> tuple[bool, str]:
    """Whether to remember, and a line that says so.

    `again`: texts are seen more than once. `before`: what was decided before an interruption.
    """
    size = f"{room.needed / _GIB:.2f} GiB for all texts"
    per_step = "the model's hidden states are computed in every step"
    if not again:
        return False, f"{per_step}: no text is seen twice"
    if before is False:
        return False, f"{per_step}, as before the interruption"
    if room.needed <= room.allowed:
        return True, f"the model's hidden states are computed once: {size}"
    line = f"{per_step}: {size}, and they may take {room.allowed / _GIB:.2f} GiB"
    if before:
        line += ". Before the interruption there was room: the result can differ in its last digits"
    return False, line


class Remembered:
    """Owns the states of all texts, end to end."""

    def __init__(self, rows: States, firsts: dict[int, int]) -> None:
        """`firsts`: where a text's tokens begin, by its id()."""
        self._rows = rows
        self._firsts = firsts

    def firsts(self, texts: Sequence[Text]) -> NDArray[Any]:
        return np.array([self._firsts[id(text)] for text in texts])

    def states(self, batch: Batch) -> States:
        return self._rows.at(batch.places)


def remember(target: Target, texts: list[Text], batch_tokens: int, advance: Advance) -> Remembered:
    """Run all texts through the target, those of like length together."""
    total = sum(len(text.tokens) for text in texts)
    one = target.end_to_end(texts[:1])
    aux_hidden_states = (
        None if one.aux_hidden_states is None else _room_like(one.aux_hidden_states, total)
    )
    rows = States(_room_like(one.last, total), aux_hidden_states)
    firsts: dict[int, int] = {}
    at = 0
    for group in in_steps(sorted(texts, key=lambda text: len(text.tokens)), batch_tokens):
        found = target.end_to_end(group)
        rows.last[at : at + len(found.last)] = found.last
        if rows.aux_hidden_states is not None and found.aux_hidden_states is not None:
            rows.aux_hidden_states[at : at + len(found.aux_hidden_states)] = found.aux_hidden_states
        for text in group:
            firsts[id(text)] = at
            at += len(text.tokens)
        advance("hidden states", len(firsts), len(texts))
    return Remembered(rows, firsts)


def _room_like(rows: Tensor, count: int) -> Tensor:
    return rows.new_empty(count, rows.shape[-1])
