"""Tables of measured seconds: a step by its number of tokens, drafting by its number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping


class StepCosts:
    """Seconds of a step by its number of tokens: straight lines between measured points."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """At least two points. A larger step never counts as cheaper than a smaller one."""
        assert len(seconds) > 1
        self._sizes = sorted(seconds)
        self._seconds: list[float] = []
        for size in self._sizes:
            before = self._seconds[-1] if self._seconds else 0.0
            self._seconds.append(max(before, seconds[size]))
        self._known: dict[int, float] = {}  # asked many times a step

    @property
    def points(self) -> dict[int, float]:
        return dict(zip(self._sizes, self._seconds, strict=True))

    def of(self, num_tokens: int) -> float:
        known = self._known.get(num_tokens)
        if known is None:
            known = self._known[num_tokens] = self._between(num_tokens)
        return known

    def _between(self, num_tokens: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        right = min(max(bisect_left(sizes, num_tokens), 1), len(sizes) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (sizes[right] - sizes[left])
        return seconds[left] + slope * (num_tokens - sizes[left])

    def describe(self) -> str:
        """For the start-up table: the cost of a verification at a few sizes."""
        shown = [size for size in (1, 2, 4, 8, 16, 32) if size <= self._sizes[-1]]
        return ", ".join(f"{size}: {1000 * self.of(size):.1f} ms" for size in shown)


class Drafting:
    """Seconds of drafting, by the number of rows and of draft tokens for each."""

    def __init__(self, by_depth: Mapping[int, StepCosts], prompt_token_s: float = 0.0) -> None:
        """`by_depth`: for at least two numbers of draft tokens, the seconds by rows.

        `prompt_token_s`: for each token of a prompt that the drafter has to compute first.
        """
        assert len(by_depth) > 1
        self.by_depth = dict(sorted(by_depth.items()))
        self.prompt_token_s = prompt_token_s
        self._known: dict[int, StepCosts] = {}  # by rows; asked many times a step

    def of(self, num_rows: int, depth: int) -> float:
        if depth < 1:
            return 0.0
        known = self._known.get(num_rows)
        if known is None:
            points = {at: costs.of(num_rows) for at, costs in self.by_depth.items()}
            known = self._known[num_rows] = StepCosts(points)
        return known.of(depth)

    def describe(self) -> str:
        """For the start-up table."""
        shown = [f"{depth}: {1000 * self.of(1, depth):.1f} ms" for depth in self.by_depth]
        prompts = ""
        if self.prompt_token_s:
            prompts = f", a prompt token before: {1000 * self.prompt_token_s:.2f} ms"
        return f"drafting {', '.join(shown)}{prompts}"
