"""A scheduler with a fake runner: the model is a function of the tokens.

`FakeRunner` keeps KV "values" in real pages, so that a wrong block, a wrong start or a block that
was handed out too early gives a wrong token, as it would in a real model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from windlass.core.blocks import BlockPool
from windlass.core.kv_layout import KVLayout
from windlass.core.limits import SchedulerLimits
from windlass.core.sampling import SamplingParams
from windlass.core.scheduler import Scheduler
from windlass.core.types import NewRequest, Output, RowResult, StepPlan, StepResult

VOCAB = 23
EOS = 7


def next_token(tokens: list[int]) -> int:
    """The model: the next token depends on all before it."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


def plain_loop(request: NewRequest, context: int, eos: int | None = EOS) -> list[int]:
    """The expected tokens of a request, computed without an engine."""
    sampling = request.sampling
    tokens = list(request.prompt)
    max_tokens = sampling.max_tokens if sampling.max_tokens is not None else context - len(tokens)
    out: list[int] = []
    while len(out) < max_tokens:
        token = next_token(tokens)
        tokens.append(token)
        out.append(token)
        if not sampling.ignore_eos and token == eos and len(out) > sampling.min_tokens:
            break
    return out


@dataclass
class FakeRunner:
    """Runs plans on pages of token values, and drafts `draft_length` tokens at max_tokens."""

    num_blocks: int
    block_size: int
    random: Random = field(default_factory=lambda: Random(0))
    draft_length: int = 0
    obeys_plans: bool = False  # drafts only after steps whose plan asks for drafts
    num_computed: int = 0

    def __post_init__(self) -> None:
        self.pages: list[list[int | None]] = [
            [None] * self.block_size for _ in range(self.num_blocks)
        ]
        self.tables: dict[int, list[int]] = {}
        self.last: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for slot in plan.freed:
            self.tables.pop(slot, None)
        for admission in plan.admitted:
            self.tables[admission.slot] = []
        for source, target in plan.copies:
            self.pages[target] = list(self.pages[source])
        rows = [self._run_row(row) for row in plan.rows]
        if self.obeys_plans:
            max_length = plan.options.draft_length
            rows = [got._replace(drafts=got.drafts[:max_length]) for got in rows]
        return StepResult(rows)

    def _run_row(self, row) -> RowResult:
        table = self.tables[row.slot]
        table.extend(row.blocks)
        tokens = row.tokens or (self.last[row.slot],)
        assert len(tokens) == row.num_tokens
        self.num_computed += len(tokens)
        for offset, token in enumerate(tokens):
            at = row.start + offset
            self.pages[table[at // self.block_size]][at % self.block_size] = token
        if not row.sample:
            return RowResult([])
        known = row.start + row.num_tokens - row.num_drafts
        seen = [self.pages[table[i // self.block_size]][i % self.block_size] for i in range(known)]
        assert None not in seen, "a position was read that was never computed"
        out = [next_token(seen)]
        for draft in tokens[len(tokens) - row.num_drafts :] if row.num_drafts else ():
            if draft != out[-1]:
                break
            seen.append(draft)
            out.append(next_token(seen))
        self.last[row.slot] = out[-1]
        return RowResult(out, drafts=self._draft(seen, out[-1]))

    def _draft(self, seen: list[int], last: int) -> tuple[int, ...]:
        """Draft tokens, 30 % of them wrong."""
        tokens, drafts = [*seen, last], []
        for _ in range(self.random.randint(0, self.draft_length)):
            token = next_token(tokens)
            if self.random.random() < 0.3:
                token = (token + 1) % VOCAB
            drafts.append(token)
            tokens.append(token)
        return tuple(drafts)


@dataclass
class World:
    """A scheduler, a fake runner, and the tokens of every request so far."""

    limits: SchedulerLimits
    caching: bool = True
    draft_length: int = 0
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.limits.num_blocks, self.caching)
        self.scheduler = Scheduler(
            self.limits, self.pool, eos_ids=(EOS,), caching=self.caching, **self.options
        )
        self.runner = FakeRunner(
            self.limits.num_blocks, self.limits.block_size, draft_length=self.draft_length
        )
        self.got: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        self.now = 0.0
        self.largest_step = 0

    def add(self, request: NewRequest) -> None:
        self.scheduler.add(request, self.now)
        self.got[request.request_id] = []

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self.check()

    def step(self) -> None:
        """The plain loop: plan, run, commit."""
        plan = self.plan()
        if plan.rows:
            self.commit(plan, self.runner.run(plan))

    def plan(self) -> StepPlan:
        self.now += 0.01
        plan = self.scheduler.plan(self.now)
        self.largest_step = max(self.largest_step, plan.num_tokens)
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        slots = [row.slot for row in plan.rows]
        assert len(set(slots)) == len(slots) <= self.limits.max_num_seqs
        self.check()
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Output]:
        outputs = self.scheduler.commit(plan, result, self.now)
        for output in outputs:
            self.got[output.request_id] += output.tokens
            if output.finish:
                self.finish[output.request_id] = output.finish
        self.check()
        return outputs

    def finish_all(self, ahead: bool = False, limit: int = 20_000) -> None:
        """Step until nothing is left; `ahead` plans the next step before the last is committed."""
        pending = None
        for _ in range(limit):
            if not self.scheduler.has_work and pending is None:
                break
            if not ahead:
                self.step()
                continue
            plan = self.plan()
            result = self.runner.run(plan) if plan.rows else None
            if pending is not None:
                self.commit(*pending)
            pending = (plan, result) if result is not None else None
        assert not self.scheduler.has_work, "the engine stopped making progress"
        assert self.pool.num_used == 0

    def check(self) -> None:
        """Every block's reference count equals the number of requests that claim it."""
        allocator = [0] * self.limits.num_blocks
        for request in self.scheduler._running:
            assert len(set(request.blocks)) == len(request.blocks)
            for block in request.blocks:
                allocator[block] += 1
        for request in self.scheduler._waiting:
            assert not request.blocks
        assert allocator == self.pool._refs
        assert {b for b, n in enumerate(allocator) if n == 0} == set(self.pool._free)


def request(request_id: str, prompt: list[int], priority: int = 0, **sampling) -> NewRequest:
    sampling.setdefault("max_tokens", 8)
    return NewRequest(request_id, prompt, SamplingParams(**sampling), priority=priority)


def limits(**changes) -> SchedulerLimits:
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "layout": KVLayout.unsized(changes.pop("block_size", 4)),
        "num_blocks": 32,
    }
    return SchedulerLimits(**{**values, **changes})
