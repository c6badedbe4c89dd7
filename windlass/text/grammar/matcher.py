"""Follows one request's output through its grammar, within a limit of CPU time.

When the grammar fails or takes too long, this request ends with an error and the others continue.
The matcher belongs to the request until it ends, so a preempted request does not repeat the work.
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
        on_break: Callable[[str], None],
        on_timeout: Callable[[str], None],
        clock: Clock = time.thread_time,
    ) -> None:
        """The callbacks receive the reason that ends the request. `clock` returns CPU seconds."""
        self._matcher = matcher
        self._timeout_s = step_timeout_s
        self._on_break = on_break
        self._on_timeout = on_timeout
        self._clock = clock
        self._num_tokens = 0
        self._spent_s = 0.0
        self._ended = False

    def mask(self) -> bytes | None:
        """One bit per token, set where the token may come next. None: the request must end."""
        if self._ended:
            return None
        began = self._clock()
        mask = self._matcher.compute_bitmask()
        self._account(began)
        return None if self._ended else mask

    def take(self, token: int) -> None:
        """Advance by one output token."""
        if self._ended:
            return
        began = self._clock()
        self._matcher.consume_token(token)
        self._num_tokens += 1
        self._account(began)

    def catch_up(self, output: Sequence[int]) -> None:
        """Advance by the tokens of `output` that this matcher has not seen."""
        for token in output[self._num_tokens :]:
            self.take(token)

    def _account(self, began: float) -> None:
        self._spent_s += self._clock() - began
        if self._matcher.is_error():
            self._ended = True
            self._on_break(self._matcher.get_error().partition("\n")[0])
            return
        allowed_s = self._timeout_s * (1 + _SHARE_PER_TOKEN * self._num_tokens)
        if self._spent_s > allowed_s:
            self._ended = True
            self._on_timeout(
                f"following it took {1e3 * self._spent_s:.0f} ms of CPU time for "
                f"{self._num_tokens} tokens, at most {1e3 * allowed_s:.0f} ms are allowed "
                "(--grammar-step-timeout)."
            )
