"""The runner's side of grammars: opens matchers from checked grammars, and notes those that failed.

A checked grammar is plain text, so the runner may be in another process than the compiler.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from windlass.config import GrammarConfig
from windlass.core.types import GrammarFailure, SlotInit
from windlass.text.grammar.matcher import Clock, RequestMatcher
from windlass.text.grammar.reasoning import ReasoningFollower

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_MAX_BUILT = 64  # grammars built here, beside those that a compiler in this process has added
_SLOW_S = 0.05  # for the masks of all running requests: ten decode steps of an 8B model
_MAX_KEPT = 64  # matchers kept for requests that may be preempted and return


class BuiltGrammars:
    """Owns compiled grammars by their text.

    A compiler in the same process adds them before their first request starts. Others are built
    when a request starts.
    """

    def __init__(self, build: Callable[[str], LLMatcher]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._added: dict[str, LLMatcher] = {}
        self._built: OrderedDict[str, LLMatcher] = OrderedDict()

    def add(self, grammar: str, matcher: LLMatcher) -> None:
        """Add a grammar, which stays until `drop`."""
        with self._lock:
            self._added[grammar] = matcher

    def drop(self, grammar: str, matcher: LLMatcher) -> None:
        """Undo `add`, unless another matcher was added for this grammar since."""
        with self._lock:
            if self._added.get(grammar) is matcher:
                del self._added[grammar]

    def discard(self, grammar: str) -> None:
        """Forget a grammar that was built here."""
        with self._lock:
            self._built.pop(grammar, None)

    def copy(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of the grammar."""
        with self._lock:
            found = self._added.get(grammar) or self._built.pop(grammar, None)
            if found is None:
                found = self._build(grammar)
            if grammar not in self._added:
                self._built[grammar] = found
                if len(self._built) > _MAX_BUILT:
                    self._built.popitem(last=False)
        return found.deep_copy()


class RequestMatchers:
    """Owns the matchers of running requests, and of a few that may return after a preemption."""

    def __init__(
        self,
        built: BuiltGrammars,
        config: GrammarConfig,
        vocab_size: int,
        clock: Clock = time.thread_time,
    ) -> None:
        """`vocab_size` is the number of logits."""
        self._built = built
        self._timeout_s = config.grammar_step_timeout
        self._clock = clock
        self._mask_words = -(-vocab_size // 32)
        self._executor: LLExecutor | None = None  # its threads start with the first use
        self._was_slow = False  # whether the last masks that were computed in parallel took long
        self._failures: list[GrammarFailure] = []
        # By request: its grammar and its matcher, the latest last.
        self._matchers: OrderedDict[str, tuple[str, RequestMatcher]] = OrderedDict()

    def open(self, new: SlotInit) -> RequestMatcher:
        """The matcher of a request that got a slot, advanced past its generated tokens."""
        output = new.tokens[new.num_prompt :]
        grammar, matcher = self._matchers.pop(new.request_id, ("", None))
        if matcher is None or grammar != new.grammar or not matcher.has_output(output):
            phase = new.sampling.reasoning
            matcher = RequestMatcher(
                self._built.copy(new.grammar) if new.grammar else None,
                step_timeout_s=self._timeout_s,
                on_fail=lambda reason, too_slow: self._fail(new, reason, too_slow),
                clock=self._clock,
                reasoning=None if phase is None else ReasoningFollower(phase),
            )
        self._matchers[new.request_id] = new.grammar, matcher
        if len(self._matchers) > _MAX_KEPT:
            self._matchers.popitem(last=False)
        matcher.catch_up(output)
        return matcher

    def prefetch(self, matchers: Sequence[RequestMatcher]) -> None:
        """Compute the next masks of several requests in parallel.

        The time of each is unknown then. When all together took long, the next masks are computed
        one by one, so that the time limit ends the request whose grammar is slow, and no other.
        """
        pairs = [(each, each.to_prefetch) for each in matchers]
        open_matchers = [(each, own) for each, own in pairs if own is not None]
        if len(open_matchers) < 2 or self._was_slow:
            self._was_slow = False
            return
        import numpy as np
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        self._executor = self._executor or LLExecutor()
        masks = np.zeros((len(open_matchers), self._mask_words), dtype=np.int32)
        began = time.perf_counter()
        own = [(matcher, i) for i, (_, matcher) in enumerate(open_matchers)]
        fill_next_token_bitmask_par(self._executor, own, masks)
        seconds = time.perf_counter() - began
        self._was_slow = seconds > _SLOW_S
        for (each, _), mask in zip(open_matchers, masks, strict=True):
            each.put_mask(mask.tobytes(), min(seconds, _SLOW_S) / len(open_matchers))

    def take_failures(self) -> tuple[GrammarFailure, ...]:
        """The requests whose grammar failed since the last call."""
        if not self._failures:
            return ()
        taken = tuple(self._failures)
        self._failures.clear()
        return taken

    def _fail(self, new: SlotInit, reason: str, too_slow: bool) -> None:
        self._failures.append(GrammarFailure(new.request_id, reason, too_slow))
        if not too_slow:  # copies share a lexer that may have reached its limits
            self._built.discard(new.grammar)
