"""Captured verifications of draft tokens: rows of equal width.

One graph covers the network, sampling, acceptance, and drafting for the next verification, whose
input rows it writes on the device. The executor launches that next graph at once, before the host
has planned it (pre-launch). If the plan then asks for something else, the result is discarded: all
KV that was written lies behind the known tokens.

A drafter may have alternatives (siblings) to its first draft token. They stay on the device by slot;
a verification of few rows tries them beside the draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from windlass.core.types import RowResult, StepPlan
from windlass.kernels.batch import AttentionWork, StepBatch
from windlass.kernels.storages import Held, held
from windlass.runner.cuda.graphs import AtStart, GraphSet
from windlass.runner.cuda.metadata import DeviceMetadata
from windlass.runner.cuda.prelaunch import LaunchedVerification, PendingVerification, Prelaunched
from windlass.runner.device_sampler import DeviceSampler
from windlass.runner.drafter import Drafter, DrafterInputs
from windlass.runner.eager import RunnerParts
from windlass.runner.executor import Executor, PendingStep
from windlass.runner.inputs import StepInputs, StepShape
from windlass.runner.slots import SlotTables

_SIZES = (1, 2, 4, 8, 16, 32, 64)
# Up to this many rows, every width is captured and the next step is pre-launched. With more rows, a
# graph costs more and saves less, and a row finishes in most steps, which wastes the pre-launch.
_MAX_PRELAUNCH_ROWS = 4
MAX_POSITIONS = 512
# Up to this many positions, attention treats each position as a decode row and splits its context
# (split-KV). Above, the positions of a row share one pass over its context.
_MAX_SPLIT_KV_POSITIONS = 64


def widths(max_drafts: int) -> list[int]:
    """Row widths to capture for up to `max_drafts` draft tokens: dense first, then doubling."""
    steps = [count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if count < max_drafts]
    return [1 + count for count in (*steps, max_drafts)]


@dataclass(frozen=True, slots=True)
class VerifyShape:
    """The shape that a graph was captured for."""

    size: int
    width: int
    draft_length: int = 0  # draft tokens per row for the next step
    batch_invariant: bool = False


class VerifyWidths:
    """The row widths that are captured for each batch size."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._widths = [1, *widths(max_draft_tokens)]
        self.draft_lengths = sorted({-(-max_draft_tokens // 2), max_draft_tokens})

    def of(self, size: int) -> list[int]:
        """The captured row widths for a batch of `size` rows."""
        fitting = [width for width in self._widths if size * width <= MAX_POSITIONS]
        if size <= _MAX_PRELAUNCH_ROWS:
            return fitting
        return sorted({1, *fitting[1:2], fitting[-1]})

    def fit(self, size: int, num_tokens: int) -> int | None:
        """The smallest captured width for rows of up to `num_tokens`."""
        return next((width for width in self.of(size) if width >= num_tokens), None)


def _size_for(num_rows: int) -> int:
    return next(size for size in _SIZES if size >= num_rows)


class InputRows:
    """Owns the input rows of graphs by size and width: [size, 3 + width], int32.

    A row has its slot, first position, token count and token ids.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def storages(self) -> Iterator[Held]:
        return held("tables", *self._buffers.values())

    def of(self, size: int, width: int) -> Tensor:
        if (size, width) not in self._buffers:
            shape = (size, 3 + width)
            self._buffers[size, width] = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._buffers[size, width]


class Forward(Protocol):
    """Computes a verification from its input rows, and writes those of the next one."""

    def attach(self, drafter: Drafter) -> None: ...

    def storages(self) -> Iterator[Held]: ...

    def forget_siblings(self, slots: list[int]) -> None:
        """Drop the siblings of rows that are sampled again, which ignores siblings."""
        ...

    def __call__(self, shape: VerifyShape, rows: InputRows) -> tuple[Tensor, Tensor]:
        """Returns logits, and [size, width + 1 + drafts]: samples, accepted count, next draft tokens."""
        ...


class VerifyGraphs(Executor):
    """Owns the verification graphs, their input rows, and the pre-launched step."""

    name = "verification graph"

    def __init__(
        self,
        forward: Forward,
        sampler: DeviceSampler,
        slots: SlotTables,
        *,
        max_rows: int,
        max_draft_tokens: int,
        at_start: AtStart = AtStart.ALL,
    ) -> None:
        """`at_start`: `ENDS` leaves all graphs but the largest and the smallest for `capture_next`."""
        self._forward = forward
        self._sampler = sampler
        self._slots = slots
        self._widths = VerifyWidths(max_draft_tokens)
        self._sizes = [size for size in _SIZES if size < 2 * max_rows]
        self._rows = rows = InputRows(sampler.device)
        self._sent: dict[tuple[int, int], Tensor] = {}
        self._graphs: GraphSet[VerifyShape] = GraphSet(
            sampler.backend, lambda shape: forward(shape, rows)
        )
        self._prelaunched: Prelaunched | None = None
        self._ahead: Prelaunched | None = None  # the pre-launched step that equals the current plan
        self._missing: list[VerifyShape] = []
        shapes = self._shapes(draft_length=0)
        if at_start is AtStart.ENDS:
            self._missing, shapes = shapes[1:-1], [shapes[0], shapes[-1]]
        for shape in shapes:
            self._capture(shape)

    @property
    def num_missing(self) -> int:
        return len(self._missing)

    def capture_next(self) -> bool:
        if not self._missing:
            return False
        self._capture(self._missing.pop(0))
        return True

    def max_draft_tokens(self, num_rows: int) -> int:
        if num_rows > _SIZES[-1]:
            return 0
        return self._widths.of(_size_for(num_rows))[-1] - 1

    def attach(self, drafter: Drafter) -> None:
        self._forward.attach(drafter)
        for draft_length in self._widths.draft_lengths:
            for shape in self._shapes(draft_length):
                self._capture(shape)

    def _shapes(self, draft_length: int) -> list[VerifyShape]:
        """All shapes, the largest first. They are captured at start: no request waits for a capture."""
        return [
            VerifyShape(size, width, draft_length)
            for size in reversed(self._sizes)
            for width in reversed(self._widths.of(size))
            if draft_length or width > 1
        ]

    def _capture(self, shape: VerifyShape) -> None:
        if self._graphs.get(shape) is None:
            padding = torch.tensor(self._padding_row(shape.width))
            self._rows.of(shape.size, shape.width).copy_(padding)
            self._graphs.capture(shape)

    def _padding_row(self, width: int) -> list[int]:
        """The input of a padding row."""
        return [self._slots.num_slots, 0, 1, *[0] * width]

    # ---- steps ---------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan) -> None:
        """Keep the pre-launched step if the plan equals it; else restore what it has overwritten."""
        ahead, self._prelaunched, self._ahead = self._prelaunched, None, None
        if ahead is None:
            return
        if plan.options.draft_length and ahead.is_for(plan):
            self._ahead = ahead
        else:
            self._undo_prelaunch(ahead)

    def _undo_prelaunch(self, ahead: Prelaunched) -> None:
        """Restore the last sampled tokens that a discarded pre-launch has overwritten."""
        slots = [each.slot for each in ahead.following]
        self._slots.set_last(slots, [each.tokens[0] for each in ahead.following])

    def storages(self) -> Iterator[Held]:
        yield from self._rows.storages()
        yield from held("tables", *self._sent.values())
        yield from self._forward.storages()

    def refuses(self, shape: StepShape) -> str | None:
        if not shape.has_drafts and not shape.draft_length:
            return "no draft tokens"
        if not shape.decodes:
            return "a row computes prompt tokens"
        if shape.adapted:
            return "a row uses an adapter"
        if shape.needs_all_hidden or shape.scores_prompts:
            return "all hidden states are read"
        if shape.pools:
            return "hidden states are pooled"
        if shape.num_rows > self._sizes[-1]:
            return "more rows than captured"
        width = self._widths.fit(_size_for(shape.num_rows), shape.max_row_tokens)
        return "longer drafts than captured" if width is None else None

    def _shape_for(self, shape: StepShape) -> VerifyShape:
        size, draft_length = _size_for(shape.num_rows), 0
        width = self._widths.fit(size, shape.max_row_tokens)
        assert width is not None
        if shape.draft_length:
            draft_length = next(
                (each for each in self._widths.draft_lengths if each >= shape.draft_length), 0
            )
        return VerifyShape(
            size, width, draft_length=draft_length, batch_invariant=shape.batch_invariant
        )

    def launch(self, inputs: StepInputs) -> PendingStep:
        self._slots.send(inputs.grown)
        shape, ahead = self._shape_for(inputs.shape), self._ahead
        if inputs.shape.special_sampling:
            self._forward.forget_siblings(
                [slot for slot in inputs.slots if self._sampler.is_special(slot)]
            )
        if ahead is not None:
            whole = all(row.num_drafts == ahead.num_drafts for row in inputs.rows)
            pending = PendingVerification(
                inputs, ahead.launched, resample=self.resample, whole=whole
            )
        else:
            self._capture(shape)
            self._send(inputs, shape)
            pending = PendingVerification(inputs, self._launch(shape), self.resample)
        self._prelaunched = self._prelaunch_next(pending, shape)
        pending.prelaunched = self._prelaunched is not None
        return pending

    def _send(self, inputs: StepInputs, shape: VerifyShape) -> None:
        """Copy the input rows to the device. The graph has read the previous ones already."""
        rows = self._rows.of(shape.size, shape.width)
        key = (shape.size, shape.width)
        if key not in self._sent:
            self._sent[key] = self._sampler.backend.host_buffer(rows.numel()).view(rows.shape)
        staged = self._sent[key]
        lines = staged.numpy()
        inputs.pack_rows(lines)
        lines[inputs.shape.num_rows :] = self._padding_row(shape.width)
        rows.copy_(staged, non_blocking=True)

    def _launch(self, shape: VerifyShape) -> LaunchedVerification:
        graph = self._graphs.get(shape)
        assert graph is not None
        graph.replay()
        logits, back = graph.outputs
        return LaunchedVerification(
            logits=logits,
            back=self._sampler.backend.copy_to_host(back),
            width=shape.width,
            draft_length=shape.draft_length,
            positions_per_row=len(logits) // shape.size,
        )

    def _prelaunch_next(
        self, pending: PendingVerification, shape: VerifyShape
    ) -> Prelaunched | None:
        """Launch the next verification if it is likely that no row finishes and no draft is trimmed."""
        inputs, num_drafts = pending.inputs, pending.launched.draft_length
        rows = inputs.rows
        if (
            not num_drafts
            or not shape.draft_length
            or len(rows) > _MAX_PRELAUNCH_ROWS
            or not pending.whole
        ):
            return None
        if not all(row.num_drafts for row in rows) or inputs.shape.special_sampling:
            return None
        lengths = [(row.slot, row.start + row.num_tokens + 1 + num_drafts) for row in rows]
        if not all(self._slots.has_room(slot, tokens) for slot, tokens in lengths):
            return None
        width = self._widths.fit(shape.size, 1 + num_drafts)
        assert width is not None
        following = replace(shape, width=width)
        if self._graphs.get(following) is None:  # capturing now would overwrite its input rows
            return None
        return Prelaunched(pending.following, self._launch(following), num_drafts)

    def resample(
        self, inputs: StepInputs, results: list[RowResult], launched: LaunchedVerification
    ) -> list[RowResult]:
        """Sample special rows again, position by position; waits for the device."""
        if not inputs.shape.special_sampling:
            return results
        for i, request in enumerate(inputs.requests):
            if self._sampler.is_special(request.slot):
                first = i * launched.positions_per_row
                own = launched.logits[first : first + request.num_positions]
                drawn = self._sampler.sample_in_turn(own, request)
                drafts = results[i].drafts if drawn.tokens == results[i].tokens else ()
                results[i] = drawn._replace(drafts=drafts)
        return results


class VerifyForward:
    """Computes a verification: from its input rows to its outputs and the input rows of the next."""

    def __init__(
        self,
        parts: RunnerParts,
        sampler: DeviceSampler,
        metadata: DeviceMetadata,
        max_draft_tokens: int,
    ) -> None:
        self._parts = parts
        self._sampler = sampler
        self._metadata = metadata
        self._widths = VerifyWidths(max_draft_tokens)
        self._drafter: Drafter | None = None
        # By slot: a position, and the siblings of the first draft token after it.
        self._siblings: Tensor | None = None

    def attach(self, drafter: Drafter) -> None:
        self._drafter = drafter
        slots = self._parts.slots
        if drafter.num_siblings and self._parts.cache.pages is not None:
            shape = (slots.num_slots + 1, 1 + drafter.num_siblings)
            self._siblings = torch.full(shape, -1, dtype=torch.int32, device=slots.device)

    def storages(self) -> Iterator[Held]:
        return held("tables", self._siblings)

    def forget_siblings(self, slots: list[int]) -> None:
        if self._siblings is not None and slots:
            self._siblings[slots, 0] = -1

    def __call__(self, shape: VerifyShape, rows: InputRows) -> tuple[Tensor, Tensor]:
        from windlass.kernels.triton import verify as kernels
        from windlass.kernels.triton.typical import drafts_after

        parts, sampler, slots = self._parts, self._sampler, self._parts.slots
        size, width = shape.size, shape.width
        inputs, siblings = rows.of(size, width), self._siblings_for(shape)
        ids, positions, row_slots, tiles = kernels.unpack(
            inputs, slots.last, size, width, slots.num_slots, siblings
        )
        batch = StepBatch(
            positions=positions,
            token_slots=row_slots,
            tables=slots.tables,
            spans=[],
            kv=parts.cache.layers,
            work=self._work(shape, tiles, len(ids)),
            batch_invariant=shape.batch_invariant,
        )
        drafter = self._drafter if shape.draft_length else None
        aux_hidden_states = {} if drafter is None else dict.fromkeys(drafter.layers, ids)
        with parts.gemm.batch_invariant(shape.batch_invariant):
            hidden = parts.network(ids, batch, aux_hidden_states)
            logits = parts.network.logits(hidden)
            sampled = sampler.draw(logits, row_slots, positions)
            if sampler.uses_typical_acceptance:
                drafts = drafts_after(inputs, ids, width)
                sampler.keep_typical(logits, row_slots, drafts, sampled)
            back = ids.new_empty((size, width + 1 + shape.draft_length))
            kept, last, chosen = kernels.keep(
                inputs, ids, positions, sampled, slots.last, back, width
            )
            if siblings is not None:
                self._adopt_siblings(inputs, chosen)
            if drafter is not None:
                found = DrafterInputs(
                    hidden=hidden,
                    read=last,
                    aux_hidden_states=aux_hidden_states,
                    following=sampled,
                    last=last,
                    batch=batch,
                    decode_batch=self._metadata.decode_batch,
                )
                self._stage_next(shape, rows, drafter=drafter, found=found, kept=kept, back=back)
        return logits, back

    def _siblings_for(self, shape: VerifyShape) -> Tensor | None:
        """The sibling table if graphs of this shape verify siblings, else None."""
        siblings, (size, width) = self._siblings, (shape.size, shape.width)
        if siblings is None or not shape.draft_length or width == 1:
            return None
        if shape.batch_invariant or size > _MAX_PRELAUNCH_ROWS:
            return None
        from windlass.kernels.triton.attention import fuses

        count = siblings.shape[1] - 1
        width += count
        apart = size * width <= _MAX_SPLIT_KV_POSITIONS and size * count <= self._parts.slots.size
        fused = fuses(size * width, self._metadata.num_kv_heads, width)
        return siblings if apart and fused else None

    def _work(self, shape: VerifyShape, tiles: Tensor, num_positions: int) -> AttentionWork:
        if shape.batch_invariant or num_positions > _MAX_SPLIT_KV_POSITIONS:
            return self._metadata.tiles_only(tiles)
        width = num_positions // shape.size
        return replace(
            self._metadata.singles(num_positions),
            width=width,
            siblings=width - shape.width,
            spare=self._parts.slots.spare,
        )

    def _adopt_siblings(self, inputs: Tensor, chosen: Tensor) -> None:
        """Move the KV of accepted siblings to the positions of the draft tokens they replace."""
        from windlass.kernels.triton.verify import adopt

        pages, slots = self._parts.cache.pages, self._parts.slots
        assert pages is not None
        assert self._siblings is not None
        adopt(
            pages,
            inputs,
            chosen=chosen,
            tables=slots.tables[0],
            num_siblings=self._siblings.shape[1] - 1,
            spare=slots.spare,
        )

    def _stage_next(
        self,
        shape: VerifyShape,
        rows: InputRows,
        drafter: Drafter,
        found: DrafterInputs,
        kept: Tensor,
        back: Tensor,
    ) -> None:
        """Draft, and write the input rows of the next verification."""
        from windlass.kernels.triton.verify import write_next

        siblings = self._siblings if shape.size <= _MAX_PRELAUNCH_ROWS else None
        num_siblings = drafter.num_siblings if siblings is not None else 0
        drafts = drafter.draft(found, shape.draft_length, num_siblings)
        after = self._widths.fit(shape.size, 1 + shape.draft_length)
        if after is None:
            back[:, shape.width + 1 :] = drafts[:, : shape.draft_length]
            return
        inputs, to = rows.of(shape.size, shape.width), rows.of(shape.size, after)
        slots = self._parts.slots
        write_next(
            inputs,
            slots.last,
            kept=kept,
            drafts=drafts,
            to=to,
            back=back,
            padding=slots.num_slots,
            siblings=siblings,
        )
