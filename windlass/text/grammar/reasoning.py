"""Follows the reasoning at the beginning of one output: where it ends, and which tokens close it."""

from __future__ import annotations

from enum import Enum, auto

from windlass.core.reasoning import ReasoningPhase, TokenIds


class Stage(Enum):
    """Where an output is."""

    UNDECIDED = auto()  # the tokens so far may begin the reasoning
    REASONING = auto()
    ANSWER = auto()


class ReasoningFollower:
    """Counts the tokens of reasoning, and looks for its end."""

    def __init__(self, phase: ReasoningPhase) -> None:
        self._phase = phase
        self.stage = Stage.UNDECIDED if phase.start else Stage.REASONING
        self._num_tokens = 0  # of the reasoning, without its closing
        self._num_closing = 0  # tokens of the closing that were written
        self._last: TokenIds = ()  # as many as the longest end, or as the beginning has
        self._num_kept = max(map(len, (*phase.ends, phase.start)))

    def take(self, token: int) -> None:
        """Advance by one token of the output."""
        self._last = (*self._last, token)[-self._num_kept :]
        phase = self._phase
        if self.stage is Stage.UNDECIDED:
            if self._last == phase.start:
                self.stage, self._last = Stage.REASONING, ()
            elif self._last != phase.start[: len(self._last)]:
                self.stage = Stage.ANSWER
        elif self.stage is Stage.REASONING:
            if token == self.forced:
                self._num_closing += 1
            else:
                self._num_tokens += 1
            if any(self._last[-len(end) :] == end for end in phase.ends):
                self.stage = Stage.ANSWER

    @property
    def starts_with(self) -> int | None:
        """The token that begins the reasoning here, if one token does."""
        is_first = self.stage is Stage.UNDECIDED and len(self._phase.start) == 1
        return self._phase.start[0] if is_first else None

    @property
    def forced(self) -> int | None:
        """The token that must come next; None: any may."""
        if self.stage is Stage.REASONING and self.may_force(0):
            return self._phase.closing[self._num_closing]
        return None

    def may_force(self, num_in_flight: int) -> bool:
        """Whether a token may be forced after this many further tokens."""
        limit = self._phase.max_tokens
        if limit is None or self.stage is Stage.ANSWER:
            return False
        return self._num_tokens + num_in_flight >= limit
