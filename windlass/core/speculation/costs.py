"""Cost tables in measured seconds: steps by their number of tokens, drafting by the draft length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A percentage is the mean change of the speed in the worlds of tests/speculative/constants.py.
FEW = 8  # up to this many requests are few. 4: -0.3 %, worst -12 %; 16: 0.0 %, worst -0.9 %
# Minimum expected gain, since costs and acceptance are estimates. 1: -0.05 %, worst -0.9 %; 1.05:
# -0.5 %, worst -5 %.
_MARGIN = 1.01
# With many requests: those with good drafts end early, and the remaining ones run in smaller steps
# that cost more per token. Without it, test_never_slower.py loses up to 9 %.
_MARGIN_OF_MANY = 1.2


def margin(num_rows: int) -> float:
    """The speed, relative to plain steps, above which drafts are profitable."""
    return _MARGIN if num_rows <= FEW else _MARGIN_OF_MANY


class StepCosts:
    """Seconds of a step by its number of tokens, interpolated linearly between measured points."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """Takes at least two points. A larger step never counts as cheaper than a smaller one."""
        assert len(seconds) > 1
        self._sizes = sorted(seconds)
        self._seconds: list[float] = []
        for size in self._sizes:
            before = self._seconds[-1] if self._seconds else 0.0
            self._seconds.append(max(before, seconds[size]))
        self._memo: dict[int, float] = {}  # looked up many times per step

    @property
    def points(self) -> dict[int, float]:
        return dict(zip(self._sizes, self._seconds, strict=True))

    def of(self, num_tokens: int) -> float:
        """Seconds of a step of `num_tokens`."""
        known = self._memo.get(num_tokens)
        if known is None:
            known = self._memo[num_tokens] = self._interpolate(num_tokens)
        return known

    def _interpolate(self, num_tokens: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        right = min(max(bisect_left(sizes, num_tokens), 1), len(sizes) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (sizes[right] - sizes[left])
        return seconds[left] + slope * (num_tokens - sizes[left])

    def describe(self) -> str:
        """Describe the cost of a verification at a few sizes, for the start-up table."""
        shown = [size for size in (1, 2, 4, 8, 16, 32) if size <= self._sizes[-1]]
        return ", ".join(f"{size}: {1000 * self.of(size):.1f} ms" for size in shown)


class DraftCosts:
    """Seconds of drafting, by the number of rows and the draft length."""

    def __init__(self, by_length: Mapping[int, StepCosts], prompt_token_s: float = 0.0) -> None:
        """`by_length`: for at least two draft lengths, the seconds by rows.

        `prompt_token_s`: seconds per prompt token that a draft model computes before it drafts.
        """
        assert len(by_length) > 1
        self.by_length = dict(sorted(by_length.items()))
        self.prompt_token_s = prompt_token_s
        self._memo: dict[int, StepCosts] = {}  # by rows; looked up many times per step

    def of(self, num_rows: int, draft_length: int) -> float:
        """Seconds of drafting `draft_length` tokens for each of `num_rows`."""
        if draft_length < 1:
            return 0.0
        known = self._memo.get(num_rows)
        if known is None:
            points = {length: costs.of(num_rows) for length, costs in self.by_length.items()}
            known = self._memo[num_rows] = StepCosts(points)
        return known.of(draft_length)

    def describe(self) -> str:
        """Describe drafting for the start-up table."""
        shown = [f"{length}: {1000 * self.of(1, length):.1f} ms" for length in self.by_length]
        prompts = ""
        if self.prompt_token_s:
            prompts = f", per prompt token: {1000 * self.prompt_token_s:.2f} ms"
        return f"drafting {', '.join(shown)}{prompts}"


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of verifications, of plain steps, and of drafting; None: drafting is free."""

    verify: StepCosts
    plain: StepCosts
    drafting: DraftCosts | None = None

    def never_profitable(self, max_draft_tokens: int) -> bool:
        """Whether drafts of one request lose time even if every draft token is accepted."""
        if self.drafting is None:
            return False
        seconds = [
            (self.verify.of(1 + length) + self.drafting.of(1, length)) / (1 + length)
            for length in range(1, 1 + max_draft_tokens)
        ]
        return min(seconds) * margin(1) > self.plain.of(1)

    def describe(self) -> str:
        """Describe the costs for the start-up table."""
        parts = [self.verify.describe(), f"plain step: {1000 * self.plain.of(1):.2f} ms"]
        if self.drafting is not None:
            parts.append(self.drafting.describe())
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "verify": self.verify.points,
            "plain": self.plain.points,
            "drafting": None,
        }
        if self.drafting is not None:
            by_length = {length: each.points for length, each in self.drafting.by_length.items()}
            found["drafting"] = by_length
            found["prompt_token_s"] = self.drafting.prompt_token_s
        return found

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Costs:
        """Read the result of `to_json`; anything else raises KeyError, TypeError or ValueError."""
        drafting = None
        if found["drafting"] is not None:
            by_length = {int(at): _points(each) for at, each in found["drafting"].items()}
            if len(by_length) < 2:
                raise ValueError("fewer than two draft lengths")
            drafting = DraftCosts(by_length, float(found["prompt_token_s"]))
        return cls(_points(found["verify"]), _points(found["plain"]), drafting)


def _points(found: dict[str, float]) -> StepCosts:
    if len(found) < 2:
        raise ValueError("fewer than two sizes")
    return StepCosts({int(size): float(seconds) for size, seconds in found.items()})
