"""Limits of tenants on a clock of the test."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from windlass.serve.problems import BudgetExceeded, NotAllowed, RateLimited, StorageError
from windlass.serve.tenant_limits import TenantLimits
from windlass.serve.tenants import Budget, Tenant
from windlass.serve.usage import Numbers, UsageKey, UsageQuery, UsageStore


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def refused() -> list[str]:
    return []


@pytest.fixture
def limits(clock: Clock, refused: list[str]) -> TenantLimits:
    return TenantLimits(None, refused.append, clock)


def test_requests_per_minute_refill_with_time(
    limits: TenantLimits, clock: Clock, refused: list[str]
) -> None:
    tenant = Tenant(name="a", requests_per_minute=3)
    headers = [limits.take(tenant, 10).headers for _ in range(3)][-1]
    assert headers == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    with pytest.raises(RateLimited, match="3 requests per minute") as caught:
        limits.take(tenant, 10)
    assert caught.value.retry_after_s == pytest.approx(20)
    assert caught.value.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused == ["tenant_requests_per_minute"]
    clock.now += 19.9
    with pytest.raises(RateLimited):
        limits.take(tenant, 10)
    clock.now += 0.2
    limits.take(tenant, 10)
    limits.take(Tenant(name="b", requests_per_minute=3), 10)  # tenants do not share a bucket


def test_reserved_tokens_are_replaced_by_the_used_ones(limits: TenantLimits, clock: Clock) -> None:
    tenant = Tenant(name="a", tokens_per_minute=600)
    first = limits.take(tenant, 500)
    assert first.headers["x-ratelimit-remaining-tokens"] == "100"
    with pytest.raises(RateLimited, match="600 tokens per minute") as caught:
        limits.take(tenant, 200)
    assert caught.value.retry_after_s == pytest.approx(10)
    limits.charge("a", 50)
    first.release()
    assert limits.state_of(tenant)["remaining_tokens"] == 550
    # A request larger than the limit runs when the bucket is full, and leaves a debt.
    with pytest.raises(RateLimited):
        limits.take(tenant, 5000)
    clock.now += 5
    large = limits.take(tenant, 5000)
    limits.charge("a", 1200)
    large.release()
    with pytest.raises(RateLimited) as caught:
        limits.take(tenant, 1)
    assert caught.value.retry_after_s == pytest.approx(60.1)


def test_requests_at_once_and_changed_limits(limits: TenantLimits, clock: Clock) -> None:
    tenant = Tenant(name="a", max_concurrent_requests=1)
    hold = limits.take(tenant, 1)
    with pytest.raises(RateLimited, match="max_concurrent_requests"):
        limits.take(tenant, 1)
    limits.take(Tenant(name="a", max_concurrent_requests=2), 1)  # raised meanwhile
    clock.now += 30
    hold.release()
    hold = limits.take(Tenant(name="a", max_concurrent_requests=2), 1)
    with pytest.raises(RateLimited) as caught:
        limits.take(tenant, 1)
    assert caught.value.retry_after_s > 1  # from the durations of earlier requests


def test_a_raised_rate_keeps_what_was_used(limits: TenantLimits) -> None:
    for _ in range(10):
        limits.take(Tenant(name="a", requests_per_minute=10), 1)
    wider = Tenant(name="a", requests_per_minute=25)
    assert limits.take(wider, 1).headers["x-ratelimit-remaining-requests"] == "14"


def test_budgets_are_read_from_the_store_and_begin_again(tmp_path: Path, clock: Clock) -> None:
    clock.now = 86_400 * 45 + 3_600  # 15 February 1970, one o'clock
    budget = Budget(usd=1.0, per="day")
    tenant = Tenant(name="a", budget=budget)
    path = tmp_path / "usage.sqlite"
    for _ in range(2):  # the second time, the costs come from the file
        store = UsageStore(path, clock)
        store.add(UsageKey("a", "k", "m"), Numbers(requests=1, usd=0.6))
        store.close()
    store = UsageStore(path, clock)
    refused: list[str] = []
    limits = TenantLimits(store, refused.append, clock)
    with pytest.raises(BudgetExceeded, match=r"\$1 per day") as caught:
        limits.take(tenant, 1)
    assert caught.value.retry_after_s == 23 * 3_600
    assert refused == ["tenant_budget"]
    monthly = Budget(usd=5.0, per="month")
    assert store.spent("a", monthly) == pytest.approx(1.2)
    assert store.seconds_left(monthly) == (14 * 24 - 1) * 3_600
    limits.take(Tenant(name="a", budget=monthly), 1)
    clock.now += 23 * 3_600
    limits.take(tenant, 1)
    assert store.spent("a", budget) == 0.0
    store.add(UsageKey("a", "k", "m"), Numbers(usd=0.25))
    assert (store.spent("a", budget), store.spent("a", monthly)) == (0.25, pytest.approx(1.45))
    store.close()


_FAULT = "CREATE TEMP TRIGGER full BEFORE INSERT ON usage BEGIN SELECT RAISE(FAIL, 'full'); END"


async def _usage_of_a_full_disk(path: Path, clock: Clock) -> UsageStore:
    """A store with two sums in memory, of which it may keep as many, and a third that is lost."""
    store = UsageStore(path, clock, max_pending=2)
    store.add(UsageKey("a", "k", "m"), Numbers(requests=1, output_tokens=7))
    await store.write()
    store._database.run_blocking(lambda connection: connection.execute(_FAULT))
    for tenant in ("a", "b", "a", "c"):
        store.add(UsageKey(tenant, "k", "m"), Numbers(requests=1, output_tokens=1, usd=0.5))
    for _ in range(3):
        with pytest.raises(StorageError):
            await store.write()
    return store


def test_usage_is_kept_in_memory_up_to_a_bound(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.now = 86_400 * 45 + 3_600

    async def body() -> None:
        store = await _usage_of_a_full_disk(tmp_path / "usage.sqlite", clock)
        assert (store.num_write_errors, store.num_unwritten_requests) == (3, 3)
        assert store.num_lost_requests == 1
        assert store.spent("c", Budget(usd=1.0, per="day")) == 0.5  # budgets count it
        query = UsageQuery(since=0, until=clock.now + 1, tenant="a")
        for bucket, start in (
            ("hour", clock.now),
            ("day", 86_400 * 45),
            ("month", 86_400 * 31),
        ):
            [(at, key, numbers)] = await store.read(query._replace(bucket=bucket))
            assert (at, key.tenant, numbers.requests, numbers.output_tokens) == (start, "a", 3, 9)
        assert [text for text in caplog.messages if "cannot be written" in text] == [
            caplog.messages[1]
        ]
        assert "usage is lost" in caplog.messages[0]
        store._database.run_blocking(lambda connection: connection.execute("DROP TRIGGER full"))
        await store.write()
        assert (store.num_unwritten_requests, len(caplog.messages)) == (0, 3)
        assert "written again" in caplog.messages[2]
        found = await store.read(query._replace(tenant=None))
        assert [(key.tenant, numbers.requests) for _, key, numbers in found] == [("a", 3), ("b", 1)]
        store.close()

    asyncio.run(body())


def test_priorities() -> None:
    assert Tenant(name="a").priority(None) == 0
    assert Tenant(name="a").priority(-5) == -5
    modest = Tenant(name="a", max_priority=2)
    assert [modest.priority(each) for each in (None, 2, 7)] == [2, 2, 7]
    with pytest.raises(NotAllowed, match="at least 2 for this key, got 1"):
        modest.priority(1)
    assert Tenant(name="a", max_priority=-3).priority(None) == 0
