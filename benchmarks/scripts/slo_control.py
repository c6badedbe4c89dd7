"""Compares a server with and without the SLO controller, when long prompts arrive among streams.

    python benchmarks/scripts/slo_control.py default --slo-tpot-ms 60 -o benchmarks/slo-control.json

Some clients stream short answers, one after the other; a long prompt arrives at fixed intervals. Both
servers run in turn, several times, so that a change of the machine's speed affects both.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
from http_rate import serving
from script_record import add_record_arguments, save_record

from windlass.tools.common.summary import percentile


@dataclass(slots=True)
class Times:
    """Times of the requests of one kind, in seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_good: int = 0
    num_tokens: int = 0


async def stream(
    http: httpx.AsyncClient, times: Times, args: argparse.Namespace, sizes: tuple[int, int]
) -> None:
    num_prompt, num_output = sizes
    body = {
        "prompt": [random.randrange(3, 20_000) for _ in range(num_prompt)],
        "max_tokens": num_output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    began, at = time.monotonic(), []
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                at.append(time.monotonic())
    ttft, tpot = at[0] - began, (at[-1] - at[0]) / (num_output - 1)
    times.ttft.append(ttft)
    times.tpot.append(tpot)
    times.gaps += [later - earlier for earlier, later in pairwise(at)]
    times.num_good += 1000 * ttft <= args.slo_ttft_ms and 1000 * tpot <= args.slo_tpot_ms
    times.num_tokens += num_output


async def load(url: str, args: argparse.Namespace, streams: Times, long: Times) -> None:
    """Send requests for `args.seconds`, and wait for the last ones."""
    short_sizes, long_sizes = (args.input_len, args.output_len), (args.long_len, 8)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        await asyncio.gather(
            *(stream(http, Times(), args, short_sizes) for _ in range(args.clients)),
            stream(http, Times(), args, long_sizes),
        )
        end = time.monotonic() + args.seconds

        async def client() -> None:
            while time.monotonic() < end:
                await stream(http, streams, args, short_sizes)

        async def arrivals() -> None:
            async with asyncio.TaskGroup() as group:
                while time.monotonic() < end:
                    group.create_task(stream(http, long, args, long_sizes))
                    await asyncio.sleep(args.long_every_s)

        await asyncio.gather(arrivals(), *(client() for _ in range(args.clients)))


def serve(args: argparse.Namespace, flags: list[str], streams: Times, long: Times) -> None:
    with serving(args.model, "--num-threads", str(args.num_threads), *flags) as port:
        asyncio.run(load(f"http://127.0.0.1:{port}", args, streams, long))


def row(name: str, kind: str, times: Times, args: argparse.Namespace) -> dict[str, Any]:
    seconds = args.seconds * args.repeats
    found: dict[str, Any] = {"controller": name, "requests": kind, "number": len(times.ttft)}
    for label, values in (("ttft", times.ttft), ("tpot", times.tpot), ("itl", times.gaps)):
        for share in (50, 99):
            value = percentile(sorted(values), share)
            found[f"{label}_p{share}_ms"] = round(1e3 * value, 1)
    found["good"] = round(times.num_good / len(times.ttft), 3)
    found["goodput"] = round(times.num_good / seconds, 2)
    found["tok_s"] = round(times.num_tokens / seconds, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--long-len", type=int, default=1500)
    parser.add_argument("--long-every-s", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--slo-tpot-ms", type=float, default=60.0)
    parser.add_argument("--slo-ttft-ms", type=float, default=3000.0)
    parser.add_argument("--num-threads", type=int, default=-1)
    add_record_arguments(parser)
    args = parser.parse_args()
    modes = {
        "off": [],
        "TPOT": ["--slo-tpot-ms", str(args.slo_tpot_ms)],
        "TPOT and TTFT": [
            *("--slo-tpot-ms", str(args.slo_tpot_ms), "--slo-ttft-ms", str(args.slo_ttft_ms))
        ],
    }
    found = {name: (Times(), Times()) for name in modes}
    for _ in range(args.repeats):
        for name, flags in modes.items():
            serve(args, flags, *found[name])
    rows = []
    for name, (streams, long) in found.items():
        rows += [row(name, "streams", streams, args), row(name, "long prompts", long, args)]
    for each in rows:
        print(each, flush=True)
    save_record("slo-control", rows, args)


if __name__ == "__main__":
    main()
