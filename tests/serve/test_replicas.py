"""Several replicas behind one server: routing, faults, metrics and admin calls."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import openai
import pytest

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, build_engine, counting
from windlass.core.card import EngineReport
from windlass.engine import Engine
from windlass.errors import CheckpointError
from windlass.serve.client import EngineClient
from windlass.serve.health import RestartPolicy

PROMPTS = [f"{number}: " + "words " * 60 for number in range(8)]


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    with running(num_replicas=2, price_per_hour=2.0, admin_key=("boss",)) as server:
        server.http.headers["Authorization"] = "Bearer boss"
        yield server


def ready(server: Server) -> None:
    wait_until(lambda: server.http.get("/health/ready").json() == {"status": "ok"})


def kill(server: Server, replica: int) -> None:
    os.kill(server.client.replicas[replica].pid or 0, signal.SIGKILL)


def num_running(server: Server) -> list[int]:
    return [replica.stats.num_running for replica in server.client.replicas]


def test_outputs_equal_those_of_one_engine(pair: Server, server: Server) -> None:
    bodies = [{"prompt": prompt, "max_tokens": 20, "n": 2} for prompt in PROMPTS]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda body: pair.complete(**body).json()["choices"], bodies))
    assert found == [server.complete(**body).json()["choices"] for body in bodies]
    # Ties take turns: both replicas have computed.
    for replica in ("0", "1"):
        assert pair.metric("generation_tokens_total", replica=replica) > 0


def test_a_conversation_finds_its_prefix(pair: Server) -> None:
    """Both replicas serve other requests in between."""
    before = pair.metric("prompt_tokens_cached_total")
    for turn in range(1, 6):
        for user in range(4):
            prompt = f"user {user} " * 10 + "turn " * 8 * turn
            reply = pair.complete(prompt=prompt, max_tokens=1).json()
            assert reply["choices"][0]["finish_reason"] == "length"
    queried = 4 * sum(70 + 40 * turn for turn in range(2, 6))
    assert pair.metric("prompt_tokens_cached_total") - before > 0.6 * queried
    hits = [pair.metric("prefix_cache_hits_total", replica=each) for each in ("0", "1")]
    assert min(hits) > 0


def test_metrics_have_a_label_per_replica(pair: Server, server: Server) -> None:
    text = pair.http.get("/metrics").text
    for name in ("engine_up", "num_requests_running", "kv_cache_usage_perc"):
        for replica in "01":
            assert f'windlass:{name}{{model_name="counter",replica="{replica}"}}' in text
    assert text.count("# TYPE windlass:num_requests_running ") == 1
    assert 'windlass:requests_in_flight{model_name="counter"}' in text
    single = server.http.get("/metrics").text
    assert 'windlass:engine_up{model_name="counter"} 1.0' in single
    assert "replica=" not in single
    names = [
        {line.split("{")[0] for line in each.splitlines() if "{" in line and "cost_" not in line}
        for each in (text, single)
    ]
    assert names[0] >= names[1]


def test_admin_calls_reach_all_replicas(pair: Server) -> None:
    for prompt in PROMPTS:
        pair.complete(prompt=prompt, max_tokens=1)
    memory = pair.http.get("/memory").json()["replicas"]
    assert [each["replica"] for each in memory] == [0, 1]
    cached = sum(each["blocks"]["cached"]["blocks"] for each in memory)
    assert pair.http.post("/reset_prefix_cache").json()["num_blocks"] == cached > 0
    reply = pair.complete(prompt=PROMPTS[0], max_tokens=4).json()
    explained = pair.http.get(f"/v1/requests/{reply['id']}/explain").json()
    assert explained["state"] == "ended"
    assert explained["completions"][0]["cost"]["usd"] > 0
    assert pair.http.get("/health/generate").json()["status"] == "ok"
    assert pair.http.get("/load").json()["server_load"] == 0


def test_replicas_share_the_price_of_the_machine(pair: Server) -> None:
    """Idle time included, two replicas cost what the machine costs."""
    pair.complete(prompt="SLOW", max_tokens=50)
    summary = pair.http.get("/cost").json()
    assert summary["price_per_hour"] == 2.0
    seconds = [each.stats.account for each in pair.client.replicas]
    up_s = sum(each.prefill_s + each.decode_s + each.idle_s for each in seconds) / 2
    assert summary["usd"]["total"] >= 0.9 * up_s * 2.0 / 3600


def test_killing_a_replica_loses_no_stream_of_the_other() -> None:
    """Streams of the dead replica end with an error; all others are complete."""
    slow_start = RestartPolicy(first_pause_s=1.0)
    with running(num_replicas=2, restarts=slow_start) as server, ThreadPoolExecutor(8) as pool:

        def stream(number: int) -> str:
            chunks = server.openai.completions.create(
                model="counter", prompt=f"SLOW {number}", max_tokens=150, stream=True
            )
            try:
                return "".join(chunk.choices[0].text for chunk in chunks)
            except openai.APIError as error:
                return f"error: {error}"

        streams = [pool.submit(stream, number) for number in range(8)]
        wait_until(lambda: sum(num_running(server)) == 8)
        assert min(num_running(server)) >= 2
        expected = num_running(server)[1]
        kill(server, 0)
        wait_until(lambda: server.http.get("/health/ready").json()["status"] == "degraded")
        health = server.http.get("/health/ready")
        assert health.status_code == 200
        assert "replica 0: the engine process was ended by signal 9" in health.json()["reason"]
        assert server.http.get("/health/generate").json()["status"] == "degraded"
        assert server.metric("engine_up", replica="0") == 0
        assert server.metric("engine_up", replica="1") == 1
        # The dead replica gets no traffic.
        assert server.complete(prompt="other", max_tokens=2).status_code == 200
        texts = [each.result(60) for each in streams]
        whole = [text for text in texts if not text.startswith("error")]
        assert [len(text) for text in whole] == [150] * expected
        assert all("signal 9 while this request was running" in t for t in texts if t not in whole)
        ready(server)
        assert server.metric("engine_up", replica="0") == 1
        assert server.client.num_in_flight == 0


def test_requests_that_were_not_started_go_to_another_replica() -> None:
    one_slot = counting(Options(max_num_seqs=1))
    with running(one_slot, num_replicas=2) as server, ThreadPoolExecutor(4) as pool:
        long = [pool.submit(server.complete, prompt=f"SLOW {n}", max_tokens=80) for n in range(2)]
        wait_until(lambda: num_running(server) == [1, 1])
        queued = [pool.submit(server.complete, prompt=f"q{n}", max_tokens=3) for n in range(2)]
        wait_until(lambda: [r.stats.num_waiting for r in server.client.replicas] == [1, 1])
        kill(server, 1)
        assert [each.result(60).status_code for each in queued] == [200, 200]
        assert sorted(each.result(60).status_code for each in long) == [200, 503]
        ready(server)


def test_a_request_is_resent_once() -> None:
    one_slot = counting(Options(max_num_seqs=1))
    slow_start = RestartPolicy(first_pause_s=30.0)
    with (
        running(one_slot, num_replicas=3, restarts=slow_start, shutdown_timeout=0.1) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        for number in range(3):
            pool.submit(server.complete, prompt=f"SLOW {number}", max_tokens=2000)
        wait_until(lambda: num_running(server) == [1, 1, 1])
        queued = pool.submit(server.complete, prompt="queued", max_tokens=3)
        alive = {0, 1, 2}
        for _ in range(2):
            wait_until(lambda: any(server.client.replicas[at].stats.num_waiting for at in alive))
            home = next(at for at in alive if server.client.replicas[at].stats.num_waiting)
            alive.remove(home)
            kill(server, home)
        reply = queued.result(60)
        assert reply.status_code == 503
        assert "before this request was started" in reply.json()["error"]["message"]
        assert f"replica {home}:" in reply.json()["error"]["message"]
        assert server.stop() == 0  # ends the request that still runs


def test_a_poison_request_kills_at_most_two_engines() -> None:
    """It is blocked on all replicas after its second strike."""
    with running(num_replicas=2) as server:
        statuses = []
        for _ in range(4):
            ready(server)
            statuses.append(server.complete(prompt="DIE").status_code)
        assert statuses == [503, 422, 422, 422]
        assert server.complete(prompt="other", max_tokens=2).status_code == 200


def test_a_hung_replica_is_replaced_while_the_other_serves() -> None:
    with running(num_replicas=2, hang_timeout=1.0) as server:
        pid = server.client.replicas[0].pid
        os.kill(pid or 0, signal.SIGSTOP)
        wait_until(lambda: server.http.get("/health/ready").json()["status"] == "degraded")
        for number in range(4):
            assert server.complete(prompt=f"p{number}", max_tokens=2).status_code == 200
        wait_until(lambda: server.client.replicas[0].pid not in (pid, None))
        ready(server)


def test_one_replica_may_fail_for_good() -> None:
    """The server goes on with the other, and exits when that fails, too."""
    never = RestartPolicy(max_restarts=0)
    with running(num_replicas=2, restarts=never) as server:
        kill(server, 0)
        wait_until(lambda: "not restarted" in server.http.get("/health/ready").text)
        assert server.complete(max_tokens=2).status_code == 200
        assert server.http.get("/health/live").status_code == 200
        assert [each["replica"] for each in server.http.get("/memory").json()["replicas"]] == [1]
        kill(server, 1)
        wait_until(server.client.failed.is_set)
        assert server.stop() == 1


def build_with_own_file(folder: Path) -> tuple[Engine, EngineReport]:
    return build_engine(Options(sleep_file=str(folder / str(os.getpid()))))


def build_one(file: Path) -> tuple[Engine, EngineReport]:
    """Build once; all other builds fail."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        raise CheckpointError("the other replica has it.") from None
    return build_engine(Options())


def test_no_process_is_left_when_a_replica_cannot_start(tmp_path: Path) -> None:
    async def main() -> None:
        before = {each.pid for each in multiprocessing.active_children()}
        client = EngineClient(partial(build_one, tmp_path / "flag"), num_replicas=2)
        with pytest.raises(CheckpointError, match="the other replica has it"):
            await client.start()
        assert [replica.pid for replica in client.replicas] == [None, None]
        assert {each.pid for each in multiprocessing.active_children()} <= before
        await client.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_all_replicas_sleep_and_wake(tmp_path: Path) -> None:
    build = partial(build_with_own_file, tmp_path)
    with running(build, num_replicas=2, admin_key=("boss",)) as server:
        server.http.headers["Authorization"] = "Bearer boss"
        for level in (1, 2):
            reply = server.http.post("/admin/sleep", json={"level": level})
            assert reply.json()["level"] == level, reply.text
            pids = [replica.pid for replica in server.client.replicas]
            assert len(list(tmp_path.iterdir())) == (2 if level == 1 else 0)
            assert pids.count(None) == (0 if level == 1 else 2)
            assert server.complete().status_code == 503
            assert server.http.post("/admin/wake", json={}).status_code == 200
            assert list(tmp_path.iterdir()) == []
            replies = [server.complete(prompt=p, max_tokens=2) for p in PROMPTS[:4]]
            assert [each.status_code for each in replies] == [200] * 4
        assert server.http.get("/health/ready").json() == {"status": "ok"}


def test_replicas_that_cannot_all_sleep_stay_awake(tmp_path: Path) -> None:
    build = partial(build_with_own_file, tmp_path)
    slow_start = RestartPolicy(first_pause_s=2.0)
    with running(build, num_replicas=2, restarts=slow_start, admin_key=("boss",)) as server:
        server.http.headers["Authorization"] = "Bearer boss"
        kill(server, 0)
        wait_until(lambda: server.http.get("/health/ready").json()["status"] == "degraded")
        assert server.http.post("/admin/sleep", json={"level": 1}).status_code == 503
        assert list(tmp_path.iterdir()) == []
        assert server.complete(max_tokens=2).status_code == 200
