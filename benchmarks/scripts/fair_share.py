"""Measures what a flood of one tenant does to the TTFT of another, with and without fair share.

    python benchmarks/scripts/fair_share.py default -o benchmarks/fair-share.json

The tenant `chat` sends requests at random times: alone, and while the tenant `flood` sends 200
requests at once. Both have the same weight.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
from typing import Any

import httpx
from http_rate import serving
from script_record import add_record_arguments, save_record

from windlass.tools.common.summary import percentile

CHAT, FLOOD = "sk-chat", "sk-flood"


async def request(client: httpx.AsyncClient, key: str, num_prompt: int, num_output: int) -> float:
    """Stream one request; returns its TTFT in seconds."""
    body = {
        "prompt": [random.randrange(3, 2000) for _ in range(num_prompt)],
        "max_tokens": num_output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    began, ttft = time.monotonic(), None
    headers = {"Authorization": f"Bearer {key}"}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if ttft is None and line.startswith("data: {"):
                ttft = time.monotonic() - began
    assert ttft is not None, "the stream had no token"
    return ttft


async def chat(client: httpx.AsyncClient, args: argparse.Namespace) -> list[float]:
    """The TTFTs of the tenant with few requests, which are the same in every run."""
    rng, tasks = random.Random(args.seed), []
    for _ in range(args.num_requests):
        await asyncio.sleep(rng.expovariate(args.request_rate))
        num_prompt = rng.randint(args.input_len // 2, 3 * args.input_len // 2)
        tasks.append(asyncio.create_task(request(client, CHAT, num_prompt, args.output_len)))
    return list(await asyncio.gather(*tasks))


async def measure(port: int, args: argparse.Namespace, floods: bool) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        # Programs for the shapes of steps are recorded at first use.
        await asyncio.gather(*(request(client, CHAT, args.input_len, 8) for _ in range(8)))
        flood = []
        if floods:
            sends = (
                request(client, FLOOD, args.flood_input_len, args.flood_output_len)
                for _ in range(200)
            )
            flood = [asyncio.create_task(each) for each in sends]
            await asyncio.sleep(2.0)
        found = sorted(await chat(client, args))
        num_left = sum(not each.done() for each in flood)
        metrics = (await client.get("/metrics", headers={"Authorization": f"Bearer {CHAT}"})).text
        for each in flood:
            each.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    jain = re.search(r"^windlass:tenant_fairness_jain\{[^}]*\} (\S+)", metrics, re.MULTILINE)
    assert jain is not None, "the server has no index of fairness"
    return {
        "requests": len(found),
        "ttft_p50_ms": round(1e3 * percentile(found, 50), 1),
        "ttft_p99_ms": round(1e3 * percentile(found, 99), 1),
        "jain": round(float(jain[1]), 2) if floods else None,
        "flood_left": num_left if floods else None,
    }


def serve(args: argparse.Namespace, flags: list[str], floods: list[bool]) -> list[dict[str, Any]]:
    """One server, and the rows of its runs."""
    keys = ("--api-key", CHAT, "--api-key", FLOOD)
    with serving(args.model, *keys, "--max-num-queued-reqs", "400", *flags) as port:
        return [asyncio.run(measure(port, args, flood)) for flood in floods]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--num-requests", type=int, default=40)
    parser.add_argument("--request-rate", type=float, default=0.5, help="of chat, per second")
    parser.add_argument("--input-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--flood-input-len", type=int, default=300)
    parser.add_argument("--flood-output-len", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    add_record_arguments(parser)
    args = parser.parse_args()
    alone, fair = serve(args, [], [False, True])
    (unfair,) = serve(args, ["--no-fair-share"], [True])
    rows = []
    for label, row in (
        ("alone", alone),
        ("flood, --no-fair-share", unfair),
        ("flood, fair share", fair),
    ):
        ratio = round(row["ttft_p99_ms"] / alone["ttft_p99_ms"], 2)
        rows.append({"label": label, **row, "p99_ratio": ratio})
        print(rows[-1], flush=True)
    save_record("fair-share", rows, args)


if __name__ == "__main__":
    main()
