"""Costs per request and per key, which add up to the price of the elapsed time."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from tests.core.world import World, limits, request
from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting
from windlass.core.types import EngineStats
from windlass.engine import Engine
from windlass.serve.cost import Price, make_cost_tracker
from windlass.serve.metrics import Metrics

PRICE = 3600.0  # one dollar per second


@pytest.fixture(scope="module")
def priced() -> Iterator[Server]:
    build = counting(Options(step_s=0.002))
    with running(
        build, price_per_hour=PRICE, api_key=("one", "two"), admin_key=("boss",)
    ) as server:
        server.http.headers["Authorization"] = "Bearer one"
        yield server


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_and_idle_time_add_up_to_the_elapsed_time(overlap: bool) -> None:
    """The clock advances with every reading; both the plain and the overlapped loop are checked."""
    world = World(limits(num_blocks=20), draft_length=0)
    clock = iter(range(10**6))
    times: list[float] = []

    def now() -> float:
        times.append(float(next(clock)))
        return times[-1]

    runner = world.runner
    runner.submit = lambda plan: _Done(runner.run(plan))  # type: ignore[attr-defined]
    engine = Engine(world.scheduler, runner, clock=now, overlap=overlap)  # type: ignore[arg-type]
    began = times[-1]
    for i in range(8):
        engine.add(request(f"r{i}", [1, 2, 3, i], max_tokens=9, ignore_eos=True))
        engine.step()
    engine.abort("r2")
    while engine.has_work:
        engine.step()
    now()
    stats = engine.stats()
    price = Price(PRICE)
    requests = price.of(engine.traces())
    idle = stats.account.idle_s * price.per_second
    assert requests.total + idle == pytest.approx((times[-1] - began) * PRICE / 3600)
    assert requests.prefill == pytest.approx(stats.account.prefill_s)
    assert idle > 0


class _Done:
    def __init__(self, result: object) -> None:
        self.wait = lambda: result


def test_include_cost_reports_the_cost(priced: Server) -> None:
    plain = priced.complete(prompt="Hello", max_tokens=8).json()["usage"]
    assert "cost" not in plain
    usage = priced.complete(prompt="Hello", max_tokens=8, include_cost=True).json()["usage"]
    assert usage["cost"] >= 8 * 0.002
    parts = usage["cost_details"]
    assert parts["prefill_usd"] + parts["decode_usd"] == pytest.approx(usage["cost"])


def test_streams_and_stop_strings_report_the_cost(priced: Server) -> None:
    text = priced.complete(prompt="Hello", max_tokens=8, include_cost=True, stream=True).text
    last = json.loads(text.split("\n\n")[-3].removeprefix("data: "))
    assert last["usage"]["cost"] > 0
    stopped = priced.complete(prompt="Hi", max_tokens=90, stop=["h"], include_cost=True).json()
    assert stopped["choices"][0]["stop_reason"] == "h"
    assert stopped["usage"]["cost"] > 0


def test_beam_searches_report_the_cost_of_all_rounds(priced: Server) -> None:
    def cost(num_rounds: int) -> float:
        body = {"max_tokens": num_rounds, "n": 2, "use_beam_search": True, "temperature": 0}
        usage = priced.complete(**body, include_cost=True).json()["usage"]
        assert usage["cost"] == pytest.approx(usage["cost_details"]["usd"])
        return float(usage["cost"])

    assert cost(12) > cost(1) > 0


def test_cached_tokens_show_as_saved(priced: Server) -> None:
    body = {"prompt": "the same long prompt for both " * 4, "max_tokens": 1, "include_cost": True}
    first, second = (priced.complete(**body).json()["usage"] for _ in range(2))
    assert first["cost_details"]["saved_usd"] == 0
    assert second["cost_details"]["saved_usd"] > 0


BOSS = {"Authorization": "Bearer boss"}


def cost(server: Server, key: str) -> dict:
    return server.http.get("/cost", headers={"Authorization": f"Bearer {key}"}).json()


def test_keys_have_their_own_sums(priced: Server) -> None:
    before = cost(priced, "boss")["by_key"]
    auth = {"Authorization": "Bearer two"}
    body = {"prompt": "Hi", "max_tokens": 4, "include_cost": True}
    paid = priced.http.post("/v1/completions", json=body, headers=auth).json()["usage"]["cost"]
    (mine,) = cost(priced, "two")["by_key"].items()
    assert mine[1]["usd"] == pytest.approx(paid)
    all_keys = cost(priced, "boss")["by_key"]
    assert all_keys[mine[0]]["usd"] == pytest.approx(paid)
    assert len(all_keys) == len(before) + 1
    # Only an admin key sees the costs of other keys and of the whole server.
    assert sorted(cost(priced, "two")) == ["by_key", "price_per_hour"]
    assert cost(priced, "boss")["usd"]["total"] > paid
    found = priced.metric("cost_usd_by_key_total", BOSS, key=mine[0])
    assert found == pytest.approx(paid)


def test_the_metrics_add_up(priced: Server) -> None:
    threads = [
        threading.Thread(target=priced.complete, kwargs={"prompt": "Hi", "max_tokens": 30})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def settled() -> bool:
        """The engine's stats arrive up to 0.25 s after the traces."""
        busy = sum(priced.metric("cost_usd_total", phase=name) for name in ("prefill", "decode"))
        return busy == pytest.approx(priced.metric("cost_usd_by_key_total", BOSS))

    wait_until(settled)
    summary = cost(priced, "boss")
    usd = summary["usd"]
    assert usd["total"] == pytest.approx(usd["prefill"] + usd["decode"] + usd["idle"])
    assert usd["idle"] > 0
    assert priced.metric("cost_usd_per_hour") == PRICE
    rates = summary["usd_per_million_tokens_last_minute"]
    assert rates["all"] > 0
    assert priced.metric("cost_usd_per_million_tokens", phase="decode") > 0


def test_without_a_price_cost_is_an_error(server: Server) -> None:
    refused = server.complete(max_tokens=1, include_cost=True)
    assert refused.status_code == 400
    assert "--price-per-hour" in refused.json()["error"]["message"]
    assert server.http.get("/cost").status_code == 400
    assert "cost_usd" not in server.http.get("/metrics").text


def test_last_minute_drops_older_samples() -> None:
    now = [0.0]
    tracker = make_cost_tracker(PRICE, "m", Metrics("m").registry)
    tracker._clock = lambda: now[0]
    last = EngineStats()
    for at in range(0, 200, 10):
        now[0] = float(at)
        tokens = 1000 if at <= 100 else 100
        stats = EngineStats(num_generated_tokens=last.num_generated_tokens + tokens)
        stats.account = type(stats.account)(decode_s=last.account.decode_s + 1.0)
        tracker.observe(stats, last)
        last = stats
    assert tracker.last_minute()["decode"] == pytest.approx(1e6 / 100)
