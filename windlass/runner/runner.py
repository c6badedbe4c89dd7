"""Turns a plan into tensors, runs the network, samples. Plain ints come back.

Knows positions, slots and blocks, not what a request means: that is decided in core. This is the
plain way, for any device; graphs.py (CUDA) and recorded.py (CPU) replay recorded steps and fall
back to this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from windlass.core.types import Row, RowResult, SlotId, StepPlan, StepResult, TokenLogprob
from windlass.kernels.batch import KVCache, Span
from windlass.kernels.products import TorchProducts
from windlass.models.network import Network
from windlass.runner.sampler import Sampler, score_tokens
from windlass.runner.slots import SlotTables
from windlass.runner.verify import asked_by, positions_of, verify

_Sample = Callable[[list[Row], list[Span], Tensor], list[RowResult]]
# Prompt scores need logits of every position; so many at a time keep the memory small.
_SCORED_AT_ONCE = 128


class Pending(Protocol):
    """A step on its way. `wait` blocks until its tokens are there."""

    guesses: bool  # whether they come with guesses, so that the next plan must wait for them

    def wait(self) -> StepResult: ...


class Done:
    """A step whose result is there already."""

    guesses = False

    def __init__(self, result: StepResult) -> None:
        self._result = result

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
        products: TorchProducts,
    ) -> None:
        """`products` are the network's own: steps may ask them for a fixed order."""
        self._network = network
        self._cache = cache
        self._slots = slots
        self._sampler = sampler
        self._products = products
        self._device = slots.device
        self._fixed: set[SlotId] = set()  # whose requests are deterministic

    @property
    def padding(self) -> SlotId:
        """A slot that no request gets."""
        return SlotId(self._slots.num_slots)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step and wait for it."""
        return self.submit(plan).wait()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Pending:
        """Start a step. The plan's copies come first, then all rows together.

        A row with guesses gives 1 + as many tokens as it guessed rightly.
        """
        self._prepare(plan)
        compute = self._verify if any(row.num_drafts for row in plan.rows) else self._compute
        return Done(StepResult(compute(plan)))

    def _compute(self, plan: StepPlan) -> list[RowResult]:
        """Operator by operator."""
        return self._through(plan, self._sample)

    def _verify(self, plan: StepPlan) -> list[RowResult]:
        return self._through(plan, self._sample_guesses)

    def _through(self, plan: StepPlan, sample: _Sample) -> list[RowResult]:
        ids, batch = self._slots.batch(plan, self._cache.layers)
        batch = replace(batch, fixed=self._in_fixed_order(plan.rows))
        with self._products.fixed_order(batch.fixed):
            hidden = self._network(ids, batch)
            return sample(plan.rows, batch.spans, hidden)

    def _in_fixed_order(self, rows: list[Row]) -> bool:
        """Whether any row's result must not depend on the others: then none does."""
        return bool(self._fixed) and any(row.slot in self._fixed for row in rows)

    def _note_fixed(self, plan: StepPlan) -> None:
        self._fixed.difference_update(plan.freed)
        for admission in plan.admitted:
            if admission.sampling.deterministic:
                self._fixed.add(admission.slot)
            else:
                self._fixed.discard(admission.slot)

    def _prepare(self, plan: StepPlan) -> None:
        self._note_fixed(plan)
        for slot in plan.freed:
            self._sampler.forget(slot)
        for admission in plan.admitted:
            self._sampler.admit(admission)
        self._slots.send(self._slots.apply(plan))
        self._cache.copy(plan.copies)

    def _sample(self, rows: list[Row], spans: list[Span], hidden: Tensor) -> list[RowResult]:
        sampled = [i for i, row in enumerate(rows) if row.sample]
        results = [RowResult([])] * len(rows)
        if sampled:
            last = torch.tensor([spans[i].first + spans[i].count - 1 for i in sampled])
            logits = self._network.logits(hidden[last.to(self._device)]).float()
            slots = [rows[i].slot for i in sampled]
            tokens, scores = self._sampler.sample(logits, slots)
            self._slots.last[slots] = torch.tensor(tokens, dtype=torch.int32, device=self._device)
            for i, token, score in zip(sampled, tokens, scores, strict=True):
                results[i] = RowResult([token], score)
        self._score_prompts(rows, spans, hidden, results)
        return results

    def _sample_guesses(
        self, rows: list[Row], spans: list[Span], hidden: Tensor
    ) -> list[RowResult]:
        asked = asked_by(rows)
        at = torch.from_numpy(positions_of(rows, asked)).to(self._device)
        logits = self._network.logits(hidden[at]).float()
        results = [RowResult([])] * len(rows)
        for each, result in zip(asked, verify(self._sampler, logits, asked), strict=True):
            results[each.row] = result
            self._slots.last[each.slot] = result.tokens[-1]
        self._score_prompts(rows, spans, hidden, results)
        return results

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
            logits = self._network.logits(hidden[at : at + len(tokens)])
            scored += score_tokens(logits, tokens, num_top)
        return scored
