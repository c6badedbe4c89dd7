"""Cost tables in measured seconds: steps by their number of tokens, drafting by the draft length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping


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
