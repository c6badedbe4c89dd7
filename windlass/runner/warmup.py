"""The steps that an engine on CUDA runs before it serves requests.

A kernel is compiled when it is first launched, which takes seconds, and many have variants for the numbers
of tokens and decodes. Capturing graphs compiles those of small steps. The steps here are larger than any
graph. The largest ones also show how much memory a step needs beside the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from windlass.core.types import Row, SlotId, StepOptions, StepPlan

_MIN_TOKENS = 1024  # mixed graphs cover smaller steps
_SHORT_CHUNK = 2  # tokens
_CACHED = 4  # times a chunk's tokens: what attention gathers at a time


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Plans whose rows have no blocks of their own."""

    largest: StepPlan  # prompts only, all hidden states are read
    variants: list[StepPlan]  # the first one has chunks behind cached tokens, too
    cached: StepPlan  # a step of the most tokens, behind cached ones

    @property
    def smallest_first(self) -> list[StepPlan]:
        """The plans to compute. `cached` takes long on a GPU, and only its memory is of interest."""
        return [*self.variants, self.largest]


def warmup_plans(*, max_tokens: int, max_rows: int, max_positions: int, slot: SlotId) -> WarmUp:
    """`max_tokens` and `max_rows`: of a step; `max_positions`: of a request; `slot`: of padding rows."""

    def mixed(num_tokens: int, num_decodes: int, *, cached: bool) -> StepPlan:
        """Decodes, a short chunk and long ones. `cached`: the long ones are behind cached tokens."""
        rows = [_row(slot, 0, count) for count in (*[1] * num_decodes, _SHORT_CHUNK)]
        left = num_tokens - num_decodes - _SHORT_CHUNK
        for count in _divided(left, max(1, max_positions // 2)):
            num_cached = min(_CACHED * count, max_positions - count) if cached else 0
            rows.append(_row(slot, num_cached, count))
        return StepPlan(rows)

    prompts = [_row(slot, 0, count) for count in _divided(max_tokens, max_positions)]
    largest = StepPlan(prompts, options=StepOptions(needs_all_hidden=True))
    # Variants change at powers of two: GEMMs with the tokens, attention with the decodes.
    sizes = [*_powers(_MIN_TOKENS, max_tokens)] or [max_tokens]
    steps = [(size, 1) for size in sizes]
    steps += [(sizes[0], num_decodes) for num_decodes in (*_powers(2, max_rows), max_rows)]
    fitting = [step for step in steps if step[0] > step[1] + _SHORT_CHUNK]
    variants = [mixed(*step, cached=at == 0) for at, step in enumerate(fitting)]
    has_room = max_tokens > 1 + _SHORT_CHUNK
    return WarmUp(largest, variants, mixed(max_tokens, 1, cached=True) if has_room else largest)


def _powers(first: int, end: int) -> Iterator[int]:
    """Powers of two from `first` on, below `end`."""
    while first < end:
        yield first
        first *= 2


def _divided(num_tokens: int, most: int) -> list[int]:
    """Counts of up to `most` tokens."""
    return [min(most, num_tokens - at) for at in range(0, num_tokens, most)]


def _row(slot: SlotId, start: int, num_tokens: int) -> Row:
    return Row.unowned(slot, (0,) * num_tokens, start=start)
