"""What compiles grammars: the vocabulary, the sandbox, and llguidance in the engine's process.

Slow, and called by threads that may wait. Only what the sandbox has compiled within its limits is
built here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from windlass.config import GrammarConfig
from windlass.core.structured import StructuredOutputs
from windlass.core.tokenizer import Tokenizer
from windlass.errors import EngineError
from windlass.text.grammar.parser_limits import parser_limits
from windlass.text.grammar.sandbox import Sandbox, Ticket, Verdict
from windlass.text.grammar.vocabulary import Vocabulary, make_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class GrammarBackend:
    """Owns the vocabulary and the sandbox; both are made when the first grammar needs them."""

    def __init__(
        self, open_tokenizer: Callable[[], Tokenizer], vocab_size: int, config: GrammarConfig
    ) -> None:
        """`vocab_size`: tokens that have logits."""
        self._open_tokenizer = open_tokenizer
        self._vocab_size = vocab_size
        self._config = config
        self._lock = threading.Lock()
        self._made: tuple[Sandbox, LLTokenizer] | None = None

    def check(self, form: StructuredOutputs, ticket: Ticket) -> Verdict:
        """Compile a form in the sandbox."""
        return self._parts()[0].check(form, ticket)

    def build(self, verdict: Verdict) -> LLMatcher:
        """Compile what the sandbox found good, for this process; requests get copies of it."""
        from llguidance import LLMatcher

        limits = parser_limits(self._config)
        matcher = LLMatcher(self._parts()[1], verdict.grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # the first takes longest; copies know its result
        if matcher.is_error():
            raise EngineError(f"the grammar compiled in the sandbox alone: {matcher.get_error()}")
        return matcher

    def _parts(self) -> tuple[Sandbox, LLTokenizer]:
        with self._lock:
            if self._made is None:
                try:
                    tokenizer = self._open_tokenizer()
                    vocabulary = Vocabulary.of(tokenizer, self._vocab_size)
                except Exception as error:  # of any kind: it is told to the requests that wait
                    raise EngineError(
                        "the vocabulary for structured outputs cannot be made: "
                        f"{type(error).__name__}: {error}"
                    ) from error
                sandbox = Sandbox(vocabulary, self._config)
                sandbox.start()  # it reads the vocabulary while this process does
                own = make_tokenizer(
                    vocabulary, lambda text: tokenizer.encode(text, add_special=False)
                )
                self._made = sandbox, own
            return self._made
