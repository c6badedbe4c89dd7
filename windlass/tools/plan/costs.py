"""What a step costs on one machine with one model, as a function of what is in it.

    seconds = rows of one token                    by their number, straight lines between points
            + tokens of prompts                    what they add to a step with these rows
            + a choice of the next token           for every prompt that ends
            + keys and values that are read        by each kind of row
            + deciding                             the scheduler's own time

Measured in calibrate.py; guesses of speculation are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windlass.core.types import Row
from windlass.speculative.costs import StepCosts


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of steps. `windows`: of layers that see no further; most models have none."""

    tokens: StepCosts  # of one prompt's tokens, their attention not counted
    rows: StepCosts  # of rows of one token each with the next one chosen, likewise
    choice_s: float  # choosing a next token, beyond `tokens`
    one_kv_s: float  # per token of context, of a row alone in its step
    kv_s: float  # the same, of many rows
    pair_s: float  # per token of a prompt and token before it
    host_s: float = 0.0  # deciding, a step
    host_row_s: float = 0.0  # and for each row of it
    windows: tuple[int | None, ...] = ()

    def device_seconds(self, rows: Sequence[Row]) -> float:
        """What the runner takes for these rows."""
        num_rows = num_prompt = num_chosen = 0
        context = pairs = 0.0
        for row in rows:
            if row.num_tokens == 1:
                num_rows += 1
                context += self._seen(row.start + 1)
            else:
                num_prompt += row.num_tokens
                num_chosen += row.sample
                middle = row.start + (row.num_tokens + 1) / 2
                pairs += row.num_tokens * self._seen(middle)
        seconds = num_chosen * self.choice_s + self._kv(num_rows) * context + self.pair_s * pairs
        if not num_rows:
            return seconds + self.tokens.of(num_prompt)
        if num_prompt:
            seconds += self.tokens.of(num_rows + num_prompt) - self.tokens.of(num_rows)
        return seconds + self.rows.of(num_rows)

    def host_seconds(self, num_rows: int) -> float:
        return self.host_s + num_rows * self.host_row_s

    def decode_seconds(self, num_rows: int, context: float) -> float:
        """A step in which so many rows of so much context advance by a token."""
        reading = self._kv(num_rows) * num_rows * self._seen(context)
        return self.rows.of(num_rows) + reading + self.host_seconds(num_rows)

    def _kv(self, num_rows: int) -> float:
        return self.one_kv_s if num_rows == 1 else self.kv_s

    def _seen(self, context: float) -> float:
        """As a mean over layers."""
        if not self.windows:
            return context
        return sum(min(context, window or context) for window in self.windows) / len(self.windows)

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens.points,
            "rows": self.rows.points,
            **{name: getattr(self, name) for name in _NUMBERS},
            "windows": list(self.windows),
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> CostModel:
        """What `to_json` gave; anything else raises KeyError, TypeError or ValueError."""
        values: dict[str, Any] = {name: float(found[name]) for name in _NUMBERS}
        if min(values.values()) < 0:
            raise ValueError("a cost below 0")
        values["windows"] = tuple(None if item is None else int(item) for item in found["windows"])
        return cls(_points(found["tokens"]), _points(found["rows"]), **values)


_NUMBERS = ("choice_s", "one_kv_s", "kv_s", "pair_s", "host_s", "host_row_s")


def _points(found: dict[str, float]) -> StepCosts:
    if len(found) < 2:
        raise ValueError("fewer than two sizes")
    return StepCosts({int(size): float(seconds) for size, seconds in found.items()})
