"""Steps on the CPU: one recorded native program for all batches, one native call per step.

Python writes the step's tokens and rows into fixed arrays and reads the sampled tokens. Steps that
need prompt logprobs run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from windlass.core.card import Choice
from windlass.core.types import Row, RowResult, StepPlan
from windlass.kernels.batch import AdapterRows, LogitsIndices, Span, StepBatch
from windlass.kernels.native import ops
from windlass.kernels.native.pool import shared_pool
from windlass.kernels.native.program import Program, ProgramLimits, StepInputs, record
from windlass.kernels.native.record import Unrecordable
from windlass.lora.bank import Bank
from windlass.lora.base import Adapter
from windlass.runner import device as found
from windlass.runner.runner import Runner
from windlass.runner.verify import positions_of, sample_requests, settle, verify

_WHAT = "steps"


class CpuRunner(Runner):
    """Owns the recorded program and its input arrays."""

    _program: Program | None = None
    _adapted: Program | None = None  # for steps with LoRA rows
    _inputs: StepInputs
    _program_limits: ProgramLimits
    _last: memoryview  # last sampled token by slot

    @torch.inference_mode()
    def record(self, limits: ProgramLimits) -> Choice:
        """Record the program. If an operation cannot be recorded, steps stay eager and the choice says why."""
        try:
            self._program = self._recorded(self._rehearse, limits)
        except Unrecordable as error:
            return Choice(_WHAT, "operator by operator", f"cannot be recorded: {error}")
        self._inputs, self._program_limits = StepInputs(limits, self._slots.tables), limits
        self._last = self._slots.last.numpy().data
        made = self._program
        size = f"{made.num_commands} commands, {found.gib(made.num_bytes)}"
        return Choice(_WHAT, f"one native call ({size})", "every operation is native")

    @torch.inference_mode()
    def attach_adapters(self, bank: Bank, fetch: Callable[[str], Adapter]) -> None:
        super().attach_adapters(bank, fetch)
        if self._program is not None:
            self._adapted = self._recorded(
                partial(self._rehearse, adapted=True), self._program_limits
            )

    def _recorded(
        self, forward: Callable[[], tuple[Tensor, Tensor]], limits: ProgramLimits
    ) -> Program:
        # The pages of a new cache count as free until they are written for the first time.
        room = found.free_bytes(torch.device("cpu")) - self._cache.num_bytes
        return record(shared_pool(), forward, limits, max(0, room))

    def _rehearse(self, adapted: bool = False) -> tuple[Tensor, Tensor]:
        """A sample step for recording: two tokens, one of them sampled."""
        two = torch.zeros(2, dtype=torch.int32)
        whole, last = (AdapterRows(two), AdapterRows(two[:1])) if adapted else (None, None)
        batch = StepBatch(
            positions=two,
            token_slots=two,
            tables=self._slots.tables,
            spans=[Span(0, 2, 0)],
            kv=self._cache.layers,
            adapters=whole,
            logits_indices=LogitsIndices(two[:1], last),
        )
        with ops.prompt_spans(batch):
            hidden = self._network(two, batch)
        logits = self._network.logits(hidden, last)
        return logits, ops.argmax(logits)

    def _program_for(self, rows: list[Row]) -> Program | None:
        """The program for these rows; None if a row needs prompt logprobs or nothing was recorded."""
        if self._scores_prompts(rows):
            return None
        return self._adapted if any(row.adapter for row in rows) else self._program

    def _compute(self, plan: StepPlan) -> list[RowResult]:
        rows = plan.rows
        program = self._program_for(rows)
        if program is None:
            return super()._compute(plan)
        sampled = self._fill(rows)
        slots = [rows[i].slot for i in sampled]
        greedy = self._sampler.all_greedy(slots)
        program.run(self._inputs, draw=greedy)
        results = [RowResult([])] * len(rows)
        if greedy:
            tokens = program.tokens[: len(sampled)].tolist()
            self._sampler.accept(slots, tokens)
            for i, token in zip(sampled, tokens, strict=True):
                results[i] = RowResult([token])
        else:
            tokens, scores = self._sampler.sample(program.logits[: len(sampled)], slots)
            for i, token, score in zip(sampled, tokens, scores, strict=True):
                results[i] = RowResult([token], score)
        for slot, token in zip(slots, tokens, strict=True):
            self._last[slot] = token
        return results

    def _verify(self, plan: StepPlan) -> list[RowResult]:
        rows = plan.rows
        program = self._program_for(rows)
        requests = sample_requests(rows)
        indices = positions_of(rows, requests)
        # Draft tokens kept from an earlier step may exceed the program's capacity.
        too_many = program is not None and len(indices) > len(program.tokens)
        if program is None or too_many or self._draft_length(plan):
            return super()._verify(plan)
        self._fill(rows)
        self._inputs.write_sampled(indices.tolist())
        greedy = self._sampler.all_greedy([each.slot for each in requests])
        program.run(self._inputs, draw=greedy)
        if greedy:
            found = settle(self._sampler, program.tokens[: len(indices)].tolist(), requests)
        else:
            found = verify(self._sampler, program.logits[: len(indices)], requests)
        results = [RowResult([])] * len(rows)
        for each, result in zip(requests, found, strict=True):
            results[each.row] = result
            self._last[each.slot] = result.tokens[-1]
        return results

    def _fill(self, rows: list[Row]) -> list[int]:
        """Write the step into the input arrays; returns the indices of sampled rows."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        table: list[int] = []
        sampled: list[int] = []
        ends: list[int] = []
        for i, row in enumerate(rows):
            first, count = len(ids), row.num_tokens
            ids.extend(row.tokens or (self._last[row.slot],))
            positions.extend(range(row.start, row.start + count))
            slots.extend([row.slot] * count)
            table.extend((first, count, row.start, row.slot))
            if row.sample:
                sampled.append(i)
                ends.append(first + count - 1)
        self._inputs.write(ids, positions, slots, table)
        self._inputs.write_prompts(self._prompt_spans(rows))
        self._inputs.write_sampled(ends)
        if self._adapted is not None:
            self._inputs.write_adapters(
                [row.adapter for row in rows for _ in range(row.num_tokens)]
            )
        return sampled
