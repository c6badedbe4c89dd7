"""A scheduler with a fake runner: the model is a function of the tokens.

`FakeRunner` keeps KV "values" in real pages, so that a wrong block, a wrong start or a block that
was handed out too early gives a wrong token, as it would in a real model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from tests.core.fake_tiers import FakeStores
from tests.core.schedulers import make_scheduler
from windlass.core.blocks import BlockPool
from windlass.core.kv_layout import KVGroup, KVLayout
from windlass.core.limits import SchedulerLimits
from windlass.core.sampling import SamplingParams
from windlass.core.types import (
    NO_BLOCK,
    NewRequest,
    Output,
    RowResult,
    StepPlan,
    StepResult,
)

VOCAB = 23
EOS = 7


FULL = KVLayout.unsized(4)


def make_layout(*kinds: str, block_size: int) -> KVLayout:
    """A layout of one layer per kind: full, latent, state, or window with its size: window5."""
    groups = []
    for layer, name in enumerate(kinds):
        window = int(name.removeprefix("window")) if name.startswith("window") else None
        groups.append(
            KVGroup(
                kind=name if window is None else "window",
                layers=(layer,),
                page=(1,) if name == "state" else (block_size, 1),
                item_bytes=block_size if name == "state" else 1,
                window=window,
            )
        )
    return KVLayout(tuple(groups), block_size)


def step_state(value: int, token: int) -> int:
    """One step of the recurrence that stands for a layer's view of the tokens."""
    return (value * 31 + token + 1) % 1_000_003


def view_of(group: KVGroup, tokens: list[int]) -> int:
    """What a layer of this group computes at the last token."""
    value = 17
    for token in tokens[-group.window :] if group.window is not None else tokens:
        value = step_state(value, token)
    return value if group.window is None else step_state(value, len(tokens))


def choose_token(views: list[int]) -> int:
    """The model's next token, given the view of every group."""
    value = 0
    for view in views:
        value = value * 7 + view
    return value % VOCAB


def next_token(tokens: list[int], layout: KVLayout = FULL) -> int:
    """The model: the next token depends on all tokens that a layer can see."""
    return choose_token([view_of(group, tokens) for group in layout.groups])


def plain_loop(
    request: NewRequest, context: int, eos: int | None = EOS, layout: KVLayout = FULL
) -> list[int]:
    """The expected tokens of a request, computed without an engine."""
    sampling = request.sampling
    tokens = list(request.prompt)
    max_tokens = sampling.max_tokens if sampling.max_tokens is not None else context - len(tokens)
    out: list[int] = []
    while len(out) < max_tokens:
        token = next_token(tokens, layout)
        tokens.append(token)
        out.append(token)
        if not sampling.ignore_eos and token == eos and len(out) > sampling.min_tokens:
            break
    return out


class Entry(NamedTuple):
    """What was written for one position of one group: a token, or the state after it."""

    group: int
    position: int
    value: int
    salt: str  # of the request: KV differs between adapters and modes


@dataclass
class FakeRunner:
    """Runs plans on pages of token values, and drafts `draft_length` tokens at max_tokens."""

    num_blocks: int
    layout: KVLayout = FULL
    random: Random = field(default_factory=lambda: Random(0))
    draft_length: int = 0
    obeys_plans: bool = False  # drafts only after steps whose plan asks for drafts
    num_computed: int = 0
    tiers: FakeStores | None = None

    def __post_init__(self) -> None:
        self.size = self.layout.block_size
        self.pages: list[list[Entry | None]] = [self._empty() for _ in range(self.num_blocks)]
        self.tables: dict[int, list[list[int]]] = {}
        self.last: dict[int, int] = {}
        self.modes: dict[int, str] = {}
        self.adapters: dict[int, str] = {0: ""}
        if self.tiers is not None:
            self.tiers.pages = self.pages

    def _empty(self) -> list[Entry | None]:
        return [None] * self.size

    def poison(self, blocks: Iterable[int]) -> None:
        """Forget the content of blocks that no request holds and no hash finds."""
        for block in blocks:
            self.pages[block] = self._empty()

    def run(self, plan: StepPlan) -> StepResult:
        if self.tiers is not None:
            self.tiers.apply(plan)
        for slot in plan.freed:
            self.tables.pop(slot, None)
        for admission in plan.admitted:
            self.tables[admission.slot] = [[] for _ in self.layout.groups]
            self.modes[admission.slot] = "fixed" if admission.sampling.deterministic else ""
        self.adapters.update(plan.adapters)
        for source, target in plan.copies:
            self.pages[target] = list(self.pages[source])
        rows = [self._run_row(row) for row in plan.rows]
        if self.obeys_plans:
            max_length = plan.options.draft_length
            rows = [got._replace(drafts=got.drafts[:max_length]) for got in rows]
        return StepResult(rows)

    def _run_row(self, row) -> RowResult:
        tables, num_groups = self.tables[row.slot], len(self.layout.groups)
        assert len(row.blocks) % num_groups == 0
        count = len(row.blocks) // num_groups
        for index, table in enumerate(tables):
            table.extend(row.blocks[index * count : (index + 1) * count])
        tokens = row.tokens or (self.last[row.slot],)
        assert len(tokens) == row.num_tokens
        self.num_computed += len(tokens)
        salt = f"{self.adapters[row.adapter]}/{self.modes[row.slot]}"
        views = [
            self._compute(index, tables[index], row.start, tokens, salt)
            for index in range(num_groups)
        ]
        if not row.sample:
            return RowResult([])
        num_known = row.num_tokens - row.num_drafts
        by_token = list(zip(*views, strict=True))[num_known - 1 :]
        out = [choose_token(by_token[0])]
        accepted = []
        for draft, seen in zip(tokens[num_known:], by_token[1:], strict=True):
            if draft != out[-1]:
                break
            accepted.append(draft)
            out.append(choose_token(seen))
        self.last[row.slot] = out[-1]
        return RowResult(out, drafts=self._draft(row, tables, accepted, out[-1]))

    def _compute(self, index: int, table: list[int], start: int, tokens, salt: str) -> list[int]:
        """Write the tokens of one group, and return its view at each of them."""
        group = self.layout.groups[index]
        if group.kind == "state":
            return self._compute_state(index, table, start, tokens, salt)
        for at, token in enumerate(tokens, start):
            assert table[at // self.size] != NO_BLOCK
            self.pages[table[at // self.size]][at % self.size] = Entry(index, at, token, salt)
        views = []
        for end in range(start + 1, start + len(tokens) + 1):
            low = 0 if group.window is None else max(0, end - group.window)
            seen = [self._read(index, table, at, salt) for at in range(low, end)]
            views.append(view_of(group, [0] * low + seen))
        return views

    def _compute_state(
        self, index: int, table: list[int], start: int, tokens, salt: str
    ) -> list[int]:
        """Continue the state before `start`; keep a copy of it at every block's end."""
        value = self._read(index, table, start - 1, salt, slot=0) if start else 17
        views = []
        for at, token in enumerate(tokens, start):
            value = step_state(value, token)
            self.pages[table[at // self.size]][0] = Entry(index, at, value, salt)
            views.append(value)
        return views

    def _read(
        self, index: int, table: list[int], at: int, salt: str, slot: int | None = None
    ) -> int:
        block = table[at // self.size]
        assert block != NO_BLOCK, f"position {at} of group {index} is behind the window"
        entry = self.pages[block][at % self.size if slot is None else slot]
        assert entry is not None, f"position {at} of group {index} was never computed, or freed"
        assert entry[:2] == (index, at), f"position {at} of group {index} holds {entry}"
        assert entry.salt == salt, f"position {at} was computed for {entry.salt}, not {salt}"
        return entry.value

    def _draft(self, row, tables, accepted: list[int], last: int) -> tuple[int, ...]:
        """Draft tokens, 30 % of them wrong. States cannot be drafted for."""
        groups = self.layout.groups
        if self.layout.has_state or not self.draft_length:
            return ()
        num_known = row.start + row.num_tokens - row.num_drafts
        salt = f"{self.adapters[row.adapter]}/{self.modes[row.slot]}"
        lows = [0 if g.window is None else max(0, num_known - g.window + 1) for g in groups]
        index = lows.index(min(lows))
        seen = [self._read(index, tables[index], at, salt) for at in range(lows[index], num_known)]
        tokens, drafts = [0] * lows[index] + [*seen, *accepted, last], []
        for _ in range(self.random.randint(0, self.draft_length)):
            token = next_token(tokens, self.layout)
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
        self.scheduler = make_scheduler(
            self.limits, self.pool, eos_ids=(EOS,), caching=self.caching, **self.options
        )
        self.runner = FakeRunner(
            self.limits.num_blocks,
            self.limits.layout,
            draft_length=self.draft_length,
            tiers=self.options.get("tiers"),
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
        result = self.runner.run(plan)
        if plan.rows:
            self.commit(plan, result)

    def plan(self) -> StepPlan:
        self.now += 0.01
        plan = self.scheduler.plan(self.now)
        self.largest_step = max(self.largest_step, plan.num_tokens)
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        slots = [row.slot for row in plan.rows]
        assert len(set(slots)) == len(slots) <= self.limits.max_num_seqs
        self.check()
        free = self.pool._free
        self.runner.poison(block for block in free if self.pool._hash_of[block] is None)
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
            result = self.runner.run(plan)
            if pending is not None:
                self.commit(*pending)
            pending = (plan, result) if plan.rows else None
        assert not self.scheduler.has_work, "the engine stopped making progress"
        assert self.pool.num_used == self.scheduler.pins.num_blocks

    def check(self) -> None:
        """Every block's reference count equals the number of requests and loads that claim it."""
        allocator = [0] * self.limits.num_blocks
        size, groups = self.limits.block_size, self.limits.layout.groups
        owners: dict[int, int] = {}
        for request in self.scheduler._running:
            assert {len(table) * size for table in request.tables} == {request.room}
            for index, (group, table) in enumerate(zip(groups, request.tables, strict=True)):
                held = [block for block in table if block != NO_BLOCK]
                assert len(set(held)) == len(held)
                in_flight = request.planned - request.computed
                self.check_held(group, len(held), in_flight, request)
                for block in held:
                    allocator[block] += 1
                    assert owners.setdefault(block, index) == index
        for load in {each.load for each in getattr(self.scheduler.tiers, "_loading", {}).values()}:
            for block in load.blocks:
                allocator[block] += 1
        for request in self.scheduler._waiting:
            assert not request.tables
        for blocks in self.scheduler.pins._blocks.values():
            for block in blocks:
                allocator[block] += 1
        assert allocator == self.pool._refs
        cached = self.pool._by_hash.values()
        assert self.pool.num_cached_free == sum(self.pool._refs[block] == 0 for block in cached)
        assert {b for b, n in enumerate(allocator) if n == 0} == set(self.pool._free)

    def check_held(self, group: KVGroup, num_held: int, in_flight: int, request) -> None:
        """A group holds no more blocks than the layout counts, and full groups hold all."""
        size = self.limits.block_size
        if group.lookback is None:
            assert num_held * size == request.room
        # Accepted draft tokens are sealed, and the blocks behind them freed, by the next row.
        ahead = max(in_flight, request.room - request.computed) + self.runner.draft_length
        assert num_held <= group.blocks_for(request.room, ahead, size)


def request(
    request_id: str, prompt: list[int], priority: int = 0, adapter: str = "", **sampling
) -> NewRequest:
    sampling.setdefault("max_tokens", 8)
    own = {name: sampling.pop(name) for name in ("tenant", "weight") if name in sampling}
    params = SamplingParams(**sampling)
    return NewRequest(request_id, prompt, params, priority=priority, adapter=adapter, **own)


def limits(**changes) -> SchedulerLimits:
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "layout": KVLayout.unsized(changes.pop("block_size", 4)),
        "num_blocks": 32,
    }
    return SchedulerLimits(**{**values, **changes})
