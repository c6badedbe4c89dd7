"""Masks the tokens that a request's grammar forbids.

text/grammar/ computes the masks; this module applies them to logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.core.types import GrammarFailure, SlotInit
from windlass.errors import EngineError
from windlass.text.grammar.matcher import RequestMatcher

_NEVER = float("-inf")


class Matchers(Protocol):
    """The matchers of running requests."""

    def open(self, new: SlotInit) -> RequestMatcher:
        """The matcher of a request that got a slot, advanced past its generated tokens."""
        ...

    def prefetch(self, matchers: Sequence[RequestMatcher]) -> None:
        """Compute the next masks of several requests at once."""
        ...

    def take_failures(self) -> tuple[GrammarFailure, ...]:
        """The requests whose grammar failed since the last call."""
        ...


class Grammar:
    """The grammar state of one request."""

    def __init__(self, matcher: RequestMatcher) -> None:
        self.matcher = matcher

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
        """A packed bitmask of the allowed next tokens; None: no constraint, or the request must end.

        Tokens beyond the end of the mask are forbidden.
        """
        mask = self.matcher.mask()
        return None if mask is None else np.frombuffer(mask, dtype=np.uint8)

    def reads(self, num_in_flight: int) -> bool:
        """Whether the mask after `num_in_flight` more tokens may depend on what these tokens are."""
        return self.matcher.reads(num_in_flight)

    def take(self, token: int) -> None:
        """Advance by a sampled token."""
        self.matcher.take(token)


def open_grammar(matchers: Matchers | None, new: SlotInit) -> Grammar | None:
    """The grammar of an admitted request; None if it has neither a grammar nor a reasoning budget."""
    if not new.grammar and new.sampling.reasoning is None:
        return None
    if matchers is None:
        raise EngineError(f"{new.request_id} has a grammar, but this runner supports none.")
    return Grammar(matchers.open(new))
