"""Drafts from predicted outputs: the client sends the text that it expects, such as a file to edit.

Needs no proposer and no measurements: the scheduler has the tokens, and every runner verifies drafts.
Where a proposer is configured, the prediction's draft replaces the proposer's while the output follows
the prediction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain, islice

from windlass.core.request import Request
from windlass.core.step import Step
from windlass.core.types import SlotId, StepOptions, StepPlan, StepResult

PREDICTED = -1  # kind of these drafts: the governor does not count them

_FIRST_LENGTH = 4  # draft tokens after the output met the prediction again
_MAX_LENGTH = 32  # the length doubles while all draft tokens are accepted
_MIN_MATCH, _MAX_MATCH = 2, 8  # equal tokens after which the output counts as following again
_MAX_CANDIDATES = 64  # places in the prediction to compare
_WINDOW = 2048  # tokens ahead in which the output is looked for


class Prediction:
    """One request's predicted tokens, and the position in them that its output has reached."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)
        self._next = 0  # the end: the output does not follow the prediction
        self._reached = 0  # where it last followed
        self._length = _FIRST_LENGTH
        self._num_misses = 0  # drafts in a row of which no token was accepted
        self._tail: tuple[int, ...] = ()  # the last tokens of the output
        self._places: dict[tuple[int, ...], list[int]] = {}  # by n-gram: positions after it
        self._num_indexed = _MIN_MATCH
        self.num_drafted = 0  # draft tokens that the next row may verify

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow the output by its new tokens."""
        for token in tokens:
            if self.is_followed and self._tokens[self._next] == token:
                self._next = self._reached = self._next + 1
            else:
                self._next = len(self._tokens)
        self._tail = (*self._tail, *tokens)[-_MAX_MATCH:]
        if not self.is_followed:
            self._find()

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Adapt to the result of the last draft."""
        if num_accepted == num_drafts:
            self._length = min(2 * self._length, _MAX_LENGTH)
        else:
            self._length = _FIRST_LENGTH
        self._num_misses = 0 if num_accepted else self._num_misses + 1

    def draft(self) -> tuple[int, ...]:
        """The tokens that follow in the prediction."""
        drafted = self._tokens[self._next : self._next + self._length]
        self.num_drafted = len(drafted)
        return drafted

    @property
    def is_followed(self) -> bool:
        return self._next < len(self._tokens)

    def _find(self) -> None:
        """Follow from where the output meets the prediction again: the next place with its last tokens.

        After drafts that were rejected whole, more tokens have to be the same.
        """
        self._index()
        places = self._places.get(self._tail[-_MIN_MATCH:], [])
        first = bisect_left(places, self._reached)
        num_equal = min(_MIN_MATCH + self._num_misses, _MAX_MATCH)
        for i in islice(chain(range(first, len(places)), range(first)), _MAX_CANDIDATES):
            at = places[i]
            if self._tokens[max(0, at - num_equal) : at] == self._tail[-num_equal:]:
                self._next = self._reached = at
                return

    def _index(self) -> None:
        """Enter the tokens that the output may reach soon: the engine waits for this."""
        end = min(len(self._tokens), self._reached + _WINDOW)
        for at in range(self._num_indexed, end):
            self._places.setdefault(self._tokens[at - _MIN_MATCH : at], []).append(at)
        self._num_indexed = max(self._num_indexed, end)


class Predictions:
    """Owns the predictions of all requests that have one."""

    def __init__(self) -> None:
        self._of: dict[str, Prediction] = {}

    def __len__(self) -> int:
        return len(self._of)

    def enter(self, request_id: str, tokens: Sequence[int]) -> None:
        self._of[request_id] = Prediction(tokens)

    def leave(self, request_id: str) -> None:
        self._of.pop(request_id, None)

    def trim(self, running: Sequence[Request], max_positions: int) -> None:
        """Cut drafts so that the next step samples at most `max_positions`, one of each request."""
        room = max_positions - len(running)
        for request in running:
            if request.draft_kind == PREDICTED and request.drafts:
                request.drafts = request.drafts[: max(0, room)]
                room -= len(request.drafts)

    def options(self, step: Step, options: StepOptions) -> StepOptions:
        """The next plan needs the tokens of requests that follow their prediction."""
        slots: list[SlotId] = []
        for row in step.plan.rows:
            prediction = self._of.get(row.request_id)
            if prediction is not None and prediction.is_followed and row.sample:
                slots.append(row.slot)
        if not slots:
            return options
        no_draft = (*options.no_draft, *slots) if options.draft_length else options.no_draft
        return options._replace(next_plan_waits=True, no_draft=no_draft)

    def draft(
        self,
        step: Step,
        plan: StepPlan,
        result: StepResult,
        withdraw: Callable[[Request], None],
    ) -> None:
        """Follow the tokens of a committed step, and give their requests new drafts.

        `withdraw` is called with the requests whose drafts of a proposer are replaced.
        """
        for (request, _), row, got in zip(step.members, plan.rows, result.rows, strict=True):
            prediction = self._of.get(request.request_id)
            if prediction is None or not row.sample or request.finish is not None:
                continue
            if row.num_drafts and prediction.num_drafted:
                prediction.verified(row.num_drafts, len(got.tokens) - 1)
            prediction.num_drafted = 0
            prediction.advance(got.tokens)
            if request.num_pending or request.slot is None or result.prelaunched:
                continue  # the next row of the request exists already, or it was preempted
            drafts = prediction.draft()
            if drafts:
                request.drafts, request.draft_kind = drafts, PREDICTED
                withdraw(request)
