"""The governor beside a simpler rule, which it must beat in the simulated worlds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log
from typing import Any

import pytest

from tests.speculative import test_never_slower as batches
from tests.speculative import test_wrong_costs as requests
from windlass.core.speculation.governor import Governor
from windlass.core.types import Draft

_DECAY = 0.98
_RETRY_EVERY = 64  # steps


class FixedLength(Governor):
    """Drafts of the maximum length while enough of the last draft tokens were accepted.

    While they were not, one step in 64 drafts nevertheless. It reads no costs and no times.
    """

    threshold = 0.5

    def __init__(self, *args: Any, max_draft_tokens: int, **options: Any) -> None:
        super().__init__(*args, max_draft_tokens=max_draft_tokens, **options)
        self._length = max_draft_tokens
        self._accepted = self._verified = 1.0
        self._num_steps = 0

    def draft_length(self, *_: Any, **__: Any) -> int:
        self._num_steps += 1
        is_on = self._accepted >= self.threshold * self._verified
        return self._length if is_on or self._num_steps % _RETRY_EVERY == 0 else 0

    def choose(self, _slots: Any, drafts: Sequence[Draft], *_: Any) -> list[int]:
        return [len(draft.tokens) for draft in drafts]

    def verified(self, _slot: Any, _kind: int, num_drafts: int, num_accepted: int) -> None:
        self._accepted = _DECAY * self._accepted + num_accepted
        self._verified = _DECAY * self._verified + num_drafts

    def observe_step(self, _step: Any) -> None:
        pass

    def observe_catch_up(self, **_: Any) -> None:
        pass


Speed = Callable[[type[Governor]], float]


def draft_model(world: requests.World, believed: requests.DraftCosts) -> Speed:
    def speed(rule: type[Governor]) -> float:
        found = [requests.run(world, believed, seed, rule=rule) for seed in range(2)]
        return sum(each.times_plain for each in found) / len(found)

    return speed


def batch(phases: list[tuple[int, float, float]], concurrency: int, head: bool) -> Speed:
    costs, drafting = (batches.GPU, batches.HEAD) if head else (batches.CPU, None)

    def speed(rule: type[Governor]) -> float:
        found = batches.speed(phases, concurrency, costs, drafting, num_batches=3, rule=rule)
        return found.times_plain

    return speed


QUARTER, HALF, EXPENSIVE = requests.QUARTER, requests.HALF, requests.EXPENSIVE
WORLDS: dict[str, Speed] = {
    f"acceptance {acceptance}, {name}": draft_model(
        requests.World(acceptance, requests.always(drafting)), drafting
    )
    for acceptance in (0.0, 0.5, 0.8, 0.97, 1.0)
    for name, drafting in (("quarter", QUARTER), ("half", HALF), ("expensive", EXPENSIVE))
}
WORLDS |= {
    f"acceptance 0.97, cost changes, {name}": draft_model(
        requests.World(0.97, requests.changing(first, then)), first
    )
    for name, first, then in (
        ("more", QUARTER, EXPENSIVE),
        ("less", EXPENSIVE, QUARTER),
        ("busy", QUARTER, HALF),
    )
}
WORLDS |= {
    f"{kind}, acceptance {acceptance}, {concurrency} at once": batch(
        [(100, found, acceptance)], concurrency, head=kind == "head"
    )
    for kind, found in (("head", 1.0), ("free", 0.5))
    for acceptance in (0.1, 0.5, 0.95)
    for concurrency in (1, 8, 32)
}


def mean(speeds: Sequence[float]) -> float:
    return exp(sum(log(speed) for speed in speeds) / len(speeds))


@pytest.fixture(scope="module")
def governed() -> list[float]:
    return [speed(Governor) for speed in WORLDS.values()]


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.9])
def test_the_governor_beats_a_fixed_length(
    governed: list[float], threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On average by far, since no threshold suits all costs; and it loses at most 3 % of a short run."""
    monkeypatch.setattr(FixedLength, "threshold", threshold)
    simple = [speed(FixedLength) for speed in WORLDS.values()]
    assert min(governed) > 0.97 > min(simple)
    assert mean(governed) > 1.05 * mean(simple)
