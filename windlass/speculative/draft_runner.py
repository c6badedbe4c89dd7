"""Drafts with a second runner: a smaller network that generates token by token.

It has the same slots and block ids as the target. With its own KV cache it computes every token
that the target has computed; with the target's KV cache (early exit) it does not. It samples with
the target's sampling params, seed and positions, and therefore with the target's noise: in sampled
requests, more drafts are accepted than with greedy drafting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from windlass.config import EngineConfig, Limits
from windlass.core.sampling import SamplingParams
from windlass.core.types import (
    BlockId,
    Draft,
    Row,
    SlotId,
    SlotInit,
    StepPlan,
    StepResult,
)
from windlass.kernels.batch import KVCache
from windlass.kernels.storages import Held
from windlass.models.hparams import HParams
from windlass.runner.assemble import Assembled, make_draft_runner
from windlass.runner.executor import PendingStep
from windlass.runner.load import Loaded
from windlass.runner.runner import Runner
from windlass.speculative.base import NO_DRAFT, SlotUpdate

_MAX_IN_FLIGHT = 2  # steps in flight: the number of staging buffers of a CUDA runner
_MAX_SINGLES = (
    3  # up to this many missing tokens are computed one per step, if decode steps are captured
)


@dataclass(frozen=True, slots=True)
class DraftRunner:
    """A runner of a draft network, and how to use it."""

    runner: Runner
    blocks_of: Callable[[SlotId], Sequence[BlockId]]  # the target's blocks of a slot
    block_size: int
    max_step_tokens: int
    max_positions: int
    vocab_size: int
    shares_kv: bool  # whether it uses the target's KV cache
    prefers_decode: bool  # whether decode steps are captured, and so far cheaper than other steps


def open_draft_runner(
    made: Assembled,
    *,
    config: EngineConfig,
    hparams: HParams,
    loaded: Loaded,
    limits: Limits,
    kv_cache: KVCache | None = None,
) -> DraftRunner:
    """Make a runner beside the target's, with as many blocks; `kv_cache`: the target's, if shared."""
    parts = loaded.parts
    runner, _ = make_draft_runner(
        config=config,
        hparams=hparams,
        loaded=loaded,
        limits=limits,
        num_blocks=made.capacity.num_blocks,
        cache=kv_cache,
    )
    on_cuda = parts.device.type == "cuda"
    return DraftRunner(
        runner=runner,
        blocks_of=made.runner.blocks_of,
        block_size=made.capacity.block_size,
        max_step_tokens=limits.max_num_batched_tokens,
        max_positions=parts.max_positions,
        vocab_size=hparams.vocab_size,
        shares_kv=kv_cache is not None,
        prefers_decode=on_cuda and not config.model.enforce_eager,
    )


@dataclass(slots=True)
class _SlotState:
    """One slot: its tokens, how many of them the draft runner has computed, and its blocks."""

    request_id: str
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    seed: int
    blocks: Sequence[BlockId] = ()  # as of the last draft
    num_sent: int = 0  # blocks that the draft runner has
    admitted: bool = False
    computed: int = 0
    drafted: tuple[int, ...] = ()
    digests: list[int] = field(default_factory=list)  # per block: of all tokens up to its end

    @property
    def num_missing(self) -> int:
        return len(self.tokens) - self.computed

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens that the target has sampled."""
        if self.drafted:
            # The last draft token was sampled, but not computed.
            self.computed = len(self.tokens) + _num_equal(tokens, self.drafted[:-1])
            self.drafted = ()
        self.tokens += tokens
        # The next draft needs the logits of the last token, which therefore always counts as missing.
        self.computed = min(self.computed, len(self.tokens) - 1)

    def digest(self, index: int, size: int) -> int:
        """Hash the tokens up to the end of a block. A collision only causes rejected drafts."""
        while len(self.digests) <= index:
            at = len(self.digests) * size
            before = self.digests[-1] if self.digests else 0
            self.digests.append(hash((before, *self.tokens[at : at + size])))
        return self.digests[index]


class DraftRunnerProposer:
    """Owns the slot states, and knows the contents of its KV blocks."""

    free = False
    in_step = False

    def __init__(self, draft_runner: DraftRunner, target_vocab: int) -> None:
        """`target_vocab`: size of the target's vocabulary; larger ids are never drafted."""
        self._draft_runner = draft_runner
        self._target_vocab = target_vocab
        self._slots: dict[SlotId, _SlotState] = {}
        self._freed: list[SlotId] = []
        self._contents: dict[
            BlockId, int
        ] = {}  # digests of the blocks that the draft runner has filled

    def storages(self) -> Iterator[Held]:
        return self._draft_runner.runner.storages()

    def admit(self, new: SlotInit) -> None:
        self._slots[new.slot] = _SlotState(
            request_id=new.request_id,
            tokens=list(new.tokens),
            num_prompt=new.num_prompt,
            sampling=new.sampling,
            seed=new.seed,
        )

    def forget(self, slot: SlotId) -> None:
        state = self._slots.pop(slot, None)
        if state is not None and state.admitted:
            self._freed.append(slot)

    def update(self, updates: Sequence[SlotUpdate]) -> None:
        for each in updates:
            self._slots[each.slot].extend(each.tokens)

    def backlog(self, slot: SlotId) -> int:
        if self._draft_runner.shares_kv:
            return 0
        state = self._slots[slot]
        computed = state.computed
        if not state.admitted:
            state.blocks = self._draft_runner.blocks_of(slot)
            computed = self._num_cached(state)
        return max(0, len(state.tokens) - 1 - computed)

    def propose(self, slots: Sequence[SlotId], draft_length: int) -> list[Draft]:
        ready = self._ready(slots)
        first, plans = self._catch_up(ready)
        lengths = {
            slot: min(draft_length, self._capacity(state) - len(state.tokens) + 1)
            for slot, state in ready.items()
            if slot in first
        }
        plans += self._decode_plans(lengths)
        found: dict[SlotId, list[int]] = {slot: [] for slot in lengths}
        for plan, result in zip(plans, self._run(plans), strict=True):
            for row, got in zip(plan.rows, result.rows, strict=True):
                if row.slot in lengths and row.start + row.num_tokens >= first[row.slot]:
                    found[row.slot] += got.tokens
        for slot, drafted in found.items():
            state = self._slots[slot]
            state.computed = len(state.tokens)
            state.drafted = tuple(drafted)
            self._record_full_blocks(state)
        return [self._draft(found[slot]) if slot in found else NO_DRAFT for slot in slots]

    def _draft(self, drafted: list[int]) -> Draft:
        vocab = self._target_vocab
        end = next((i for i, token in enumerate(drafted) if token >= vocab), len(drafted))
        return Draft(tuple(drafted[:end]))

    def _ready(self, slots: Iterable[SlotId]) -> dict[SlotId, _SlotState]:
        """Slots whose blocks have room for the last token, fewest missing tokens first."""
        ready = {}
        for slot in slots:
            state = self._slots[slot]
            state.blocks = self._draft_runner.blocks_of(slot)
            if len(state.tokens) > self._capacity(state):
                continue
            if self._draft_runner.shares_kv:
                state.computed = len(state.tokens) - 1
            elif not state.admitted:
                state.computed = self._num_cached(state)
            ready[slot] = state
        return dict(sorted(ready.items(), key=lambda item: item[1].num_missing))

    def _capacity(self, state: _SlotState) -> int:
        num_tokens = len(state.blocks) * self._draft_runner.block_size
        return min(num_tokens, self._draft_runner.max_positions)

    def _num_cached(self, state: _SlotState) -> int:
        """Tokens of a prefix that an earlier slot has left in the same blocks."""
        size = self._draft_runner.block_size
        num_full = min(len(state.blocks), (len(state.tokens) - 1) // size)
        count = 0
        while count < num_full:
            if self._contents.get(state.blocks[count]) != state.digest(count, size):
                break
            count += 1
        return count * size

    # ---- plans ---------------------------------------------------------------------------------

    def _catch_up(
        self, ready: dict[SlotId, _SlotState]
    ) -> tuple[dict[SlotId, int], list[StepPlan]]:
        """Plan steps that compute missing tokens, within one step's token budget.

        Returns the lengths of the slots that are complete then: these sample a first draft token.
        """
        budget, first, rows = self._draft_runner.max_step_tokens, {}, []
        max_missing = max((state.num_missing for state in ready.values()), default=0)
        singly = self._draft_runner.prefers_decode and max_missing <= _MAX_SINGLES
        plans = list(self._single_token_plans(ready)) if singly else []
        for slot, state in ready.items():
            start = len(state.tokens) - 1 if singly else state.computed
            count = min(len(state.tokens) - start, budget)
            if count <= 0:
                break
            budget -= count
            done = start + count == len(state.tokens)
            rows.append(self._row(slot, state, start=start, count=count, sample=done))
            state.computed = start + count
            if done:
                first[slot] = len(state.tokens)
        if rows:
            plans.append(self._plan(rows))
        return first, plans

    def _single_token_plans(self, ready: dict[SlotId, _SlotState]) -> Iterator[StepPlan]:
        """Plan all missing tokens but the last, one per step."""
        for left in range(_MAX_SINGLES, 1, -1):
            rows = [
                self._row(slot, state, start=len(state.tokens) - left, count=1, sample=True)
                for slot, state in ready.items()
                if state.num_missing >= left
            ]
            if rows:
                yield self._plan(rows)

    def _row(self, slot: SlotId, state: _SlotState, *, start: int, count: int, sample: bool) -> Row:
        vocab = self._draft_runner.vocab_size
        tokens = tuple([t if t < vocab else 0 for t in state.tokens[start : start + count]])
        return Row(
            request_id=state.request_id,
            slot=slot,
            start=start,
            num_tokens=count,
            tokens=tokens,
            blocks=self._take_blocks(state, start, count),
            sample=sample,
        )

    def _plan(self, rows: list[Row]) -> StepPlan:
        """Plan a step; admit slots that the draft runner does not have yet."""
        admitted = []
        for row in rows:
            state = self._slots[row.slot]
            if not state.admitted:
                state.admitted = True
                admitted.append(
                    SlotInit(
                        request_id=state.request_id,
                        slot=row.slot,
                        tokens=state.tokens,
                        num_prompt=state.num_prompt,
                        sampling=_draft_sampling(state.sampling),
                        stop_ids=frozenset(),
                        seed=state.seed,
                    )
                )
        freed, self._freed = self._freed, []
        return StepPlan(rows, admitted, freed)

    def _decode_plans(self, lengths: dict[SlotId, int]) -> list[StepPlan]:
        """Plan one decode step per draft token after the first."""
        plans = []
        for ahead in range(1, max(lengths.values(), default=0)):
            rows = []
            for slot, length in lengths.items():
                if ahead < length:
                    state = self._slots[slot]
                    start = len(state.tokens) + ahead - 1
                    rows.append(
                        Row(
                            request_id=state.request_id,
                            slot=slot,
                            start=start,
                            num_tokens=1,
                            tokens=(),
                            blocks=self._take_blocks(state, start, 1),
                            sample=True,
                        )
                    )
            plans.append(StepPlan(rows))
        return plans

    def _run(self, plans: list[StepPlan]) -> list[StepResult]:
        """Run steps in order, with a few in flight at a time."""
        results: list[StepResult] = []
        waiting: deque[PendingStep] = deque()
        for plan in plans:
            if len(waiting) == _MAX_IN_FLIGHT:
                results.append(waiting.popleft().wait())
            waiting.append(self._draft_runner.runner.submit(plan))
        return results + [pending.wait() for pending in waiting]

    # ---- contents of the KV blocks -------------------------------------------------------------

    def _take_blocks(self, state: _SlotState, start: int, count: int) -> tuple[BlockId, ...]:
        """The blocks that the runner lacks for this row, and none for later rows: a captured step
        takes a new block for the block of its own position.
        """
        size = self._draft_runner.block_size
        end = (start + count - 1) // size + 1
        for index in range(start // size, end):
            self._contents.pop(state.blocks[index], None)
        fresh = tuple(state.blocks[state.num_sent : end])
        state.num_sent = max(state.num_sent, end)
        return fresh

    def _record_full_blocks(self, state: _SlotState) -> None:
        """Record the blocks that are full of known tokens."""
        if self._draft_runner.shares_kv:
            return
        size = self._draft_runner.block_size
        for index in reversed(range(state.computed // size)):
            block = state.blocks[index]
            if block in self._contents:
                break
            self._contents[block] = state.digest(index, size)


def _draft_sampling(target: SamplingParams) -> SamplingParams:
    """The params that decide the sampled token's likelihood; the target applies the others."""
    return SamplingParams(
        temperature=target.temperature, top_p=target.top_p, top_k=target.top_k, min_p=target.min_p
    )


def _num_equal(tokens: Sequence[int], drafted: Sequence[int]) -> int:
    count = 0
    for token, draft in zip(tokens, drafted, strict=False):
        if token != draft:
            break
        count += 1
    return count
