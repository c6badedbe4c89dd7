"""The SLO controller in a server: metrics, explain and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, build_engine
from windlass.core.card import EngineReport
from windlass.core.slo import SloController, SloTargets
from windlass.engine import Engine


def build(options: Options) -> tuple[Engine, EngineReport]:
    """A counting engine whose steps of 5 ms miss a target of 2 ms."""
    engine, report = build_engine(options)
    targets = SloTargets(tpot_s=0.002, ttft_s=0.05, max_rows=64, max_tokens=4096)
    engine._scheduler._slo = SloController(targets, lambda _warning: None)
    return engine, report


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(partial(build, Options(step_s=0.005)), slo_admission=True) as server:
        yield server


def test_decisions_are_in_the_metrics(server: Server) -> None:
    server.complete(max_tokens=60, ignore_eos=True)
    wait_until(lambda: server.metric("slo_tpot_possible") == 0)
    assert server.metric("slo_limit_changes_total", reason="tpot_impossible") == 1
    assert server.metric("slo_limit", limit="prompt_tokens") >= 16
    assert server.metric("slo_limit", limit="running") >= 1
    assert server.metric("slo_prompt_tokens_per_second") > 0


def test_a_late_first_token_is_refused_with_429(server: Server) -> None:
    server.complete(max_tokens=60, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.complete, prompt="x" * 2000, max_tokens=1)
        wait_until(lambda: server.http.get("/load").json()["num_waiting_tokens"] > 500)
        response = server.complete(prompt="y" * 100, max_tokens=1)
        assert long.result().status_code == 200
    assert response.status_code == 429
    assert "--slo-ttft-ms" in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) >= 1
    assert server.metric("admission_rejections_total", reason="slo_ttft") >= 1
