"""What one grammar may cost llguidance, at the gateway that accepts it and on the ranks that follow it.

Work is counted, not time, so every process that has the same grammar and the same tokens gives up at the same place. On
one core of 2026 the limits amount to about 100 ms of compiling and 10 ms a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

INITIAL_FUEL, STEP_FUEL = 1_000_000, 150_000  # of the lexer
STEP_ITEMS, ROW_ITEMS = 40_000, 2_000  # of the parser
LEXER_STATES = 50_000  # 1 to 2 kB each
GRAMMAR_SYMBOLS = 200_000


def parser_limits() -> LLParserLimits:
    """Returns the limits as llguidance takes them; its first import takes a moment."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=ROW_ITEMS,
        initial_lexer_fuel=INITIAL_FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=STEP_ITEMS,
        max_lexer_states=LEXER_STATES,
        max_grammar_size=GRAMMAR_SYMBOLS,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
