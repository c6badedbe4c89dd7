"""Fair share between tenants, with a simulated clock: a step takes time by its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from tests.core.schedulers import make_scheduler
from windlass.core.blocks import BlockPool
from windlass.core.fair_share import OUTPUT_COST, PROMPT_COST
from windlass.core.kv_layout import KVLayout
from windlass.core.limits import SchedulerLimits
from windlass.core.policy import Fcfs, Priority
from windlass.core.sampling import SamplingParams
from windlass.core.trace import SEQUENCES, TENANTS
from windlass.core.types import (
    BATCH_PRIORITY,
    PROBE_PRIORITY,
    NewRequest,
    RowResult,
    StepPlan,
    StepResult,
)

# Seconds of a step, of a prompt token and of a generated token, as measured on a CPU.
STEP_S, PROMPT_S, OUTPUT_S = 0.005, 0.0016, 0.0023


@dataclass
class Sim:
    """A scheduler whose steps take virtual time."""

    max_num_seqs: int = 32
    budget: int = 512
    num_blocks: int = 4096
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=4096,
            layout=KVLayout.unsized(16),
            num_blocks=self.num_blocks,
        )
        self.scheduler = make_scheduler(limits, BlockPool(self.num_blocks), **self.options)
        self.now = 0.0
        self.arrivals: list[tuple[float, NewRequest]] = []
        self.arrived: dict[str, float] = {}
        self.ttft: dict[str, float] = {}
        self.tokens: dict[str, float] = {}  # cost of the computed tokens, by tenant
        self.tenant_of: dict[str, str] = {}
        self.num_made = 0

    def send(self, tenant: str, num_prompt: int, max_tokens: int, **options) -> str:
        """Queue a request now, or at the time `at`."""
        at = options.pop("at", self.now)
        self.num_made += 1
        name = f"{tenant}-{self.num_made}"
        prompt = [self.num_made, *range(num_prompt - 1)]
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = NewRequest(name, prompt, sampling, tenant=tenant, **options)
        self.arrivals.append((at, request))
        self.arrivals.sort(key=lambda pair: pair[0])
        self.tenant_of[name] = tenant
        return name

    def step(self) -> StepPlan | None:
        """One step; returns None when no request is left."""
        if not self.scheduler.has_work and self.arrivals:
            self.now = max(self.now, self.arrivals[0][0])
        while self.arrivals and self.arrivals[0][0] <= self.now:
            at, request = self.arrivals.pop(0)
            self.arrived[request.request_id] = at
            self.scheduler.add(request, self.now)
        if not self.scheduler.has_work:
            return None
        plan = self.scheduler.plan(self.now)
        assert plan.rows, "work conserving: a step computes something while requests exist"
        seconds = STEP_S
        for row in plan.rows:
            seconds += row.num_tokens * PROMPT_S if row.num_tokens > 1 else OUTPUT_S
            cost = (row.num_tokens - row.sample * (row.num_tokens == 1)) * PROMPT_COST
            tenant = self.tenant_of[row.request_id]
            self.tokens[tenant] = self.tokens.get(tenant, 0) + cost + OUTPUT_COST * row.sample
        self.now += seconds
        result = StepResult([RowResult([1] if row.sample else []) for row in plan.rows])
        for output in self.scheduler.commit(plan, result, self.now):
            name = output.request_id
            self.ttft.setdefault(name, self.now - self.arrived[name])
        return plan

    def run(self, until: float = float("inf")) -> None:
        while self.now < until and self.step() is not None:
            pass

    def ttfts(self, tenant: str) -> list[float]:
        return sorted(s for name, s in self.ttft.items() if self.tenant_of[name] == tenant)

    def p99(self, tenant: str) -> float:
        found = self.ttfts(tenant)
        return found[min(len(found) - 1, int(0.99 * len(found)))]


def chats(sim: Sim, tenant: str, rng: Random, count: int = 60, num_prompt: int = 160) -> None:
    """Requests of a tenant with a few users, at random times; about a sixth of what the engine can do."""
    at = 0.0
    for _ in range(count):
        at += rng.expovariate(50 / num_prompt)
        sim.send(tenant, rng.randint(num_prompt // 2, 2 * num_prompt), rng.randint(8, 48), at=at)


def flood(sim: Sim, rng: Random, at: float, num_prompt: int = 400) -> None:
    for _ in range(200):
        sim.send("flood", rng.randint(num_prompt // 2, num_prompt), 128, at=at)


@pytest.mark.parametrize("num_blocks", [4096, 700])
@pytest.mark.parametrize(("flood_prompt", "prompt"), [(400, 160), (3000, 160), (100, 400)])
def test_a_flood_does_not_double_the_ttft_of_another_tenant(
    flood_prompt: int, prompt: int, num_blocks: int
) -> None:
    found = {}
    for name, floods, fair in (("alone", 0, True), ("fair", 1, True), ("unfair", 1, False)):
        sim = Sim(options={"fair_share": fair}, num_blocks=num_blocks)
        sim.send("chat", prompt, 8)  # the tenant is known
        chats(sim, "chat", Random(1), num_prompt=prompt)
        if floods:
            flood(sim, Random(2), at=2.0, num_prompt=flood_prompt)
        sim.run()
        found[name] = sim.p99("chat")
    assert found["fair"] <= 2 * found["alone"], found
    assert found["unfair"] > 5 * found["alone"], found


def backlogged(weights: dict[str, float], num_prompt: int = 200, **options) -> Sim:
    """Tenants that all have more requests than the engine can serve."""
    sim = Sim(**options)
    for tenant, weight in weights.items():
        for _ in range(400):
            sim.send(tenant, num_prompt, 32, weight=weight)
    return sim


def test_the_service_of_backlogged_tenants_differs_by_a_bound() -> None:
    sim = backlogged({"a": 1.0, "b": 1.0})
    # A step of prompts, the tokens of all slots in flight, and the credit of a step.
    bound = 2 * sim.budget * PROMPT_COST + 32 * sim.max_num_seqs * OUTPUT_COST
    for _ in range(400):
        sim.step()
        assert abs(sim.tokens.get("a", 0) - sim.tokens.get("b", 0)) <= bound


@pytest.mark.parametrize("num_prompt", [40, 200, 1000])
def test_weights_give_tokens_in_proportion(num_prompt: int) -> None:
    sim = backlogged({"a": 3.0, "b": 1.0}, num_prompt)
    for _ in range(50):
        sim.step()
    before = dict(sim.tokens)
    for _ in range(250):
        sim.step()
    got = {name: sim.tokens[name] - before[name] for name in "ab"}
    assert got["a"] / got["b"] == pytest.approx(3.0, rel=0.1)
    assert sim.scheduler.stats().tenant_fairness > 0.97


def test_without_fair_share_the_index_shows_who_comes_first() -> None:
    sim = backlogged({"a": 1.0, "b": 1.0}, options={"fair_share": False})
    for _ in range(100):
        sim.step()
    assert sim.scheduler.stats().tenant_fairness < 0.6


@pytest.mark.parametrize("seed", range(12))
def test_random_arrivals_are_all_served(seed: int) -> None:
    rng = Random(seed)
    sim = Sim(
        max_num_seqs=rng.choice([1, 2, 8]),
        budget=rng.choice([16, 128]),
        num_blocks=rng.choice([260, 1000]),
        options={"policy": rng.choice([Fcfs(), Priority()])},
    )
    names = []
    for _ in range(60):
        tenant = rng.choice("abbbbbb")
        names.append(
            sim.send(
                tenant,
                rng.randint(1, 600),
                rng.randint(1, 40),
                at=rng.uniform(0, 20),
                weight={"a": 1.0, "b": 0.5}[tenant],
                priority=rng.choice([0, 0, 3, BATCH_PRIORITY]),
            )
        )
    sim.run()
    assert set(sim.ttft) == set(names)
    assert sim.scheduler.stats().num_running == sim.scheduler.stats().num_used_blocks == 0
    assert all(account.num_requests == 0 for account in sim.scheduler._fair._accounts.values())


def test_idle_time_earns_at_most_a_step_of_credit() -> None:
    sim = backlogged({"a": 1.0})
    sim.send("b", 100, 4)
    for _ in range(300):
        sim.step()
    before = dict(sim.tokens)
    for _ in range(400):
        sim.send("b", 200, 32)
    for _ in range(200):
        sim.step()
    got = {name: sim.tokens[name] - before[name] for name in "ab"}
    assert got["b"] - got["a"] <= sim.budget + 32 * sim.max_num_seqs * OUTPUT_COST
    assert got["b"] > 0.5 * got["a"]


def plans(requests: list[tuple[str, int]], **options) -> list[list[tuple[str, int]]]:
    sim, found = Sim(**options), []
    for tenant, num_prompt in requests:
        sim.send(tenant, num_prompt, 16)
    while (plan := sim.step()) is not None:
        found.append([(row.request_id, row.num_tokens) for row in plan.rows])
    return found


def test_one_tenant_is_served_as_without_fair_share() -> None:
    requests = [("a", 10 + 70 * (i % 9)) for i in range(60)]
    options = {"max_num_seqs": 6, "num_blocks": 300}
    assert plans(requests, **options) == plans(requests, **options, options={"fair_share": False})


def test_a_tenant_that_holds_all_slots_gives_them_up_to_its_share() -> None:
    sim = Sim(max_num_seqs=8)
    for _ in range(20):
        sim.send("flood", 50, 500)
    for _ in range(10):
        sim.step()
    names = [sim.send("chat", 50, 500) for _ in range(6)]
    sim.step()
    running = [request.account.name for request in sim.scheduler._running]
    assert running.count("chat") == running.count("flood") == 4
    assert set(sim.ttft) >= set(names[:4])
    num_preemptions = sim.scheduler.stats().num_preemptions
    for _ in range(30):
        sim.step()
    assert sim.scheduler.stats().num_preemptions == num_preemptions == 4


def test_a_single_running_request_is_not_preempted_for_another_tenant() -> None:
    sim = Sim(num_blocks=300, max_num_seqs=1)
    sim.send("a", 100, 400)
    for _ in range(5):
        sim.step()
    sim.send("b", 100, 4)
    sim.run()
    assert sim.scheduler.stats().num_preemptions == 0


def order_of_starts(sim: Sim) -> list[str]:
    admitted: list[str] = []
    while (plan := sim.step()) is not None:
        admitted += [each.request_id for each in plan.admitted]
    return admitted


def test_probes_come_first_and_batches_last_and_priorities_order_a_tenants_own() -> None:
    sim = Sim(max_num_seqs=1, options={"policy": Priority()})
    batch = sim.send("a", 5, 2, priority=BATCH_PRIORITY)
    late = sim.send("a", 5, 2, priority=9)
    soon = sim.send("a", 5, 2, priority=1)
    other = sim.send("b", 5, 2, priority=1000)
    probe = sim.send("", 5, 1, priority=PROBE_PRIORITY)
    assert order_of_starts(sim) == [probe, soon, other, late, batch]


def test_tenants_are_forgotten_a_minute_after_their_last_request() -> None:
    sim = Sim()
    sim.send("a", 5, 2)
    sim.send("b", 5, 2)
    sim.run()
    fair = sim.scheduler._fair
    assert fair.several
    sim.send("a", 5, 200, at=sim.now + 100)
    sim.step()
    assert not fair.several


def test_probes_are_no_tenant() -> None:
    sim = Sim()
    sim.send("a", 5, 2)
    sim.send("", 5, 1, priority=PROBE_PRIORITY)
    sim.step()
    assert not sim.scheduler._fair.measures


def test_traces_tell_the_time_behind_other_tenants() -> None:
    sim = Sim(max_num_seqs=2)
    first = sim.send("a", 50, 40)
    second = sim.send("a", 50, 40)
    third = sim.send("a", 50, 4)
    sim.step()
    for _ in range(2):
        sim.send("b", 50, 40)
    sim.run()
    traces = {trace.request_id: trace for trace in sim.scheduler.accounting.traces}
    assert traces[third].blocked_s[TENANTS] > 0
    for name in (first, second):
        assert traces[name].timeline.num_preemptions or not sum(traces[name].blocked_s)
    for trace in traces.values():
        assert min(trace.blocked_s) > -1e-9
        times = trace.timeline
        waited = (times.admitted or 0.0) - times.arrived + trace.waited_again_s
        assert sum(trace.blocked_s) == pytest.approx(waited, abs=1e-6)
    assert any(trace.blocked_s[SEQUENCES] > 0 for trace in traces.values())
