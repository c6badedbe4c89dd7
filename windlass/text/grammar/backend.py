"""Compiles grammars: owns the vocabulary, the sandbox, and llguidance in the engine process.

The methods are slow and run in threads. The engine process builds only grammars that the sandbox
compiled within its limits.
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
from windlass.text.grammar.sandbox import Cancellation, Sandbox, Verdict
from windlass.text.grammar.vocabulary import Vocabulary, make_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class GrammarBackend:
    """Owns the vocabulary and the sandbox. The first grammar creates both."""

    def __init__(
        self, open_tokenizer: Callable[[], Tokenizer], vocab_size: int, config: GrammarConfig
    ) -> None:
        """`vocab_size` is the number of logits."""
        self._open_tokenizer = open_tokenizer
        self._vocab_size = vocab_size
        self._config = config
        self._lock = threading.Lock()
        self._made: tuple[Sandbox, LLTokenizer] | None = None

    def check(self, structured: StructuredOutputs, cancellation: Cancellation) -> Verdict:
        """Compile structured outputs in the sandbox."""
        return self._parts()[0].check(structured, cancellation)

    def build(self, grammar: str) -> LLMatcher:
        """Compile a grammar that the sandbox accepted. Requests get copies of the matcher."""
        from llguidance import LLMatcher

        limits = parser_limits(self._config)
        matcher = LLMatcher(self._parts()[1], grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # the first mask takes longest; copies share its result
        if matcher.is_error():
            raise EngineError(
                f"the grammar compiled in the sandbox but not in the engine: {matcher.get_error()}"
            )
        return matcher

    def close(self) -> None:
        """End the sandbox's process. The next grammar starts another one."""
        with self._lock:
            if self._made is not None:
                self._made[0].close()

    def _parts(self) -> tuple[Sandbox, LLTokenizer]:
        with self._lock:
            if self._made is None:
                try:
                    tokenizer = self._open_tokenizer()
                    vocabulary = Vocabulary.of(tokenizer, self._vocab_size)
                except Exception as error:  # of any type: the waiting requests report it
                    raise EngineError(
                        "the vocabulary for structured outputs cannot be made: "
                        f"{type(error).__name__}: {error}"
                    ) from error
                sandbox = Sandbox(vocabulary, self._config)
                sandbox.start()  # reads the vocabulary while this process does the same
                own = make_tokenizer(
                    vocabulary, lambda text: tokenizer.encode(text, add_special=False)
                )
                self._made = sandbox, own
            return self._made
