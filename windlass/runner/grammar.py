"""Masks the tokens that a request's grammar forbids.

text/grammar/ computes the masks; this module applies them to logits.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.core.types import GrammarFailure, SlotInit, StepPlan, StepResult
from windlass.errors import EngineError
from windlass.text.grammar.matcher import RequestMatcher

_NEVER = float("-inf")


class Matchers(Protocol):
    """The matchers of running requests."""

    def open(self, new: SlotInit) -> RequestMatcher:
        """The matcher of a request that got a slot, advanced past its generated tokens."""
        ...

    def take_failures(self) -> tuple[GrammarFailure, ...]:
        """The requests whose grammar failed since the last call."""
        ...


class Grammar:
    """The grammar state of one request."""

    def __init__(self, matcher: RequestMatcher) -> None:
        self._matcher = matcher

    def mask(self, scores: Tensor, logits: Tensor) -> Tensor:
        """Scores of a row with forbidden tokens at -inf.

        If other sampling params have masked all allowed tokens, the grammar takes precedence over
        them: the result is the masked `logits`.
        """
        allowed = self.allowed()
        if allowed is None:
            return scores
        bits = np.unpackbits(allowed, bitorder="little", count=scores.shape[-1])
        forbidden = torch.from_numpy(bits == 0).to(scores.device)
        left = scores.masked_fill(forbidden, _NEVER)
        return left if left.max() > _NEVER else logits.masked_fill(forbidden, _NEVER)

    def allowed(self) -> NDArray[Any] | None:
        """One bit per token that may come next, as bytes; None: the request must end."""
        mask = self._matcher.mask()
        return None if mask is None else np.frombuffer(mask, dtype=np.uint8)

    def take(self, token: int) -> None:
        """Advance by a sampled token."""
        self._matcher.take(token)


def open_grammar(matchers: Matchers | None, new: SlotInit) -> Grammar | None:
    """The grammar of a request that got a slot; None: no grammar."""
    if not new.grammar:
        return None
    if matchers is None:
        raise EngineError(f"{new.request_id} has a grammar, but this runner supports none.")
    return Grammar(matchers.open(new))


class Submits(Protocol):
    """A runner."""

    def submit(self, plan: StepPlan) -> PendingStep: ...


class PendingStep(Protocol):
    """A step in flight."""

    def wait(self) -> StepResult: ...


class _PendingGrammars:
    def __init__(self, pending: PendingStep, matchers: Matchers) -> None:
        self._pending = pending
        self._matchers = matchers

    def wait(self) -> StepResult:
        result = self._pending.wait()
        failures = self._matchers.take_failures()
        return result._replace(grammar_failures=failures) if failures else result


class GrammarRunner:
    """A runner whose results carry the grammars that failed in a step."""

    def __init__(self, runner: Submits, matchers: Matchers) -> None:
        self._runner = runner
        self._matchers = matchers

    def run(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).wait()

    def submit(self, plan: StepPlan) -> PendingStep:
        return _PendingGrammars(self._runner.submit(plan), self._matchers)
