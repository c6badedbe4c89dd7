"""Logits of given tokens at every position, computed by the runner.

Used for quality evaluation and calibration. Nothing is sampled or kept between groups of windows.
Memory is bounded by one step and one chunk of logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.core.kv_layout import KVLayout
from windlass.core.types import BlockId, Row, SlotId, SlotInit, StepOptions, StepPlan
from windlass.errors import EngineError
from windlass.models.network import Network
from windlass.runner.runner import Runner

# Numbers per chunk of logits: 128 MiB in float32.
_CHUNK_NUMBERS = 2**25
_MAX_POSITIONS = 512


@dataclass(frozen=True, slots=True)
class Window:
    """A sequence of tokens, and the first position whose logits are returned."""

    tokens: Sequence[int]
    first: int = 0


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Values [positions, width] of one window (by its index) from `start` on."""

    window: int
    start: int
    values: Tensor

    def targets(self, window: Window) -> Sequence[int]:
        """The next token of each position; the last position of a window has none."""
        return window.tokens[self.start + 1 : self.start + 1 + len(self.values)]


@dataclass(frozen=True, slots=True)
class ScoringLimits:
    """Step sizes. Two scorers with equal limits yield chunks in lockstep."""

    longest: int  # tokens of the longest window
    step_tokens: int
    rows: int

    def num_blocks(self, layout: KVLayout) -> int:
        """KV blocks for any group of windows: one step, or one longer window."""
        each = -(-max(self.longest, self.step_tokens) // layout.block_size) + self.rows
        return each * len(layout.groups)


class Scorer:
    """Usage: `for piece in scorer.logits([Window(tokens)]): piece.values.log_softmax(-1)`

    Only one iteration may run at a time: they share the KV pages.
    """

    def __init__(
        self,
        runner: Runner,
        network: Network,
        limits: ScoringLimits,
        layout: KVLayout,
        vocab_size: int,
    ) -> None:
        self.network = network
        self.limits = limits
        self.vocab_size = vocab_size
        self._runner = runner
        self._layout = layout

    def logits(
        self, windows: Iterable[Window], vocab_size: int | None = None
    ) -> Iterator[ScoredChunk]:
        """Yield float32 logits from each window's `first` on, in small chunks.

        `vocab_size` drops the padding rows of a vocabulary.
        """
        width = vocab_size or self.vocab_size
        count = max(1, min(_MAX_POSITIONS, _CHUNK_NUMBERS // width))
        for piece in self.hidden(windows):
            for at in range(0, len(piece.values), count):
                with torch.inference_mode():
                    logits = self.network.logits(piece.values[at : at + count])
                    logits = logits[:, :width].float()
                yield ScoredChunk(piece.window, piece.start + at, logits)

    def hidden(self, windows: Iterable[Window]) -> Iterator[ScoredChunk]:
        """Yield the last hidden states, before the LM head."""
        number = 0
        for group in self._groups(windows):
            yield from self._compute(group, number)
            number += len(group)

    def _groups(self, windows: Iterable[Window]) -> Iterator[list[Window]]:
        """Group consecutive windows that fit one step. A window longer than a step is its own group."""
        group: list[Window] = []
        total = 0
        for window in windows:
            count = len(window.tokens)
            if not 0 < count <= self.limits.longest:
                raise EngineError(
                    f"a window of {count} tokens, but this scorer takes 1 to {self.limits.longest}."
                )
            full = len(group) == self.limits.rows or total + count > self.limits.step_tokens
            if group and full:
                yield group
                group, total = [], 0
            group.append(window)
            total += count
        if group:
            yield group

    def _compute(self, group: list[Window], number: int) -> Iterator[ScoredChunk]:
        longest = max(len(window.tokens) for window in group)
        for start in range(0, longest, self.limits.step_tokens):
            plan = self._plan(group, start)
            hidden = self._run(plan)
            at = 0
            for row in plan.rows:
                first = max(0, group[row.slot].first - start)
                if first < row.num_tokens:
                    values = hidden[at + first : at + row.num_tokens]
                    yield ScoredChunk(number + row.slot, start + first, values)
                at += row.num_tokens

    def _plan(self, group: list[Window], start: int) -> StepPlan:
        """One step of all windows from position `start`. Slots and blocks are numbered in order."""
        rows, admitted, next_block = [], [], 0
        for i, window in enumerate(group):
            slot = SlotId(i)
            blocks: tuple[BlockId, ...] = ()
            if start == 0:
                count = -(-len(window.tokens) // self._layout.block_size)
                count *= len(self._layout.groups)
                blocks = tuple(BlockId(next_block + j) for j in range(count))
                next_block += count
                known = list(window.tokens)
                admitted.append(SlotInit.greedy(slot, known, num_prompt=len(known)))
            part = tuple(window.tokens[start : start + self.limits.step_tokens])
            row = Row.unowned(slot, part, start=start, blocks=blocks)
            rows.append(row._replace(sample=False))
        # Sample and discard one token, so that the step takes the same path as a served one.
        rows[-1] = rows[-1]._replace(sample=True)
        return StepPlan(rows, admitted, options=StepOptions(needs_all_hidden=True))

    def _run(self, plan: StepPlan) -> Tensor:
        """Run a step and return the network's hidden states, caught by a forward hook."""
        seen: list[Tensor] = []
        listener = self.network.register_forward_hook(lambda *call: seen.append(call[-1]))
        try:
            self._runner.run(plan)
        finally:
            listener.remove()
        if len(seen) != 1:
            raise EngineError(
                f"the runner called its network {len(seen)} times in one step, expected once."
            )
        return seen[0]
