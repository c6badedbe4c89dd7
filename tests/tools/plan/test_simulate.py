"""The simulator against traces that were reckoned by hand, and against its own second run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from windlass.config import EngineConfig
from windlass.core.card import Capacity
from windlass.core.types import Row, RowResult, SlotId, StepPlan, StepResult
from windlass.speculative.costs import StepCosts
from windlass.tools.common.drive import EngineRun
from windlass.tools.common.requests import Request
from windlass.tools.common.slo import parse_slo
from windlass.tools.common.timing import Timing
from windlass.tools.plan.calibrate import Room, calibrate
from windlass.tools.plan.costs import CostModel
from windlass.tools.plan.simulate import simulate
from windlass.tools.plan.steps import Steps
from windlass.tools.plan.what_if import devices_needed, split

# A token of a prompt takes 1 ms, a row that decodes 10 ms and every further one 1 ms.
PLAIN = CostModel(
    StepCosts({1: 0.001, 2: 0.002}), StepCosts({1: 0.010, 2: 0.011}), 0.0, 0.0, 0.0, 0.0
)


def run(requests: Sequence[Request], costs: CostModel = PLAIN, at_once: int | None = None, **wish: Any) -> EngineRun:  # fmt: skip
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **wish}
    num_blocks = options.pop("num_blocks", 64)
    config = EngineConfig.of(block_size=4, **options)
    capacity = Capacity(num_blocks, 4, 1, "as set")
    return simulate(config, config.limits("cpu"), capacity, 256, costs, requests, at_once)


def ms(timing: Timing) -> list[float]:
    """When its tokens came, after it was sent."""
    return [round(1e3 * (at - timing.sent_at), 6) for at in timing.times]


def prompt(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def test_one_request() -> None:
    found = run([Request(prompt(8), 3)])
    assert ms(found.timings[0]) == [8, 18, 28]
    assert found.duration == pytest.approx(0.028)
    assert (found.num_steps, found.num_preemptions, found.prompt_tokens_computed) == (3, 0, 8)
    assert found.peak_blocks == 3  # 8 tokens of the prompt and 2 of the 3 that follow


def test_a_long_prompt_is_cut_and_a_late_one_joins_it() -> None:
    # 8 tokens in two steps of 4; the second one comes at 2 ms and is seen when a step ends.
    requests = [Request(prompt(8), 2), Request(prompt(3, 100), 1, at=0.002)]
    first, second = sorted(
        run(requests, max_num_batched_tokens=4, max_num_seqs=2).timings, key=lambda t: t.sent_at
    )
    # 0-4 and 4-8 the first prompt; then its last row of 10 ms with 3 tokens of the other: 13 ms.
    assert ms(first) == [8, 21]
    assert ms(second) == [19]


def test_decoding_rows_share_a_step() -> None:
    found = run([Request(prompt(4), 3), Request(prompt(4, 50), 3)])
    assert [ms(timing) for timing in found.timings] == [[8, 19, 30]] * 2


def test_requests_wait_for_a_place_and_for_the_turn_before() -> None:
    requests = [
        Request(prompt(4), 2),
        Request(prompt(4, 50), 2),
        Request(prompt(4, 90), 1, follows=0),
    ]
    found = run(requests, at_once=1)
    assert [round(1e3 * t.sent_at, 6) for t in found.timings] == [0, 14, 28]
    assert found.duration == pytest.approx(0.032)


def test_contexts_choices_and_deciding_are_counted() -> None:
    costs = CostModel(
        *(PLAIN.tokens, PLAIN.rows),
        choice_s=0.5,
        one_kv_s=0.01,
        kv_s=0.02,
        pair_s=0.001,
        host_s=1.0,
        host_row_s=2.0,
    )
    rows = [Row("a", SlotId(0), 9, 1, (1,), (), True)]
    assert costs.device_seconds(rows) == pytest.approx(0.010 + 10 * 0.01)
    rows.append(Row("b", SlotId(1), 0, 3, (1, 2, 3), (), True))
    # 3 more tokens, one choice, pairs 1 + 2 + 3, and a context of 10 with one row of one token.
    expected = 0.010 + 0.003 + 0.5 + 6 * 0.001 + 10 * 0.01
    assert costs.device_seconds(rows) == pytest.approx(expected)
    assert costs.host_seconds(2) == 5.0
    assert CostModel.from_json(costs.to_json()).to_json() == costs.to_json()
    seen = CostModel(PLAIN.tokens, PLAIN.rows, 0.0, 0.01, 0.01, 0.0, windows=(4, None))
    assert seen.device_seconds(rows[:1]) == pytest.approx(0.010 + 7 * 0.01)


def test_a_small_cache_preempts_and_nobody_loses_a_token() -> None:
    requests = [Request(prompt(16, 100 * i), 24) for i in range(4)]
    found = run(requests, num_blocks=16)
    assert found.num_preemptions > 0
    assert found.peak_kv == 1.0
    assert [timing.num_output for timing in found.timings] == [24] * 4
    again = run(requests, num_blocks=16)
    assert again == found


def test_shared_prefixes_are_found() -> None:
    requests = [Request([*prompt(32), 40 + i], 1, at=float(i)) for i in range(2)]
    found = run(requests)
    assert [timing.num_cached for timing in found.timings] == [0, 32]


def test_what_can_never_fit_fails_alone() -> None:
    found = run([Request(prompt(300), 2), Request(prompt(4), 1, follows=0)])
    assert [timing.is_good for timing in found.timings] == [False, True]
    assert "300 tokens" in str(found.timings[0].error)
    assert "1 requests failed" in parse_slo([]).misses(parse_slo([]).summarise(found))[0]


def test_static_batches_let_time_pass() -> None:
    found = run([Request(prompt(4), 1)], batching="static", max_wait_ms=5.0)
    assert 5 <= ms(found.timings[0])[0] - 4 < 6


def test_devices_until_the_promise_is_kept() -> None:
    requests = [Request(prompt(32, 100 * i), 2) for i in range(6)] + [
        Request(prompt(4), 1, follows=1)
    ]
    parts = split(requests, 2)
    assert [len(part) for part in parts] == [3, 4]
    assert parts[1][3].follows == 0
    fleets = devices_needed(run, requests, parse_slo(["ttft_p99=70ms"]), most=64)
    assert [fleet.num_devices for fleet in fleets] == [1, 2, 3, 4]
    assert [bool(fleet.misses) for fleet in fleets] == [True, True, False, False]
    never = devices_needed(run, requests, parse_slo(["ttft_p99=1ms"]), most=64)
    assert [fleet.num_devices for fleet in never] == [1, 2, 4, 6]
    assert all(fleet.misses for fleet in never)


class _Law:
    """A runner whose steps take what a cost model says, on a clock of its own."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.at = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        self.at += self.costs.device_seconds(plan.rows)
        return StepResult([RowResult([]) for _ in plan.rows])


def test_measuring_finds_the_law_that_steps_follow() -> None:
    law = CostModel(
        StepCosts({1: 0.002, 64: 0.020, 512: 0.200}),
        StepCosts({1: 0.003, 64: 0.090}),
        *(0.001, 2e-6, 3e-6, 1e-7),
    )
    runner = _Law(law)
    room = Room.wanted(rows=32, tokens=512, positions=2048, block_size=16)
    measured = calibrate(runner, room, clock=lambda: runner.at)
    assert measured.spread == pytest.approx(0, abs=1e-9)
    found = measured.costs
    for rows in (1, 7, 32):
        row = [Row(str(i), SlotId(i), 500, 1, (0,), (), True) for i in range(rows)]
        chunk = Row("p", SlotId(40), 256, 200, (0,) * 200, (), False)
        for plan in (row, [*row, chunk], [chunk]):
            expected = law.device_seconds(plan)
            assert found.device_seconds(plan) == pytest.approx(expected, rel=0.02)


class _Disturbed(_Law):
    """Somebody else takes half of the machine from some moment on."""

    since = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        before = self.at
        result = super().run(plan)
        self.at += (self.at - before) if self.at > self.since else 0.0
        return result


def test_a_machine_that_was_not_quiet_is_noticed() -> None:
    law = CostModel(
        StepCosts({1: 0.002, 512: 0.2}), StepCosts({1: 0.003, 64: 0.09}), *(0.001, 0, 0, 0)
    )
    quiet, runner = _Law(law), _Disturbed(law)
    room = Room.wanted(rows=32, tokens=512, positions=2048, block_size=16)
    calibrate(quiet, room, clock=lambda: quiet.at)
    runner.since = quiet.at / 2
    found = calibrate(runner, room, clock=lambda: runner.at)
    assert found.spread > 0.5
    assert found.costs.rows.of(1) == pytest.approx(0.003, rel=0.01)
    steps = Steps(found.costs, "cpu", 1, 1, 32, 512, "2026-01-31", "", found.spread)
    assert "apart: something else used this machine" in (steps.warning or "")
    assert Steps.from_json(steps.to_json(), "").spread == steps.spread
