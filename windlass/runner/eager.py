"""Computes any step operator by operator, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from windlass.core.types import Row, RowResult, TokenLogprob
from windlass.kernels.batch import (
    AdapterRows,
    AttentionWork,
    KVCache,
    LayerPages,
    LogitsIndices,
    Span,
    StepBatch,
)
from windlass.kernels.gemm import TorchGemm
from windlass.kernels.native.ops import prompt_spans
from windlass.kernels.native.pool import Workers
from windlass.kernels.storages import Held
from windlass.kernels.token_split import TokenSplit
from windlass.models.network import Network
from windlass.parallel.mesh import Group
from windlass.runner.adapters import grouped
from windlass.runner.drafter import Drafter, DrafterInputs
from windlass.runner.executor import (
    PASSED_ON,
    CompletedSamples,
    CompletedStep,
    Executor,
    PendingStep,
    SampledStep,
    Samples,
)
from windlass.runner.inputs import StepInputs, StepShape
from windlass.runner.pipeline import Pipeline
from windlass.runner.pooling import Pooler
from windlass.runner.sampler import score_tokens
from windlass.runner.sampling import Sampling
from windlass.runner.sequence_parallel import SequenceParallel
from windlass.runner.slots import SlotTables, to_device

# Prompt logprobs need the logits of every position; this chunk size bounds their memory.
_LOGPROBS_CHUNK = 128


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """The objects that a runner and its executors share."""

    network: Network
    cache: KVCache
    slots: SlotTables
    sampling: Sampling
    gemm: TorchGemm  # of the network; steps switch its batch-invariant mode
    workers: Workers  # of the network's native kernels
    pipeline: Pipeline = field(default_factory=Pipeline)
    pooler: Pooler = field(default_factory=Pooler)
    coarse_prompts: bool = False  # CPU GEMMs quantise prompt activations coarsely
    sequence_parallel: SequenceParallel | None = None  # None: no step is split over the ranks


class Metadata(Protocol):
    """Makes the metadata that the kernels of one device read."""

    def adapters(
        self, slots: Sequence[int], counts: Sequence[int], batch_invariant: bool
    ) -> AdapterRows | None:
        """The adapter of each token, given the adapter slot and the token count of each row."""
        ...

    def storages(self) -> Iterator[Held]: ...

    def attention(self, inputs: StepInputs) -> AttentionWork | None: ...

    def decode_batch(self, positions: Tensor, slots: Tensor) -> StepBatch:
        """A batch of one token per row, without KV pages: a drafter adds its own."""
        ...


class ReferenceMetadata:
    """For the reference kernels and the native CPU kernels."""

    def __init__(self, slots: SlotTables) -> None:
        self._slots = slots

    def storages(self) -> Iterator[Held]:
        return iter(())

    def adapters(
        self, slots: Sequence[int], counts: Sequence[int], batch_invariant: bool
    ) -> AdapterRows | None:
        if not any(slots):
            return None
        return grouped(np.repeat(slots, counts), self._slots.device, batch_invariant)

    def attention(self, inputs: StepInputs) -> AttentionWork | None:
        del inputs
        return None

    def decode_batch(self, positions: Tensor, slots: Tensor) -> StepBatch:
        spans = [Span(i, 1, at) for i, at in enumerate(positions.tolist())]
        return StepBatch(
            positions=positions, token_slots=slots, tables=self._slots.tables, spans=spans, kv=[]
        )


def pack_step(inputs: StepInputs, slots: SlotTables) -> tuple[Tensor, Tensor, Tensor]:
    """The token ids, positions and slots of a step on the device."""
    total = inputs.shape.num_tokens
    # Multiples of 16 entries keep every row aligned, as kernels assume.
    packed = np.zeros((3, -(-total // 16) * 16), dtype=np.int32)
    inputs.pack(packed)
    ids, positions, token_slots = to_device(packed, slots.device)[:, :total]
    return slots.fill_last(ids, token_slots), positions, token_slots


def step_batch(
    inputs: StepInputs, slots: SlotTables, kv: Sequence[LayerPages], metadata: Metadata
) -> tuple[Tensor, StepBatch]:
    """The token ids of a step and its batch metadata."""
    ids, positions, token_slots = pack_step(inputs, slots)
    shape = inputs.shape
    batch = StepBatch(
        positions=positions,
        token_slots=token_slots,
        tables=slots.tables,
        spans=inputs.spans,
        kv=kv,
        work=metadata.attention(inputs),
        batch_invariant=shape.batch_invariant,
        adapters=metadata.adapters(inputs.adapters, inputs.counts, shape.batch_invariant),
        logits_indices=_logits_indices(inputs, slots, metadata) if _gathers(inputs) else None,
        prompts=inputs.prompt_spans(),
    )
    return ids, batch


def _gathers(inputs: StepInputs) -> bool:
    """Whether to gather the sampled hidden states: pays if they are at most half of the tokens."""
    shape = inputs.shape
    if shape.needs_all_hidden or shape.scores_prompts:
        return False
    return 2 * max(1, len(inputs.sampled)) <= shape.num_tokens


def _logits_indices(inputs: StepInputs, slots: SlotTables, metadata: Metadata) -> LogitsIndices:
    """The positions to compute logits for; the first one when no row samples."""
    indices = np.array(inputs.sampled or [0], dtype=np.int32)
    rows = [inputs.rows[each.row] for each in inputs.requests] or inputs.rows[:1]
    counts = [each.num_positions for each in inputs.requests] or [1]
    adapters = metadata.adapters(
        [row.adapter for row in rows], counts, inputs.shape.batch_invariant
    )
    return LogitsIndices(to_device(indices, slots.device), adapters)


class EagerExecutor(Executor):
    """Computes every step, and never refuses. Waits for the device to read results on the host."""

    name = "eager"
    splits_tokens = True

    def __init__(self, parts: RunnerParts, metadata: Metadata) -> None:
        self._parts = parts
        self._metadata = metadata
        self._drafter: Drafter | None = None

    def refuses(self, shape: StepShape) -> str | None:
        del shape
        return None

    def storages(self) -> Iterator[Held]:
        return self._metadata.storages()

    def attach(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def launch(self, inputs: StepInputs) -> PendingStep:
        parts, shape = self._parts, inputs.shape
        parts.slots.send(inputs.grown)
        ids, batch = step_batch(inputs, parts.slots, kv=parts.cache.layers, metadata=self._metadata)
        if parts.sequence_parallel is not None and parts.sequence_parallel.splits(shape):
            batch = replace(batch, split=self._split(batch, parts.sequence_parallel.group))
        drafter = self._drafter if shape.draft_length else None
        aux_hidden_states = {} if drafter is None else dict.fromkeys(drafter.layers, ids)
        pipeline = parts.pipeline
        x = pipeline.enter(ids, aux_hidden_states)
        with parts.gemm.batch_invariant(shape.batch_invariant):
            hidden = self._forward(x, batch, aux_hidden_states)
            if not pipeline.is_last:
                pipeline.leave(hidden, aux_hidden_states)
                return PASSED_ON
            samples = self._sample(inputs, batch, hidden)
            vectors = None
            if shape.pools:
                gathered = batch.logits_indices is not None
                vectors = parts.pooler.start(inputs, hidden, gathered=gathered)
            if drafter is None and not shape.scores_prompts:
                return SampledStep(inputs, samples, vectors)
            results = inputs.spread(samples.wait())
            if shape.scores_prompts:
                self._score_prompts(inputs, hidden, results)
            if drafter is not None:
                found = _drafter_inputs(
                    inputs,
                    results,
                    ids=ids,
                    batch=batch,
                    hidden=hidden,
                    aux_hidden_states=aux_hidden_states,
                    metadata=self._metadata,
                )
                results = _with_drafts(inputs, results, drafter.draft(found, shape.draft_length))
        pooled = None if vectors is None else vectors.wait()
        return CompletedStep(inputs.result(results, vectors=pooled))

    def _split(self, batch: StepBatch, group: Group) -> TokenSplit:
        rows_are = partial(prompt_spans, self._parts.workers.pool, batch) if batch.prompts else None
        return TokenSplit(group, len(batch.positions), rows_are)

    def _forward(self, x: Tensor, batch: StepBatch, aux_hidden_states: dict[int, Tensor]) -> Tensor:
        network = self._parts.network
        if not batch.prompts:
            return network(x, batch, aux_hidden_states)
        with prompt_spans(self._parts.workers.pool, batch):
            return network(x, batch, aux_hidden_states)

    def _sample(self, inputs: StepInputs, batch: StepBatch, hidden: Tensor) -> Samples:
        if not inputs.requests:
            return CompletedSamples([])
        logits_indices = batch.logits_indices
        if logits_indices is None:
            logits_indices = _logits_indices(inputs, self._parts.slots, self._metadata)
            hidden = hidden[logits_indices.tokens]
        logits = self._parts.network.logits(hidden, logits_indices.adapters)
        return self._parts.sampling.finish(inputs, logits, batch, logits_indices.tokens)

    def _score_prompts(self, inputs: StepInputs, hidden: Tensor, results: list[RowResult]) -> None:
        for i, (row, span) in enumerate(zip(inputs.rows, inputs.spans, strict=True)):
            if inputs.facts.num_prompt_scores(row.slot) is not None:
                part = hidden[span.first : span.first + span.count]
                scored = self._score_prompt(inputs, row, part)
                results[i] = results[i]._replace(prompt_logprobs=scored)

    def _score_prompt(self, inputs: StepInputs, row: Row, hidden: Tensor) -> list[TokenLogprob]:
        """Logprobs of the prompt tokens that follow this row's positions."""
        num_top = inputs.facts.num_prompt_scores(row.slot)
        assert num_top is not None
        following = inputs.facts.prompt(row.slot)[row.start + 1 : row.start + row.num_tokens + 1]
        batch_invariant = inputs.shape.batch_invariant
        scored: list[TokenLogprob] = []
        for at in range(0, len(following), _LOGPROBS_CHUNK):
            tokens = following[at : at + _LOGPROBS_CHUNK]
            adapters = self._metadata.adapters([row.adapter], [len(tokens)], batch_invariant)
            logits = self._parts.network.logits(hidden[at : at + len(tokens)], adapters)
            scored += score_tokens(logits, tokens, num_top)
        return scored


def _drafter_inputs(
    inputs: StepInputs,
    results: list[RowResult],
    ids: Tensor,
    batch: StepBatch,
    hidden: Tensor,
    aux_hidden_states: dict[int, Tensor],
    metadata: Metadata,
) -> DrafterInputs:
    """Collect a finished step for a drafter, which reads all rows and drafts for the sampled rows."""
    following, device = ids.roll(-1), ids.device
    indices: list[int] = []
    tokens: list[int] = []
    last: list[int] = []
    last_sampled: list[int] = []  # the same rows, as indices of sampled positions
    num_sampled, prompt_tokens = 0, iter(inputs.following())
    for row, span, result in zip(inputs.rows, inputs.spans, results, strict=True):
        end = span.first + span.count
        if row.sample:
            first = end - 1 - row.num_drafts
            indices += range(first, first + len(result.tokens))
            tokens += result.tokens
            last.append(indices[-1])
            last_sampled.append(num_sampled + len(result.tokens) - 1)
            num_sampled += 1 + row.num_drafts
        else:
            indices.append(end - 1)
            tokens.append(next(prompt_tokens))
    following[torch.tensor(indices, device=device)] = torch.tensor(
        tokens, dtype=ids.dtype, device=device
    )
    last_at, read = torch.tensor((last, last_sampled), dtype=torch.int64, device=device)
    return DrafterInputs(
        hidden=hidden,
        read=last_at if batch.logits_indices is None else read,
        aux_hidden_states=aux_hidden_states,
        following=following,
        last=last_at,
        batch=replace(batch, split=None),
        decode_batch=metadata.decode_batch,
    )


def _with_drafts(inputs: StepInputs, results: list[RowResult], drafts: Tensor) -> list[RowResult]:
    found = iter(drafts.tolist())
    return [
        result._replace(drafts=tuple(next(found))) if row.sample else result
        for row, result in zip(inputs.rows, results, strict=True)
    ]
