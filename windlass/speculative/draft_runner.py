"""Guessing by a second runner: a smaller network that goes ahead, a token at a time.

It has the same slots and block ids as the target. Its pages are its own, and then it must compute
whatever the target has computed; or they are the target's, and then it need not. What it samples
has the target's wishes, seed and positions, and so the target's noise: guesses of a sampled request
are right more often than the likeliest tokens would be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from windlass.config import EngineConfig, Limits
from windlass.core.sampling import SamplingParams
from windlass.core.types import (
    BlockId,
    Row,
    SlotId,
    SlotInit,
    StepPlan,
    StepResult,
)
from windlass.kernels.batch import KVCache
from windlass.models.hparams import HParams
from windlass.runner.assemble import Assembled, Loaded, make_draft_runner
from windlass.runner.runner import PendingStep
from windlass.runner.sampler import Sampler, draw_with
from windlass.speculative.base import NO_DRAFT, Draft, Seen
from windlass.speculative.speculation import Submits

_IN_FLIGHT = 2  # steps: a runner on CUDA has as many buffers to send from
_FEW = 3  # tokens that are computed one by one where such steps are recorded


@dataclass(frozen=True, slots=True)
class DraftRunner:
    """A runner that guesses, and how it must be used."""

    runner: Submits
    blocks_of: Callable[[SlotId], Sequence[BlockId]]  # that the target has for a slot
    block_size: int
    step_tokens: int  # most of a step
    longest: int  # positions that it knows
    vocab_size: int
    shares_pages: bool  # whether its pages are the target's
    sampler: Sampler | None  # whose memory of a slot must be as long as the slot's tokens
    singly: bool  # whether steps of one token a row are far cheaper than others


def open_draft_runner(
    made: Assembled,
    config: EngineConfig,
    hparams: HParams,
    loaded: Loaded,
    limits: Limits,
    pages: KVCache | None = None,
) -> DraftRunner:
    """A runner beside the target's, with as many blocks; `pages` are those of the target, if shared."""
    parts = loaded.parts
    sampler = Sampler(hparams.vocab_size, parts.device, draw=draw_with(parts.ops))
    runner, _ = make_draft_runner(
        config, hparams, loaded, limits, made.capacity.num_blocks, sampler, pages
    )
    on_cuda = parts.device.type == "cuda"
    return DraftRunner(
        runner,
        made.runner.blocks_of,
        config.cache.block_size,
        limits.max_num_batched_tokens,
        parts.max_positions,
        hparams.vocab_size,
        shares_pages=pages is not None,
        sampler=None if on_cuda else sampler,
        singly=on_cuda and not config.model.enforce_eager,
    )


@dataclass(slots=True)
class _Track:
    """One slot: its tokens, how far the second runner has them, and its blocks."""

    name: str
    tokens: list[int]
    num_prompt: int
    wish: SamplingParams
    seed: int
    blocks: Sequence[BlockId] = ()  # as of the last guesses
    num_sent: int = 0  # blocks that the second runner knows of
    admitted: bool = False
    computed: int = 0
    num_synced: int = 0  # tokens that its sampler remembers and that will not change
    guesses: tuple[int, ...] = ()
    digests: list[int] = field(default_factory=list)  # of the blocks' tokens and all before

    @property
    def num_missing(self) -> int:
        return len(self.tokens) - self.computed

    def go_on(self, tokens: Sequence[int]) -> None:
        """Append tokens that the target has sampled."""
        if self.guesses:
            # The last guess was made, but not computed.
            self.computed = len(self.tokens) + _num_alike(tokens, self.guesses[:-1])
            self.guesses = ()
        self.tokens += tokens
        # The target may sample what no step verified: the next draft needs the last token's logits.
        self.computed = min(self.computed, len(self.tokens) - 1)

    def digest(self, index: int, size: int) -> int:
        """Of the tokens up to the end of a block. A wrong one would cost a wrong guess, no more."""
        while len(self.digests) <= index:
            at = len(self.digests) * size
            before = self.digests[-1] if self.digests else 0
            self.digests.append(hash((before, *self.tokens[at : at + size])))
        return self.digests[index]


class DraftRunnerProposer:
    """Owns the tracks, and knows what its pages hold."""

    free = False
    in_step = False

    def __init__(self, draft_runner: DraftRunner, target_vocab: int) -> None:
        """Guesses from `target_vocab` on are none of the target's tokens."""
        self._draft_runner = draft_runner
        self._target_vocab = target_vocab
        self._tracks: dict[SlotId, _Track] = {}
        self._freed: list[SlotId] = []
        self._depth = 0
        self._contents: dict[BlockId, int] = {}  # digests of the blocks that it has filled

    def admit(self, new: SlotInit) -> None:
        known = (list(new.tokens), new.num_prompt, new.sampling, new.seed)
        self._tracks[new.slot] = _Track(new.request_id, *known)

    def forget(self, slot: SlotId) -> None:
        track = self._tracks.pop(slot, None)
        if track is not None and track.admitted:
            self._freed.append(slot)

    def begin(self, wanted: int) -> None:
        self._depth = wanted

    def take_in(self, seen: Sequence[Seen]) -> None:
        for each in seen:
            self._tracks[each.slot].go_on(each.tokens)

    def backlog(self, slot: SlotId, num_tokens: int) -> int:
        if self._draft_runner.shares_pages:
            return 0
        track = self._tracks[slot]
        computed = track.computed
        if not track.admitted:
            track.blocks = self._draft_runner.blocks_of(slot)
            computed = self._num_found(track)
        return max(0, num_tokens - 1 - computed)

    def propose(self, slots: Sequence[SlotId]) -> list[Draft]:
        ready = self._ready(slots)
        first, plans = self._catch_up(ready)
        depths = {
            slot: min(self._depth, self._room(track) - len(track.tokens) + 1)
            for slot, track in ready.items()
            if slot in first
        }
        plans += self._go_on(depths)
        found: dict[SlotId, list[int]] = {slot: [] for slot in depths}
        for plan, result in zip(plans, self._run(plans), strict=True):
            for row, got in zip(plan.rows, result.rows, strict=True):
                if row.slot in depths and row.start + row.num_tokens >= first[row.slot]:
                    found[row.slot] += got.tokens
        for slot, guesses in found.items():
            track = self._tracks[slot]
            track.computed = len(track.tokens)
            track.guesses = tuple(guesses)
            self._mark(track)
        return [self._draft(found[slot]) if slot in found else NO_DRAFT for slot in slots]

    def _draft(self, guesses: list[int]) -> Draft:
        known = self._target_vocab
        wrong = next((i for i, token in enumerate(guesses) if token >= known), len(guesses))
        return Draft(tuple(guesses[:wrong]))

    def _ready(self, slots: Iterable[SlotId]) -> dict[SlotId, _Track]:
        """Slots whose last token has a place in their blocks, those that lack the least first."""
        ready = {}
        for slot in slots:
            track = self._tracks[slot]
            track.blocks = self._draft_runner.blocks_of(slot)
            if len(track.tokens) > self._room(track):
                continue
            if self._draft_runner.shares_pages:
                track.computed = len(track.tokens) - 1
            elif not track.admitted:
                track.computed = self._num_found(track)
            ready[slot] = track
        return dict(sorted(ready.items(), key=lambda item: item[1].num_missing))

    def _room(self, track: _Track) -> int:
        return min(len(track.blocks) * self._draft_runner.block_size, self._draft_runner.longest)

    def _num_found(self, track: _Track) -> int:
        """Tokens of a prefix that an earlier slot has left in the same blocks."""
        size = self._draft_runner.block_size
        most = min(len(track.blocks), (len(track.tokens) - 1) // size)
        count = 0
        while count < most and self._contents.get(track.blocks[count]) == track.digest(count, size):
            count += 1
        return count * size

    # ---- plans ---------------------------------------------------------------------------------

    def _catch_up(self, ready: dict[SlotId, _Track]) -> tuple[dict[SlotId, int], list[StepPlan]]:
        """Steps that compute what is missing, as far as one step goes.

        Returns the lengths of the slots that are complete then: they have a first guess.
        """
        budget, first, rows = self._draft_runner.step_tokens, {}, []
        missing = [track.num_missing for track in ready.values()]
        few = self._draft_runner.singly and max(missing, default=0) <= _FEW
        plans = list(self._singles(ready)) if few else []
        for slot, track in ready.items():
            start = len(track.tokens) - 1 if few else track.computed
            count = min(len(track.tokens) - start, budget)
            if count <= 0:
                break
            budget -= count
            done = start + count == len(track.tokens)
            rows.append(self._row(slot, track, start, count, done))
            track.computed = start + count
            if done:
                first[slot] = len(track.tokens)
        if rows:
            plans.append(self._plan(rows))
        return first, plans

    def _singles(self, ready: dict[SlotId, _Track]) -> Iterator[StepPlan]:
        """All missing tokens but the last, one a step."""
        for left in range(_FEW, 1, -1):
            rows = [
                self._row(slot, track, len(track.tokens) - left, 1, True)
                for slot, track in ready.items()
                if track.num_missing >= left
            ]
            if rows:
                yield self._plan(rows)

    def _row(self, slot: SlotId, track: _Track, start: int, count: int, sample: bool) -> Row:
        most = self._draft_runner.vocab_size
        tokens = tuple([t if t < most else 0 for t in track.tokens[start : start + count]])
        fresh = self._write(track, start, count)
        return Row(track.name, slot, start, count, tokens, fresh, sample)

    def _plan(self, rows: list[Row]) -> StepPlan:
        """A step; slots that the runner does not know yet are admitted with it."""
        admitted = []
        for row in rows:
            track = self._tracks[row.slot]
            if not track.admitted:
                track.admitted = True
                track.num_synced = len(track.tokens)
                known = (track.name, row.slot, track.tokens, track.num_prompt)
                wish = _plainly(track.wish)
                admitted.append(SlotInit(*known, wish, frozenset(), track.seed))
        freed, self._freed = self._freed, []
        return StepPlan(rows, admitted, freed)

    def _go_on(self, depths: dict[SlotId, int]) -> list[StepPlan]:
        """Steps of the token that was sampled last, as many as there are further guesses."""
        plans = []
        for ahead in range(1, max(depths.values(), default=0)):
            rows = []
            for slot, depth in depths.items():
                if ahead < depth:
                    track = self._tracks[slot]
                    start = len(track.tokens) + ahead - 1
                    fresh = self._write(track, start, 1)
                    rows.append(Row(track.name, slot, start, 1, (), fresh, True))
            plans.append(StepPlan(rows))
        return plans

    def _run(self, plans: list[StepPlan]) -> list[StepResult]:
        """Results of steps that do not wait for each other's."""
        self._remind(plans)
        results: list[StepResult] = []
        waiting: deque[PendingStep] = deque()
        for plan in plans:
            if len(waiting) == _IN_FLIGHT:
                results.append(waiting.popleft().wait())
            waiting.append(self._draft_runner.runner.submit(plan))
        return results + [pending.wait() for pending in waiting]

    def _remind(self, plans: list[StepPlan]) -> None:
        """Noise depends on how many tokens the sampler remembers: let them be the known ones."""
        sampler = self._draft_runner.sampler
        if sampler is None or not plans:
            return
        fresh = {new.slot for plan in plans for new in plan.admitted}
        for slot in {row.slot for plan in plans for row in plan.rows} - fresh:
            track = self._tracks[slot]
            sampler.tokens(slot)[track.num_synced :] = track.tokens[track.num_synced :]
            track.num_synced = len(track.tokens)

    # ---- what the pages hold -------------------------------------------------------------------

    def _write(self, track: _Track, start: int, count: int) -> tuple[BlockId, ...]:
        """Returns the blocks that the runner lacks for this row, and none for later ones: a
        recorded step takes a new block for that of its own position.
        """
        size = self._draft_runner.block_size
        end = (start + count - 1) // size + 1
        for index in range(start // size, end):
            self._contents.pop(track.blocks[index], None)
        fresh = tuple(track.blocks[track.num_sent : end])
        track.num_sent = max(track.num_sent, end)
        return fresh

    def _mark(self, track: _Track) -> None:
        """Note the blocks that are full of known tokens."""
        if self._draft_runner.shares_pages:
            return
        size = self._draft_runner.block_size
        for index in reversed(range(track.computed // size)):
            block = track.blocks[index]
            if block in self._contents:
                break
            self._contents[block] = track.digest(index, size)


def _plainly(wish: SamplingParams) -> SamplingParams:
    """What decides which token is likeliest to be sampled; the rest is the target's business."""
    return SamplingParams(
        temperature=wish.temperature, top_p=wish.top_p, top_k=wish.top_k, min_p=wish.min_p
    )


def _num_alike(tokens: Sequence[int], guesses: Sequence[int]) -> int:
    count = 0
    for token, guess in zip(tokens, guesses, strict=False):
        if token != guess:
            break
        count += 1
    return count
