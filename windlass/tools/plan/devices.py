"""How many devices a load needs, each with a whole copy of the model, so that a promise is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from windlass.tools.load.summary import Summary
from windlass.tools.plan.replay import Job, Replayed
from windlass.tools.plan.slo import Slo

Predict = Callable[[Sequence[Job]], Replayed]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The load on so many devices."""

    num_devices: int
    summary: Summary
    misses: list[str]  # empty: the promise is kept


def split(jobs: Sequence[Job], count: int) -> list[list[Job]]:
    """Conversations in turn to each device; all turns of one stay where their prefix is."""
    home: list[tuple[int, int]] = []  # device, and number there
    parts: list[list[Job]] = [[] for _ in range(count)]
    num_conversations = 0
    for job in jobs:
        if job.follows is None:
            device = num_conversations % count
            num_conversations += 1
            placed = job
        else:
            device, number = home[job.follows]
            placed = replace(job, follows=number)
        home.append((device, len(parts[device])))
        parts[device].append(placed)
    return [part for part in parts if part]


def merged(runs: Sequence[Replayed]) -> Replayed:
    """Of runs beside each other, all from the same moment."""
    return Replayed(
        [timing for run in runs for timing in run.timings],
        max(run.duration for run in runs),
        sum(run.num_steps for run in runs),
        sum(run.num_blocks for run in runs),
        sum(run.peak_blocks for run in runs),
        sum(run.mean_blocks for run in runs),
        sum(run.peak_waiting for run in runs),
        sum(run.num_preemptions for run in runs),
        sum(run.prompt_tokens_computed for run in runs),
    )


def devices_needed(predict: Predict, jobs: Sequence[Job], slo: Slo, most: int) -> list[Fleet]:
    """What was tried, in order; the first that keeps the promise is the least, if there is one.

    The number is doubled until the promise is kept, then the gap is halved: more devices are taken
    to be no worse.
    """
    most = min(most, sum(job.follows is None for job in jobs))
    tried: dict[int, Fleet] = {}

    def keeps(count: int) -> bool:
        summary = slo.summarise(merged([predict(part) for part in split(jobs, count)]))
        tried[count] = Fleet(count, summary, slo.misses(summary))
        return not tried[count].misses

    below, count = 0, 1
    while not keeps(count) and count < most:
        below, count = count, min(2 * count, most)
    if not tried[count].misses:
        while count - below > 1:
            middle = (below + count) // 2
            if keeps(middle):
                count = middle
            else:
                below = middle
    return [tried[number] for number in sorted(tried)]
