"""Rules tokens out that would break the form a request's output must have.

Each request has a matcher that knows where its output stands, and says of every token of the
vocabulary whether it may come next. The vocabulary is made when the first request needs it, in a
thread, while others go on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.core.text import Tokenizer
from windlass.core.types import Admission
from windlass.errors import EngineError

_NEVER = float("-inf")
_KEPT = 64  # forms that were asked for last, ready to be used again


class Grammar:
    """Where one request's output stands."""

    def __init__(self, matcher: Any, broke: Callable[[str], None]) -> None:
        """`broke` is told why the form can be followed no further."""
        self._matcher = matcher
        self._broke = broke

    def rule_out(self, scores: Tensor, logits: Tensor) -> Tensor:
        """Scores of a row with only those tokens left that may come next.

        Where other wishes leave none of these, the form counts more than they do.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._is_broken():
            return scores
        bits = np.unpackbits(mask, bitorder="little", count=scores.shape[-1])
        forbidden = torch.from_numpy(bits == 0).to(scores.device)
        left = scores.masked_fill(forbidden, _NEVER)
        return left if left.max() > _NEVER else logits.masked_fill(forbidden, _NEVER)

    def take(self, token: int) -> None:
        """The output goes on with this one."""
        if not self._matcher.is_error():
            self._matcher.consume_token(token)
            self._is_broken()

    def _is_broken(self) -> bool:
        broken = self._matcher.is_error()
        if broken:
            self._broke(self._matcher.get_error().partition("\n")[0])
        return bool(broken)


class Grammars:
    """Owns the vocabulary as llguidance reads it, the latest forms, and what failed."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        """`vocab_size`: tokens that have logits."""
        self.failed: dict[str, str] = {}  # by request
        self._open_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Any = None
        self._maker: threading.Thread | None = None
        self._problem: str | None = None
        self._ready: OrderedDict[str, Any] = OrderedDict()

    def prepare(self) -> bool:
        """Begin to make the vocabulary, in a thread; whether it is there."""
        if self._vocabulary is not None:
            return True
        if self._problem is not None:
            problem, self._problem, self._maker = (
                self._problem,
                None,
                None,
            )  # the next may try again
            raise EngineError(f"the vocabulary for structured outputs cannot be made: {problem}")
        if self._maker is None:
            self._maker = threading.Thread(target=self._make, daemon=True)
            self._maker.start()
        return False

    def _make(self) -> None:
        try:
            self._vocabulary = _vocabulary(self._open_tokenizer(), self._vocab_size)
        except Exception as error:  # the border of the thread: told to who asks next
            self._problem = f"{type(error).__name__}: {error}"

    def open(self, new: Admission) -> Grammar | None:
        """For a request that got a slot, at the end of what it has generated before."""
        form = new.sampling.structured_outputs
        if form is None:
            return None
        matcher = self._matcher(form.spelled()).deep_copy()

        def broke(why: str) -> None:
            self.failed.setdefault(new.request_id, why)

        grammar = Grammar(matcher, broke)
        for token in new.tokens[new.num_prompt :]:
            grammar.take(token)
        return grammar

    def _matcher(self, spelled: str) -> Any:
        """One that has seen nothing."""
        found = self._ready.get(spelled)
        if found is None:
            from llguidance import LLMatcher

            if self._vocabulary is None:  # nobody prepared it
                self._vocabulary = _vocabulary(self._open_tokenizer(), self._vocab_size)
            found = self._ready[spelled] = LLMatcher(self._vocabulary, spelled, log_level=0)
        self._ready.move_to_end(spelled)
        if len(self._ready) > _KEPT:
            self._ready.popitem(last=False)
        return found


class _Words:
    """A vocabulary under the names that llguidance asks for."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, count: int) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(count)]
        self.eos_token_id = tokenizer.eos_ids[0]
        # They stand for no text, even where it looks like theirs.
        self.special_token_ids = tokenizer.special_ids
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode(text, add_special=False)


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    words = _Words(tokenizer, min(tokenizer.vocab_size, vocab_size))
    return LLTokenizer(TokenizerWrapper(words), eos_token=list(tokenizer.eos_ids))
