"""The limits of llguidance's parser, equal in the sandbox and in the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.config import GrammarConfig

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# Earley items per mask. An object with 495 optional properties needs 10,000; it is about the largest
# object that llguidance's limit of 2,000 items per row allows. Time grows faster than the number of
# items: with llguidance's default of 50,000, masks of ambiguous grammars took 0.4 to 2.3 s.
_STEP_MAX_ITEMS = 12_000
_BYTES_PER_LEXER_STATE = 2048  # upper bound; 600 to 900 were measured
_MIN_LEXER_STATES = 10_000


def parser_limits(config: GrammarConfig) -> LLParserLimits:
    """Limit the work of one step, and the growth of a lexer during generation."""
    from llguidance import LLParserLimits

    states = config.grammar_memory_bytes // _BYTES_PER_LEXER_STATE
    return LLParserLimits(
        step_max_items=_STEP_MAX_ITEMS,
        max_lexer_states=max(_MIN_LEXER_STATES, states),
        verbose_errors=False,
    )
