"""How many guesses of each request go into the next step: as many as make the batch faster.

Pure Python with no clock of its own: it is told what steps of so many tokens cost, what each step
took, and how many guesses were right. With drafts it gives the most expected tokens per second;
where none pays, nobody guesses and steps are the plain ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from windlass.config import MAX_SPEC_TOKENS
from windlass.core.types import SlotId
from windlass.spec.base import Draft
from windlass.spec.pause import Lengths, Pause
from windlass.spec.slowness import Slowness

_FADE = 0.9  # evidence of one request: about the last ten verifications count
_FADE_ALL = 0.98  # evidence of all requests, by kind of guess
_WEIGHT = 2.0  # verifications that an expectation counts for
_WEIGHT_ALL = 4.0  # and the hope for all requests, whose first guesses may be wrong by chance
_HOPE = 0.6  # acceptance of a kind of guess of which nothing is known yet
_MARGIN = 1.01  # what guesses must promise: costs and chances are estimates
# Of many requests. Those that guess well end early, and the rest go on in smaller, dearer steps.
_MARGIN_OF_MANY = 1.2
_TOO_DEAR = 0.8  # of what was measured, which guesses may cost in truth
_STAY = 0.97  # of the most promised, with which the number of guesses stays as it is
_ASKED = 32  # requests whose records say how many guesses are made, and that try at once
_FEW = 8  # requests: more are many


@dataclass(frozen=True, slots=True)
class _Pauses:
    """Lengths of those between looks, between tries of anybody, and of one request."""

    looks: Lengths
    tries: Lengths
    own_tries: Lengths


_USUAL = _Pauses(Lengths(16, 16, 512), Lengths(1, 32, 512), Lengths(1, 16, 512))
# Where guesses cost nothing to make, and a few requests nothing to verify.
_SHORT = _Pauses(Lengths(16, 8, 8), Lengths(1, 16, 128), Lengths(1, 16, 128))


class Drafting:
    """Seconds that guesses for a number of rows take, by how many are made for each."""

    def __init__(self, one: StepCosts, many: StepCosts, depth: int) -> None:
        """`many`: with `depth` guesses a row, at least two; in between lies a straight line."""
        self.one = one
        self.many = many
        self.depth = depth
        self._known: dict[tuple[int, int], float] = {}  # asked many times a step

    def of(self, num_rows: int, depth: int) -> float:
        known = self._known.get((num_rows, depth))
        if known is None:
            first = self.one.of(num_rows)
            each = max(0.0, self.many.of(num_rows) - first) / (self.depth - 1)
            known = self._known[num_rows, depth] = first + each * (depth - 1) if depth else 0.0
        return known

    def describe(self) -> str:
        """For the start-up table."""
        one, many = 1000 * self.of(1, 1), 1000 * self.of(1, self.depth)
        return f"making 1 guess: {one:.1f} ms, {self.depth}: {many:.1f} ms"


class StepCosts:
    """Seconds of a step by its number of tokens: straight lines between measured points."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """At least two points. A larger step never counts as cheaper than a smaller one."""
        assert len(seconds) > 1
        self._sizes = sorted(seconds)
        self._seconds: list[float] = []
        for size in self._sizes:
            before = self._seconds[-1] if self._seconds else 0.0
            self._seconds.append(max(before, seconds[size]))
        self._known: dict[int, float] = {}  # asked many times a step

    @property
    def points(self) -> dict[int, float]:
        return dict(zip(self._sizes, self._seconds, strict=True))

    def of(self, num_tokens: int) -> float:
        known = self._known.get(num_tokens)
        if known is None:
            known = self._known[num_tokens] = self._between(num_tokens)
        return known

    def _between(self, num_tokens: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        right = min(max(bisect_left(sizes, num_tokens), 1), len(sizes) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (sizes[right] - sizes[left])
        return seconds[left] + slope * (num_tokens - sizes[left])

    def describe(self) -> str:
        """For the start-up table: what verifying costs, at a few sizes."""
        shown = [size for size in (1, 2, 4, 8, 16, 32) if size <= self._sizes[-1]]
        return ", ".join(f"{size}: {1000 * self.of(size):.1f} ms" for size in shown)


@dataclass(slots=True)
class _Record:
    """How the guesses of one request did. Counts fade, so that the latest matter most."""

    hits: list[float] = field(default_factory=list)  # by position
    tries: list[float] = field(default_factory=list)
    pause: Pause = field(default_factory=Pause)  # of its tries
    trying: bool = False  # whether its guess in flight is one

    def chances(self, expected: float, count: int) -> list[float]:
        """The chance that the guess at each position is reached and right."""
        rate, reached, chances = expected, 1.0, []
        for at in range(count):
            if at < len(self.tries):
                rate = (self.hits[at] + _WEIGHT * rate) / (self.tries[at] + _WEIGHT)
            reached *= rate
            chances.append(reached)
        return chances

    def note(self, num_drafts: int, num_accepted: int) -> None:
        missing = num_drafts - len(self.tries)
        self.hits += [0.0] * missing
        self.tries += [0.0] * missing
        for at in range(min(num_accepted + 1, num_drafts)):
            self.tries[at] = _FADE * self.tries[at] + 1
            self.hits[at] = _FADE * self.hits[at] + (at < num_accepted)

    def begin_anew(self) -> None:
        self.hits, self.tries = [], []

    def guesses(self, now: int, lengths: Lengths, trying: bool) -> None:
        """Its guesses go into the next step, because they promise something or as a try."""
        if not trying:
            self.pause.begin_anew()
        self.pause.in_vain(now, lengths)
        self.trying = trying


class Governor:
    """Owns the records of all slots, and what is known of kinds of guesses and of costs.

    Guesses that pay by what is known are verified in every step. Where none do there are pauses,
    the longer the more often in vain (pause.py), of two things. A look asks the proposer for
    guesses, or first whether making them would pay. A try lets a request verify one guess that
    promises too little, since only that shows when guesses are right again; it takes a look, and
    that the pauses for everybody's and for its own tries are over. Both are as at first again when
    guesses pay. Looks are also when half of the requests are gone, and, where they are free and
    there are few, with each new one.
    """

    def __init__(
        self,
        costs: StepCosts,
        most_positions: int,
        plain: StepCosts | None = None,
        drafting: Drafting | None = None,
        most_guesses: int = MAX_SPEC_TOKENS,
        most_of: Callable[[int], int] | None = None,
    ) -> None:
        """A step has room to sample `most_positions`; one of n rows for `most_of(n)` guesses in each.

        `plain` are the costs of steps that carry no guesses, where these are cheaper; `drafting`
        those of making guesses, where that is not free.
        """
        self._costs = costs
        self._plain = plain or costs
        self._drafting = drafting
        self._most_guesses = most_guesses
        self._most_positions = most_positions
        self._most_of = cache(most_of or (lambda _: most_guesses))  # asked several times a step
        self._now = 0  # steps so far
        self._looks, self._tries = Pause(), Pause()
        self._pauses = _USUAL
        self._rows_then = 0  # at the last look
        self._slots: dict[SlotId, _Record] = {}
        self._last_kind = 0
        self._kinds: dict[int, tuple[float, float]] = {}  # first guesses: right, tried
        # By the size of a batch, roughly: with more requests a host has more to do.
        self._slowness: defaultdict[int, Slowness] = defaultdict(Slowness)
        self._last_depth = 0
        self._hopeless: dict[int, bool] = {}  # by rows

    def admit(self, slot: SlotId) -> None:
        record = self._slots[slot] = _Record()
        # It does not try with the first guess that is let go.
        record.pause.in_vain(self._now, self._pauses.own_tries)
        if self._pauses is _SHORT:
            self._looks.begin_anew()

    def forget(self, slot: SlotId) -> None:
        self._slots.pop(slot, None)

    def allows(self, num_rows: int) -> bool:
        """Whether a step of so many rows may have guesses at all."""
        return self._most_of(num_rows) > 0

    def rests(self, num_rows: int) -> bool:
        """Whether the next step is part of a pause; then it has passed, and nothing is to be asked."""
        if 2 * num_rows <= self._rows_then or self._looks.is_over(self._now + 1):
            return False
        self._now += 1
        return True

    def wanted(self, slots: Sequence[SlotId], free: bool) -> int:
        """How many guesses to make for each of these requests after the next step.

        This or `rests` is called once a step, which is how time passes here.
        """
        self._now += 1
        num_rows = len(slots)
        if not self.allows(num_rows):
            return 0
        if 2 * num_rows <= self._rows_then:
            self._looks.begin_anew()
        if not self._looks.is_over(self._now):
            return 0
        self._rows_then = num_rows
        self._pauses = _SHORT if free and num_rows <= _FEW else _USUAL
        depth, pays = self._depth(slots)
        if pays:
            return depth
        if not self.is_hopeless(num_rows) and self._tries.is_over(self._now):
            # Requests that began a moment ago may try soon: until then this was no look.
            return int(any(record.pause.is_over(self._now) for record in self._records(slots)))
        self._looks.in_vain(self._now, self._pauses.looks)
        return 0

    def is_hopeless(self, num_rows: int) -> bool:
        """Whether guesses are so dear to make that they would not pay if all were right."""
        if self._drafting is None:
            return False
        if num_rows not in self._hopeless:
            most = min(self._most_guesses, self._most_of(num_rows))
            rates = [
                (1 + depth) / self._seconds(num_rows, num_rows * (1 + depth), depth)
                for depth in range(1, most + 1)
            ]
            highest = max(rates, default=0.0) / _TOO_DEAR
            self._hopeless[num_rows] = highest < self._least(num_rows)
        return self._hopeless[num_rows]

    def _least(self, num_rows: int) -> float:
        """What guesses must promise: tokens of a row per second."""
        return _margin(num_rows) / self._plain.of(num_rows)

    def _records(self, slots: Sequence[SlotId]) -> list[_Record]:
        """Of as many requests as are asked."""
        return [self._slots[slot] for slot in slots[:_ASKED] if slot in self._slots]

    def _depth(self, slots: Sequence[SlotId]) -> tuple[int, bool]:
        """The number of guesses that promises the most, at least one, and whether they would pay.

        They are not made yet, and making them may cost more than they give.
        """
        most = min(self._most_guesses, self._most_of(len(slots)))
        if self._drafting is None:
            return most, True
        expected = self._expected(self._last_kind)
        hopes = [record.chances(expected, most) for record in self._records(slots)]
        hopes = hopes or [[0.0] * most]
        num_rows, tokens, rates = len(slots), 1.0, {}
        for depth in range(1, most + 1):
            tokens += sum(hope[depth - 1] for hope in hopes) / len(hopes)
            rates[depth] = tokens / self._seconds(num_rows, num_rows * (1 + depth), depth)
        best = max(rates, key=rates.__getitem__)
        highest = rates[best]
        # A step that follows another of its kind may be launched before it is planned.
        if rates.get(self._last_depth, 0.0) > _STAY * highest:
            best = self._last_depth
        self._last_depth = best
        dearness = self._slowness_of(num_rows).dearness
        return best, highest > dearness * self._least(num_rows)

    def _seconds(self, num_rows: int, num_tokens: int, depth: int) -> float:
        """What a step with guesses should take, the making of those for the next included."""
        making = self._drafting.of(num_rows, depth) if self._drafting is not None else 0.0
        return self._costs.of(num_tokens) + making

    def took(
        self, num_tokens: int, guessed: bool, seconds: float, num_rows: int = 0, depth: int = 0
    ) -> None:
        """A step without prompt tokens took so long; `depth` guesses a row were made after it."""
        dearer = guessed or (depth > 0 and self._drafting is not None)
        usual = self._seconds(num_rows, num_tokens, depth) if dearer else self._plain.of(num_tokens)
        self._slowness_of(num_rows or num_tokens).note(dearer, seconds / usual)

    def verified(self, slot: SlotId, kind: int, num_drafts: int, num_accepted: int) -> None:
        """So many of a request's guesses were right."""
        record = self._slots[slot]
        right = num_accepted > 0
        hits, tries = self._kinds.get(kind, (0.0, 0.0))
        self._kinds[kind] = (_FADE_ALL * hits + right, _FADE_ALL * tries + 1)
        self._last_kind = kind
        if record.trying and right:
            record.begin_anew()
            self._looks.end(self._now)
        record.trying = False
        record.note(num_drafts, num_accepted)

    def choose(self, slots: Sequence[SlotId], drafts: Sequence[Draft], others: int) -> list[int]:
        """How many guesses of each draft to verify. `others`: tokens of the next step's prompts."""
        if all(draft.begun for draft in drafts):  # costs nothing more
            counts = [len(draft.tokens) for draft in drafts]
        else:
            counts = self._most_promising(slots, drafts, others)
        if any(counts):
            self._looks.begin_anew()
            self._tries.begin_anew()
        else:
            self._looks.in_vain(self._now, self._pauses.looks)
        self._let_some_try(slots, drafts, counts)
        return counts

    def _most_promising(
        self, slots: Sequence[SlotId], drafts: Sequence[Draft], others: int
    ) -> list[int]:
        """How many guesses of each draft give the most tokens per second.

        Chances fall from guess to guess, so the best so many guesses of the batch are the first
        few of each request, and one pass over them in order of chance finds the best number.
        """
        counts = [0] * len(drafts)
        offers, widest = [], self._most_of(len(drafts))
        for i, (slot, draft) in enumerate(zip(slots, drafts, strict=True)):
            if draft.tokens:
                expected = self._expected(draft.kind)
                count = min(len(draft.tokens), widest)
                chances = self._slots[slot].chances(expected, count)
                offers += [(chance, i) for chance in chances]
        if not offers:
            return counts
        offers.sort(key=lambda offer: -offer[0])
        room = max(0, self._most_positions - len(drafts))
        depth = max(len(draft.tokens) for draft in drafts)
        likeliest = [chance for chance, _ in offers[:room]]
        for _, i in offers[: self._best_number(likeliest, len(drafts), others, depth)]:
            counts[i] += 1
        return counts

    def _let_some_try(
        self, slots: Sequence[SlotId], drafts: Sequence[Draft], counts: list[int]
    ) -> None:
        """Add tries to the guesses that promise something."""
        may_try, tried = self._tries.is_over(self._now), False
        own_tries = self._pauses.own_tries
        room = min(_ASKED, self._most_positions - len(drafts) - sum(counts))
        for i, (slot, draft) in enumerate(zip(slots, drafts, strict=True)):
            record = self._slots[slot]
            if counts[i]:
                record.guesses(self._now, own_tries, trying=False)
            elif may_try and room > 0 and draft.tokens and record.pause.is_over(self._now):
                record.guesses(self._now, own_tries, trying=True)
                counts[i], room, tried = 1, room - 1, True
        if tried:
            self._tries.in_vain(self._now, self._pauses.tries)
            self._slowness_of(len(slots)).doubt()

    def _expected(self, kind: int) -> float:
        """The chance of a guess before anything is known of its request."""
        hits, tries = self._kinds.get(kind, (0.0, 0.0))
        return (hits + _WEIGHT_ALL * _HOPE) / (tries + _WEIGHT_ALL)

    def _best_number(self, chances: Sequence[float], num_rows: int, others: int, depth: int) -> int:
        """How many guesses, the likeliest first, give the most tokens per second, prompts included."""
        base = num_rows + others
        dearer = self._slowness_of(num_rows).dearness
        most = _margin(num_rows) * base / self._plain.of(base)
        best, tokens = 0, float(base)
        for count, chance in enumerate(chances, start=1):
            tokens += chance
            rate = tokens / (dearer * self._seconds(num_rows, base + count, depth))
            if rate > most:
                best, most = count, rate
        return best

    def _slowness_of(self, num_rows: int) -> Slowness:
        return self._slowness[num_rows.bit_length()]


def _margin(num_rows: int) -> float:
    return _MARGIN if num_rows <= _FEW else _MARGIN_OF_MANY
