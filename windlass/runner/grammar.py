"""Masks the tokens that a request's grammar forbids.

text/grammar/ computes the masks; this module applies them to logits.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from windlass.core.types import SlotInit
from windlass.text.grammar.matcher import RequestMatcher

_NEVER = float("-inf")


class Matchers(Protocol):
    """The grammars of the requests in an engine."""

    def matcher(self, request_id: str) -> RequestMatcher: ...


class Grammar:
    """The grammar state of one request."""

    def __init__(self, matcher: RequestMatcher) -> None:
        self._matcher = matcher

    def mask(self, scores: Tensor, logits: Tensor) -> Tensor:
        """Scores of a row with forbidden tokens at -inf.

        If other sampling params have masked all allowed tokens, the grammar takes precedence over
        them: the result is the masked `logits`.
        """
        mask = self._matcher.mask()
        if mask is None:
            return scores
        allowed = np.frombuffer(mask, dtype=np.uint8)
        bits = np.unpackbits(allowed, bitorder="little", count=scores.shape[-1])
        forbidden = torch.from_numpy(bits == 0).to(scores.device)
        left = scores.masked_fill(forbidden, _NEVER)
        return left if left.max() > _NEVER else logits.masked_fill(forbidden, _NEVER)

    def take(self, token: int) -> None:
        """Advance by a sampled token."""
        self._matcher.take(token)


def open_grammar(matchers: Matchers | None, new: SlotInit) -> Grammar | None:
    """The grammar of a request that got a slot, advanced past its generated tokens; None: no grammar."""
    if matchers is None or new.sampling.structured_outputs is None:
        return None
    matcher = matchers.matcher(new.request_id)
    matcher.catch_up(new.tokens[new.num_prompt :])
    return Grammar(matcher)
