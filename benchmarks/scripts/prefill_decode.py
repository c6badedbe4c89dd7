"""Measures the time between tokens of running streams under a flood of long prompts.

    python benchmarks/scripts/prefill_decode.py default -o benchmarks/prefill-decode.json

Two replicas on the same cores or devices: both do everything, or one computes prompts and the other
generates (--prefill-replicas 1). Streams run all the time; long prompts with few output tokens arrive
at a fixed rate.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
from itertools import pairwise
from typing import Any

import httpx
from http_rate import serving
from script_record import add_record_arguments, save_record

from windlass.tools.common.summary import percentile


async def stream(
    client: httpx.AsyncClient, num_prompt: int, num_output: int
) -> tuple[float, list[float]]:
    """Stream one request; returns its TTFT and the times between its tokens, in seconds."""
    body = {
        "prompt": [random.randrange(3, 2000) for _ in range(num_prompt)],
        "max_tokens": num_output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    times = [time.monotonic()]
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
    gaps = [after - before for before, after in pairwise(times)]
    return gaps[0], gaps[1:]


async def measure(port: int, args: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        # Programs for the shapes of steps are recorded at first use.
        await asyncio.gather(*(stream(client, args.input_len, 8) for _ in range(args.num_streams)))
        await stream(client, args.flood_input_len, args.flood_output_len)
        running = [
            asyncio.create_task(stream(client, args.input_len, args.output_len))
            for _ in range(args.num_streams)
        ]
        flood = []
        while not all(each.done() for each in running):
            flood.append(
                asyncio.create_task(stream(client, args.flood_input_len, args.flood_output_len))
            )
            await asyncio.sleep(1 / args.flood_rate)
        gaps = sorted(gap for each in running for gap in each.result()[1])
        ttfts = sorted([ttft for ttft, _ in await asyncio.gather(*flood)])
        metrics = (await client.get("/metrics")).text
    handed = re.search(
        r'^windlass:handovers_total\{[^}]*result="handed over"[^}]*\} (\S+)', metrics, re.MULTILINE
    )
    return {
        "tokens": len(gaps),
        "itl_p50_ms": round(1e3 * percentile(gaps, 50), 1),
        "itl_p99_ms": round(1e3 * percentile(gaps, 99), 1),
        "itl_max_ms": round(1e3 * gaps[-1], 1),
        "prompts": len(ttfts),
        "ttft_p50_ms": round(1e3 * percentile(ttfts, 50), 1),
        "ttft_p99_ms": round(1e3 * percentile(ttfts, 99), 1),
        "handed_over": 0 if handed is None else int(float(handed[1])),
    }


def serve(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Start a server and measure it."""
    queue = ("--max-num-queued-reqs", "4000")
    with serving(args.model, *queue, *flags, *args.flags.split()) as port:
        return asyncio.run(measure(port, args))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--num-streams", type=int, default=4)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--flood-rate", type=float, default=0.5, help="long prompts per second")
    parser.add_argument("--flood-input-len", type=int, default=1500)
    parser.add_argument("--flood-output-len", type=int, default=4)
    parser.add_argument("--flags", default="", help="further flags of all servers")
    add_record_arguments(parser)
    args = parser.parse_args()
    two = ["--data-parallel-size", "2"]
    rows = []
    for label, flags in (
        ("one engine", []),
        ("two replicas", two),
        ("prefill and decode apart", [*two, "--prefill-replicas", "1"]),
    ):
        rows.append({"label": label, **serve(args, flags)})
        print(rows[-1], flush=True)
    save_record("prefill-decode", rows, args)


if __name__ == "__main__":
    main()
