"""Executes plans eagerly: packs the rows into tensors, runs the network, samples.

Knows positions, slots and blocks; core decides what a request means. It runs on any device.
cuda_runner.py replays CUDA graphs, cpu_runner.py a recorded native program; both fall back to this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from windlass.core.types import (
    BlockId,
    Row,
    RowResult,
    SlotId,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from windlass.errors import EngineError
from windlass.kernels.batch import AdapterRows, KVCache, LogitsIndices, Span, StepBatch
from windlass.kernels.gemm import TorchGemm
from windlass.kernels.native.ops import prompt_spans
from windlass.lora.bank import Bank
from windlass.lora.base import Adapter
from windlass.models.network import Network
from windlass.runner.adapters import grouped
from windlass.runner.drafter import Drafter, DrafterInputs
from windlass.runner.grammar import Matchers
from windlass.runner.sampler import Sampler, score_tokens
from windlass.runner.slots import SlotTables, to_device
from windlass.runner.verify import SampleRequest, positions_of, sample_requests, verify

# Prompt logprobs need the logits of every position; this chunk size bounds their memory.
_LOGPROBS_CHUNK = 128


class PendingStep(Protocol):
    """A step in flight. `wait` blocks until its tokens have arrived."""

    def wait(self) -> StepResult: ...


class CompletedStep:
    """A step whose result is already known."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """The objects that a runner is built from."""

    network: Network
    cache: KVCache
    slots: SlotTables
    sampler: Sampler
    gemm: TorchGemm  # of the network; steps switch its batch-invariant mode
    coarse_prompts: bool = False  # CPU GEMMs quantise prompt activations coarsely


class Runner:
    """Owns the KV pages, the block tables and the sampler state."""

    def __init__(self, parts: RunnerParts) -> None:
        self._network = parts.network
        self._cache = parts.cache
        self._slots = parts.slots
        self._sampler = parts.sampler
        self._gemm = parts.gemm
        self._device = parts.slots.device
        self._batch_invariant: set[SlotId] = set()  # slots of deterministic requests
        self.drafter: Drafter | None = None
        self._prompts: dict[SlotId, list[int]] = {}  # prompt tokens by slot, for the drafter
        self._coarse_prompts = parts.coarse_prompts
        self._num_prompt: dict[SlotId, int] = {}  # prompt length by slot, if `coarse_prompts`
        self._bank: Bank | None = None
        self._fetch: Callable[[str], Adapter] | None = None

    @property
    def padding(self) -> SlotId:
        """The slot of padding rows."""
        return SlotId(self._slots.num_slots)

    def blocks_of(self, slot: SlotId) -> list[BlockId]:
        """The blocks of a slot after the steps submitted so far."""
        return self._slots.blocks_of(slot)

    def max_draft_tokens(self, requested: int, num_rows: int) -> int:
        """Max draft tokens per row that a captured graph covers."""
        del num_rows
        return requested

    @property
    def max_mixed_tokens(self) -> int:
        """Max tokens of a mixed step that a captured graph covers. Such a graph verifies no drafts."""
        return 0

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step and wait for it."""
        return self.submit(plan).wait()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step: block copies first, then all rows as one batch.

        A row with draft tokens returns 1 + the number of accepted ones.
        """
        self._prepare(plan)
        speculates = self._draft_length(plan) or plan.has_drafts
        compute = self._verify if speculates else self._compute
        return CompletedStep(StepResult(compute(plan)))

    def attach(self, drafter: Drafter) -> None:
        """Add a drafter, which runs in steps with a `draft_length`."""
        self.drafter = drafter

    def _draft_length(self, plan: StepPlan) -> int:
        """Draft tokens that the step makes; 0 if a proposer outside the runner makes them."""
        return 0 if self.drafter is None else plan.options.draft_length

    def attach_adapters(self, bank: Bank, fetch: Callable[[str], Adapter]) -> None:
        """Add LoRA slots, which plans may fill and rows may use."""
        self._bank, self._fetch = bank, fetch

    def attach_grammars(self, grammars: Matchers) -> None:
        """Enable structured outputs."""
        self._sampler.grammars = grammars

    def _put_adapters(self, plan: StepPlan) -> None:
        if not plan.adapters:
            return
        if self._bank is None or self._fetch is None:
            names = ", ".join(name for _, name in plan.adapters)
            raise EngineError(f"a plan wants adapters ({names}), but this runner has no bank.")
        for slot, name in plan.adapters:
            self._bank.put(slot, self._fetch(name))

    def _adapters(self, rows: Sequence[Row], counts: Sequence[int]) -> AdapterRows | None:
        """The adapter of each token; `counts` are tokens per row. None when no row has an adapter."""
        if not any(row.adapter for row in rows):
            return None
        slots = np.repeat([row.adapter for row in rows], counts)
        return grouped(slots, self._device, self._is_batch_invariant(rows))

    def _compute(self, plan: StepPlan) -> list[RowResult]:
        """Run a step without draft tokens."""
        ids, batch = self._batch(plan)
        with self._gemm.batch_invariant(batch.batch_invariant):
            return self._sample(plan.rows, batch, self._forward(ids, batch))

    def _verify(self, plan: StepPlan) -> list[RowResult]:
        """Run a step that verifies draft tokens, drafts for the next step, or both."""
        ids, batch = self._batch(plan)
        with self._gemm.batch_invariant(batch.batch_invariant):
            if self.drafter is None or not self._draft_length(plan):
                return self._sample_and_verify(plan.rows, batch, self._forward(ids, batch))
            aux_hidden_states = dict.fromkeys(self.drafter.layers, ids)
            hidden = self._forward(ids, batch, aux_hidden_states)
            results = self._sample_and_verify(plan.rows, batch, hidden)
            return self._draft(plan, ids, batch, hidden, aux_hidden_states, results)

    def _forward(
        self, ids: Tensor, batch: StepBatch, aux_hidden_states: dict[int, Tensor] | None = None
    ) -> Tensor:
        if not batch.prompts:
            return self._network(ids, batch, aux_hidden_states)
        with prompt_spans(batch):
            return self._network(ids, batch, aux_hidden_states)

    def _batch(self, plan: StepPlan) -> tuple[Tensor, StepBatch]:
        rows = plan.rows
        ids, batch = self._slots.batch(plan, self._cache.layers)
        return ids, replace(
            batch,
            batch_invariant=self._is_batch_invariant(rows),
            adapters=self._adapters(rows, [row.num_tokens for row in rows]),
            logits_indices=self._logits_indices(rows) if self._gathers_sampled(plan) else None,
            prompts=self._prompt_spans(rows),
        )

    def _prompt_spans(self, rows: Sequence[Row]) -> list[tuple[int, int]]:
        """Ranges of prompt tokens within the step, for GEMMs that quantise them differently.

        The position alone decides, so a recomputed token gets the same result.
        """
        spans: list[tuple[int, int]] = []
        first = 0
        for row in rows if self._num_prompt else ():
            count = min(row.num_tokens, self._num_prompt.get(row.slot, 0) - row.start)
            if count > 0:
                joined = bool(spans) and spans[-1][1] == first
                spans.append((spans.pop()[0] if joined else first, first + count))
            first += row.num_tokens
        return spans

    def _gathers_sampled(self, plan: StepPlan) -> bool:
        """Whether so few hidden states are sampled that gathering them pays."""
        rows = plan.rows
        if plan.options.needs_all_hidden or self._scores_prompts(rows):
            return False
        read = sum(1 + row.num_drafts for row in rows if row.sample)
        return 2 * max(1, read) <= sum(row.num_tokens for row in rows)

    def _logits_indices(self, rows: Sequence[Row]) -> LogitsIndices:
        """The positions to compute logits for; the first one when no row samples."""
        requests = sample_requests(rows) or [SampleRequest(0, rows[0].slot, ())]
        indices = positions_of(rows, requests).astype(np.int32)
        own = [rows[each.row] for each in requests]
        adapters = self._adapters(own, [each.num_positions for each in requests])
        return LogitsIndices(to_device(indices, self._device), adapters)

    def _logits(
        self, rows: Sequence[Row], batch: StepBatch, hidden: Tensor
    ) -> tuple[Tensor, LogitsIndices]:
        """Logits of the sampled positions, and their indices."""
        logits_indices = batch.logits_indices
        if logits_indices is None:
            logits_indices = self._logits_indices(rows)
            hidden = hidden[logits_indices.tokens]
        return self._network.logits(hidden, logits_indices.adapters), logits_indices

    def _is_batch_invariant(self, rows: Sequence[Row]) -> bool:
        """Whether any row is deterministic: then the whole step is batch-invariant."""
        return bool(self._batch_invariant) and any(
            row.slot in self._batch_invariant for row in rows
        )

    def _note_lengths(self, plan: StepPlan) -> None:
        if not self._coarse_prompts:
            return
        for slot in plan.freed:
            self._num_prompt.pop(slot, None)
        for admission in plan.admitted:
            self._num_prompt[admission.slot] = admission.num_prompt

    def _note_batch_invariant(self, plan: StepPlan) -> None:
        self._batch_invariant.difference_update(plan.freed)
        for admission in plan.admitted:
            if admission.sampling.deterministic:
                self._batch_invariant.add(admission.slot)
            else:
                self._batch_invariant.discard(admission.slot)

    def _prepare(self, plan: StepPlan) -> None:
        self._put_adapters(plan)
        self._note_batch_invariant(plan)
        self._note_prompts(plan)
        self._note_lengths(plan)
        for slot in plan.freed:
            self._sampler.forget(slot)
        for admission in plan.admitted:
            self._sampler.admit(admission)
        self._slots.send(self._slots.apply(plan))
        self._cache.copy(plan.copies)

    def _sample(self, rows: list[Row], batch: StepBatch, hidden: Tensor) -> list[RowResult]:
        sampled = [i for i, row in enumerate(rows) if row.sample]
        results = [RowResult([])] * len(rows)
        if sampled:
            logits, _ = self._logits(rows, batch, hidden)
            slots = [rows[i].slot for i in sampled]
            tokens, scores = self._sampler.sample(logits.float(), slots)
            self._slots.last[slots] = torch.tensor(tokens, dtype=torch.int32, device=self._device)
            for i, token, score in zip(sampled, tokens, scores, strict=True):
                results[i] = RowResult([token], score)
        self._score_prompts(rows, batch.spans, hidden, results)
        return results

    def _sample_and_verify(
        self, rows: list[Row], batch: StepBatch, hidden: Tensor
    ) -> list[RowResult]:
        requests = sample_requests(rows)
        results = [RowResult([])] * len(rows)
        if requests:
            logits = self._logits(rows, batch, hidden)[0].float()
            for each, result in zip(requests, verify(self._sampler, logits, requests), strict=True):
                results[each.row] = result
                self._slots.last[each.slot] = result.tokens[-1]
        self._score_prompts(rows, batch.spans, hidden, results)
        return results

    def _note_prompts(self, plan: StepPlan) -> None:
        if self.drafter is None:
            return
        self.drafter.copy(plan.copies)
        for admission in plan.admitted:
            self._prompts[admission.slot] = admission.tokens
        # The drafter may write beyond a request's blocks.
        self._slots.clear([admission.slot for admission in plan.admitted])

    def _next_prompt_token(self, row: Row) -> int:
        """The prompt token that follows a chunk."""
        return self._prompts[row.slot][row.start + row.num_tokens]

    def _draft(
        self,
        plan: StepPlan,
        ids: Tensor,
        batch: StepBatch,
        hidden: Tensor,
        aux_hidden_states: dict[int, Tensor],
        results: list[RowResult],
    ) -> list[RowResult]:
        """Add draft tokens to the rows that sampled. The drafter reads all rows."""
        assert self.drafter is not None
        rows = plan.rows
        following = ids.roll(-1)
        indices: list[int] = []
        tokens: list[int] = []
        last: list[int] = []
        own: list[int] = []  # the same, as an index into the sampled positions
        requests = 0
        for row, span, result in zip(rows, batch.spans, results, strict=True):
            end = span.first + span.count
            if row.sample:
                first = end - 1 - row.num_drafts
                indices += range(first, first + len(result.tokens))
                tokens += result.tokens
                last.append(indices[-1])
                own.append(requests + len(result.tokens) - 1)
                requests += 1 + row.num_drafts
            else:
                indices.append(end - 1)
                tokens.append(self._next_prompt_token(row))
        following[torch.tensor(indices, device=self._device)] = torch.tensor(
            tokens, dtype=ids.dtype, device=self._device
        )
        at, read = torch.tensor((last, own), dtype=torch.int64, device=self._device)
        if batch.logits_indices is None:
            read = at
        found = DrafterInputs(
            hidden=hidden,
            read=read,
            aux_hidden_states=aux_hidden_states,
            following=following,
            last=at,
            batch=batch,
            decode_batch=self._decode_batch,
        )
        drafts = iter(self.drafter.draft(found, self._draft_length(plan)).tolist())
        return [
            result._replace(drafts=tuple(next(drafts))) if row.sample else result
            for row, result in zip(rows, results, strict=True)
        ]

    def _decode_batch(self, positions: Tensor, slots: Tensor) -> StepBatch:
        """A batch of one token per row without KV pages; the drafter has its own."""
        spans = [Span(i, 1, at) for i, at in enumerate(positions.tolist())]
        return StepBatch(
            positions=positions, token_slots=slots, tables=self._slots.tables, spans=spans, kv=[]
        )

    def _scores_prompts(self, rows: Sequence[Row]) -> bool:
        scores = self._sampler.num_prompt_scores
        return any(scores(row.slot) is not None for row in rows)

    def _score_prompts(
        self, rows: list[Row], spans: list[Span], hidden: Tensor, results: list[RowResult]
    ) -> None:
        for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
            num_top = self._sampler.num_prompt_scores(row.slot)
            if num_top is not None:
                part = hidden[span.first : span.first + span.count]
                scored = self._score_prompt(row, part, num_top)
                results[i] = results[i]._replace(prompt_logprobs=scored)

    def _score_prompt(self, row: Row, hidden: Tensor, num_top: int) -> list[TokenLogprob]:
        """Logprobs of the prompt tokens that follow this row's positions."""
        end = min(row.start + row.num_tokens + 1, self._sampler.num_prompt(row.slot))
        following = self._sampler.tokens(row.slot)[row.start + 1 : end]
        scored: list[TokenLogprob] = []
        for at in range(0, len(following), _LOGPROBS_CHUNK):
            tokens = following[at : at + _LOGPROBS_CHUNK]
            adapters = self._adapters([row], [len(tokens)])
            logits = self._network.logits(hidden[at : at + len(tokens)], adapters)
            scored += score_tokens(logits, tokens, num_top)
        return scored
