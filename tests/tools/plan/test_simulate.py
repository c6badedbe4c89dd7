"""The simulator compared with schedules computed by hand, and with its own second run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from windlass.config import EngineConfig
from windlass.core.card import Capacity
from windlass.core.kv_layout import KVLayout
from windlass.core.speculation.costs import StepCosts
from windlass.core.types import Row, RowResult, SlotId, StepPlan, StepResult
from windlass.tools.common.drive import EngineRun
from windlass.tools.common.requests import Request, Timing
from windlass.tools.common.slo import parse_slo
from windlass.tools.plan.calibrate import CalibrationLimits, calibrate
from windlass.tools.plan.cost_model import CostModel
from windlass.tools.plan.simulate import simulate
from windlass.tools.plan.step_costs import MeasuredSteps
from windlass.tools.plan.what_if import devices_needed, split

# A prefill token takes 1 ms, the first decode row 10 ms and each further row 1 ms.
PLAIN = CostModel(
    tokens=StepCosts({1: 0.001, 2: 0.002}),
    rows=StepCosts({1: 0.010, 2: 0.011}),
    choice_s=0.0,
    one_kv_s=0.0,
    kv_s=0.0,
    pair_s=0.0,
)


def run(
    requests: Sequence[Request],
    costs: CostModel = PLAIN,
    max_concurrency: int | None = None,
    **settings: Any,
) -> EngineRun:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **settings}
    num_blocks = options.pop("num_blocks", 64)
    config = EngineConfig.of(block_size=4, **options)
    capacity = Capacity(num_blocks, KVLayout.unsized(4), 1, "as set")
    return simulate(
        requests,
        costs,
        config=config,
        limits=config.limits("cpu"),
        capacity=capacity,
        max_model_len=256,
        max_concurrency=max_concurrency,
    )


def ms(timing: Timing) -> list[float]:
    """Milliseconds from sending the request to each of its tokens."""
    return [round(1e3 * (at - timing.sent_at), 6) for at in timing.times]


def prompt(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def test_one_request() -> None:
    found = run([Request(prompt(8), 3)])
    assert ms(found.timings[0]) == [8, 18, 28]
    assert found.duration == pytest.approx(0.028)
    assert (found.num_steps, found.num_preemptions, found.prompt_tokens_computed) == (3, 0, 8)
    assert found.peak_blocks == 3  # 8 prompt tokens and 2 of the 3 generated ones


def test_long_prompt_is_chunked_and_a_later_one_joins() -> None:
    # 8 tokens in two steps of 4; the second request arrives at 2 ms and is seen when a step ends.
    requests = [Request(prompt(8), 2), Request(prompt(3, 100), 1, at=0.002)]
    first, second = sorted(
        run(requests, max_num_batched_tokens=4, max_num_seqs=2).timings, key=lambda t: t.sent_at
    )
    # 0-4 and 4-8 ms: the first prompt; then its decode row of 10 ms with 3 prefill tokens: 13 ms.
    assert ms(first) == [8, 21]
    assert ms(second) == [19]


def test_decoding_rows_share_a_step() -> None:
    found = run([Request(prompt(4), 3), Request(prompt(4, 50), 3)])
    assert [ms(timing) for timing in found.timings] == [[8, 19, 30]] * 2


def test_requests_wait_for_max_concurrency_and_for_the_turn_before() -> None:
    requests = [
        Request(prompt(4), 2),
        Request(prompt(4, 50), 2),
        Request(prompt(4, 90), 1, follows=0),
    ]
    found = run(requests, max_concurrency=1)
    assert [round(1e3 * t.sent_at, 6) for t in found.timings] == [0, 14, 28]
    assert found.duration == pytest.approx(0.032)


def test_attention_sampling_and_scheduling_are_counted() -> None:
    costs = CostModel(
        tokens=PLAIN.tokens,
        rows=PLAIN.rows,
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
    # 3 prefill tokens, one sample, 1 + 2 + 3 pairs, and one decode row with a context of 10.
    expected = 0.010 + 0.003 + 0.5 + 6 * 0.001 + 10 * 0.01
    assert costs.device_seconds(rows) == pytest.approx(expected)
    assert costs.host_seconds(2) == 5.0
    assert CostModel.from_json(costs.to_json()).to_json() == costs.to_json()
    windowed = replace(PLAIN, one_kv_s=0.01, kv_s=0.01, windows=(4, None))
    assert windowed.device_seconds(rows[:1]) == pytest.approx(0.010 + 7 * 0.01)


def test_small_cache_preempts_and_loses_no_token() -> None:
    requests = [Request(prompt(16, 100 * i), 24) for i in range(4)]
    found = run(requests, num_blocks=16)
    assert found.num_preemptions > 0
    assert found.peak_kv == 1.0
    assert [timing.num_output for timing in found.timings] == [24] * 4
    again = run(requests, num_blocks=16)
    assert again == found


def test_shared_prefixes_are_cached() -> None:
    requests = [Request([*prompt(32), 40 + i], 1, at=float(i)) for i in range(2)]
    found = run(requests)
    assert [timing.num_cached for timing in found.timings] == [0, 32]


def test_request_that_cannot_fit_fails_alone() -> None:
    found = run([Request(prompt(300), 2), Request(prompt(4), 1, follows=0)])
    assert [timing.is_good for timing in found.timings] == [False, True]
    assert "300 tokens" in str(found.timings[0].error)
    assert "1 requests failed" in parse_slo([]).misses(parse_slo([]).summarise(found))[0]


def test_static_batching_waits() -> None:
    found = run([Request(prompt(4), 1)], batching="static", max_wait_ms=5.0)
    assert 5 <= ms(found.timings[0])[0] - 4 < 6


def test_devices_until_the_slo_is_met() -> None:
    requests = [Request(prompt(32, 100 * i), 2) for i in range(6)] + [
        Request(prompt(4), 1, follows=1)
    ]
    parts = split(requests, 2)
    assert [len(part) for part in parts] == [3, 4]
    assert parts[1][3].follows == 0
    fleets = devices_needed(run, requests, parse_slo(["ttft_p99=70ms"]), max_devices=64)
    assert [fleet.num_devices for fleet in fleets] == [1, 2, 3, 4]
    assert [bool(fleet.misses) for fleet in fleets] == [True, True, False, False]
    never = devices_needed(run, requests, parse_slo(["ttft_p99=1ms"]), max_devices=64)
    assert [fleet.num_devices for fleet in never] == [1, 2, 4, 6]
    assert all(fleet.misses for fleet in never)


class _CostRunner:
    """A runner whose step times follow a cost model, with its own clock."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.at = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        self.at += self.costs.device_seconds(plan.rows)
        return StepResult([RowResult([]) for _ in plan.rows])


def test_calibration_recovers_the_cost_model() -> None:
    costs = CostModel(
        tokens=StepCosts({1: 0.002, 64: 0.020, 512: 0.200}),
        rows=StepCosts({1: 0.003, 64: 0.090}),
        choice_s=0.001,
        one_kv_s=2e-6,
        kv_s=3e-6,
        pair_s=1e-7,
    )
    runner = _CostRunner(costs)
    limits = CalibrationLimits(rows=32, tokens=512, positions=2048, block_size=16)
    measured = calibrate(runner, limits, clock=lambda: runner.at)
    assert measured.spread == pytest.approx(0, abs=1e-9)
    found = measured.costs
    for rows in (1, 7, 32):
        row = [Row(str(i), SlotId(i), 500, 1, (0,), (), True) for i in range(rows)]
        chunk = Row("p", SlotId(40), 256, 200, (0,) * 200, (), False)
        for plan in (row, [*row, chunk], [chunk]):
            expected = costs.device_seconds(plan)
            assert found.device_seconds(plan) == pytest.approx(expected, rel=0.02)


class _Disturbed(_CostRunner):
    """Other work takes half of the machine from `since` on."""

    since = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        before = self.at
        result = super().run(plan)
        self.at += (self.at - before) if self.at > self.since else 0.0
        return result


def test_disturbed_calibration_is_reported() -> None:
    costs = replace(
        PLAIN,
        tokens=StepCosts({1: 0.002, 512: 0.2}),
        rows=StepCosts({1: 0.003, 64: 0.09}),
        choice_s=0.001,
    )
    quiet, runner = _CostRunner(costs), _Disturbed(costs)
    limits = CalibrationLimits(rows=32, tokens=512, positions=2048, block_size=16)
    calibrate(quiet, limits, clock=lambda: quiet.at)
    runner.since = quiet.at / 2
    found = calibrate(runner, limits, clock=lambda: runner.at)
    assert found.spread > 0.5
    assert found.costs.rows.of(1) == pytest.approx(0.003, rel=0.01)
    steps = MeasuredSteps(
        costs=found.costs,
        device="cpu",
        kv_dtype="float16",
        weight_bytes=1,
        rows=32,
        tokens=512,
        date="2026-01-31",
        source="",
        spread=found.spread,
    )
    assert "other work used this machine" in (steps.warning or "")
    assert MeasuredSteps.from_json(steps.to_json(), "").spread == steps.spread
