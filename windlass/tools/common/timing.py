"""How one request of a load went: when it was asked, sent, answered, and with how many tokens.

Knows neither HTTP nor the engine; whoever sends requests fills these in. All times are seconds of one
clock, such as `time.perf_counter`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Timing:
    """One request, ended well or not; then `error` says why, and what came before it is here.

    asked_at   the load wanted it sent       |
    sent_at    it was sent                   |.|      later than asked: a limit of concurrency
    times[0]   its first tokens came         |.|..|
    times[-1]  its last tokens came          |.|..|.|.|.|
    ended_at   nothing more will come        |.|..|.|.|.||
    """

    asked_at: float
    sent_at: float
    ended_at: float
    num_prompt: int
    num_output: int
    times: tuple[float, ...] = ()  # of every chunk that brought tokens
    tokens: tuple[int, ...] = ()  # how many each brought
    error: str | None = None
    num_rejected: int = 0  # how often the server said 429
    num_cached: int | None = None  # prompt tokens that came from a prefix cache; None: not said
    text: str = field(default="", repr=False)

    @property
    def is_good(self) -> bool:
        return self.error is None

    @property
    def first_at(self) -> float | None:
        """When its first tokens came."""
        return self.times[0] if self.times else None

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.times[0] - self.sent_at if self.times else None

    @property
    def e2el(self) -> float:
        """Seconds to the last token; to the end where none came."""
        return (self.times[-1] if self.times else self.ended_at) - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None where there is no second."""
        if self.num_output < 2 or not self.times:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_output - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between chunks, whatever number of tokens each brought."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
