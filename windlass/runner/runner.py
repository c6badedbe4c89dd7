"""Turns a plan into tensors, runs the network, samples. Plain ints come back.

Knows positions, slots and blocks, not what a request means: that is decided in core. This is the
plain way, for any device; cuda_runner.py (CUDA) and cpu_runner.py (CPU) replay recorded steps and fall
back to this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
from windlass.kernels.native.ops import prompts_apart
from windlass.lora.bank import Bank
from windlass.lora.base import Adapter
from windlass.models.network import Network
from windlass.runner.adapters import grouped
from windlass.runner.drafter import Drafter, DrafterInputs
from windlass.runner.grammar import Matchers
from windlass.runner.sampler import Sampler, score_tokens
from windlass.runner.slots import SlotTables, to_device
from windlass.runner.verify import SampleRequest, positions_of, sample_requests, verify

# Prompt scores need logits of every position; so many at a time keep the memory small.
_SCORED_AT_ONCE = 128


class PendingStep(Protocol):
    """A step on its way. `wait` blocks until its tokens are there."""

    has_drafts: bool  # whether they come with guesses, so that the next plan must wait for them

    def wait(self) -> StepResult: ...


class CompletedStep:
    """A step whose result is there already."""

    def __init__(self, result: StepResult, has_drafts: bool = False) -> None:
        self._result = result
        self.has_drafts = has_drafts

    def wait(self) -> StepResult:
        return self._result


class Runner:
    """Owns the KV pages, the slots' tables and the sampler's memory."""

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        slots: SlotTables,
        sampler: Sampler,
        gemm: TorchGemm,
    ) -> None:
        """`gemm` are the network's own: steps may ask them for a fixed order."""
        self._network = network
        self._cache = cache
        self._slots = slots
        self._sampler = sampler
        self._gemm = gemm
        self._device = slots.device
        self._batch_invariant: set[SlotId] = set()  # whose requests are deterministic
        self.drafter: Drafter | None = None
        self.drafting = 0  # guesses of the drafter with which a row's step ends
        self.needs_all_hidden = (
            False  # whether somebody reads hidden states that no token is drawn from
        )
        self._prompts: dict[SlotId, list[int]] = {}  # what is known beforehand, for the drafter
        self.coarse_prompts = False  # whether products on a CPU round inputs of prompts coarsely
        self._num_prompt: dict[SlotId, int] = {}  # tokens of the prompt, where that is so
        self._bank: Bank | None = None
        self._fetch: Callable[[str], Adapter] | None = None

    @property
    def padding(self) -> SlotId:
        """A slot that no request gets."""
        return SlotId(self._slots.num_slots)

    def blocks_of(self, slot: SlotId) -> list[BlockId]:
        """All that a slot has by the steps so far."""
        return self._slots.blocks_of(slot)

    def max_draft_tokens(self, wish: int, num_rows: int) -> int:
        """How many of the guesses that are wished for each of so many rows do not leave the fast way."""
        del num_rows
        return wish

    @property
    def max_mixed_tokens(self) -> int:
        """Tokens of a step with prompts up to which there is a faster way, which takes no guesses."""
        return 0

    @property
    def is_prelaunched(self) -> bool:
        """Whether the next step is being computed already, with all guesses of the last."""
        return False

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step and wait for it."""
        return self.submit(plan).wait()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step. The plan's copies come first, then all rows together.

        A row with guesses gives 1 + as many tokens as it guessed rightly.
        """
        self._prepare(plan)
        guided = self.drafting or plan.has_drafts
        compute = self._verify if guided else self._compute
        return CompletedStep(StepResult(compute(plan)))

    def attach(self, drafter: Drafter) -> None:
        """From now on steps may end with guesses of its: see `drafting`."""
        self.drafter = drafter

    def attach_adapters(self, bank: Bank, fetch: Callable[[str], Adapter]) -> None:
        """From now on plans may put adapters into the bank's slots, and rows may name those."""
        self._bank, self._fetch = bank, fetch

    def attach_grammars(self, grammars: Matchers) -> None:
        """From now on requests may say what form their outputs must have."""
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
        """The adapters of so many tokens of each row; None where no row has one."""
        if not any(row.adapter for row in rows):
            return None
        slots = np.repeat([row.adapter for row in rows], counts)
        return grouped(slots, self._device, self._is_batch_invariant(rows))

    def _compute(self, plan: StepPlan) -> list[RowResult]:
        """Operator by operator."""
        ids, batch = self._batch(plan)
        with self._gemm.batch_invariant(batch.batch_invariant):
            return self._sample(plan.rows, batch, self._forward(ids, batch))

    def _verify(self, plan: StepPlan) -> list[RowResult]:
        """The same for rows with guesses, and with guesses for the next step."""
        ids, batch = self._batch(plan)
        with self._gemm.batch_invariant(batch.batch_invariant):
            if not self.drafting or self.drafter is None:
                return self._sample_guesses(plan.rows, batch, self._forward(ids, batch))
            aux_hidden_states = dict.fromkeys(self.drafter.layers, ids)
            hidden = self._forward(ids, batch, aux_hidden_states)
            results = self._sample_guesses(plan.rows, batch, hidden)
            return self._draft(plan.rows, ids, batch, hidden, aux_hidden_states, results)

    def _forward(
        self, ids: Tensor, batch: StepBatch, aux_hidden_states: dict[int, Tensor] | None = None
    ) -> Tensor:
        if not batch.prompts:
            return self._network(ids, batch, aux_hidden_states)
        with prompts_apart(batch):
            return self._network(ids, batch, aux_hidden_states)

    def _batch(self, plan: StepPlan) -> tuple[Tensor, StepBatch]:
        rows = plan.rows
        ids, batch = self._slots.batch(plan, self._cache.layers)
        return ids, replace(
            batch,
            batch_invariant=self._is_batch_invariant(rows),
            adapters=self._adapters(rows, [row.num_tokens for row in rows]),
            logits_indices=self._logits_indices(rows) if self._leaves_out(rows) else None,
            prompts=self._prompt_spans(rows),
        )

    def _prompt_spans(self, rows: Sequence[Row]) -> list[tuple[int, int]]:
        """Runs of a step's tokens that are of prompts, where that makes a difference.

        It is a matter of the position alone: what is computed again comes out the same.
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

    def _leaves_out(self, rows: Sequence[Row]) -> bool:
        """Whether so many hidden states are read by nobody that selecting the others pays."""
        if self.needs_all_hidden or self._scores_prompts(rows):
            return False
        read = sum(1 + row.num_drafts for row in rows if row.sample)
        return 2 * max(1, read) <= sum(row.num_tokens for row in rows)

    def _logits_indices(self, rows: Sequence[Row]) -> LogitsIndices:
        """The tokens that rows ask for; where none does, any."""
        requests = sample_requests(rows) or [SampleRequest(0, rows[0].slot, ())]
        places = positions_of(rows, requests).astype(np.int32)
        own = [rows[each.row] for each in requests]
        adapters = self._adapters(own, [each.num_positions for each in requests])
        return LogitsIndices(to_device(places, self._device), adapters)

    def _logits(
        self, rows: Sequence[Row], batch: StepBatch, hidden: Tensor
    ) -> tuple[Tensor, LogitsIndices]:
        """Of the tokens that rows ask for, and which those are."""
        logits_indices = batch.logits_indices
        if logits_indices is None:
            logits_indices = self._logits_indices(rows)
            hidden = hidden[logits_indices.tokens]
        return self._network.logits(hidden, logits_indices.adapters), logits_indices

    def _is_batch_invariant(self, rows: Sequence[Row]) -> bool:
        """Whether any row's result must not depend on the others: then none does."""
        return bool(self._batch_invariant) and any(
            row.slot in self._batch_invariant for row in rows
        )

    def _note_lengths(self, plan: StepPlan) -> None:
        if not self.coarse_prompts:
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

    def _sample_guesses(self, rows: list[Row], batch: StepBatch, hidden: Tensor) -> list[RowResult]:
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
        # The drafter may write past the blocks that a request has.
        self._slots.clear([admission.slot for admission in plan.admitted])

    def _after(self, row: Row) -> int:
        """The token of a prompt behind a chunk that ends within it."""
        return self._prompts[row.slot][row.start + row.num_tokens]

    def _draft(
        self,
        rows: list[Row],
        ids: Tensor,
        batch: StepBatch,
        hidden: Tensor,
        aux_hidden_states: dict[int, Tensor],
        results: list[RowResult],
    ) -> list[RowResult]:
        """Add guesses to the rows that sampled; the drafter sees all of them."""
        assert self.drafter is not None
        following = ids.roll(-1)
        places: list[int] = []
        tokens: list[int] = []
        last: list[int] = []
        own: list[int] = []  # the same among the tokens that rows ask for
        requests = 0
        for row, span, result in zip(rows, batch.spans, results, strict=True):
            end = span.first + span.count
            if row.sample:
                first = end - 1 - row.num_drafts
                places += range(first, first + len(result.tokens))
                tokens += result.tokens
                last.append(places[-1])
                own.append(requests + len(result.tokens) - 1)
                requests += 1 + row.num_drafts
            else:
                places.append(end - 1)
                tokens.append(self._after(row))
        following[torch.tensor(places, device=self._device)] = torch.tensor(
            tokens, dtype=ids.dtype, device=self._device
        )
        at, read = torch.tensor((last, own), dtype=torch.int64, device=self._device)
        if batch.logits_indices is None:
            read = at
        found = DrafterInputs(
            hidden, read, aux_hidden_states, following, at, batch, self._decode_batch
        )
        drafts = iter(self.drafter.draft(found, self.drafting).tolist())
        return [
            result._replace(drafts=tuple(next(drafts))) if row.sample else result
            for row, result in zip(rows, results, strict=True)
        ]

    def _decode_batch(self, positions: Tensor, slots: Tensor) -> StepBatch:
        """A batch of one token a row, without pages: whoever asks has its own."""
        spans = [Span(i, 1, at) for i, at in enumerate(positions.tolist())]
        return StepBatch(positions, slots, self._slots.tables, spans, [])

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
        """Log probabilities of the prompt's tokens that follow this row's positions."""
        end = min(row.start + row.num_tokens + 1, self._sampler.num_prompt(row.slot))
        following = self._sampler.tokens(row.slot)[row.start + 1 : end]
        scored: list[TokenLogprob] = []
        for at in range(0, len(following), _SCORED_AT_ONCE):
            tokens = following[at : at + _SCORED_AT_ONCE]
            adapters = self._adapters([row], [len(tokens)])
            logits = self._network.logits(hidden[at : at + len(tokens)], adapters)
            scored += score_tokens(logits, tokens, num_top)
        return scored
