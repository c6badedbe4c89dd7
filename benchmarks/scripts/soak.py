"""Serves for half an hour with a fault every minute, and records what the clients and the memory did.

    python benchmarks/scripts/soak.py -o benchmarks/soak.json

Clients send requests whose right answers are known. Faults: the engine killed, the engine stopped, an
HTTP worker killed, clients that disconnect, malformed bodies, the prefix cache emptied, an adapter
loaded and unloaded, grammars that are too large.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fault_load import (
    ADAPTER,
    ADMIN_KEY,
    BOMBS,
    HANG_S,
    MALFORMED,
    Job,
    Oracle,
    Served,
    Tally,
    Usage,
    account,
    disconnect,
    make_jobs,
    send_malformed,
    serving,
)

from windlass.tools.common.record import Record

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
HANG_TIMEOUT_S = 8.0
PAUSE_S = 0.25  # of a client between two requests: other programs share the machine
SAMPLE_S = 5.0
WARM_UP_S = 240.0  # of the server; of an engine: half of that
WARM_UP_REQUESTS = 1200  # of the server: its store keeps 1,000 traces
MAX_GROWTH = 0.02
MAX_FDS = 8  # open connections vary
DROP_S = 2.0  # a worker that is being killed still gets connections


@dataclass(frozen=True, slots=True)
class Sample:
    """The processes at one time."""

    at: float
    usages: dict[tuple[str, int], Usage]  # by role and process id


@dataclass(slots=True)
class Soak:
    """Owns the state of a run."""

    served: Served
    http: httpx.AsyncClient
    oracle: Oracle
    adapter: Path
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    tally: Tally = field(default_factory=Tally)
    ended: list[tuple[float, float, str]] = field(default_factory=list)  # began, ended, outcome
    samples: list[Sample] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    fault_times: list[float] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def client(self, number: int) -> None:
        dice = random.Random(number)
        while not self.stop.is_set():
            began = time.monotonic()
            outcome = await self.oracle.check(self.http, dice, self.tally)
            self.ended.append((began, time.monotonic(), outcome))
            await asyncio.sleep(PAUSE_S if outcome == "right" else 1.0)

    async def sample(self) -> None:
        while not self.stop.is_set():
            roles = {self.served.process.pid: "server"}
            roles |= dict.fromkeys(self.served.worker_pids(), "worker")
            if (engine := self.served.engine_pid()) is not None:
                roles[engine] = "engine"
            usages = {}
            for pid, role in roles.items():
                with contextlib.suppress(OSError, ValueError):  # it has just ended
                    usages[role, pid] = Usage.of(pid)
            self.samples.append(Sample(time.monotonic(), usages))
            await asyncio.sleep(SAMPLE_S)

    async def wait_ready(self) -> None:
        while (await self.http.get("/health/ready")).status_code != 200:
            await asyncio.sleep(0.2)

    # ---- faults ------------------------------------------------------------------------------

    async def kill_engine(self) -> dict[str, Any]:
        return await self._end_engine(signal.SIGKILL)

    async def stop_engine(self) -> dict[str, Any]:
        return await self._end_engine(signal.SIGSTOP)

    async def _end_engine(self, number: int) -> dict[str, Any]:
        pid = self.served.engine_pid()
        assert pid is not None
        began = time.monotonic()
        os.kill(pid, number)
        while (await self.http.get("/health/ready")).status_code == 200:
            await asyncio.sleep(0.02)
        red = time.monotonic()
        await self.wait_ready()
        ready = time.monotonic()
        refused = [
            end - began
            for start, end, outcome in self.ended
            if start < began < end < ready and outcome == "refused"
        ]
        return {
            "health_red_after_s": round(red - began, 2),
            "ready_again_after_s": round(ready - began, 1),
            "failed_in_flight": len(refused),
            "last_of_them_answered_after_s": round(max(refused, default=0.0), 2),
        }

    async def kill_worker(self) -> dict[str, Any]:
        pids = self.served.worker_pids()
        os.kill(self.dice.choice(pids), signal.SIGKILL)
        while len(set(self.served.worker_pids()) | set(pids)) == len(pids):
            await asyncio.sleep(0.2)
        return {"workers": len(pids)}

    async def disconnects(self) -> dict[str, Any]:
        jobs = [self.dice.choice(self.oracle.jobs) for _ in range(60)]
        for start in range(0, len(jobs), 10):
            await asyncio.gather(
                *(disconnect(self.http, job, self.dice) for job in jobs[start : start + 10])
            )
        return {"num_requests": len(jobs)}

    async def malformed(self) -> dict[str, Any]:
        statuses = [await send_malformed(self.http, body) for body in MALFORMED * 4]
        assert all(400 <= status < 500 for status in statuses), statuses
        return {"num_requests": len(statuses)}

    async def reset_cache(self) -> dict[str, Any]:
        response = await self.http.post("/admin/reset_prefix_cache", headers=ADMIN)
        return {"status": response.status_code}

    async def change_adapters(self) -> dict[str, Any]:
        name = {"lora_name": ADAPTER}
        bodies = {"load": {**name, "lora_path": str(self.adapter)}, "unload": name}
        statuses = []
        for _ in range(3):
            for path, body in bodies.items():
                response = await self.http.post(
                    f"/v1/{path}_lora_adapter", json=body, headers=ADMIN
                )
                statuses.append(response.status_code)
                if response.status_code != 200:
                    self.tally.problems.append(f"{path} adapter: {response.text}")
                elif path == "load":
                    job = {"model": ADAPTER, "prompt": "abc", "max_tokens": 8}
                    used = await self.http.post("/v1/completions", json=job)
                    statuses.append(used.status_code)
        assert set(statuses) == {200}, statuses
        return {"statuses": statuses}

    async def grammar_bombs(self) -> dict[str, Any]:
        body = {"prompt": "x", "max_tokens": 40}
        responses = await asyncio.gather(
            *(
                self._post_bomb(Job("/v1/completions", {**body, "structured_outputs": bomb}))
                for bomb in BOMBS
            )
        )
        return {"statuses": responses}

    async def _post_bomb(self, job: Job) -> int:
        return (await self.http.post(job.path, json=job.body)).status_code

    async def run(self, num_faults: int, interval_s: float) -> None:
        faults: list[Callable[[], Awaitable[dict[str, Any]]]] = [
            self.disconnects,
            self.kill_engine,
            self.malformed,
            self.kill_worker,
            self.change_adapters,
            self.stop_engine,
            self.reset_cache,
            self.grammar_bombs,
        ]
        began = time.monotonic()
        for number in range(num_faults):
            await asyncio.sleep(max(0.0, began + interval_s * (number + 0.5) - time.monotonic()))
            fault = faults[number % len(faults)]
            name = getattr(fault, "__name__", "")
            self.fault_times.append(time.monotonic())
            try:
                result = await asyncio.wait_for(fault(), HANG_S)
            except Exception as error:  # one fault that goes wrong must not end the soak
                result = {"error": repr(error)}
            self.faults.append(
                {"at_s": round(self.fault_times[-1] - began), "fault": name, **result}
            )
            print(self.faults[-1], dict(self.tally.outcomes), flush=True)
        await asyncio.sleep(max(0.0, began + interval_s * num_faults - time.monotonic()))


def growth(usages: list[tuple[float, Usage]], warm_up_s: float) -> dict[str, Any]:
    """How memory and descriptors changed after the warm-up: means of the first and last fifth."""
    warm = [usage for at, usage in usages if at >= usages[0][0] + warm_up_s]
    if len(warm) < 10:
        return {}
    part = max(2, len(warm) // 5)
    first = sum(each.rss_bytes for each in warm[:part]) / part
    last = sum(each.rss_bytes for each in warm[-part:]) / part
    return {
        "rss_mib": [round(first / 2**20, 1), round(last / 2**20, 1)],
        "rss_growth": round(last / first - 1, 4),
        "fds": [
            max(each.num_fds for each in warm[:part]),
            max(each.num_fds for each in warm[-part:]),
        ],
    }


def lives(samples: list[Sample], ended: list[float]) -> list[dict[str, Any]]:
    """The growth of every process that lived long enough. `ended`: the times of all requests."""
    first = samples[0].at
    num_warm_up = min(WARM_UP_REQUESTS, len(ended) // 2)
    server_warm_up_s = max(WARM_UP_S, ended[num_warm_up] - first)
    found: dict[tuple[str, int], list[tuple[float, Usage]]] = {}
    for sample in samples:
        for process, usage in sample.usages.items():
            found.setdefault(process, []).append((sample.at, usage))
    measured = [
        {"process": role, "seconds": round(usages[-1][0] - usages[0][0])}
        | growth(usages, server_warm_up_s if role == "server" else WARM_UP_S / 2)
        for (role, _), usages in found.items()
    ]
    return [each for each in measured if "rss_growth" in each]


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between faults")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--http-workers", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    flags = ["--http-workers", str(args.http_workers), "--hang-timeout", str(HANG_TIMEOUT_S)]
    with tempfile.TemporaryDirectory() as work:
        log = args.output.with_suffix(".log")
        async with serving(Path(work), *flags, "--retry-on-restart", log=log) as served:
            limits = httpx.Limits(max_keepalive_connections=0)
            async with httpx.AsyncClient(
                base_url=served.url, timeout=HANG_S, limits=limits
            ) as http:
                adapter = Path(work) / "adapters" / ADAPTER
                soak = Soak(served, http, Oracle(make_jobs(48)), adapter)
                await soak.oracle.learn(http)
                tasks = [asyncio.create_task(soak.client(n)) for n in range(args.clients)]
                tasks.append(asyncio.create_task(soak.sample()))
                await soak.run(args.faults, args.interval)
                soak.stop.set()
                await asyncio.gather(*tasks)
                accounted = await account(http)
    return report(soak, accounted, args)


def report(soak: Soak, accounted: dict[str, Any], args: argparse.Namespace) -> int:
    """Save the record; returns 1 if a check fails."""
    processes = lives(soak.samples, sorted(end for _, end, _ in soak.ended))
    outcomes = soak.tally.outcomes
    kills = [
        at
        for at, fault in zip(soak.fault_times, soak.faults, strict=True)
        if fault["fault"] == "kill_worker"
    ]
    # The connections of a killed worker end with it; no others may.
    unexplained = sum(
        outcome == "dropped" and not any(began < kill + DROP_S and kill < end for kill in kills)
        for began, end, outcome in soak.ended
    )
    summary = {
        "requests": sum(outcomes.values()),
        **{name: outcomes[name] for name in ("right", "wrong", "refused", "dropped", "hung")},
        "lost": outcomes["wrong"] + outcomes["hung"] + unexplained,
        "account": accounted,
        "processes": processes,
    }
    checks = {
        "no request is lost": summary["lost"] == 0,
        "the account is exact": accounted["received"]
        == accounted["ended"] + accounted["in_flight"],
        "all KV blocks are free": accounted["kv_blocks_used"] == 0,
        "memory is flat": all(each["rss_growth"] < MAX_GROWTH for each in processes),
        "descriptors are flat": all(
            each["fds"][1] <= each["fds"][0] + MAX_FDS for each in processes
        ),
        "every fault was injected": not any("error" in each for each in soak.faults),
    }
    failed = [name for name, holds in checks.items() if not holds]
    Record(
        name="soak",
        rows=[summary, *soak.faults],
        notes="; ".join(f"{n} x {what}" for what, n in Counter(soak.tally.problems).items()),
        settings={**vars(args), "hang_timeout_s": HANG_TIMEOUT_S, "failed_checks": failed},
    ).save(args.output)
    print(summary, "failed checks:", failed or "none")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
