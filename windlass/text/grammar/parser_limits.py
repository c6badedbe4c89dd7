"""llguidance's own limits, the same in the sandbox and in the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.config import GrammarConfig

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# Earley items per mask. An object with 495 optional properties, about the most that llguidance's
# limit of 2,000 items per row allows, needs 10,000. Time grows faster than the number of items: with
# llguidance's default of 50,000, masks of ambiguous grammars took 0.4 to 2.3 s.
_STEP_MAX_ITEMS = 12_000
_BYTES_PER_LEXER_STATE = 2048  # at most; 600 to 900 were measured
_MIN_LEXER_STATES = 10_000


def parser_limits(config: GrammarConfig) -> LLParserLimits:
    """Bounds of one step's work, and of what a lexer may grow to while it is used."""
    from llguidance import LLParserLimits

    states = config.grammar_memory_bytes // _BYTES_PER_LEXER_STATE
    return LLParserLimits(
        step_max_items=_STEP_MAX_ITEMS,
        max_lexer_states=max(_MIN_LEXER_STATES, states),
        verbose_errors=False,
    )
