"""Measures the scheduler's plan and commit at several numbers of requests, without a model."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from windlass.core.blocks import BlockPool
from windlass.core.kv_layout import KVLayout
from windlass.core.limits import SchedulerLimits
from windlass.core.sampling import SamplingParams
from windlass.core.scheduler import Scheduler
from windlass.core.types import NewRequest, RowResult, StepPlan, StepResult

_PROMPT = 512
_STEPS = 200


def _fake_result(plan: StepPlan) -> StepResult:
    return StepResult([RowResult([1] if row.sample else []) for row in plan.rows])


def measure(num_requests: int, steps: int = _STEPS) -> dict[str, Any]:
    """Milliseconds per decode step of `num_requests` requests: medians and p99."""
    limits = SchedulerLimits(
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests + 8192,
        max_model_len=_PROMPT + steps + 1040,
        layout=KVLayout.unsized(16),
        num_blocks=num_requests * (_PROMPT + steps + 1040) // 16,
    )
    scheduler = Scheduler(limits, BlockPool(limits.num_blocks))
    for i in range(num_requests):
        prompt = [(i * 7 + j) % 50_000 for j in range(_PROMPT)]
        params = SamplingParams(max_tokens=steps + 1024, ignore_eos=True)
        scheduler.add(NewRequest(f"r{i}", prompt, params), 0.0)
    while scheduler.stats().num_waiting_tokens:
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, _fake_result(plan), 0.0)
    plans, commits = [], []
    for _ in range(steps):
        started = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        result = _fake_result(plan)
        ready = time.perf_counter()
        scheduler.commit(plan, result, 0.0)
        commits.append(time.perf_counter() - ready)
        plans.append(planned - started)
        assert len(plan.rows) == num_requests
    totals = sorted(a + b for a, b in zip(plans, commits, strict=True))
    return {
        "running": num_requests,
        "plan_ms": round(1e3 * median(plans), 3),
        "commit_ms": round(1e3 * median(commits), 3),
        "step_ms": round(1e3 * median(totals), 3),
        "p99_ms": round(1e3 * totals[int(len(totals) * 0.99)], 3),
    }
