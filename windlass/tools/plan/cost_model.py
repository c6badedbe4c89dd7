"""Step time on one machine with one model, as a function of the rows of the step.

    seconds = decode rows                          piecewise linear in their number
            + prefill tokens                       what they add to a step with these rows
            + sampling                             for each prompt that ends in the step
            + attention                            KV tokens read, by kind of row
            + scheduling                           host time

step_costs.py measures the parameters. Draft tokens are not part of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windlass.core.speculation.costs import StepCosts
from windlass.core.types import Row


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds per step. `windows`: sliding windows by layer; empty if no layer has one."""

    tokens: StepCosts  # by prefill tokens, without attention
    rows: StepCosts  # by decode rows with sampling, without attention
    choice_s: float  # sampling one token, in addition to `tokens`
    one_kv_s: float  # per KV token that a decode row alone in its step reads
    kv_s: float  # per KV token that one of several decode rows reads
    pair_s: float  # per prefill token and KV token before it
    host_s: float = 0.0  # scheduling, per step
    host_row_s: float = 0.0  # scheduling, per row
    windows: tuple[int | None, ...] = ()

    def device_seconds(self, rows: Sequence[Row]) -> float:
        """Return the runner's time for these rows."""
        num_rows = num_prompt = num_sampled = 0
        context = pairs = 0.0
        for row in rows:
            if row.num_tokens == 1:
                num_rows += 1
                context += self._kv_tokens_read(row.start + 1)
            else:
                num_prompt += row.num_tokens
                num_sampled += row.sample
                middle = row.start + (row.num_tokens + 1) / 2
                pairs += row.num_tokens * self._kv_tokens_read(middle)
        kv_s = self._kv_token_seconds(num_rows)
        seconds = num_sampled * self.choice_s + kv_s * context + self.pair_s * pairs
        if not num_rows:
            return seconds + self.tokens.of(num_prompt)
        if num_prompt:
            seconds += self.tokens.of(num_rows + num_prompt) - self.tokens.of(num_rows)
        return seconds + self.rows.of(num_rows)

    def host_seconds(self, num_rows: int) -> float:
        return self.host_s + num_rows * self.host_row_s

    def decode_seconds(self, num_rows: int, context: float) -> float:
        """Return the time of a decode step in which every row has `context` KV tokens."""
        reading = self._kv_token_seconds(num_rows) * num_rows * self._kv_tokens_read(context)
        return self.rows.of(num_rows) + reading + self.host_seconds(num_rows)

    def _kv_token_seconds(self, num_rows: int) -> float:
        return self.one_kv_s if num_rows == 1 else self.kv_s

    def _kv_tokens_read(self, context: float) -> float:
        """Mean over layers."""
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
        """Parse what `to_json` returned; raise KeyError, TypeError or ValueError for other input."""
        values: dict[str, Any] = {name: float(found[name]) for name in _NUMBERS}
        if min(values.values()) < 0:
            raise ValueError("a cost is below 0")
        values["windows"] = tuple(None if item is None else int(item) for item in found["windows"])
        return cls(tokens=_points(found["tokens"]), rows=_points(found["rows"]), **values)


_NUMBERS = ("choice_s", "one_kv_s", "kv_s", "pair_s", "host_s", "host_row_s")


def _points(found: dict[str, float]) -> StepCosts:
    if len(found) < 2:
        raise ValueError("fewer than two sizes")
    return StepCosts({int(size): float(seconds) for size, seconds in found.items()})
