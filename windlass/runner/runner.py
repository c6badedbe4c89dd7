"""Turns a plan into tensors, runs the network, samples. Plain ints come back.

Knows positions, slots and blocks, not what a request means: that is decided in core.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.core.types import Row, RowResult, StepPlan, StepResult, TokenLogprob
from windlass.kernels.batch import KVCache, Span
from windlass.models.network import Network
from windlass.runner.sampler import Sampler, score_tokens
from windlass.runner.slots import SlotTables

# Prompt scores need logits of every position; so many at a time keep the memory small.
_SCORED_AT_ONCE = 128


class Runner:
    """Owns the KV pages, the slots' tables and the sampler's memory."""

    def __init__(
        self, network: Network, cache: KVCache, slots: SlotTables, sampler: Sampler
    ) -> None:
        self._network = network
        self._cache = cache
        self._slots = slots
        self._sampler = sampler
        self._device = cache.layers[0].keys.device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step. The plan's copies come first, then all rows together."""
        for slot in plan.freed:
            self._sampler.forget(slot)
        for admission in plan.admitted:
            self._sampler.admit(admission)
        self._slots.apply(plan)
        self._cache.copy(plan.copies)
        ids, batch = self._slots.batch(plan, self._cache.layers, self._device)
        hidden = self._network(ids, batch)
        return StepResult(self._results(plan.rows, batch.spans, hidden))

    def _results(self, rows: list[Row], spans: list[Span], hidden: Tensor) -> list[RowResult]:
        sampled = [i for i, row in enumerate(rows) if row.sample]
        results = [RowResult([])] * len(rows)
        if sampled:
            last = torch.tensor([spans[i].first + spans[i].count - 1 for i in sampled])
            logits = self._network.logits(hidden[last.to(self._device)])
            tokens, scores = self._sampler.sample(logits, [rows[i].slot for i in sampled])
            for i, token, score in zip(sampled, tokens, scores, strict=True):
                self._slots.sampled(rows[i].slot, token)
                results[i] = RowResult([token], score)
        for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
            if self._sampler.wishes(row.slot).prompt_logprobs is not None:
                scored = self._score_prompt(row, hidden[span.first : span.first + span.count])
                results[i] = results[i]._replace(prompt_logprobs=scored)
        return results

    def _score_prompt(self, row: Row, hidden: Tensor) -> list[TokenLogprob]:
        """Log probabilities of the prompt's tokens that follow this row's positions."""
        num_top = self._sampler.wishes(row.slot).prompt_logprobs
        assert num_top is not None
        end = min(row.start + row.num_tokens + 1, self._sampler.num_prompt(row.slot))
        following = self._sampler.tokens(row.slot)[row.start + 1 : end]
        scored: list[TokenLogprob] = []
        for at in range(0, len(following), _SCORED_AT_ONCE):
            tokens = following[at : at + _SCORED_AT_ONCE]
            logits = self._network.logits(hidden[at : at + len(tokens)])
            scored += score_tokens(logits, tokens, num_top)
        return scored
