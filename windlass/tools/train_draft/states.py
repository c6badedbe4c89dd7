"""Caches the target's hidden states of all texts for all epochs, if they fit in memory.

They are computed in steps that depend on the texts alone, so a resumed run has the same states.
Held-out texts are seen once, and their states are not cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from windlass.runner.device import free_bytes
from windlass.tools.train_draft.batches import Batch, group_texts
from windlass.tools.train_draft.corpus import OnProgress, Text
from windlass.tools.train_draft.target import States, Target

_MEMORY_SHARE = {"cuda": 0.5, "cpu": 0.25}  # of the free memory
_GIB = 2**30


class StatesSource(Protocol):
    """The source of a step's states: the target, or the cache."""

    def offsets(self, texts: Sequence[Text]) -> NDArray[Any]:
        """The first state row of each text."""
        ...

    def states(self, batch: Batch) -> States: ...


def memory_need(target: Target, texts: list[Text]) -> tuple[int, int]:
    """Bytes that the states of all texts need, and the bytes that they may use."""
    one = target.packed_states(texts[:1])
    parts = [part for part in (one.last, one.aux_hidden_states) if part is not None]
    token_bytes = sum(part.nbytes for part in parts) / len(one.last)
    needed = int(token_bytes * sum(len(text.tokens) for text in texts))
    return needed, int(free_bytes(target.device) * _MEMORY_SHARE[target.device.type])


def should_cache(needed: int, allowed: int, reused: bool, before: bool | None) -> tuple[bool, str]:
    """Decide whether to cache the states of `needed` bytes; also returns a log line.

    `reused`: texts are seen more than once. `before`: the decision before an interruption.
    """
    size = f"{needed / _GIB:.2f} GiB for all texts"
    per_step = "the model's hidden states are computed in every step"
    if not reused:
        return False, f"{per_step}: no text is seen twice"
    if before is False:
        return False, f"{per_step}, as before the interruption"
    if needed <= allowed:
        return True, f"the model's hidden states are computed once: {size}"
    line = f"{per_step}: {size}, and they may use {allowed / _GIB:.2f} GiB"
    if before:
        line += ". Before the interruption they fitted: the result can differ in its last digits"
    return False, line


class CachedStates:
    """Owns the states of all texts, concatenated."""

    def __init__(
        self, target: Target, texts: list[Text], batch_tokens: int, on_progress: OnProgress
    ) -> None:
        """Run all texts through the target, similar lengths together."""
        total = sum(len(text.tokens) for text in texts)
        one = target.packed_states(texts[:1])
        aux = one.aux_hidden_states
        self._rows = rows = States(
            _empty_like(one.last, total), None if aux is None else _empty_like(aux, total)
        )
        self._firsts: dict[int, int] = {}  # row of a text's first token, by its id()
        at = 0
        for group in group_texts(sorted(texts, key=lambda text: len(text.tokens)), batch_tokens):
            found = target.packed_states(group)
            end = at + len(found.last)
            rows.last[at:end] = found.last
            if rows.aux_hidden_states is not None and found.aux_hidden_states is not None:
                rows.aux_hidden_states[at:end] = found.aux_hidden_states
            for text in group:
                self._firsts[id(text)] = at
                at += len(text.tokens)
            on_progress("hidden states", len(self._firsts), len(texts))

    def offsets(self, texts: Sequence[Text]) -> NDArray[Any]:
        return np.array([self._firsts[id(text)] for text in texts])

    def states(self, batch: Batch) -> States:
        return self._rows.at(batch.state_indices)


def _empty_like(rows: Tensor, count: int) -> Tensor:
    return rows.new_empty(count, rows.shape[-1])
