"""Decides what every step computes, and takes in what it gave.

There are no phases. A request has tokens, some are computed, a step computes more: chunked
prompts, prefix hits, verification of guesses and preemption are one subtraction. Plans may run
ahead of commits by a step, for a loop that overlaps them. What a token costs to compute, where its
KV lies and how it is sampled is the runner's business.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import replace
from random import Random

from windlass.core.accounting import StepAccounting, lacks
from windlass.core.adapters import Adapters
from windlass.core.blocks import BlockPool
from windlass.core.grammars import Grammars, NoGrammars
from windlass.core.kv_allocator import KVAllocator
from windlass.core.limits import SchedulerLimits
from windlass.core.memory import BlockUse
from windlass.core.policy import Continuous, Fcfs, Gate, Policy, WaitingQueue
from windlass.core.request import Request
from windlass.core.step import Step, make_tuple
from windlass.core.trace import ADAPTER, BLOCKS, GRAMMAR, PREFIX, RequestTrace
from windlass.core.types import (
    BlockId,
    EngineStats,
    FinishReason,
    NewRequest,
    Output,
    Row,
    RowResult,
    SlotId,
    StepPlan,
    StepResult,
)
from windlass.errors import EngineError, RequestError

_NO_BLOCKS: list[BlockId] = []
_MIN_BUDGET = 64  # tokens: a step that lacks memory for these will not get it


class Scheduler:
    """Owns the requests and the block pool. Not thread-safe."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        eos_ids: tuple[int, ...] = (),
        policy: Policy | None = None,
        gate: Gate | None = None,
        caching: bool = True,
        seed: int = 0,
        adapters: Adapters | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._limits = limits
        self._eos_ids = frozenset(eos_ids)
        self._policy = policy or Fcfs()
        self._gate = gate or Continuous()
        self._random = Random(seed)
        self.adapters = adapters or Adapters()
        self.grammars: Grammars = grammars or NoGrammars()
        self._stuck_for = ADAPTER  # what all waiting requests lack, while the queue is stuck
        self.failed: list[Output] = []  # requests that ended while the last plan was made
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue(self._policy)
        self._running: list[Request] = []  # in the policy's order: the last is the first victim
        self._slots = deque(SlotId(i) for i in range(limits.max_num_seqs))
        self._freed: list[SlotId] = []
        self._in_flight: deque[Step] = deque()
        self._budget = limits.max_num_batched_tokens  # tokens a step; less after a lack of memory
        self._num_arrivals = 0
        self._count = EngineStats()
        self.accounting = StepAccounting()
        self._allocator = KVAllocator(limits, pool, caching)

    # ---- requests in and out -----------------------------------------------------------------

    def add(self, new: NewRequest, now: float) -> None:
        """Queue a request; one that is malformed or can never fit is refused here."""
        if new.request_id in self._requests:
            raise RequestError(f"request id {new.request_id!r} is already in use.", "request_id")
        if not new.prompt:
            raise RequestError("the prompt has no tokens.", "prompt")
        self._limits.check(new.sampling)
        max_tokens = self._limits.fit(len(new.prompt), new.sampling.max_tokens)
        eos_ids = () if new.sampling.ignore_eos else self._eos_ids
        stops = frozenset((*new.sampling.stop_token_ids, *eos_ids))
        salt = self.adapters.enter(new.adapter) if new.adapter else ""
        seed = self._random.getrandbits(62) if new.sampling.seed is None else new.sampling.seed
        request = Request(new, self._num_arrivals, max_tokens, stops, seed, now, salt)
        self._num_arrivals += 1
        self._requests[new.request_id] = request
        if new.sampling.structured_outputs is not None:
            self.grammars.enter(new.request_id, new.sampling.structured_outputs)
        self.accounting.arrived(request, len(self._waiting), len(self._running), now)
        self._waiting.push(request)

    def abort(self, request_id: str, now: float | None = None) -> None:
        """Drop a request, if it is still there; its blocks are free at once."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort", now)

    def fail_all(self, error: str) -> list[Output]:
        """End every request with an error, in-flight steps included."""
        outputs = [self._fail(request, error) for request in list(self._requests.values())]
        self._in_flight.clear()
        self.adapters.forget_idle()
        return outputs

    def retract(self, plan: StepPlan, error: str) -> list[Output]:
        """Take back the latest plan, for which the device had no memory, and plan smaller steps.

        Its requests wait again and lose no token. When steps cannot get smaller, the largest row's
        request ends with the error: the returned output.
        """
        least = max(_MIN_BUDGET, self._limits.max_num_seqs)
        smallest, self._budget = self._budget <= least, max(self._budget // 2, least)
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
        )

    def _fail_broken(self) -> list[Output]:
        """End the requests whose grammar could not be followed in the last step."""
        outputs: list[Output] = []
        while self.grammars.failed:
            request_id, error = self.grammars.failed.popitem()
            outputs.append(self._fail(self._requests[request_id], error))
        return outputs

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def known(self) -> dict[SlotId, list[int]]:
        """All committed tokens of the requests that run, by their slots; nobody may change them."""
        return {each.slot: each.tokens for each in self._running if each.slot is not None}

    def reset_prefix_cache(self) -> int:
        return self._allocator.pool.reset_cache()

    def block_use(self) -> BlockUse:
        return self._allocator.use(self._running)

    def trace(self, request_id: str, now: float) -> RequestTrace | None:
        """What is to be told so far of a request that has not ended."""
        request = self._requests.get(request_id)
        return None if request is None else self.accounting.told(request, now)

    def stats(self, now: float | None = None) -> EngineStats:
        """How things stand now; the caller owns the result."""
        if now is not None and not self._running and not self._in_flight:
            self.accounting.rest(now)
        prompts_left = (max(0, r.num_prompt - r.planned) for r in self._requests.values())
        return replace(
            self._count,
            account=self.accounting.account(),
            adapters=self.adapters.stats(),
            grammars=self.grammars.stats(),
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=sum(prompts_left),
            num_blocks=self._allocator.pool.num_blocks,
            num_used_blocks=self._allocator.pool.num_used,
            num_cached_blocks=self._allocator.pool.num_cached,
            accepted_per_position=list(self._count.accepted_per_position),
        )

    # ---- plan --------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """Say what to compute next: running requests first, then waiting ones in order."""
        plan = StepPlan([], [], [], [], self._count.num_steps, [])
        step = Step(plan, self._limits, self._budget)
        num_before = self._count.num_preemptions
        accounting = self.accounting
        if not self._running and not self._in_flight:
            accounting.rest(now)
        accounting.look(now)
        self.adapters.begin()
        self.grammars.begin()
        self.failed = []
        self._plan_running(step, now)
        if self._count.num_preemptions == num_before:
            self._plan_waiting(step, now)
        else:
            accounting.waits(BLOCKS, now)
        if plan.rows:
            plan.freed.extend(self._freed)
            self._freed.clear()
            plan.adapters.extend(self.adapters.orders())
            self._in_flight.append(step)
            self._count.num_steps += 1
            self._count.num_step_tokens = step.close(self._budget)
            self._count.num_prompt_tokens_computed += step.num_prompt_tokens
        pending_admissions = min(len(self._slots), accounting.num_ready(len(self._waiting)))
        return (
            plan._replace(num_pending_admissions=pending_admissions) if pending_admissions else plan
        )

    def _plan_running(self, step: Step, now: float) -> None:
        for request in list(self._running):
            if request.slot is None:  # interrupted a moment ago, as are all behind it
                break
            num_known = len(request.tokens) + request.num_pending
            count = num_known - request.planned
            # At its longest, the sample in flight is its last.
            if count <= 0 or request.verifying or num_known >= request.longest:
                step.leave_out(request)
                continue
            if count == 1 and step.budget and step.emit_decode(request):
                continue
            count = self._limits.chunk(count, step.budget)
            if count == 0:
                step.leave_out(request)
                continue
            fresh: list[BlockId] | None = _NO_BLOCKS
            end = request.planned + count
            if request.drafts or self._limits.lookahead:
                spare = step.budget - count
                end = self._allocator.end_with_drafts(request, end, spare, len(self._running))
            if end > len(request.blocks) * self._limits.block_size:
                fresh = self._grow(request, end, now)
            if fresh is not None:
                step.emit(request, count, fresh)

    def _plan_waiting(self, step: Step, now: float) -> None:
        # Readings and compilations may end any moment: what is noted is the state before the look.
        state = self.adapters.state, self.grammars.state
        request = self._waiting.peek()
        if request is None:
            return
        if self._waiting.stuck_at == state:
            self.accounting.waits(self._stuck_for, now)
            return
        waited_s = now - request.timeline.arrived
        openings = self._gate.openings(len(self._waiting), len(self._running), waited_s)
        promised, count, lacked = False, 1, set()
        while request is not None and openings > 0 and step.budget > 0 and self._slots:
            if request.num_pending:  # interrupted while its last sample is still in flight
                break
            lack = self._lacks(request)
            if lack is not None:
                if request.finish is None:
                    self.accounting.pass_over(self._waiting.set_aside(), lack)
                    lacked.add(lack)
                request = self._waiting.peek()
                continue
            cached = self._allocator.find(request)
            if self._allocator.should_wait(request, cached):
                self.accounting.pass_over(self._waiting.set_aside(), PREFIX)
                promised = True
            else:
                count = self._admit(step, request, cached, now)
                if count <= 0:
                    break
                step.emit(request, count, request.blocks)
                openings -= 1
            request = self._waiting.peek()
        is_stuck = request is None and not promised and len(lacked) == 1
        self._waiting.restore(state if is_stuck else None)
        if is_stuck:
            (self._stuck_for,) = lacked
        if self._waiting:
            self.accounting.waits(lacks(request, openings, len(self._slots), count), now)

    def _lacks(self, request: Request) -> int | None:
        """What a waiting request lacks of its own; an adapter or grammar with an error ends it."""
        blocker = ADAPTER
        try:
            if request.adapter and not self.adapters.wanted(request.adapter, request.request_id):
                return ADAPTER
            blocker = GRAMMAR
            if request.has_grammar and not self.grammars.ready(request.request_id):
                return GRAMMAR
        except EngineError as error:
            self.failed.append(self._fail(request, error))
            return blocker
        return None

    def _grow(self, request: Request, num_tokens: int, now: float) -> list[BlockId] | None:
        """Take the blocks that a running request lacks for `num_tokens`, by preemption if need be.

        Returns None when the request itself was the one to go back.
        """
        need = self._allocator.need(request, num_tokens)
        while need > self._allocator.pool.num_free:
            last = self._running[-1]
            self._preempt(last, now)
            if last is request:
                return None
        fresh = self._allocator.pool.take(need) if need > 0 else []
        request.blocks.extend(fresh)
        return fresh

    def _admit(self, step: Step, request: Request, cached: list[BlockId], now: float) -> int:
        """Give a waiting request a slot and its first blocks; not above 0: it cannot have them."""
        count = self._allocator.start(step, request, cached, alone=not self._running)
        if count <= 0:
            return count
        self._place(step.plan, request)
        if self.accounting.placed(request, request.computed, now):
            self._allocator.note_miss(request)
            if self._allocator.may_read(request):
                self._count.prefix_queries += request.num_prompt
                self._count.prefix_hits += request.computed
        return count

    def _place(self, plan: StepPlan, request: Request) -> None:
        self._waiting.pop()
        self._gate.moved(+1)
        request.slot = self._slots.popleft()
        insort(self._running, request, key=self._policy.key)
        if request.adapter:
            request.adapter_slot = self.adapters.acquire(request.adapter, request.request_id)
        if request.has_grammar:
            self.grammars.acquire(request.request_id)
        plan.admitted.append(request.admission())

    def _preempt(self, request: Request, now: float) -> None:
        """Back to the queue. Its sealed blocks stay findable, so little is computed twice."""
        self._running.remove(request)
        self._release(request)
        self.accounting.interrupted(request, now)
        request.forget_kv()
        request.timeline.num_preemptions += 1
        self._count.num_preemptions += 1
        self._gate.moved(-1)
        self._waiting.push(request)

    # ---- commit ------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Output]:
        """Take in the results of the oldest uncommitted plan; returns what each request got."""
        outputs: list[Output] = []
        step, accounting = self._in_flight.popleft(), self.accounting
        unit = accounting.step(now, step)
        rows = zip(step.members, plan.rows, result.rows, strict=True)
        for (request, generation), row, got in rows:
            if request.finish is not None:
                accounting.unclaimed(request, row, unit)
                continue
            if request.generation == generation:
                request.computed = row.start + row.num_tokens
                if row.num_drafts or got.drafts:
                    request.settle_drafts(row, got, self._count)
                if request.computed >= request.seal_at:
                    self._allocator.seal(request)
            else:
                accounting.late(request, row, unit)
            if row.sample:
                request.num_pending -= 1
                outputs.append(self._append(request, row, got, now))
            elif got.prompt_logprobs:
                scores = request.unreported(row, got.prompt_logprobs)
                outputs.append(Output(request.request_id, prompt_logprobs=scores))
        self._count.add([len(output.tokens) for output in outputs], result.drafting_s)
        return outputs + self._fail_broken() if self.grammars.failed else outputs

    def _append(self, request: Request, row: Row, got: RowResult, now: float) -> Output:
        """Add sampled tokens up to the first that ends the request."""
        first = len(request.tokens) == request.num_prompt
        taken, finish, stop_token = request.take(got.tokens)
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
            self._finish(request, finish)
        if got.prompt_logprobs is not None:
            prompt_scores = request.unreported(row, got.prompt_logprobs)
        values = (request.request_id, tokens, scores, prompt_scores, finish, stop_token)
        return make_tuple(Output, (*values, None, timeline, None))

    def _finish(self, request: Request, reason: FinishReason, now: float | None = None) -> None:
        request.finish = reason
        self.accounting.ended(request, self.accounting.now if now is None else now)
        del self._requests[request.request_id]
        if request.slot is None:
            self._waiting.remove(request)
            self.adapters.drop_waiter(request.request_id)
        else:
            self._running.remove(request)
            self._release(request)
            request.slot = None
        if request.adapter:
            self.adapters.leave(request.adapter)
        if request.has_grammar:
            self.grammars.leave(request.request_id)

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        self._allocator.release(request)
        self._slots.append(request.slot)
        self._freed.append(request.slot)
        if request.adapter:
            self.adapters.release(request.adapter)
