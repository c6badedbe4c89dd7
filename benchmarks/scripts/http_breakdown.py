"""Breaks the time of a run of http_rate.py --trace down: engine steps, idle device, way of a request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from windlass.tools.common.summary import percentile

# The stages of a request, from the last token of its client's previous one.
STAGES = (
    "last_token",
    "server_ended",
    "worker_ended",
    "worker_closed",
    "client_ended",
    "client_began",
    "connected",
    "body_read",
    "worker_sent",
    "server_got",
    "server_sent",
    "engine_add",
    "planned",
    "first_token",
    "client_first",
)
_OF_PREVIOUS = STAGES.index("client_began")  # the stages before it are of the previous request
_NO_WORK_S = 0.004  # an idle device for longer than this had nothing to do


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What a client has seen of one request."""

    client: int
    request_id: str
    began: float
    first: float
    ended: float


@dataclass(frozen=True, slots=True)
class Window:
    """The measured part of a run."""

    began: float
    ended: float

    def has(self, at: float) -> bool:
        return self.began <= at <= self.ended


def load(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def show_steps(engine: Mapping[str, Any], window: Window, num_waves: float) -> None:
    """Print the engine's steps by kind, and the device's idle time."""
    spans = engine["spans"]
    columns = [spans[name] for name in ("submit", "wait", "commit")]
    steps = [each for each in zip(*columns, strict=False) if window.has(each[0][0])]
    device = engine["device"] or [(wait[0], wait[1]) for wait in spans["wait"]]
    first = next(i for i, each in enumerate(spans["submit"]) if window.has(each[0]))
    device = device[first : first + len(steps)]
    print("  steps       count  rows  prompt tokens  device ms  wait ms  submit ms  commit ms")
    for kind, is_prompt in (("decode", False), ("prompts", True)):
        mine = [i for i, (submit, *_) in enumerate(steps) if (submit[3] > 0) == is_prompt]
        if not mine:
            continue
        values = (
            fmean(steps[i][0][2] for i in mine),
            fmean(steps[i][0][3] for i in mine),
            1e3 * fmean(device[i][1] - device[i][0] for i in mine),
            *(1e3 * fmean(steps[i][c][1] - steps[i][c][0] for i in mine) for c in (1, 0, 2)),
        )
        print(
            f"  {kind:10s} {len(mine):6d} {values[0]:5.0f} {values[1]:14.0f} {values[2]:10.3f} "
            f"{values[3]:8.3f} {values[4]:10.3f} {values[5]:10.3f}"
        )
    gaps = [after[0] - before[1] for before, after in pairwise(device)]
    without_work = sum(gap for gap in gaps if gap > _NO_WORK_S)
    late = [gap for gap in gaps if 20e-6 < gap <= _NO_WORK_S]
    busy = sum(end - start for start, end in device)
    print(
        f"  a wave: {1e3 * busy / num_waves:.1f} ms of steps, {1e3 * without_work / num_waves:.1f} ms "
        f"idle without work, {1e3 * sum(late) / num_waves:.1f} ms idle between steps "
        f"({len(late) / num_waves:.0f} gaps), "
        f"{1e3 * (window.ended - window.began) / num_waves:.1f} ms in all"
    )
    for name in ("plan", "add", "_receive", "_send", "_step"):
        found = [each[1] - each[0] for each in spans.get(name, ()) if window.has(each[0])]
        if found:
            print(
                f"  {name:10s} {len(found):6d} calls, mean {1e3 * fmean(found):.3f} ms, "
                f"p99 {1e3 * percentile(sorted(found), 99):.3f}, sum {1e3 * sum(found) / num_waves:.1f} ms a wave"
            )


def show_way(processes: Iterable[Mapping[str, Any]], requests: Sequence[ClientRequest]) -> None:
    """Print the time between the stages of a request, from the last token of the previous one."""
    times: dict[str, dict[str, float]] = {name: {} for name in STAGES}
    for process in processes:
        for name, found in process["stages"].items():
            times[name] |= found
    by_client: dict[int, list[ClientRequest]] = {}
    for each in sorted(requests, key=lambda each: each.began):
        by_client.setdefault(each.client, []).append(each)
        times["client_began"][each.request_id] = each.began
        times["client_first"][each.request_id] = each.first
        times["client_ended"][each.request_id] = each.ended
    ways = [
        [
            times[name].get((old if i < _OF_PREVIOUS else new).request_id)
            for i, name in enumerate(STAGES)
        ]
        for own in by_client.values()
        for old, new in pairwise(own)
    ]
    whole = [[each for each in way if each is not None] for way in ways if None not in way]
    print(f"  the way of {len(whole)} requests   mean ms    p50    p99    max")
    if not whole:
        return
    for i, name in enumerate(STAGES[1:], 1):
        row(name, [way[i] - way[i - 1] for way in whole])
    planned = STAGES.index("planned")
    row("last_token to planned", [way[planned] - way[0] for way in whole])
    in_engine = [
        times["last_token"][name] - at
        for name, at in times["planned"].items()
        if name in times["last_token"] and name in times["client_began"]
    ]
    row("planned to last_token", in_engine)


def row(name: str, seconds: Sequence[float]) -> None:
    found = sorted(seconds)
    values = (fmean(found), percentile(found, 50), percentile(found, 99), found[-1])
    print(f"  {name:28s}" + "".join(f"{1e3 * each:9.2f}" for each in values))
