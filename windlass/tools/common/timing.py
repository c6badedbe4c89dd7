"""Timestamps and token counts of one request of a load.

Independent of HTTP and of the engine. All times are seconds of one clock, such as
`time.perf_counter`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Timing:
    """One finished request. A failed request has an `error`, and the data received before it.

    due_at     scheduled arrival             |
    sent_at    sent                          |.|      after due_at when concurrency is limited
    times[0]   first tokens received         |.|..|
    times[-1]  last tokens received          |.|..|.|.|.|
    ended_at   response complete             |.|..|.|.|.||
    """

    due_at: float
    sent_at: float
    ended_at: float
    num_prompt: int
    num_output: int
    times: tuple[float, ...] = ()  # of every chunk with tokens
    tokens: tuple[int, ...] = ()  # tokens of each of these chunks
    error: str | None = None
    num_rejected: int = 0  # responses with status 429
    num_cached: int | None = None  # prompt tokens from the prefix cache; None: not reported
    text: str = field(default="", repr=False)

    @property
    def is_good(self) -> bool:
        return self.error is None

    @property
    def first_at(self) -> float | None:
        return self.times[0] if self.times else None

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first token."""
        return self.times[0] - self.sent_at if self.times else None

    @property
    def e2el(self) -> float:
        """Seconds from sending to the last token, or to the end when there were no tokens."""
        return (self.times[-1] if self.times else self.ended_at) - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens."""
        if self.num_output < 2 or not self.times:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_output - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between consecutive chunks, independent of their token counts."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
