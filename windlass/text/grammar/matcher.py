"""Follows one request's output through its grammar, within a limit of CPU time.

When the grammar fails or takes too long, this request ends with an error and the others continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

Clock = Callable[[], float]

_SHARE_PER_TOKEN = 0.1  # each token adds this share of the step timeout to the time limit


class RequestMatcher:
    """A request's own copy of a compiled grammar."""

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        step_timeout_s: float,
        on_fail: Callable[[str, bool], None],
        clock: Clock = time.thread_time,
    ) -> None:
        """`on_fail` gets the reason that ends the request, and whether it is its time limit.

        `clock` returns CPU seconds.
        """
        self._matcher = matcher
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
        """One bit per token, set where the token may come next. None: the request must end."""
        if self._ended:
            return None
        mask, self._next_mask = self._next_mask, None
        if mask is None:
            began = self._clock()
            mask = self._matcher.compute_bitmask()
            self._account(self._clock() - began)
        return None if self._ended else mask

    @property
    def to_prefetch(self) -> LLMatcher | None:
        """The matcher whose next mask may be computed ahead; None: the request must end."""
        return None if self._ended else self._matcher

    def put_mask(self, mask: bytes, seconds: float) -> None:
        """Keep a mask that was computed ahead in `seconds`."""
        self._next_mask = mask
        self._account(seconds)

    def take(self, token: int) -> None:
        """Advance by one output token."""
        if self._ended:
            return
        began = self._clock()
        self._matcher.consume_token(token)
        self._tokens.append(token)
        self._next_mask = None
        self._account(self._clock() - began)

    def catch_up(self, output: Sequence[int]) -> None:
        """Advance by the tokens of `output` that this matcher has not seen."""
        for token in output[len(self._tokens) :]:
            self.take(token)

    def _account(self, seconds: float) -> None:
        self._spent_s += seconds
        if self._matcher.is_error():
            self._ended = True
            self._on_fail(self._matcher.get_error().partition("\n")[0], False)
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
