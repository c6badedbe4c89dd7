"""Verification of draft tokens on CUDA: captured graphs for equal row widths, eager beside prompts.

One graph covers the network, sampling, acceptance, and drafting for the next verification, whose
input rows it writes on the device. The runner launches that next graph at once, before the host has
planned it (pre-launch). If the plan then asks for something else, the result is discarded: all KV
that was written lies behind the known tokens.

A drafter may have alternatives (siblings) to its first draft token. They stay on the device by slot;
a verification of few rows tries them beside the draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from windlass.core.types import Row, RowResult, StepPlan, StepResult
from windlass.kernels.batch import AttentionWork, StepBatch
from windlass.runner.cuda_runner import CudaRunner
from windlass.runner.drafter import Drafter, DrafterInputs
from windlass.runner.prelaunch import (
    CapturedVerification,
    LaunchedVerification,
    PendingMixedStep,
    PendingVerification,
    Prelaunched,
    VerifyOutputs,
)
from windlass.runner.runner import CompletedStep, PendingStep, RunnerParts
from windlass.runner.slots import to_device
from windlass.runner.verify import keep, sample_requests

_SIZES = (1, 2, 4, 8, 16, 32, 64)
# Up to this many rows every width is captured and the next step is pre-launched. With more rows a
# graph costs more and helps less, and in most steps some row finishes, which wastes a pre-launch.
_FEW = 4
_MAX_POSITIONS = 512
# Up to this many positions, attention handles each position alone and splits its context (split-KV).
# Above, the positions of a row share one pass over its context.
_APART = 64


def widths(max_drafts: int) -> list[int]:
    """Row widths to capture for up to `max_drafts` draft tokens: dense first, then doubling."""
    steps = [count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if count < max_drafts]
    return [1 + count for count in (*steps, max_drafts)]


@dataclass(frozen=True, slots=True)
class _Key:
    """The shape that a graph was captured for."""

    size: int
    width: int
    drafting: int  # draft tokens per row for the next step
    batch_invariant: bool


class CudaVerifyRunner(CudaRunner):
    """Owns the captured verification graphs and their input buffers."""

    def __init__(
        self,
        parts: RunnerParts,
        *,
        tile: int,
        graph_rows: int,
        max_tokens: int,
        max_draft_tokens: int,
    ) -> None:
        super().__init__(parts, tile=tile, graph_rows=graph_rows, max_tokens=max_tokens)
        self._widths = [1, *widths(max_draft_tokens)]
        self._depths = sorted({-(-max_draft_tokens // 2), max_draft_tokens})
        self._captured: dict[_Key, CapturedVerification] = {}
        self._input_buffers: dict[tuple[int, int], Tensor] = {}
        self._prelaunched: Prelaunched | None = None
        # By slot: a position, and the siblings of the first draft token after it.
        self._siblings: Tensor | None = None
        num_positions = max(_MAX_POSITIONS, self._widths[-1], self._slots.num_slots + 1)
        self._indices = torch.arange(num_positions, dtype=torch.int32, device=self._device)
        self._position_counters = torch.zeros(
            num_positions * self._num_kv_heads, dtype=torch.int32, device=self._device
        )

    def max_draft_tokens(self, requested: int, num_rows: int) -> int:
        if not self._sizes:
            return requested
        if num_rows > _SIZES[-1]:
            return 0
        size = next(size for size in _SIZES if size >= num_rows)
        return min(requested, self._widths_of(size)[-1] - 1)

    def attach(self, drafter: Drafter) -> None:
        super().attach(drafter)
        if drafter.num_siblings and self._cache.pages is not None:
            shape = (self._slots.num_slots + 1, 1 + drafter.num_siblings)
            self._siblings = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        for depth in self._depths:
            self._capture_verifications(depth)
        with torch.inference_mode():
            for tokens in reversed(self._mixed_sizes):
                self._mixed_step(self._graph_shape(tokens, drafting=self._depths[-1]))

    def capture(self) -> None:
        super().capture()
        self._capture_verifications()

    @torch.inference_mode()
    def _capture_verifications(self, depth: int = 0) -> None:
        """Capture all graphs at start, the largest first, so that no request waits for a capture."""
        if not self._sizes:
            return
        for size in reversed([one for one in _SIZES if one < 2 * self._sizes[-1]]):
            for width in reversed(self._widths_of(size)):
                if depth or width > 1:
                    self._captured_for(_Key(size, width, depth, False))

    def _widths_of(self, size: int) -> list[int]:
        """The captured row widths for a batch of `size` rows."""
        fitting = [width for width in self._widths if size * width <= _MAX_POSITIONS]
        if size <= _FEW:
            return fitting
        return sorted({1, *fitting[1:2], fitting[-1]})

    def _submit(self, plan: StepPlan) -> PendingStep:
        rows, draft_length = plan.rows, self._draft_length(plan)
        ahead, self._prelaunched = self._prelaunched, None
        if ahead is not None and not (draft_length and ahead.is_for(plan)):
            self._undo_prelaunch(ahead)
            ahead = None
        self._note_prompts(plan)
        if not draft_length and not plan.has_drafts:
            return super()._submit(plan)
        self._put_adapters(plan)
        self._note_batch_invariant(plan)
        self._device_sampler.forget(plan.freed)
        self._device_sampler.admit(plan.admitted)
        self._slots.send(self._slots.apply(plan))
        self._cache.copy(plan.copies)
        batch_invariant = self._is_batch_invariant(rows)
        key = self._key_for(rows, draft_length, batch_invariant)
        self._forget_siblings(rows)
        if key is None:
            return self._submit_with_prompts(plan, batch_invariant)
        if ahead is not None:
            whole = all(row.num_drafts == ahead.num_drafts for row in rows)
            pending = PendingVerification(
                resample=self.resample, rows=rows, launched=ahead.launched, whole=whole
            )
        else:
            captured = self._captured_for(key)
            captured.send(rows, self._padding_row(key.width))
            pending = PendingVerification(self.resample, rows, captured.launch())
        self._prelaunched = self._prelaunch_next(pending, key)
        pending.prelaunched = self._prelaunched is not None
        return pending

    def _submit_with_prompts(self, plan: StepPlan, batch_invariant: bool) -> PendingStep:
        """Use a mixed graph when no row verifies drafts or needs the host sampler, else run eagerly."""
        rows = plan.rows
        special = self._device_sampler.special([row.slot for row in rows])
        if self._draft_length(plan) and not (plan.has_drafts or special or batch_invariant):
            mixed = self._mixed_for(plan, self._depths[-1])
            if mixed is not None:
                mixed.launch()
                return PendingMixedStep(rows, mixed.tokens)
        with self._gemm.batch_invariant(batch_invariant):
            return CompletedStep(StepResult(self._verify_eagerly(plan)))

    def _forget_siblings(self, rows: list[Row]) -> None:
        """Drop the siblings of rows that the host samples again, which ignores siblings."""
        if self._siblings is not None:
            slots = [row.slot for row in rows]
            special = [slots[i] for i in self._device_sampler.special(slots)]
            if special:
                self._siblings[special, 0] = -1

    def _siblings_for(self, key: _Key) -> Tensor | None:
        """The sibling table if graphs of this shape verify siblings, else None."""
        siblings = self._siblings
        if (
            siblings is None
            or not key.drafting
            or key.width == 1
            or key.batch_invariant
            or key.size > _FEW
        ):
            return None
        from windlass.kernels.triton.attention import fuses

        count = siblings.shape[1] - 1
        width = key.width + count
        apart = key.size * width <= _APART and key.size * count <= self._slots.size
        fused = fuses(key.size * width, self._num_kv_heads, width, quantised=False)
        return siblings if apart and fused else None

    def _padding_row(self, width: int) -> list[int]:
        """The input of a padding row."""
        return [self._slots.num_slots, 0, 1, *[0] * width]

    # ---- pre-launch ----------------------------------------------------------------------------

    def _prelaunch_next(self, pending: PendingVerification, key: _Key) -> Prelaunched | None:
        """Launch the next verification if it is likely that no row finishes and no draft is trimmed."""
        rows, num_drafts = pending.rows, pending.launched.drafting
        if not num_drafts or not key.drafting or len(rows) > _FEW or not pending.whole:
            return None
        if not all(row.num_drafts for row in rows):
            return None
        if self._device_sampler.special([row.slot for row in rows]):
            return None
        lengths = [(row.slot, row.start + row.num_tokens + 1 + num_drafts) for row in rows]
        if not all(self._slots.has_room(slot, tokens) for slot, tokens in lengths):
            return None
        width = self._width_for(key.size, 1 + num_drafts)
        assert width is not None
        captured = self._captured.get(replace(key, width=width))
        if captured is None:  # capturing now would overwrite its input buffer
            return None
        return Prelaunched(pending.following, captured.launch(), num_drafts)

    def _undo_prelaunch(self, ahead: Prelaunched) -> None:
        """Restore the last sampled tokens that a discarded pre-launch has overwritten."""
        slots = np.array([each.slot for each in ahead.following], dtype=np.int64)
        tokens = np.array([each.tokens[0] for each in ahead.following], dtype=np.int32)
        self._slots.last[to_device(slots, self._device)] = to_device(tokens, self._device)

    # ---- captured graphs -----------------------------------------------------------------------

    def _key_for(self, rows: list[Row], draft_length: int, batch_invariant: bool) -> _Key | None:
        """The smallest graph that holds these rows; None for prompts and adapters."""
        if not self._sizes or len(rows) > _SIZES[-1]:
            return None
        for row in rows:
            if row.num_tokens != 1 + row.num_drafts or not row.sample or row.adapter:
                return None
        longest = max(row.num_tokens for row in rows)
        size = next(size for size in _SIZES if size >= len(rows))
        width = self._width_for(size, longest)
        if width is None:
            return None
        depth = next((depth for depth in self._depths if depth >= draft_length), 0)
        return _Key(size, width, depth if draft_length else 0, batch_invariant)

    def _width_for(self, size: int, longest: int) -> int | None:
        return next((width for width in self._widths_of(size) if width >= longest), None)

    def _captured_for(self, key: _Key) -> CapturedVerification:
        if key not in self._captured:
            self._input_buffer(key.size, key.width).copy_(
                torch.tensor(self._padding_row(key.width))
            )
            self._run(key)  # compiles kernels outside of the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Another thread may pin memory for an adapter during the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = self._run(key)
            input_buffer = self._input_buffer(key.size, key.width)
            shape = (key.width, key.drafting, len(outputs.logits) // key.size)
            self._captured[key] = CapturedVerification(
                graph=graph, input_buffer=input_buffer, found=outputs, shape=shape
            )
        return self._captured[key]

    def _input_buffer(self, size: int, width: int) -> Tensor:
        """[size, 3 + width]: slot, first position, token count and token ids of each row."""
        if (size, width) not in self._input_buffers:
            shape = (size, 3 + width)
            self._input_buffers[size, width] = torch.zeros(
                shape, dtype=torch.int32, device=self._device
            )
        return self._input_buffers[size, width]

    def _run(self, key: _Key) -> VerifyOutputs:
        """One verification: from its input buffer to its outputs and the input buffer of the next."""
        from windlass.kernels.triton import verify as kernels
        from windlass.kernels.triton.typical import drafts_after

        slots, (size, width) = self._slots, (key.size, key.width)
        inputs, siblings = self._input_buffer(size, width), self._siblings_for(key)
        ids, positions, row_slots, tiles = kernels.unpack(
            inputs, slots.last, size, width, slots.num_slots, siblings
        )
        work = self._work_for(key, tiles, len(ids))
        batch = StepBatch(
            positions=positions,
            token_slots=row_slots,
            tables=slots.tables,
            spans=[],
            kv=self._cache.layers,
            work=work,
            batch_invariant=key.batch_invariant,
        )
        drafter = self.drafter if key.drafting else None
        aux_hidden_states = dict.fromkeys(drafter.layers, ids) if drafter is not None else None
        with self._gemm.batch_invariant(key.batch_invariant):
            hidden = self._network(ids, batch, aux_hidden_states)
            logits = self._network.logits(hidden)
            sampled = self._device_sampler.draw(logits, row_slots, positions)
            if self._device_sampler.uses_typical_acceptance:
                drafts = drafts_after(inputs, ids, width)
                self._device_sampler.keep_typical(logits, row_slots, drafts, sampled)
            back = ids.new_empty((size, width + 1 + key.drafting))
            kept, last, chosen = kernels.keep(
                inputs, ids, positions, sampled, slots.last, back, width
            )
            if siblings is not None:
                self._adopt_siblings(inputs, chosen)
            if drafter is not None:
                found = DrafterInputs(
                    hidden=hidden,
                    read=last,
                    aux_hidden_states=aux_hidden_states or {},
                    following=sampled,
                    last=last,
                    batch=batch,
                    decode_batch=self._decode_batch,
                )
                self._stage_next(key, drafter, found, kept, back)
        return VerifyOutputs(logits, back)

    def _adopt_siblings(self, inputs: Tensor, chosen: Tensor) -> None:
        """Move the KV of accepted siblings to the positions of the draft tokens they replace."""
        from windlass.kernels.triton.verify import adopt

        pages, slots = self._cache.pages, self._slots
        assert pages is not None
        assert self._siblings is not None
        adopt(pages, inputs, chosen, slots.tables, self._siblings.shape[1] - 1, slots.spare)

    def _stage_next(
        self, key: _Key, drafter: Drafter, found: DrafterInputs, kept: Tensor, back: Tensor
    ) -> None:
        """Draft, and write the input rows of the next verification."""
        from windlass.kernels.triton.verify import write_next

        siblings = self._siblings if key.size <= _FEW else None
        drafts = drafter.draft(
            found, key.drafting, drafter.num_siblings if siblings is not None else 0
        )
        after = self._width_for(key.size, 1 + key.drafting)
        if after is None:
            back[:, key.width + 1 :] = drafts[:, : key.drafting]
            return
        inputs, to = self._input_buffer(key.size, key.width), self._input_buffer(key.size, after)
        slots = self._slots
        write_next(inputs, slots.last, kept, drafts, to, back, slots.num_slots, siblings)

    def _work_for(self, key: _Key, tiles: Tensor, num_positions: int) -> AttentionWork:
        if key.batch_invariant or num_positions > _APART:
            return AttentionWork(
                singles=self._indices[:0], tiles=tiles, splits=1, counters=self._position_counters
            )
        width = num_positions // key.size
        singles, splits = self._indices[:num_positions], self._splits(num_positions)
        more = (width, width - key.width, self._slots.spare)
        return AttentionWork(singles, tiles[:0], splits, self._position_counters, *more)

    def _decode_batch(self, positions: Tensor, slots: Tensor) -> StepBatch:
        count = positions.shape[0]
        singles, splits = self._indices[:count], self._splits(count)
        work = AttentionWork(
            singles=singles, tiles=self._no_tiles, splits=splits, counters=self._position_counters
        )
        return StepBatch(
            positions=positions,
            token_slots=slots,
            tables=self._slots.tables,
            spans=[],
            kv=[],
            work=work,
        )

    @torch.inference_mode()
    def resample(
        self, rows: Sequence[Row], results: list[RowResult], launched: LaunchedVerification
    ) -> list[RowResult]:
        """Sample rows again on the host whose sampling params the kernels do not support."""
        for i in self._device_sampler.special([row.slot for row in rows]):
            requests, first = sample_requests([rows[i]])[0], i * launched.positions_per_row
            own = launched.logits[first : first + requests.num_positions]
            drawn = self._device_sampler.resample_row(own, requests)
            drafts = results[i].drafts if drawn.tokens == results[i].tokens else ()
            results[i] = drawn._replace(drafts=drafts)
        return results

    # ---- eager ---------------------------------------------------------------------------------

    def _verify_eagerly(self, plan: StepPlan) -> list[RowResult]:
        rows = plan.rows
        ids, batch = self._batch(plan)
        aux_hidden_states = None
        if self._draft_length(plan) and self.drafter is not None:
            aux_hidden_states = dict.fromkeys(self.drafter.layers, ids)
        hidden = self._network(ids, batch, aux_hidden_states)
        results = self._draw(rows, batch, hidden)
        if self._device_sampler.special([row.slot for row in rows]):
            self._score_prompts(rows, batch.spans, hidden, results)
        if aux_hidden_states is None:
            return results
        return self._draft(plan, ids, batch, hidden, aux_hidden_states, results)

    def _draw(self, rows: list[Row], batch: StepBatch, hidden: Tensor) -> list[RowResult]:
        """Sample and verify; returns one result per row."""
        requests = sample_requests(rows)
        results = [RowResult([])] * len(rows)
        if not requests:
            return results
        logits, logits_indices = self._logits(rows, batch, hidden)
        slots, positions = (
            batch.token_slots[logits_indices.tokens],
            batch.positions[logits_indices.tokens],
        )
        drawn = self._device_sampler.draw(logits, slots, positions)
        if self._device_sampler.uses_typical_acceptance:
            drafts = np.array([t for each in requests for t in (*each.drafts, -1)], dtype=np.int32)
            on_device = to_device(drafts, self._device)
            self._device_sampler.keep_typical(logits, slots, on_device, drawn)
        sampled, first = drawn.tolist(), 0
        special = set(self._device_sampler.special([each.slot for each in requests]))
        for i, each in enumerate(requests):
            end = first + each.num_positions
            if i in special:
                results[each.row] = self._device_sampler.resample_row(logits[first:end], each)
            else:
                sampled_tokens = sampled[first:end]
                target_tokens = tuple(sampled_tokens) if each.drafts else ()
                results[each.row] = RowResult(
                    keep(sampled_tokens, each.drafts), target_tokens=target_tokens
                )
            first = end
        last = [results[each.row].tokens[-1] for each in requests]
        self._slots.last[[each.slot for each in requests]] = torch.tensor(
            last, dtype=torch.int32, device=self._device
        )
        return results
