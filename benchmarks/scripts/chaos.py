"""Sends good requests among disconnecting clients and malformed bodies, and checks every answer.

    python benchmarks/scripts/chaos.py -o benchmarks/chaos.json

The answer of a good request must be the one it gets alone. Afterwards no KV block may be in use, and
memory and file descriptors must be what they were after the first fifth of the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from fault_load import (
    HANG_S,
    MALFORMED,
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

MAX_GROWTH = 0.02
MAX_FDS = 8  # open connections vary


def shuffled(num_good: int, num_disconnects: int, num_malformed: int) -> list[str]:
    """The kinds of all requests, in the order in which they are sent."""
    kinds = ["good"] * num_good + ["disconnect"] * num_disconnects + ["malformed"] * num_malformed
    random.Random(0).shuffle(kinds)
    return kinds


async def send_all(
    http: httpx.AsyncClient, oracle: Oracle, kinds: Sequence[str], num_clients: int
) -> tuple[Tally, list[int]]:
    """Send requests from `num_clients` at once; returns the outcomes and the statuses of malformed ones."""
    tally, statuses = Tally(), []
    waiting = iter(kinds)
    dice = random.Random(1)

    async def client() -> None:
        for kind in waiting:
            if kind == "good":
                await oracle.check(http, dice, tally)
            elif kind == "disconnect":
                await disconnect(http, dice.choice(oracle.jobs), dice)
            else:
                statuses.append(await send_malformed(http, dice.choice(MALFORMED)))

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return tally, statuses


async def run(served: Served, http: httpx.AsyncClient, args: argparse.Namespace) -> dict[str, Any]:
    """Send everything; returns the figures."""
    oracle = Oracle(make_jobs(200))
    await oracle.learn(http)
    kinds = shuffled(args.good, args.disconnects, args.malformed)
    pids = {"server": served.process.pid, "engine": served.engine_pid() or 0}
    fifth = len(kinds) // 5
    began = time.monotonic()
    early, early_statuses = await send_all(http, oracle, kinds[:fifth], args.clients)
    before = {role: Usage.of(pid) for role, pid in pids.items()}
    tally, statuses = await send_all(http, oracle, kinds[fifth:], args.clients)
    seconds = time.monotonic() - began
    accounted = await account(http)
    after = {role: Usage.of(pid) for role, pid in pids.items()}
    statuses += early_statuses
    tally.outcomes.update(early.outcomes)
    return {
        "seconds": round(seconds, 1),
        **{str(outcome): count for outcome, count in tally.outcomes.items()},
        "malformed_statuses": {str(each): statuses.count(each) for each in sorted(set(statuses))},
        "account": accounted,
        **{
            role: {
                "rss_mib": [
                    round(each.rss_bytes / 2**20, 1) for each in (before[role], after[role])
                ],
                "fds": [before[role].num_fds, after[role].num_fds],
            }
            for role in pids
        },
        "problems": early.problems + tally.problems,
    }


def failed_checks(figures: dict[str, Any], args: argparse.Namespace) -> list[str]:
    checks = {
        "every good answer is right": figures.get("right") == args.good,
        "malformed requests get 4xx": all(
            status.startswith("4") for status in figures["malformed_statuses"]
        ),
        "the account is exact": figures["account"]["received"] == figures["account"]["ended"],
        "all KV blocks are free": figures["account"]["kv_blocks_used"] == 0,
    }
    for role in ("server", "engine"):
        rss, fds = figures[role]["rss_mib"], figures[role]["fds"]
        checks[f"memory of the {role} is flat"] = rss[1] < rss[0] * (1 + MAX_GROWTH)
        checks[f"descriptors of the {role} are flat"] = fds[1] <= fds[0] + MAX_FDS
    return [name for name, holds in checks.items() if not holds]


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--good", type=int, default=5000)
    parser.add_argument("--disconnects", type=int, default=1000)
    parser.add_argument("--malformed", type=int, default=500)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        async with serving(Path(work), log=args.output.with_suffix(".log")) as served:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            async with httpx.AsyncClient(
                base_url=served.url, timeout=HANG_S, limits=limits
            ) as http:
                figures = await run(served, http, args)
    failed = failed_checks(figures, args)
    settings = {**vars(args), "failed_checks": failed}
    Record(name="chaos", rows=[figures], settings=settings).save(args.output)
    print(figures, "failed checks:", failed or "none")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
