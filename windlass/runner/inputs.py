"""Turns a plan into arrays: the one packer of all executors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from windlass.core.pooling import PoolingParams
from windlass.core.types import (
    GrammarFailure,
    Row,
    RowResult,
    SlotId,
    SlotInit,
    StepPlan,
    StepResult,
)
from windlass.kernels.batch import Span
from windlass.models.network import DEFAULT_BLOCK_SIZE
from windlass.runner.verify import SampleRequest, sample_requests

# Getters in C: they read hundreds of rows in every step.
_SLOT, _START, _COUNT, _TOKENS, _BLOCKS, _SAMPLE, _DRAFTS, _ADAPTER = (
    itemgetter(Row._fields.index(name))
    for name in (
        "slot",
        "start",
        "num_tokens",
        "tokens",
        "blocks",
        "sample",
        "num_drafts",
        "adapter",
    )
)
Value = TypeVar("Value")
_MAX_FINE_PROMPT = 2  # tokens behind the last full block
_LAST = (-1,)  # the token that the runner sampled last for the slot


class _lazy(Generic[Value]):
    """An attribute that is computed on first use, without the lock of functools.cached_property."""

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Value:
        value = self._compute(instance)
        instance.__dict__[self._name] = value
        return value


class StepShape(NamedTuple):
    """The facts about a step that decide which executor computes it."""

    num_rows: int
    num_tokens: int
    max_row_tokens: int
    num_chunks: int  # rows of more than one token
    num_sampled: int  # positions that are sampled, draft tokens included
    decodes: bool  # every row samples, and has one token and its draft tokens
    has_drafts: bool  # a row verifies draft tokens
    draft_length: int  # draft tokens that the step makes for the next step
    adapted: bool  # a row uses a LoRA adapter
    batch_invariant: bool  # a row is deterministic
    scores_prompts: bool  # a row returns prompt logprobs
    needs_all_hidden: bool  # also of rows with mean pooling
    pools: bool  # hidden states of a row become a vector
    special_sampling: bool  # a row has penalties, logprobs, a grammar or token lists
    max_new_blocks: int  # of one row
    max_start: int  # the longest context before the step
    max_chunk_start: int  # of rows of more than one token; 0: there is none


class SlotFacts:
    """Owns the facts about the requests in the slots that steps depend on."""

    def __init__(self, coarse_prompts: bool = False) -> None:
        """`coarse_prompts`: CPU GEMMs quantise prompt activations coarsely."""
        self.coarse_prompts = coarse_prompts
        # The requests whose grammar failed since the last call.
        self.take_failures: Callable[[], tuple[GrammarFailure, ...]] = tuple
        self.has_drafter = False  # False: a proposer outside the runner drafts
        self._inits: dict[SlotId, SlotInit] = {}
        self._deterministic: set[SlotId] = set()
        self._scores_prompts: set[SlotId] = set()
        self._special: set[SlotId] = set()
        self._pooled: set[SlotId] = set()
        self._pooled_whole: set[SlotId] = set()  # mean pooling
        self._sets = (
            self._deterministic,
            self._scores_prompts,
            self._special,
            self._pooled,
            self._pooled_whole,
        )

    def apply(self, plan: StepPlan) -> None:
        """Forget freed slots, then note admitted requests."""
        for slot in plan.freed:
            self._inits.pop(slot, None)
            for slots in self._sets:
                slots.discard(slot)
        for new in plan.admitted:
            slot, params, pooling = new.slot, new.sampling, new.pooling
            self._inits[slot] = new
            for slots, member in (
                (self._deterministic, params.deterministic),
                (self._scores_prompts, params.prompt_logprobs is not None),
                (self._special, params.changes_logits or params.logprobs is not None),
                (self._pooled, pooling is not None),
                (self._pooled_whole, pooling is not None and pooling.reads_all),
            ):
                (slots.add if member else slots.discard)(slot)

    def shape(self, plan: StepPlan, counts: Sequence[int], slots: Sequence[SlotId]) -> StepShape:
        """The shape of a step, from passes over the rows without a Python loop."""
        rows, num_tokens = plan.rows, sum(counts)
        is_chunk, starts = list(map((1).__lt__, counts)), list(map(_START, rows))
        num_drafts, num_rows_sampled = sum(map(_DRAFTS, rows)), sum(map(_SAMPLE, rows))
        return StepShape(
            num_rows=len(rows),
            num_tokens=num_tokens,
            max_row_tokens=max(counts),
            num_chunks=sum(is_chunk),
            num_sampled=num_rows_sampled + num_drafts,
            # A row has at least one token beside its draft tokens.
            decodes=num_tokens == len(rows) + num_drafts and num_rows_sampled == len(rows),
            has_drafts=num_drafts > 0,
            draft_length=plan.options.draft_length if self.has_drafter else 0,
            adapted=any(map(_ADAPTER, rows)),
            batch_invariant=_any_of(self._deterministic, slots),
            scores_prompts=_any_of(self._scores_prompts, slots)
            and any(row.start < self.num_prompt(row.slot) for row in self._scoring(rows)),
            needs_all_hidden=plan.options.needs_all_hidden or _any_of(self._pooled_whole, slots),
            pools=_any_of(self._pooled, slots) and self._pools(rows),
            special_sampling=_any_of(self._special, slots),
            max_new_blocks=max(map(len, map(_BLOCKS, rows))),
            max_start=max(starts),
            max_chunk_start=max(compress(starts, is_chunk), default=0),
        )

    def _pools(self, rows: Sequence[Row]) -> bool:
        whole = self._pooled_whole
        return any(row.slot in self._pooled and (row.sample or row.slot in whole) for row in rows)

    def _scoring(self, rows: Sequence[Row]) -> Iterator[Row]:
        return (row for row in rows if row.slot in self._scores_prompts)

    def num_prompt_scores(self, slot: SlotId) -> int | None:
        """Number of prompt logprobs per token; None: not requested."""
        init = self._inits.get(slot)
        return None if init is None else init.sampling.prompt_logprobs

    def pooling(self, slot: SlotId) -> PoolingParams | None:
        init = self._inits.get(slot)
        return None if init is None else init.pooling

    def num_prompt(self, slot: SlotId) -> int:
        init = self._inits.get(slot)
        return 0 if init is None else init.num_prompt

    def num_coarse(self, slot: SlotId) -> int:
        """Number of prompt tokens, from the first, that CPU GEMMs may quantise coarsely.

        If all full blocks of a prompt are cached, only the tokens behind them are computed. If
        these are one or two tokens, requantising the weights takes longer than the GEMM, so they
        are never quantised coarsely. Nor are prompts of up to one block, for the same reason. The rule
        depends on the prompt's length alone, and treats all tokens of a full block alike, so results
        do not depend on the prefix cache, unless the block is that of a prompt of one block.
        """
        num_prompt = self.num_prompt(slot)
        if num_prompt <= DEFAULT_BLOCK_SIZE:
            return 0
        num_last = (num_prompt - 1) % DEFAULT_BLOCK_SIZE + 1
        return num_prompt - num_last if num_last <= _MAX_FINE_PROMPT else num_prompt

    def prompt_token(self, slot: SlotId, position: int) -> int:
        return self._inits[slot].tokens[position]

    def prompt(self, slot: SlotId) -> list[int]:
        init = self._inits[slot]
        return init.tokens[: init.num_prompt]


def _any_of(members: set[SlotId], slots: Sequence[SlotId]) -> bool:
    return bool(members) and not members.isdisjoint(slots)


class StepInputs:
    """One step: its plan, its shape, and the arrays that executors read, each made on first use."""

    def __init__(self, plan: StepPlan, facts: SlotFacts, grown: list[Row]) -> None:
        """`grown`: the rows that got new blocks."""
        self.plan = plan
        self.rows = plan.rows
        self.facts = facts
        self.grown = grown
        self.counts = list(map(_COUNT, plan.rows))  # tokens per row
        self.slots = list(map(_SLOT, plan.rows))
        self.shape = facts.shape(plan, self.counts, self.slots)
        self.executor = ""
        self.refusals: tuple[tuple[str, str], ...] = ()  # by name of the executors that were asked

    @_lazy
    def spans(self) -> list[Span]:
        """The range of each row's tokens in the packed step."""
        spans, first = [], 0
        for row in self.rows:
            spans.append(Span(first, row.num_tokens, row.start))
            first += row.num_tokens
        return spans

    @_lazy
    def requests(self) -> list[SampleRequest]:
        """The positions to sample of each row that samples."""
        return sample_requests(self.rows)

    @_lazy
    def sampled(self) -> list[int]:
        """Indices of the sampled positions in the packed step: the last 1 + k of each row."""
        if self.shape.decodes:
            return list(range(self.shape.num_tokens))
        ends = np.cumsum(self.counts).tolist()
        return [
            index
            for each in self.requests
            for index in range(ends[each.row] - each.num_positions, ends[each.row])
        ]

    @_lazy
    def adapters(self) -> list[int]:
        """The adapter slot of each row."""
        return list(map(_ADAPTER, self.rows))

    @_lazy
    def token_adapters(self) -> NDArray[Any]:
        """The adapter slot of each token."""
        return np.repeat(np.array(self.adapters, dtype=np.int32), self.counts)

    @property
    def knows_all_tokens(self) -> bool:
        """Whether no row reads the token that was sampled last for its slot."""
        return all(map(_TOKENS, self.rows))

    @property
    def new_blocks(self) -> list[int]:
        """The new block of each row that has at most one; -1: none."""
        return [blocks[0] if blocks else -1 for blocks in map(_BLOCKS, self.rows)]

    def pack(self, into: NDArray[Any]) -> None:
        """Write token ids (-1: last sampled token), positions and slots of all tokens: [3, tokens]."""
        total, rows = self.shape.num_tokens, self.rows
        starts = list(map(_START, rows))
        if self.shape.max_row_tokens == 1:
            into[0, :total] = [(tokens or _LAST)[0] for tokens in map(_TOKENS, rows)]
            into[1, :total] = starts
            into[2, :total] = self.slots
            return
        ids: list[int] = []
        for tokens in map(_TOKENS, rows):
            ids.extend(tokens or _LAST)
        into[0, :total] = ids
        firsts = np.cumsum(self.counts) - self.counts
        into[1, :total] = np.arange(total) - np.repeat(firsts - np.array(starts), self.counts)
        into[2, :total] = np.repeat(self.slots, self.counts)

    def pack_rows(self, into: NDArray[Any]) -> None:
        """Write slot, first position, token count and token ids of each row: [rows, 3 + tokens]."""
        for i, row in enumerate(self.rows):
            ids = row.tokens or _LAST
            into[i, : 3 + len(ids)] = (row.slot, row.start, row.num_tokens, *ids)

    def prompt_spans(self) -> list[tuple[int, int]]:
        """Ranges of prompt tokens within the step that GEMMs quantise coarsely.

        The position alone decides, so a recomputed token gets the same result.
        """
        spans: list[tuple[int, int]] = []
        if not self.facts.coarse_prompts:
            return spans
        first = 0
        for row in self.rows:
            count = min(row.num_tokens, self.facts.num_coarse(row.slot) - row.start)
            if count > 0:
                joined = bool(spans) and spans[-1][1] == first
                spans.append((spans.pop()[0] if joined else first, first + count))
            first += row.num_tokens
        return spans

    def following(self) -> list[int]:
        """The next prompt token of each row that does not sample, for drafters."""
        prompt_token = self.facts.prompt_token
        return [
            prompt_token(row.slot, row.start + row.num_tokens)
            for row in self.rows
            if not row.sample
        ]

    def result(
        self,
        samples: list[RowResult],
        prelaunched: bool = False,
        vectors: Mapping[int, bytes] | None = None,
    ) -> StepResult:
        """The step's result from the results of the rows that sample, and the vectors of rows."""
        rows = self.spread(samples)
        for i, vector in (vectors or {}).items():
            rows[i] = rows[i]._replace(pooled=vector)
        return StepResult(
            rows,
            prelaunched=prelaunched,
            grammar_failures=self.facts.take_failures(),
            executor=self.executor,
            refusals=self.refusals,
        )

    def spread(self, samples: list[RowResult]) -> list[RowResult]:
        """A result for every row, from the results of the rows that sample."""
        if len(samples) == len(self.rows):
            return samples
        found = iter(samples)
        return [next(found) if row.sample else RowResult([]) for row in self.rows]
