"""Summarises the timings of a load, with the field names and the output of `vllm bench serve`.

Figures cover successful requests. Percentiles are interpolated linearly, as in numpy.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.errors import ConfigError
from windlass.tools.common.requests import Timing

METRICS = ("ttft", "tpot", "itl", "e2el")
TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
PERCENTILES = (90.0, 99.0)
_GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_WIDTH = 50


@dataclass(frozen=True, slots=True)
class Spread:
    """One metric over all requests, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a load. Rates are per second of `duration`."""

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    num_rejected: int = 0
    request_goodput: float | None = None  # None: no targets
    goodput_share: float | None = None  # share of all requests that met every target
    cached_input_tokens: int | None = None  # None: the server does not report it
    spreads: dict[str, Spread] = field(default_factory=dict)  # by metric; absent without values
    errors: dict[str, int] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """All figures in one flat dict, under vLLM's names."""
        row: dict[str, Any] = {
            "duration": round(self.duration, 4),
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": round(self.request_throughput, 4),
            "request_goodput": _rounded(self.request_goodput),
            "goodput_share": _rounded(self.goodput_share),
            "output_throughput": round(self.output_throughput, 3),
            "total_token_throughput": round(self.total_token_throughput, 3),
            "max_output_tokens_per_s": self.max_output_tokens_per_s,
            "max_concurrent_requests": self.max_concurrent_requests,
            "num_rejected": self.num_rejected,
            "cached_input_tokens": self.cached_input_tokens,
        }
        for metric, spread in self.spreads.items():
            for name in ("mean", "median", "std"):
                row[f"{name}_{metric}_ms"] = _rounded(getattr(spread, name))
            for share, value in spread.percentiles.items():
                row[f"p{share:g}_{metric}_ms"] = _rounded(value)
        return row

    def lines(
        self,
        metrics: Sequence[str] = METRICS,
        max_concurrency: int | None = None,
        request_rate: float = math.inf,
    ) -> list[str]:
        """The printed summary; `max_concurrency` and `request_rate` are the load's settings."""
        table: list[tuple[str, Any]] = [
            ("Successful requests:", self.completed),
            ("Failed requests:", self.failed),
        ]
        if self.num_rejected:
            table.append(("Responses 429 (rejected):", self.num_rejected))
        if max_concurrency is not None:
            table.append(("Maximum request concurrency:", max_concurrency))
        if math.isfinite(request_rate):
            table.append(("Request rate configured (RPS):", request_rate))
        table += [
            ("Benchmark duration (s):", self.duration),
            ("Total input tokens:", self.total_input_tokens),
            ("Total generated tokens:", self.total_output_tokens),
            ("Request throughput (req/s):", self.request_throughput),
        ]
        if self.request_goodput is not None:
            table.append(("Request goodput (req/s):", self.request_goodput))
        table += [
            ("Output token throughput (tok/s):", self.output_throughput),
            ("Peak output token throughput (tok/s):", float(self.max_output_tokens_per_s)),
            ("Peak concurrent requests:", self.max_concurrent_requests),
            ("Total token throughput (tok/s):", self.total_token_throughput),
        ]
        if self.cached_input_tokens is not None:
            table.append(("Cached input tokens:", self.cached_input_tokens))
        lines = [
            " Serving Benchmark Result ".center(_WIDTH, "="),
            *(line_of(name, value) for name, value in table),
        ]
        for metric in metrics:
            lines += self._section(metric)
        lines.append("=" * _WIDTH)
        return lines

    def _section(self, metric: str) -> list[str]:
        title, short = TITLES[metric]
        lines = [title.center(_WIDTH, "-")]
        spread = self.spreads.get(metric)
        if spread is None:
            return [*lines, "no values"]
        lines.append(line_of(f"Mean {short} (ms):", spread.mean))
        lines.append(line_of(f"Median {short} (ms):", spread.median))
        for share, value in spread.percentiles.items():
            lines.append(line_of(f"P{share:g} {short} (ms):", value))
        return lines


def line_of(name: str, value: Any) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {shown:<9}".rstrip()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Percentile `share` (0 to 100) of sorted values, interpolated linearly."""
    at = (len(ordered) - 1) * share / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def values_of(timings: Sequence[Timing], metric: str) -> list[float]:
    """Sorted values of a metric over successful requests, in milliseconds."""
    good = [timing for timing in timings if timing.is_good]
    found: list[float | None] = []
    if metric == "itl":
        found = [gap for timing in good for gap in timing.itls]
    else:
        found = [getattr(timing, metric) for timing in good]
    return sorted(1e3 * value for value in found if value is not None)


def spread_of(values: Sequence[float], percentiles: Sequence[float]) -> Spread:
    """Statistics of sorted values; there must be at least one."""
    return Spread(
        mean=statistics.fmean(values),
        median=percentile(values, 50),
        std=statistics.pstdev(values),
        percentiles={share: percentile(values, share) for share in percentiles},
    )


def summarise(
    timings: Sequence[Timing],
    duration: float,
    goodput: Mapping[str, float] | None = None,
    percentiles: Sequence[float] = PERCENTILES,
) -> Summary:
    """Summarise; `goodput` holds the maximum ttft, tpot and e2el in milliseconds."""
    good = [timing for timing in timings if timing.is_good]
    num_in, num_out = sum(t.num_prompt for t in good), sum(t.num_output for t in good)
    spreads = {}
    for metric in METRICS:
        values = values_of(timings, metric)
        if values:
            spreads[metric] = spread_of(values, percentiles)
    per_s = 1 / duration if duration > 0 else 0.0
    cached = [t.num_cached for t in good if t.num_cached is not None]
    num_meeting = sum(_meets(t, goodput) for t in good) if goodput else None
    return Summary(
        duration=duration,
        completed=len(good),
        failed=len(timings) - len(good),
        total_input_tokens=num_in,
        total_output_tokens=num_out,
        request_throughput=len(good) * per_s,
        output_throughput=num_out * per_s,
        total_token_throughput=(num_in + num_out) * per_s,
        max_output_tokens_per_s=max(tokens_by_second(timings), default=0),
        max_concurrent_requests=peak_concurrency(timings),
        num_rejected=sum(t.num_rejected for t in timings),
        request_goodput=None if num_meeting is None else num_meeting * per_s,
        goodput_share=None if num_meeting is None else num_meeting / max(1, len(timings)),
        cached_input_tokens=sum(cached) if cached else None,
        spreads=spreads,
        errors=dict(Counter(t.error for t in timings if t.error is not None)),
    )


def _meets(timing: Timing, goodput: Mapping[str, float]) -> bool:
    """Whether a request meets all targets; a single-token request has no TPOT and meets it."""
    values = {name: getattr(timing, name) for name in goodput}
    return all(value is None or 1e3 * value <= goodput[name] for name, value in values.items())


def tokens_by_second(timings: Sequence[Timing]) -> list[int]:
    """Output tokens in each second since the first request was sent."""
    if not timings:
        return []
    began = min(timing.sent_at for timing in timings)
    counts: Counter[int] = Counter()
    for timing in timings:
        for at, count in zip(timing.times, timing.tokens, strict=True):
            counts[int(at - began)] += count
    return [counts[second] for second in range(max(counts, default=-1) + 1)]


def peak_concurrency(timings: Sequence[Timing]) -> int:
    """Peak number of requests in flight."""
    # An end sorts before a start at the same time.
    changes = sorted([(t.sent_at, 1) for t in timings] + [(t.ended_at, -1) for t in timings])
    current = peak = 0
    for _, change in changes:
        current += change
        peak = max(peak, current)
    return peak


def parse_goodput(specs: Sequence[str]) -> dict[str, float]:
    """Parse `ttft:500 tpot:40` to milliseconds by metric."""
    targets: dict[str, float] = {}
    for spec in (part for text in specs for part in text.replace(",", " ").split()):
        name, colon, text = spec.partition(":")
        if name not in _GOODPUT_METRICS or not colon:
            raise ConfigError(
                f"--goodput {spec!r}: expected NAME:MILLISECONDS, such as ttft:500 or tpot:40. "
                f"Names: {', '.join(_GOODPUT_METRICS)}."
            )
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"--goodput {spec!r}: expected milliseconds above 0, got {text!r}.")
        if name in targets:
            raise ConfigError(f"--goodput has {name} twice.")
        targets[name] = value
    return targets
