"""Follows one request's output through its reasoning and its grammar, within a limit of CPU time.

When the grammar fails or takes too long, this request ends with an error and the others continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from windlass.text.grammar.reasoning import ReasoningFollower, Stage

if TYPE_CHECKING:
    from llguidance import LLMatcher

Clock = Callable[[], float]

_SHARE_PER_TOKEN = 0.1  # each token adds this share of the step timeout to the time limit


class RequestMatcher:
    """A request's own copy of a compiled grammar, which begins behind its reasoning."""

    def __init__(
        self,
        matcher: LLMatcher | None,
        *,
        step_timeout_s: float,
        on_fail: Callable[[str, bool], None],
        clock: Clock = time.thread_time,
        reasoning: ReasoningFollower | None = None,
    ) -> None:
        """`matcher` None: any answer is allowed. `on_fail` gets the reason that ends the request, and whether it is its time limit.

        `clock` returns CPU seconds.
        """
        self._matcher = matcher
        self._reasoning = reasoning
        self._timeout_s = step_timeout_s
        self._on_fail = on_fail
        self._clock = clock
        self._tokens: list[int] = []
        self._spent_s = 0.0
        self._ended = False
        self._next_mask: bytes | None = None  # computed ahead

    def has_output(self, output: Sequence[int]) -> bool:
        """Whether this matcher has followed the beginning of `output`, and nothing else."""
        return not self._ended and self._tokens == list(output[: len(self._tokens)])

    def mask(self) -> bytes | None:
        """One bit per token, set where the token may come next. None: any may, or the request must end."""
        following = self._reasoning
        if following is not None and following.forced is not None:
            return _bits(following.forced)
        matcher = self.to_prefetch
        if matcher is None:
            return None
        mask, self._next_mask = self._next_mask, None
        if mask is None:
            began = self._clock()
            mask = matcher.compute_bitmask()
            self._account(self._clock() - began, matcher)
        if self._ended:
            return None
        first = None if following is None else following.starts_with
        return mask if first is None else _with_bit(mask, first)

    def reads(self, num_in_flight: int) -> bool:
        """Whether the mask after this many further tokens may depend on them."""
        if self._matcher is not None or self._reasoning is None:
            return True
        return self._reasoning.may_force(num_in_flight)

    @property
    def to_prefetch(self) -> LLMatcher | None:
        """The matcher whose next mask may be computed ahead; None: it has none to compute."""
        is_reasoning = self._reasoning is not None and self._reasoning.stage is Stage.REASONING
        return None if self._ended or is_reasoning else self._matcher

    def put_mask(self, mask: bytes, seconds: float) -> None:
        """Keep a mask that was computed ahead in `seconds`."""
        assert self._matcher is not None
        self._next_mask = mask
        self._account(seconds, self._matcher)

    def take(self, token: int) -> None:
        """Advance by one output token."""
        if self._ended:
            return
        self._tokens.append(token)
        self._next_mask = None
        if self._reasoning is not None and self._reasoning.stage is not Stage.ANSWER:
            was_open = self._reasoning.stage is Stage.REASONING
            self._reasoning.take(token)
            if was_open or self._reasoning.stage is Stage.REASONING:
                return
        if self._matcher is not None:
            began = self._clock()
            self._matcher.consume_token(token)
            self._account(self._clock() - began, self._matcher)

    def catch_up(self, output: Sequence[int]) -> None:
        """Advance by the tokens of `output` that this matcher has not seen."""
        for token in output[len(self._tokens) :]:
            self.take(token)

    def _account(self, seconds: float, matcher: LLMatcher) -> None:
        self._spent_s += seconds
        if matcher.is_error():
            self._ended = True
            self._on_fail(matcher.get_error().partition("\n")[0], False)
            return
        num_tokens = len(self._tokens)
        allowed_s = self._timeout_s * (1 + _SHARE_PER_TOKEN * num_tokens)
        if self._spent_s > allowed_s:
            self._ended = True
            reason = (
                f"following it took {1e3 * self._spent_s:.0f} ms of CPU time for "
                f"{num_tokens} tokens, at most {1e3 * allowed_s:.0f} ms are allowed "
                "(--grammar-step-timeout)."
            )
            self._on_fail(reason, True)


def _bits(token: int) -> bytes:
    """A mask that allows one token."""
    return bytes(token // 8) + bytes([1 << token % 8])


def _with_bit(mask: bytes, token: int) -> bytes:
    at = token // 8
    return mask[:at] + bytes([mask[at] | 1 << token % 8]) + mask[at + 1 :]
