"""Measures a fleet of the default model on a local Ray.

    python benchmarks/scripts/fleet.py routing -o benchmarks/fleet-routing.json
    python benchmarks/scripts/fleet.py scaling -o benchmarks/fleet-scaling.json
    python benchmarks/scripts/fleet.py cost -o benchmarks/fleet-cost.json
    python benchmarks/scripts/fleet.py router -o benchmarks/fleet-router.json
    python benchmarks/scripts/fleet.py failures --minutes 30 --every 120 -o benchmarks/fleet-failures.json

routing: conversations with each policy of routing: cached prompt tokens, TTFT, throughput.
scaling: the output tokens per second of one and of two replicas.
cost: the CPU time of each process per request and per frame of tokens.
router: without Ray, the time of a choice, and cached prompt tokens of simulated conversations.
failures: two replicas under load, and a kill -9 every so often: lost requests, time to recovery.
    Half of the requests are streamed. `--minutes 3 --every 20` is the short form.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from script_record import add_record_arguments, save_record

from windlass.cluster import deploy
from windlass.cluster.fleet import Fleet
from windlass.cluster.routing import Call, FleetRouting
from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest
from windlass.serve.routing import PrefixIndex
from windlass.tools.common.summary import percentile

# Processes of Ray by a part of their name; the engine is a child of its replica.
_PROCESSES = {
    "proxy": "ray::ProxyActor",
    "ingress": "ray::ServeReplica:windlass:ingress",
    "replica": "ray::ServeReplica:windlass:chat",
    "controller": "ray::ServeController",
    "raylet": "raylet/raylet",
    "gcs": "gcs/gcs_server",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed request."""

    ttft_s: float
    num_prompt: int
    num_cached: int
    num_output: int
    text: str


@contextmanager
def running(args: argparse.Namespace, **model: Any) -> Iterator[str]:
    """A fleet of one model; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"max_num_seqs": 16, "num_blocks": args.num_blocks, **json.loads(args.options)}
    entry = {"name": "chat", "model": args.model, "cpus": 0.5, "options": options, **model}
    entry["options"].setdefault("num_threads", 1)
    fleet = Fleet.model_validate({"port": port, "ingress": {"cpus": 0.5}, "models": [entry]})
    fleet.check()
    ray.init(
        num_cpus=4, object_store_memory=80_000_000, include_dashboard=False, log_to_driver=False
    )
    try:
        yield deploy.up(fleet)
    finally:
        serve.shutdown()
        ray.shutdown()


async def stream(
    client: httpx.AsyncClient, messages: list[dict[str, str]], num_output: int
) -> Answer:
    body = {
        "messages": messages,
        "max_tokens": num_output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, ttft, text = time.monotonic(), None, ""
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if choice["delta"].get("content"):
                    ttft = ttft or time.monotonic() - began
                    text += choice["delta"]["content"]
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        ttft_s=ttft or time.monotonic() - began,
        num_prompt=usage["prompt_tokens"],
        num_cached=details.get("cached_tokens", 0),
        num_output=usage["completion_tokens"],
        text=text,
    )


def words(rng: random.Random, count: int) -> str:
    names = [
        "load",
        "lever",
        "rope",
        "drum",
        "anchor",
        "chain",
        "deck",
        "sail",
        "mast",
        "keel",
        "harbour",
        "crew",
        "storm",
        "tide",
    ]
    return " ".join(rng.choice(names) for _ in range(count))


async def converse(client: httpx.AsyncClient, user: int, args: argparse.Namespace) -> list[Answer]:
    """The turns of one user, each with all turns before it."""
    rng = random.Random(user)
    messages = [{"role": "system", "content": words(random.Random(-1 - user % 2), 60)}]
    answers = []
    for _ in range(args.turns):
        await asyncio.sleep(rng.expovariate(1 / args.think_s))
        messages.append({"role": "user", "content": words(rng, args.input_len)})
        answer = await stream(client, messages, args.output_len)
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
    return answers


async def conversations(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """The conversations of `--repeat` groups of users, one group after the other."""
    answers: list[Answer] = []
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        await stream(client, [{"role": "user", "content": "Hi"}], 4)  # the first is slow
        began = time.monotonic()
        for group in range(args.repeat):
            users = range(group * args.users, (group + 1) * args.users)
            found = await asyncio.gather(*(converse(client, user, args) for user in users))
            answers += [each for one in found for each in one]
        seconds = time.monotonic() - began
    ttfts = sorted(each.ttft_s for each in answers)
    return {
        "requests": len(answers),
        "hit_rate": round(
            sum(each.num_cached for each in answers) / sum(each.num_prompt for each in answers), 3
        ),
        "ttft_p50_ms": round(1e3 * percentile(ttfts, 50), 1),
        "ttft_p99_ms": round(1e3 * percentile(ttfts, 99), 1),
        "output_tok_s": round(sum(each.num_output for each in answers) / seconds, 1),
    }


def routing(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for policy in ("prefix", "power-of-two", "round-robin"):
        with running(args, replicas=2, routing=policy) as url:
            rows.append({"routing": policy, **asyncio.run(conversations(url, args))})
        print(rows[-1], flush=True)
    return rows


async def burst(url: str, args: argparse.Namespace) -> float:
    """The output tokens per second of requests that are sent at once."""
    rng = random.Random(args.seed)
    prompts = [words(rng, args.input_len) for _ in range(args.users * args.turns)]
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        await asyncio.gather(*(stream(client, each, 8) for each in chats[:4]))
        began = time.monotonic()
        answers = await asyncio.gather(*(stream(client, each, args.output_len) for each in chats))
        return sum(each.num_output for each in answers) / (time.monotonic() - began)


def scaling(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for count in (1, 2):
        with running(args, replicas=count) as url:
            rates = sorted(asyncio.run(burst(url, args)) for _ in range(args.repeat))
        rate = percentile(rates, 50)
        ratio = rate / rows[0]["output_tok_s"] if rows else 1.0
        rows.append({"replicas": count, "output_tok_s": round(rate, 1), "ratio": round(ratio, 2)})
        print(rows[-1], flush=True)
    return rows


def cpu_times() -> dict[str, float]:
    """CPU seconds of each part so far."""
    found = dict.fromkeys([*_PROCESSES, "engine"], 0.0)
    own = psutil.Process().children(recursive=True)
    for process in own:
        try:
            command, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue
        for part, text in _PROCESSES.items():
            if text in command:
                found[part] += times.user + times.system
                if part == "replica":
                    engines = (each.cpu_times() for each in process.children(recursive=True))
                    found["engine"] += sum(each.user + each.system for each in engines)
    return found


def cost(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of CPU time per request of one token, and what each further frame adds."""

    async def send(url: str, num_output: int) -> tuple[dict[str, float], float]:
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            chat = [{"role": "user", "content": "Hi"}]
            await asyncio.gather(*(stream(client, chat, num_output) for _ in range(8)))
            before, began = cpu_times(), time.monotonic()
            for _ in range(args.num_requests // 4):
                await asyncio.gather(*(stream(client, chat, num_output) for _ in range(4)))
            seconds = time.monotonic() - began
            after = cpu_times()
        return {name: after[name] - before[name] for name in after}, seconds

    with running(args, replicas=1, frame_ms=0) as url:
        time.sleep(3)
        idle_before = cpu_times()
        time.sleep(10)
        idle = {name: (value - idle_before[name]) / 10 for name, value in cpu_times().items()}
        one, one_s = asyncio.run(send(url, 1))
        many, many_s = asyncio.run(send(url, 1 + args.frames))
    count = args.num_requests // 4 * 4
    rows = []
    for name in one:
        request = 1e3 * (one[name] - idle[name] * one_s) / count
        frames = 1e3 * (many[name] - idle[name] * many_s) / count - request
        rows.append(
            {
                "part": name,
                "idle_cpu_pct": round(100 * idle[name], 1),
                "request_ms": round(request, 2),
                "token_ms": round(frames / args.frames, 3),
            }
        )
        print(rows[-1], flush=True)
    return rows


def router(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Conversations of ten users per replica, one turn of a random user after the other."""
    rows = []
    for count in (2, 8, 32, 100):
        ids = [f"replica-{number}" for number in range(count)]
        turns = [user for user in range(10 * count) for _ in range(args.turns)]
        random.Random(args.seed).shuffle(turns)
        choose_s, hits = 0.0, {}
        for policy in ("prefix", "round-robin"):
            routing = FleetRouting()
            routing.configure(16, 10**6)
            routing.set_replicas(ids)
            caches = {each: PrefixIndex(10**6) for each in ids}
            lengths = dict.fromkeys(turns, 0)
            num_prompt = num_cached = 0
            for number, user in enumerate(turns):
                lengths[user] += 12  # blocks of 16 tokens: the user's words, and the answer
                blocks = [f"{user}-{block}".encode() for block in range(lengths[user])]
                prompt = [100_000 * user + token for token in range(16 * len(blocks))]
                request = NewRequest(str(number), prompt, SamplingParams(max_tokens=64))
                began = time.perf_counter()
                chosen = routing.choose(Call(request), ids)[0]
                if policy == "round-robin":
                    chosen = ids[number % count]
                else:
                    choose_s += time.perf_counter() - began
                routing.ended(request.request_id, 64)
                num_prompt += len(blocks)
                num_cached += caches[chosen].num_found(blocks)
                caches[chosen].add(blocks)
            hits[policy] = round(num_cached / num_prompt, 3)
        rows.append(
            {
                "replicas": count,
                "choice_ms": round(1e3 * choose_s / len(turns), 3),
                "hit_rate_prefix": hits["prefix"],
                "hit_rate_round_robin": hits["round-robin"],
            }
        )
        print(rows[-1], flush=True)
    return rows


@dataclass(slots=True)
class Loss:
    """Requests between two kills, by their end."""

    victim: str
    ok: int = 0
    cut: int = 0  # streams that ended with an error event after their first token
    lost: int = 0  # no response, or an error before the first token
    recovery_s: float | None = None  # until all replicas were up again


async def send_until(url: str, user: int, args: argparse.Namespace, losses: list[Loss]) -> None:
    """Send one request after the other, until the last of `losses` is the end."""
    rng = random.Random(user)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        while losses[-1].victim != "end":
            chat = [{"role": "user", "content": words(rng, args.input_len)}]
            at, outcome = losses[-1], "ok"
            try:
                if user % 2:
                    await stream(client, chat, args.output_len)
                else:
                    body = {"messages": chat, "max_tokens": args.output_len, "ignore_eos": True}
                    (await client.post("/v1/chat/completions", json=body)).raise_for_status()
            except KeyError:  # an error event, which has no choices
                outcome = "cut"
            except httpx.HTTPError:
                outcome = "lost"
            setattr(at, outcome, getattr(at, outcome) + 1)


def snapshots() -> list[Any]:
    name = deploy.status()["windlass"]["models"]["chat"]["deployment"]
    found: list[Any] = (
        serve.get_deployment_handle(name, "windlass")
        .broadcast("snapshot")
        .results(timeout_s=20, return_exceptions=True)
    )
    return [each for each in found if not isinstance(each, Exception)]


def kill(victim: str, number: int) -> None:
    """End one process with SIGKILL."""
    if victim in ("replica", "engine"):
        found = sorted(snapshots(), key=lambda each: each.replica)
        chosen = found[number % len(found)]
        pid = chosen.pid if victim == "replica" else chosen.engine_pid
    else:
        (pid,) = [
            each.pid
            for each in psutil.Process().children(recursive=True)
            if _PROCESSES[victim] in " ".join(each.cmdline())
        ]
    os.kill(pid, signal.SIGKILL)


async def recovered(num_replicas: int, dead: set[int]) -> float:
    """The seconds until all replicas are up, with other processes than the dead ones."""
    began = time.monotonic()
    while True:
        await asyncio.sleep(0.5)
        try:
            found = await asyncio.to_thread(snapshots)
        except (ray.exceptions.RayError, RayServeException, TimeoutError):
            continue  # the controller is being restarted
        pids = {pid for each in found for pid in (each.pid, each.engine_pid)}
        if len(found) == num_replicas and all(each.health.ok for each in found) and not pids & dead:
            return time.monotonic() - began


async def kill_often(url: str, args: argparse.Namespace) -> list[Loss]:
    losses = [Loss("none")]
    users = [asyncio.create_task(send_until(url, user, args, losses)) for user in range(args.users)]
    victims = args.victims.split(",")
    for number in range(int(60 * args.minutes / args.every)):
        began = time.monotonic()
        await asyncio.sleep(args.every if not number else 0)
        victim = victims[number % len(victims)]
        before = await asyncio.to_thread(snapshots)
        losses.append(Loss(victim))
        await asyncio.to_thread(kill, victim, number // len(victims))
        after = {each.pid for each in psutil.Process().children(recursive=True)}
        dead = {pid for each in before for pid in (each.pid, each.engine_pid)} - after
        losses[-1].recovery_s = round(await recovered(len(before), dead), 1)
        print(losses[-1], flush=True)
        await asyncio.sleep(max(0.0, args.every - (time.monotonic() - began)))
    losses.append(Loss("end"))
    await asyncio.gather(*users)
    return losses


def failures(args: argparse.Namespace) -> list[dict[str, Any]]:
    with running(args, replicas=2) as url:
        losses = asyncio.run(kill_often(url, args))
    rows = []
    for victim in ("none", *args.victims.split(",")):
        found = [each for each in losses if each.victim == victim]
        times = sorted(each.recovery_s for each in found if each.recovery_s is not None)
        rows.append(
            {
                "killed": victim,
                "kills": 0 if victim == "none" else len(found),
                "ok": sum(each.ok for each in found),
                "cut": sum(each.cut for each in found),
                "lost": sum(each.lost for each in found),
                "recovery_p50_s": percentile(times, 50) if times else None,
                "recovery_max_s": times[-1] if times else None,
            }
        )
        print(rows[-1], flush=True)
    return rows


_MEASUREMENTS = {
    "routing": routing,
    "scaling": scaling,
    "cost": cost,
    "router": router,
    "failures": failures,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("measurement", choices=[*_MEASUREMENTS])
    parser.add_argument("--model", default="default")
    parser.add_argument("--options", default="{}", help="of the engine, as JSON")
    parser.add_argument("--num-blocks", type=int, default=1024)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--think-s", type=float, default=1.0)
    parser.add_argument("--input-len", type=int, default=40, help="words")
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--num-requests", type=int, default=100)
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=30.0, help="of failures")
    parser.add_argument("--every", type=float, default=120.0, help="seconds between two kills")
    parser.add_argument(
        "--victims",
        default="replica,engine",
        help="of: replica, engine, ingress, controller, proxy",
    )
    parser.add_argument("--seed", type=int, default=0)
    add_record_arguments(parser)
    args = parser.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    rows = _MEASUREMENTS[args.measurement](args)
    save_record(f"fleet-{args.measurement}", rows, args, hidden=("measurement",))


if __name__ == "__main__":
    main()
