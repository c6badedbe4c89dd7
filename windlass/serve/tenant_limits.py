"""Limits of tenants: requests and tokens per minute, requests at once, and the budget.

The server's process counts for all HTTP workers. A request reserves its prompt tokens and the most
tokens that it may generate, at most the whole limit; when it ends, the reservation is given back, and
the tokens that it has used are taken instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from windlass.serve.problems import BudgetExceeded, RateLimited
from windlass.serve.tenants import Tenant
from windlass.serve.usage import UsageStore

_MINUTE_S = 60.0
_MIN_WAIT_S = 1.0
_NEW_SHARE = 0.2  # weight of the last request in the mean duration

Headers = Mapping[str, str]


@dataclass(slots=True)
class _Bucket:
    """A token bucket that is full after a minute without use. It may be in debt."""

    capacity: float
    level: float
    at: float

    def advance(self, now: float, capacity: float) -> None:
        """Refill up to `now`; a changed capacity keeps what was used."""
        self.level += capacity - self.capacity
        self.capacity = capacity
        elapsed_s = max(0.0, now - self.at)
        self.level = min(capacity, self.level + elapsed_s * capacity / _MINUTE_S)
        self.at = now

    def give(self, amount: float) -> None:
        self.level = min(self.capacity, self.level + amount)

    def seconds_until(self, level: float) -> float:
        return max(0.0, (level - self.level) * _MINUTE_S / self.capacity)

    def headers(self, kind: str) -> dict[str, str]:
        """OpenAI's headers."""
        return {
            f"x-ratelimit-limit-{kind}": str(int(self.capacity)),
            f"x-ratelimit-remaining-{kind}": str(max(0, int(self.level))),
            f"x-ratelimit-reset-{kind}": _duration(self.seconds_until(self.capacity)),
        }


@dataclass(slots=True)
class _Counts:
    """What the requests of one tenant have taken."""

    num_running: int = 0
    mean_s: float = _MIN_WAIT_S  # duration of its requests
    requests: _Bucket | None = None
    tokens: _Bucket | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """An admitted request, until `release`. `headers`: of its response."""

    release: Callable[[], None]
    headers: Headers = field(default_factory=dict)


class Limits(Protocol):
    """Where requests of limited tenants are counted."""

    async def admit(self, tenant: Tenant, num_tokens: int) -> Hold:
        """Count a request that takes up to `num_tokens`; raises RateLimited."""
        ...


class TenantLimits:
    """Owns the counts of all tenants. `on_reject` gets the name of the limit, for the metrics."""

    def __init__(
        self,
        usage: UsageStore | None,
        on_reject: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._usage = usage
        self._on_reject = on_reject
        self._clock = clock
        self._counts: dict[str, _Counts] = {}

    async def admit(self, tenant: Tenant, num_tokens: int) -> Hold:
        return self.take(tenant, num_tokens)

    def take(self, tenant: Tenant, num_tokens: int) -> Hold:
        """Count a request that takes up to `num_tokens`; raises RateLimited."""
        counts, began = self._advance(tenant), self._clock()
        self._check_budget(tenant)
        running, most = counts.num_running, tenant.max_concurrent_requests
        if most is not None and running >= most:
            wait_s = counts.mean_s / most
            self._refuse(counts, "max_concurrent_requests", f"{running} requests run now", wait_s)
        if (bucket := counts.requests) is not None and (wait_s := bucket.seconds_until(1)) > 0:
            limit = f"{bucket.capacity:.0f} requests per minute"
            self._refuse(counts, "requests_per_minute", limit, wait_s)
        reserved = 0.0
        if (bucket := counts.tokens) is not None:
            reserved = min(num_tokens, bucket.capacity)
            if (wait_s := bucket.seconds_until(reserved)) > 0:
                limit = (
                    f"{bucket.capacity:.0f} tokens per minute; the request may take {num_tokens} "
                    "(prompt and max_tokens)"
                )
                self._refuse(counts, "tokens_per_minute", limit, wait_s)
            bucket.level -= reserved
        if counts.requests is not None:
            counts.requests.level -= 1
        counts.num_running += 1

        def release() -> None:
            counts.num_running -= 1
            counts.mean_s += _NEW_SHARE * (self._clock() - began - counts.mean_s)
            if counts.tokens is not None:
                counts.tokens.give(reserved)

        return Hold(release, _headers(counts))

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Take the tokens that a request has used."""
        counts = self._counts.get(tenant)
        if counts is not None and counts.tokens is not None:
            counts.tokens.level -= num_tokens

    def state_of(self, tenant: Tenant) -> dict[str, float | int | None]:
        """The counts of a tenant now, for the admin endpoints."""
        counts = self._advance(tenant)
        requests, tokens, budget = counts.requests, counts.tokens, tenant.budget
        usage = self._usage
        return {
            "running_requests": counts.num_running,
            "remaining_requests": None if requests is None else max(0, int(requests.level)),
            "remaining_tokens": None if tokens is None else max(0, int(tokens.level)),
            "spent_usd": None
            if budget is None or usage is None
            else usage.spent(tenant.name, budget),
        }

    def _advance(self, tenant: Tenant) -> _Counts:
        counts, now = self._counts.setdefault(tenant.name, _Counts()), self._clock()
        counts.requests = _advanced(counts.requests, tenant.requests_per_minute, now)
        counts.tokens = _advanced(counts.tokens, tenant.tokens_per_minute, now)
        return counts

    def _check_budget(self, tenant: Tenant) -> None:
        budget, usage = tenant.budget, self._usage
        if budget is None or usage is None:  # without a store, a budget is refused at the start
            return
        spent = usage.spent(tenant.name, budget)
        if spent >= budget.usd:
            self._on_reject("tenant_budget")
            raise BudgetExceeded(
                f"the tenant has spent its budget of ${budget.usd:g} per {budget.per} "
                f"(${spent:.6g}); the next {budget.per} begins at midnight UTC.",
                usage.seconds_left(budget),
            )

    def _refuse(self, counts: _Counts, reason: str, limit: str, wait_s: float) -> None:
        self._on_reject(f"tenant_{reason}")
        wait_s = max(_MIN_WAIT_S, wait_s)
        raise RateLimited(
            f"the tenant's limit {reason} is reached ({limit}); try again in about {wait_s:.0f} s.",
            wait_s,
            _headers(counts),
        )


def _advanced(bucket: _Bucket | None, capacity: int | None, now: float) -> _Bucket | None:
    if capacity is None:
        return None
    if bucket is None:
        return _Bucket(capacity, capacity, now)
    bucket.advance(now, capacity)
    return bucket


def _headers(counts: _Counts) -> Headers:
    headers: dict[str, str] = {}
    for kind, bucket in (("requests", counts.requests), ("tokens", counts.tokens)):
        if bucket is not None:
            headers |= bucket.headers(kind)
    return headers


def _duration(seconds: float) -> str:
    """A duration as OpenAI writes it: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    minutes, rest = divmod(round(seconds, 1), 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
