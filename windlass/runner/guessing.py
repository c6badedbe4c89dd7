"""Verification on CUDA: recorded for rows of equal width, eager beside prompts.

A recorded verification holds everything: both copies, network, sampling, how much of each row is
kept, and the drafter's guesses for the next. What the host does for it is to write down the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.core.types import Row, RowResult, StepPlan, StepResult
from windlass.kernels.batch import AttentionWork, StepBatch
from windlass.runner.drafter import Drafter, Verified
from windlass.runner.graphs import CudaRunner
from windlass.runner.runner import Done, Pending
from windlass.runner.slots import to_device
from windlass.runner.verify import asked_by, keep, positions_of

_SIZES = (1, 2, 4, 8, 16, 32, 64)
_ALL_WIDTHS = 4  # rows up to which every width is recorded; above, each costs more and gives less
_MOST_PLACES = 512
# Up to so many places attention sees each by itself, its context cut into parts; above, the places
# of a row together read its context once.
_APART = 64


def widths(most: int) -> list[int]:
    """Tokens of a row to record, for up to `most` guesses: dense at first, then doubling."""
    steps = [guesses for guesses in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if guesses < most]
    return [1 + guesses for guesses in (*steps, most)]


@dataclass(frozen=True, slots=True)
class _Key:
    """What a recording is for."""

    size: int
    width: int
    drafting: int  # guesses for the next step
    fixed: bool


@dataclass(frozen=True, slots=True)
class _Mail:
    """Pinned memory of a recording. One step at a time has guesses, so that one place is enough."""

    # [size, 3 + width]: slot, position of the first token, how many, and the tokens of every row
    sent: Tensor
    # [size, width + 1 + guesses]: samples, how many are kept, and the next guesses
    back: Tensor
    nobody: list[int]  # what is sent of rows that only pad

    @classmethod
    def of(cls, key: _Key, padding: int) -> _Mail:
        nobody = [padding, 0, 1, *[0] * key.width]
        sent = torch.tensor([nobody] * key.size, dtype=torch.int32).pin_memory()
        shape = (key.size, key.width + 1 + key.drafting)
        return cls(sent, torch.empty(shape, dtype=torch.int32, pin_memory=True), nobody)

    def write(self, rows: list[Row]) -> None:
        lines = self.sent.numpy()
        for i, row in enumerate(rows):
            count = row.num_tokens
            lines[i, : 3 + count] = (row.slot, row.start, count, *(row.tokens or (-1,)))
        lines[len(rows) :] = self.nobody


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    mail: _Mail
    logits: Tensor
    arrived: torch.cuda.Event


class _OnItsWay:
    """A verification whose results are travelling to the host."""

    def __init__(
        self, owner: CudaGuesser, rows: list[Row], recorded: _Recorded, width: int
    ) -> None:
        self.guesses = True
        self._owner = owner
        self._rows = rows
        self._recorded = recorded
        self._width = width
        recorded.arrived.record()

    def wait(self) -> StepResult:
        self._recorded.arrived.synchronize()
        width, results = self._width, []
        for row, found in zip(self._rows, self._recorded.mail.back.tolist(), strict=False):
            said = found[: row.num_tokens]
            trail = tuple(said) if row.num_drafts else ()
            kept, drafts = said[: found[width]], tuple(found[width + 1 :])
            results.append(RowResult(kept, drafts=drafts, trail=trail))
        return StepResult(self._owner.redraw(self._rows, results, self._recorded.logits, width))


class CudaGuesser(CudaRunner):
    """Owns the recorded verifications and the buffers that they read."""

    def __init__(self, *args: Any, most_guesses: int) -> None:
        super().__init__(*args)
        self._widths = [1, *widths(most_guesses)]
        self._depths = sorted({-(-most_guesses // 2), most_guesses})
        self._verifications: dict[_Key, _Recorded] = {}
        places = max(_MOST_PLACES, self._widths[-1], self._slots.num_slots + 1)
        self._places = torch.arange(places, dtype=torch.int32, device=self._device)
        self._place_counters = torch.zeros(
            places * self._num_kv_heads, dtype=torch.int32, device=self._device
        )

    @property
    def most_guessing(self) -> int | None:
        return _SIZES[-1] if self._sizes else None

    def attach(self, drafter: Drafter) -> None:
        super().attach(drafter)
        for depth in self._depths:
            self.drafting = depth
            self._record_verifications()

    def record(self) -> None:
        super().record()
        self._record_verifications()

    @torch.inference_mode()
    def _record_verifications(self) -> None:
        """Record all that requests need, the largest first: later they would have to wait for it."""
        if not self._sizes:
            return
        for size in reversed([one for one in _SIZES if one < 2 * self._sizes[-1]]):
            for width in reversed(self._widths_of(size)):
                if self.drafting or width > 1:
                    self._verification(_Key(size, width, self.drafting, False))

    def _widths_of(self, size: int) -> list[int]:
        """Tokens of a row that recordings of so many rows have."""
        fitting = [width for width in self._widths if size * width <= _MOST_PLACES]
        if size <= _ALL_WIDTHS:
            return fitting
        return sorted({1, *fitting[1:2], fitting[-1]})

    @torch.inference_mode()
    def _submit(self, plan: StepPlan) -> Pending:
        rows = plan.rows
        self._note_prompts(plan)
        if not self.drafting and not any(row.num_drafts for row in rows):
            return super()._submit(plan)
        self._put_adapters(plan)
        self._note_fixed(plan)
        self._device_sampler.forget(plan.freed)
        self._device_sampler.admit(plan.admitted)
        self._slots.send(self._slots.apply(plan))
        self._cache.copy(plan.copies)
        fixed = self._in_fixed_order(rows)
        key = self._key_for(rows, fixed)
        if key is None:
            with self._products.fixed_order(fixed):
                return Done(StepResult(self._verify_eagerly(plan, fixed)), guesses=True)
        recorded = self._verification(key)
        recorded.mail.write(rows)
        recorded.graph.replay()
        return _OnItsWay(self, rows, recorded, key.width)

    # ---- recorded ------------------------------------------------------------------------------

    def _key_for(self, rows: list[Row], fixed: bool) -> _Key | None:
        """The smallest recording that holds these rows; None where there is a prompt or adapter."""
        if not self._sizes or len(rows) > _SIZES[-1]:
            return None
        for row in rows:
            if row.num_tokens != 1 + row.num_drafts or not row.sample or row.adapter:
                return None
        longest = max(row.num_tokens for row in rows)
        size = next(size for size in _SIZES if size >= len(rows))
        width = next((width for width in self._widths_of(size) if width >= longest), None)
        if width is None:
            return None
        depth = next((depth for depth in self._depths if depth >= self.drafting), 0)
        return _Key(size, width, depth if self.drafting else 0, fixed)

    def _verification(self, key: _Key) -> _Recorded:
        if key not in self._verifications:
            mail = _Mail.of(key, self._slots.num_slots)
            self._run(key, mail)  # compiles what is missing, outside of the recording
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                logits = self._run(key, mail)
            self._verifications[key] = _Recorded(graph, mail, logits, torch.cuda.Event())
        return self._verifications[key]

    def _run(self, key: _Key, mail: _Mail) -> Tensor:
        """One verification, from what is sent to what comes back; returns its logits."""
        from windlass.kernels.triton import verify as kernels

        slots, (size, width) = self._slots, (key.size, key.width)
        inputs = torch.empty(mail.sent.shape, dtype=torch.int32, device=self._device)
        inputs.copy_(mail.sent, non_blocking=True)
        ids, positions, row_slots, tiles = kernels.unpack(
            inputs, slots.last, size, width, slots.num_slots
        )
        work = self._work_for(key, tiles)
        batch = StepBatch(
            positions, row_slots, slots.tables, [], self._cache.layers, work, key.fixed
        )
        drafter = self.drafter if key.drafting else None
        taps = dict.fromkeys(drafter.layers, ids) if drafter is not None else None
        with self._products.fixed_order(key.fixed):
            hidden = self._network(ids, batch, taps)
            logits = self._network.logits(hidden)
            sampled = self._device_sampler.draw(logits, row_slots, positions)
            kept, last = kernels.keep(inputs, ids, sampled, slots.last, size, width)
            parts = [sampled.view(size, width), kept[:, None]]
            if drafter is not None:
                found = Verified(hidden, taps or {}, sampled, last, batch, self._alone)
                parts.append(drafter.draft(found, key.drafting))
        mail.back.copy_(torch.cat(parts, dim=1), non_blocking=True)
        return logits

    def _work_for(self, key: _Key, tiles: Tensor) -> AttentionWork:
        places = key.size * key.width
        if key.fixed or places > _APART:
            return AttentionWork(self._places[:0], tiles, 1, self._place_counters)
        splits = self._splits(places)
        singles = self._places[:places]
        return AttentionWork(singles, tiles[:0], splits, self._place_counters, key.width > 1)

    def _alone(self, positions: Tensor, slots: Tensor) -> StepBatch:
        count = positions.shape[0]
        singles, splits = self._places[:count], self._splits(count)
        work = AttentionWork(singles, self._no_tiles, splits, self._place_counters)
        return StepBatch(positions, slots, self._slots.tables, [], [], work)

    @torch.inference_mode()
    def redraw(
        self, rows: Sequence[Row], results: list[RowResult], logits: Tensor, width: int
    ) -> list[RowResult]:
        """Draw the rows anew whose wishes the kernels do not know."""
        for i in self._device_sampler.special([row.slot for row in rows]):
            asked = asked_by([rows[i]])[0]
            own = logits[i * width : i * width + asked.num_positions]
            drawn = self._device_sampler.redraw_row(own, asked)
            drafts = results[i].drafts if drawn.tokens == results[i].tokens else ()
            results[i] = drawn._replace(drafts=drafts)
        return results

    # ---- eager ---------------------------------------------------------------------------------

    def _verify_eagerly(self, plan: StepPlan, fixed: bool) -> list[RowResult]:
        rows = plan.rows
        ids, batch = self._slots.batch(plan, self._cache.layers)
        adapters = self._adapters(rows, [row.num_tokens for row in rows])
        work = self._work(rows, batch.spans, fixed)
        batch = replace(batch, work=work, fixed=fixed, adapters=adapters)
        taps = None
        if self.drafting and self.drafter is not None:
            taps = dict.fromkeys(self.drafter.layers, ids)
        hidden = self._network(ids, batch, taps)
        results = self._draw(rows, batch, hidden)
        if self._device_sampler.special([row.slot for row in rows]):
            self._score_prompts(rows, batch.spans, hidden, results)
        if taps is None:
            return results
        return self._draft(rows, ids, batch, hidden, taps, results)

    def _draw(self, rows: list[Row], batch: StepBatch, hidden: Tensor) -> list[RowResult]:
        """Tokens of the rows that sample, in the order of all rows."""
        asked = asked_by(rows)
        results = [RowResult([])] * len(rows)
        if not asked:
            return results
        at = to_device(positions_of(rows, asked).astype(np.int32), self._device)
        logits = self._network.logits(hidden[at], self._asked_adapters(rows, asked))
        drawn = self._device_sampler.draw(logits, batch.token_slots[at], batch.positions[at])
        sampled, first = drawn.tolist(), 0
        special = set(self._device_sampler.special([each.slot for each in asked]))
        for i, each in enumerate(asked):
            end = first + each.num_positions
            if i in special:
                results[each.row] = self._device_sampler.redraw_row(logits[first:end], each)
            else:
                said = sampled[first:end]
                trail = tuple(said) if each.drafts else ()
                results[each.row] = RowResult(keep(said, each.drafts), trail=trail)
            first = end
        slots = [each.slot for each in asked]
        last = [results[each.row].tokens[-1] for each in asked]
        self._slots.last[slots] = torch.tensor(last, dtype=torch.int32, device=self._device)
        return results
