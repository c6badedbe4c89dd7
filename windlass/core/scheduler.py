"""Decides what each step computes, and applies its results.

There are no phases. A request has tokens, some are computed, a step computes more: chunked
prefill, prefix hits, verification of draft tokens and preemption are one subtraction. A plan may
run one step ahead of the last commit, for the overlapped loop, or one step per pipeline stage. The
runner knows how tokens are computed and sampled and where their KV lies.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from windlass.core.accounting import StepAccounting, blocker_of
from windlass.core.adapters import Adapters
from windlass.core.blocks import BlockPool
from windlass.core.deadlines import Deadlines, Rates
from windlass.core.fair_share import CLASSES, FairShare
from windlass.core.grammars import Grammars, NoGrammars
from windlass.core.kv_allocator import CachedPrefix, KVAllocator
from windlass.core.limits import EngineCaps, SchedulerLimits
from windlass.core.memory import BlockUse
from windlass.core.pins import PinnedPrefixes
from windlass.core.policy import Continuous, Fcfs, Gate, Policy, WaitingQueue
from windlass.core.request import Request
from windlass.core.slo import NoSlo, SloController, with_times
from windlass.core.speculation.planner import DraftPlanner, NoDrafts
from windlass.core.speculation.prediction import Predictions
from windlass.core.step import Step, make_tuple
from windlass.core.tiers import NoTiers, Tiers, TierStores
from windlass.core.trace import ADAPTER, BLOCKS, GRAMMAR, KV, PREFIX, SLO, TOKENS, RequestTrace
from windlass.core.types import (
    NO_OPTIONS,
    PROBE_PRIORITY,
    BlockId,
    EngineStats,
    FinishReason,
    GrammarFailure,
    NewRequest,
    Output,
    Row,
    RowResult,
    SlotId,
    StepPlan,
    StepResult,
)
from windlass.errors import EngineError, Overloaded, RequestError

_NO_BLOCKS: list[BlockId] = []
# The fields of an output of tokens behind `timeline`.
_UNSET = (None,) * (len(Output._fields) - Output._fields.index("timeline") - 1)
_MIN_BUDGET = 64  # tokens; if the device lacks memory for such a step, smaller steps will not help


def _one(_: Request) -> int:
    return 1


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Plain settings of a scheduler."""

    eos_ids: tuple[int, ...] = ()
    caching: bool = True  # use the prefix cache
    seed: int = 0  # of requests without a seed
    fair_share: bool = True  # between tenants
    max_pinned_share: float = 0.25  # of the blocks, for named prefixes


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """The objects that a scheduler asks. A part belongs to one scheduler."""

    policy: Policy = field(default_factory=Fcfs)
    gate: Gate = field(default_factory=Continuous)
    adapters: Adapters = field(default_factory=Adapters)
    grammars: Grammars = field(default_factory=NoGrammars)
    drafts: DraftPlanner | NoDrafts = field(default_factory=NoDrafts)
    slo: SloController | NoSlo = field(default_factory=NoSlo)
    tiers: TierStores | None = None


class Scheduler:
    """Owns the requests and their KV blocks. Not thread-safe."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        options: SchedulerOptions = SchedulerOptions(),  # noqa: B008 - frozen
        parts: SchedulerParts | None = None,
    ) -> None:
        parts = parts or SchedulerParts()
        self._limits = limits
        self._eos_ids = frozenset(options.eos_ids)
        self._policy = parts.policy
        self._gate = parts.gate
        self._is_continuous = isinstance(parts.gate, Continuous)
        self._random = Random(options.seed)
        self.adapters = parts.adapters
        self.grammars = parts.grammars
        self._drafts = parts.drafts
        self._predictions = Predictions()
        self._slo = parts.slo
        self._deadlines = Deadlines()
        self._stuck_for = ADAPTER  # the blocker that all queued requests have in common
        # Requests that failed, or ended at their deadline, while the last plan was made.
        self.failed: list[Output] = []
        # Requests that ended after their first token, and the keys of their prompt, until they are taken.
        self.handed_over: list[tuple[str, list[bytes]]] = []
        self._requests: dict[str, Request] = {}
        self._fair = FairShare(limits.max_num_batched_tokens, enabled=options.fair_share)
        self._waiting = WaitingQueue(self._policy, by_tenant=options.fair_share)
        # In policy order, with tenants taking turns: the last one is preempted first.
        self._running: list[Request] = []
        self._slots = deque(SlotId(i) for i in range(limits.max_num_seqs))
        self._freed: list[SlotId] = []
        self._in_flight: deque[Step] = deque()
        self._budget = (
            limits.max_num_batched_tokens
        )  # tokens per step; halved after running out of memory
        self._max_budget = self._budget
        self._max_running = limits.max_num_seqs
        self._num_arrivals = 0
        self._count = EngineStats()
        self.accounting = StepAccounting()
        self._allocator = KVAllocator(limits, pool, options.caching)
        self.tiers = (
            NoTiers()
            if parts.tiers is None
            else Tiers(parts.tiers, self._allocator, limits=limits, rates=self._rates)
        )
        self.pins = PinnedPrefixes(
            limits,
            self._allocator,
            self.adapters,
            tiers=self.tiers,
            caching=options.caching,
            max_share=options.max_pinned_share,
        )

    # ---- requests in and out -----------------------------------------------------------------

    def add(self, new: NewRequest, now: float) -> None:
        """Queue a request. A malformed one, or one that can never fit, raises."""
        if new.request_id in self._requests:
            raise RequestError(f"request id {new.request_id!r} is already in use.", "request_id")
        max_tokens = self._limits.check_request(new)
        eos_ids = () if new.sampling.ignore_eos else self._eos_ids
        stops = frozenset((*new.sampling.stop_token_ids, *eos_ids))
        salt = self.adapters.enter(new.adapter, new.adapter_version) if new.adapter else ""
        seed = self._random.getrandbits(62) if new.sampling.seed is None else new.sampling.seed
        account = self._fair.enter(new, self._waiting.peek(), now)
        request = Request(
            new,
            self._num_arrivals,
            max_tokens=max_tokens,
            stop_ids=stops,
            seed=seed,
            now=now,
            account=account,
            adapter_salt=salt,
        )
        self._num_arrivals += 1
        self._requests[new.request_id] = request
        if new.sampling.structured_outputs is not None:
            self.grammars.enter(new.request_id, new.sampling.structured_outputs)
        if new.prediction:
            self._predictions.enter(new.request_id, new.prediction)
        if new.deadline is not None:
            self._deadlines.enter(request)
        self.accounting.arrived(request, len(self._waiting), len(self._running), now)
        if new.generated:
            request.timeline.first_token = now
            self.accounting.first_token(request)
        self._waiting.push(request)

    def abort(self, request_id: str, now: float | None = None) -> None:
        """Drop a request if it still exists. Its blocks are free at once."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort", now)

    def fail_running(self, error: str) -> list[Output]:
        """End the requests of all steps in flight with an error; queued requests stay queued.

        If no request is running, planning itself failed, and the queued requests end, too.
        """
        requests = list(self._requests.values())
        lost = [each for each in requests if each.slot is not None or each.num_pending]
        outputs = [self._fail(request, error) for request in lost or requests]
        self._in_flight.clear()
        self.adapters.forget_idle()
        return outputs

    def retract(self, plan: StepPlan, error: str) -> list[Output]:
        """Withdraw the latest plan after the device ran out of memory, and plan smaller steps.

        Its requests are queued again and lose no token. When steps cannot get smaller, the request
        of the largest row fails: the returned output.
        """
        floor = max(_MIN_BUDGET, self._limits.max_num_seqs)
        smallest, self._budget = self._budget <= floor, max(self._budget // 2, floor)
        largest = max(plan.rows, key=lambda row: row.num_tokens)
        outputs, members = [], self._in_flight.pop().members
        for (request, generation), row in zip(members, plan.rows, strict=True):
            if row.sample:
                request.num_pending -= 1
            if request.finish is not None or request.generation != generation:
                continue
            if smallest and row is largest:
                outputs.append(self._fail(request, error))
            else:
                self._preempt(request, self.accounting.now)
        self.adapters.forget_idle()
        return outputs

    def _fail(self, request: Request, error: str | EngineError) -> Output:
        self._finish(request, "error")
        return Output(
            request.request_id,
            finish="error",
            error=str(error),
            timeline=request.timeline,
            param=error.param if isinstance(error, RequestError) else None,
            retry_after_s=error.retry_after_s if isinstance(error, Overloaded) else None,
        )

    def _end_late(self, now: float) -> list[Output]:
        """End the requests whose deadline has passed, and queued ones that cannot meet theirs.

        A request with output tokens keeps them; one without fails.
        """
        outputs = []
        for request, _, why in self._deadlines.late(now, self._rates, self._num_cached):
            request.share.why_ended = why
            self._finish(request, "deadline", now)
            timeline = request.timeline
            timeline.num_output = request.num_output
            error = None if request.num_output else why
            outputs.append(
                Output(request.request_id, finish="deadline", error=error, timeline=timeline)
            )
        return outputs

    def _rates(self) -> Rates:
        count = self._count
        num_generated = max(1, count.num_generated_tokens)
        return self.accounting.rates(1 - count.num_saved_tokens / num_generated)

    def _num_cached(self, request: Request) -> int:
        """The number of prompt tokens of a queued request that are in the prefix cache."""
        num_cached = self._allocator.find(request).num_blocks * self._limits.block_size
        return min(num_cached, request.num_prompt - 1)

    def _fail_broken(self, failures: Iterable[GrammarFailure]) -> list[Output]:
        """End the requests whose grammar failed in a step, unless they have ended already."""
        return [
            self._fail(self._requests[failure.request_id], self.grammars.fail(failure))
            for failure in failures
            if failure.request_id in self._requests
        ]

    def set_caps(self, caps: EngineCaps) -> None:
        """Lower limits, or raise them again. Requests that run go on, also above the new limit."""
        limits = self._limits
        self._max_running = min(caps.max_num_seqs or limits.max_num_seqs, limits.max_num_seqs)
        max_tokens = limits.max_num_batched_tokens
        self._max_budget = min(caps.max_num_batched_tokens or max_tokens, max_tokens)
        self._drafts.cap(caps.max_draft_tokens)
        if caps.slo is not None:
            self._slo = with_times(self._slo, caps.slo, limits)

    @property
    def _num_free_slots(self) -> int:
        """Queued requests that may start."""
        return max(0, min(len(self._slots), self._max_running - len(self._running)))

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether a plan is needed: for a request, or for blocks that KV tiers save or load."""
        return bool(self._requests) or self.tiers.has_work

    @property
    def num_stages(self) -> int:
        """Pipeline stages of the runner: so many plans may be in flight."""
        return self._limits.num_stages

    def reset_prefix_cache(self) -> int:
        """Drop the cached blocks of the device that no request uses; returns their number."""
        self.tiers.reset()
        return self._allocator.pool.reset_cache()

    def block_use(self) -> BlockUse:
        return self._allocator.use(self._running)

    def trace(self, request_id: str, now: float) -> RequestTrace | None:
        """The trace so far of an unfinished request."""
        request = self._requests.get(request_id)
        return None if request is None else self.accounting.trace(request, now)

    def stats(self, now: float | None = None) -> EngineStats:
        """A snapshot; the caller owns it."""
        if now is not None and not self._running and not self._in_flight:
            self.accounting.idle(now)
        prompts_left = (max(0, r.num_prompt - r.planned) for r in self._requests.values())
        return replace(
            self._count,
            account=self.accounting.account(),
            adapters=self.adapters.stats(),
            grammars=self.grammars.stats(),
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            tenant_fairness=self._fair.jain(),
            num_waiting_tokens=sum(prompts_left),
            waiting_by_reason=self.accounting.waiting(len(self._waiting)),
            num_blocks=self._allocator.pool.num_blocks,
            num_used_blocks=self._allocator.pool.num_used,
            num_cached_blocks=self._allocator.pool.num_cached_free,
            num_pinned_blocks=self.pins.num_blocks,
            accepted_per_position=list(self._count.accepted_per_position),
            deadlines=dict(self._deadlines.num_ended),
            slo=self._slo.stats,
            executors=dict(self._count.executors),
            refusals={name: dict(found) for name, found in self._count.refusals.items()},
            tiers=self.tiers.stats(),
            tier_decisions=self.tiers.decisions,
        )

    # ---- plan --------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """Plan the next step: running requests first, then queued ones in policy order."""
        plan = StepPlan(
            rows=[], admitted=[], freed=[], copies=[], step=self._count.num_steps, adapters=[]
        )
        max_samples = self._limits.max_samples(
            len(self._running) + len(self._waiting),
            num_pending=sum(step.num_samples for step in self._in_flight),
            num_plans=len(self._in_flight),
        )
        budget = min(self._budget, self._max_budget)
        step = Step(plan, self._limits, budget, began=now, max_samples=max_samples)
        accounting, fair = self.accounting, self._fair
        if not self._running and not self._in_flight:
            accounting.idle(now)
        accounting.begin_plan(now)
        self.adapters.begin()
        self.grammars.begin()
        self.tiers.begin()
        self.failed = self._end_late(now) if self._deadlines else []
        self._drafts.trim(self._running, budget)
        if self._predictions:
            self._predictions.trim(self._running, self._limits.max_num_seqs)
        step.prompt_budget, step.max_running, step.max_drafts = self._slo.limits(self._running, now)
        if fair.measures:
            fair.begin_plan(now)
        if fair.is_unsorted:
            fair.arrange(self._running, self._policy.key)
        if fair.several:
            self._make_way(now)
        num_before = self._count.num_preemptions
        prompts = self._plan_running(step, now)
        if fair.measures:
            fair.charge_rows(step.members, plan.rows)
        step.decode_budget = step.budget
        if self._count.num_preemptions == num_before:
            self._plan_waiting(step, prompts, now)
        else:
            self._block_queue(BLOCKS, now)
        self._plan_prompts(step, prompts, counter=math.inf, now=now)
        num_tokens = step.close(budget)
        moves = self.tiers.moves()
        if moves is not None:
            plan = step.plan = plan._replace(saves=moves[0], loads=moves[1])
        if not plan.rows:
            return plan
        plan.freed.extend(self._freed)
        self._freed.clear()
        plan.adapters.extend(self.adapters.orders())
        self._in_flight.append(step)
        self._count.num_steps += 1
        self._count.num_step_tokens = num_tokens
        self._count.num_prompt_tokens_computed += step.num_prompt_tokens
        options = self._drafts.options(step, self.num_pending_admissions)
        if self._predictions:
            options = self._predictions.options(step, options)
        return plan if options is NO_OPTIONS else plan._replace(options=options)

    @property
    def num_pending_admissions(self) -> int:
        """Queued requests that are likely to join the step after the last plan."""
        return min(self._num_free_slots, self.accounting.num_ready(len(self._waiting)))

    def _make_way(self, now: float) -> None:
        """Preempt requests of tenants over their share for the first tenant of the queue.

        That tenant stays within its share, so none of its requests is preempted in return.
        """
        head = self._waiting.peek()
        if head is None or not self._may_claim(head):
            return
        cached = self._allocator.find(head)
        if self._allocator.should_wait(head, cached) or self.tiers.is_waiting(head):
            return
        fair, limits, pool, account = self._fair, self._limits, self._allocator.pool, head.account
        num_fair = max(1, int(fair.share(account) * self._max_running))
        # As many as the step is likely to start.
        num_starts = 1 + self._budget // (1 + int(account.mean_prompt))
        num_claims = min(num_starts, account.num_waiting, num_fair - account.num_running)
        if num_claims > self._num_free_slots:
            wanted = num_claims - self._num_free_slots
            for victim in fair.victims(
                self._running, account, size=_one, total=self._max_running, wanted=wanted
            ):
                self._preempt(victim, now)
        count = limits.chunk(len(head.tokens), self._budget)
        lacking = self._allocator.lacking(head, cached, count, alone=False)
        num_blocks = limits.blocks_for(len(head.tokens)) * len(limits.layout.groups)
        size = self._allocator.num_held
        for each in self._running:
            num_blocks += size(each) if each.account is account else 0
        if (
            lacking > 0
            and self._num_free_slots
            and num_blocks <= fair.share(account) * pool.num_blocks
        ):
            victims = fair.victims(
                self._running, account, size=size, total=pool.num_blocks, wanted=lacking
            )
            if sum(map(size, victims)) >= lacking:
                for victim in victims:
                    self._preempt(victim, now)

    def _may_claim(self, head: Request) -> bool:
        """Whether requests of other tenants may be preempted for the queue's head."""
        if not self._is_continuous or head.priority in CLASSES or head.num_pending:
            return False
        if head.adapter and not self.adapters.is_resident(head.adapter):
            return False
        try:
            return not head.has_grammar or self.grammars.ready(head.request_id)
        except EngineError:  # `_blocker` will end the request
            return False

    def _plan_running(self, step: Step, now: float) -> list[Request]:
        """Plan the rows of running requests; returns those whose prompts other tenants may delay."""
        max_pending, prompts = self._limits.max_pending, []
        running, max_chunk = list(self._running), step.prompt_budget
        for at, request in enumerate(running):
            if request.slot is None:  # preempted by this plan, as are all behind it
                break
            num_known = len(request.tokens) + request.num_pending
            count = num_known - request.planned
            # A request at its maximum length only waits for the sample in flight.
            if (
                count <= 0
                or request.verifying
                or num_known >= request.longest
                or request.num_pending > max_pending
            ):
                step.skip(request)
                continue
            if count == 1 and step.budget and step.emit_decode(request):
                continue
            if count > 1 and self._fair.several:
                prompts.append(request)
                continue
            if count > max_chunk and self._has_shorter(step, running[at + 1 :], count):
                # The SLO controller divides this prompt; shorter ones must not wait for its end.
                step.max_prompt = max(1, step.prompt_budget // 2)
            self._plan_row(step, request, count=count, now=now)
            step.max_prompt = step.total
        return prompts

    def _has_shorter(self, step: Step, behind: Sequence[Request], num_left: int) -> bool:
        """Whether a prompt of at most half of `num_left` tokens could join: of `behind`, or the queue's first."""
        if any(1 < each.num_left <= num_left // 2 for each in behind):
            return True
        if not self._num_free_slots or len(self._running) >= step.max_running:
            return False
        head = self._waiting.peek()
        return head is not None and len(head.tokens) <= num_left // 2

    def _plan_row(self, step: Step, request: Request, count: int, now: float) -> None:
        """Plan the row of a running request with `count` tokens left."""
        chunk = self._limits.chunk(count, step.room_for(count))
        if chunk == 0 or (chunk == count and not step.may_sample):
            step.skip(request)
            return
        count = chunk
        fresh: list[BlockId] | None = _NO_BLOCKS
        end = request.planned + count
        if request.drafts or self._limits.lookahead:
            spare = step.budget - count
            end = self._allocator.end_with_drafts(
                request, end, spare=spare, num_running=len(self._running)
            )
        if end > request.room:
            fresh = self._grow(request, end, now)
        if fresh is not None:
            step.emit(request, count, fresh)

    def _plan_prompts(self, step: Step, prompts: list[Request], counter: float, now: float) -> bool:
        """Plan the prompts of running requests whose tenants were served at most `counter`."""
        num_before = len(prompts)
        while prompts:
            request = min(prompts, key=lambda each: each.account.counter)
            if request.account.counter > counter:
                break
            prompts.remove(request)
            if request.slot is None:  # preempted for an earlier prompt
                continue
            has_rows = step.budget < step.total
            step.max_prompt = self._prompt_room(step, request)
            end = request.planned + self._limits.chunk(
                request.num_left, step.room_for(request.num_left)
            )
            # Rows that are planned already must not lose their blocks.
            if has_rows and self._allocator.need(request, end) > self._allocator.pool.num_free:
                step.skip(request)
            else:
                start = request.planned
                self._plan_row(step, request, count=request.num_left, now=now)
                if request.planned > start:
                    self._fair.charge_chunk(request, start)
        return len(prompts) < num_before

    def _prompt_room(self, step: Step, request: Request) -> int:
        """Tokens of a prompt that may join the step, beside the rows of other tenants."""
        if not self._fair.several or request.priority == PROBE_PRIORITY:
            return step.budget
        has_prompts = step.budget < step.decode_budget
        if not (has_prompts or self._limits.chunked_prefill):
            return step.budget
        num_tokens = step.total - step.budget
        room = self._fair.max_step_tokens(request.account) - num_tokens
        return max(room, 0 if has_prompts else self._fair.min_chunk)

    def _plan_waiting(self, step: Step, prompts: list[Request], now: float) -> None:
        # Adapter loads and grammar compilations may finish during this loop: use the state from
        # before it.
        state = self.adapters.state, self.grammars.state, self.tiers.state
        request = self._waiting.peek()
        if request is None:
            return
        if self._waiting.stuck_at == state:
            self._block_queue(self._stuck_for, now)
            return
        waited_s = now - request.timeline.arrived
        openings = self._gate.openings(len(self._waiting), len(self._running), waited_s)
        if request.priority != PROBE_PRIORITY:
            openings = min(openings, step.max_running - len(self._running))
        awaits_prefix, count, blockers = False, 1, set()
        while request is not None and openings > 0 and step.has_room and self._num_free_slots:
            if request.num_pending:  # preempted while its last sample is in flight
                break
            if prompts and self._plan_prompts(
                step, prompts, counter=request.account.counter, now=now
            ):
                request = self._waiting.peek()
                continue
            step.max_prompt = self._prompt_room(step, request)
            if not step.max_prompt:
                break
            blocker = self._blocker(request)
            if blocker is not None:
                if request.finish is None:
                    self.accounting.pass_over(self._waiting.set_aside(), blocker)
                    blockers.add(blocker)
                request = self._waiting.peek()
                continue
            cached = self._allocator.find(request)
            if self._allocator.should_wait(request, cached):
                self.accounting.pass_over(self._waiting.set_aside(), PREFIX)
                awaits_prefix = True
            elif self.tiers.should_wait(
                step, request, cached, num_slots=self._num_free_slots, alone=not self._running
            ):
                self.accounting.pass_over(self._waiting.set_aside(), KV)
                blockers.add(KV)
            else:
                count = self._admit(step, request, cached, now)
                if count <= 0:
                    break
                step.emit(request, count, [block for table in request.tables for block in table])
                if self._fair.measures:
                    self._fair.charge_chunk(request, request.computed)
                openings -= 1
            request = self._waiting.peek()
        is_stuck = request is None and not awaits_prefix and len(blockers) == 1
        self._waiting.restore(state if is_stuck else None)
        if is_stuck:
            (self._stuck_for,) = blockers
        if self._waiting:
            if request is None:  # all were passed over
                blocker = self.accounting.passed[-1][1]
            else:
                blocker = blocker_of(request, openings, num_slots=self._num_free_slots, count=count)
                is_full = self._num_free_slots and len(self._running) >= step.max_running
                if is_full or (blocker == TOKENS and step.prompt_budget <= 0 < step.budget):
                    blocker = SLO
            self._block_queue(blocker, now)

    def _block_queue(self, blocker: int, now: float) -> None:
        head = self._waiting.peek() if self._fair.several else None
        self.accounting.block_queue(blocker, now, None if head is None else head.account)

    def _blocker(self, request: Request) -> int | None:
        """Return what blocks a queued request: its adapter, its grammar or nothing.

        An adapter or a grammar that failed ends the request.
        """
        blocker = ADAPTER
        try:
            if request.adapter and not self.adapters.available(request.adapter, request.request_id):
                return ADAPTER
            blocker = GRAMMAR
            if request.has_grammar and not self.grammars.ready(request.request_id):
                return GRAMMAR
        except EngineError as error:
            self.failed.append(self._fail(request, error))
            return blocker
        return None

    def _grow(self, request: Request, num_tokens: int, now: float) -> list[BlockId] | None:
        """Allocate the blocks that a running request needs for `num_tokens`, preempting if necessary.

        Returns None when the request itself was preempted.
        """
        need = self._allocator.need(request, num_tokens)
        while need > self._allocator.pool.num_free:
            last = self._running[-1]
            self._preempt(last, now)
            if last is request:
                return None
        return self._allocator.grow(request, need)

    def _admit(self, step: Step, request: Request, cached: CachedPrefix, now: float) -> int:
        """Give a queued request a slot and its first blocks. Returns <= 0 if it cannot start now."""
        count = self._allocator.start(step, request, cached, alone=not self._running)
        if count <= 0:
            return count
        self.tiers.admitted(request)
        self._place(step.plan, request)
        if self.accounting.admitted(request, request.computed, now):
            self._allocator.note_miss(request)
            if self._allocator.may_read(request):
                self._count.prefix_queries += request.num_prompt
                self._count.prefix_hits += request.computed
        return count

    def _place(self, plan: StepPlan, request: Request) -> None:
        self._waiting.pop()
        self._gate.moved(+1)
        request.slot = self._slots.popleft()
        self._fair.start(request, len(request.tokens) - request.computed)
        if self._fair.several:
            self._running.append(request)
            self._fair.is_unsorted = True
        else:
            insort(self._running, request, key=self._policy.key)
        self._drafts.admit(request.slot)
        if request.adapter:
            request.adapter_slot = self.adapters.acquire(request.adapter, request.request_id)
        grammar = self.grammars.acquire(request.request_id) if request.has_grammar else ""
        plan.admitted.append(request.slot_init(grammar))

    def _preempt(self, request: Request, now: float) -> None:
        """Send a request back to the queue. Its sealed blocks stay in the prefix cache."""
        self._running.remove(request)
        self._release(request)
        self.accounting.preempted(request, now)
        request.forget_kv()
        request.timeline.num_preemptions += 1
        self._count.num_preemptions += 1
        self._gate.moved(-1)
        self._fair.stop(request)
        self._waiting.push(request)

    # ---- commit ------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Output]:
        """Apply the results of the oldest uncommitted plan; returns the outputs of its requests."""
        outputs: list[Output] = []
        step, accounting = self._in_flight.popleft(), self.accounting
        unit = accounting.step(now, step)
        self._slo.observe(step, unit * step.num_tokens)
        self._drafts.observe(step, plan=plan, result=result, now=now)
        rows = zip(step.members, plan.rows, result.rows, strict=True)
        for (request, generation), row, got in rows:
            if request.finish is not None:
                accounting.add_wasted_row(request, row, unit)
                continue
            if request.generation == generation:
                request.computed = row.start + row.num_tokens
                if row.num_drafts or got.drafts:
                    request.settle_drafts(row, got, self._count)
                if request.computed >= request.seal_at:
                    self._allocator.advance(request)
            else:
                accounting.add_preempted_row(request, row, unit)
            if row.sample:
                request.num_pending -= 1
                outputs.append(self._append(request, row, got, now))
            elif got.prompt_logprobs:
                scores = request.unreported(row, got.prompt_logprobs)
                outputs.append(Output(request.request_id, prompt_logprobs=scores))
        if self._predictions:
            self._predictions.draft(step, plan, result, self._drafts.withdraw)
        if step.verifies and self._fair.measures:
            self._fair.charge_drafts(step.members, plan.rows, result.rows)
        self._count.count_executor(result)
        self._count.add([len(output.tokens) for output in outputs], result.drafting_s)
        failures = result.grammar_failures
        return outputs + self._fail_broken(failures) if failures else outputs

    def _append(self, request: Request, row: Row, got: RowResult, now: float) -> Output:
        """Append sampled tokens up to the first that finishes the request."""
        if got.pooled is not None:
            return self._end_pooled(request, got.pooled, now)
        first = len(request.tokens) == request.num_prompt
        taken, finish, stop_token = request.take(got.tokens)
        if finish is not None and request.sampling.max_tokens == 0:
            taken, finish, stop_token = 0, "length", None
            request.tokens.pop()
        tokens, scores, prompt_scores, timeline = got.tokens, got.logprobs, None, None
        if first or finish is not None or row.num_drafts:
            timeline = request.timeline
            timeline.num_output = request.num_output
            timeline.last_token = now
            if first:
                timeline.first_token = now
                self.accounting.first_token(request)
        if finish is not None:
            tokens = tokens[:taken]
            scores = scores[:taken] if scores is not None else None
            if finish == "handover":
                keys = self._allocator.prompt_keys(request)
                self.handed_over.append((request.request_id, keys))
            self._finish(request, finish)
        if got.prompt_logprobs is not None:
            prompt_scores = request.unreported(row, got.prompt_logprobs)
        values = (request.request_id, tokens, scores, prompt_scores, finish, stop_token)
        return make_tuple(Output, (*values, None, timeline, *_UNSET))

    def _end_pooled(self, request: Request, pooled: bytes, now: float) -> Output:
        """Finish a pooling request with its vector."""
        timeline = request.timeline
        timeline.first_token = timeline.last_token = now
        self.accounting.first_token(request)
        self._finish(request, "stop")
        return Output(request.request_id, finish="stop", timeline=timeline, pooled=pooled)

    def _finish(self, request: Request, reason: FinishReason, now: float | None = None) -> None:
        request.finish = reason
        self.accounting.finished(request, self.accounting.now if now is None else now)
        del self._requests[request.request_id]
        if request.slot is None:
            self._waiting.remove(request)
            self.adapters.drop_waiter(request.request_id)
            self.tiers.drop(request)
        else:
            self._running.remove(request)
            self._release(request)
            request.slot = None
            self._fair.stop(request)
        self._fair.leave(request)
        if request.deadline is not None:
            self._deadlines.leave()
        if request.adapter:
            self.adapters.leave(request.adapter)
        if request.has_grammar:
            self.grammars.leave(request.request_id)
        if self._predictions:
            self._predictions.leave(request.request_id)

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        self._allocator.release(request)
        self._slots.append(request.slot)
        self._freed.append(request.slot)
        self._drafts.release(request.slot)
        if request.adapter:
            self.adapters.release(request.adapter)
