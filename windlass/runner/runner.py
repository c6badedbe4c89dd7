"""Executes plans: applies them to slots and pages, then asks its executors in order.

Knows positions, slots and blocks; core decides what a request means. The executors compute:
eager.py on any device, program.py on the CPU, cuda/ with captured graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from windlass.core.types import BlockId, Row, SlotId, StepPlan, StepResult
from windlass.errors import EngineError, OutOfMemory
from windlass.kernels.storages import Held
from windlass.lora.bank import Bank
from windlass.lora.base import Adapter
from windlass.runner.drafter import Drafter
from windlass.runner.eager import RunnerParts
from windlass.runner.executor import PASSED_ON, Executor, PendingStep
from windlass.runner.grammar import Matchers
from windlass.runner.inputs import SlotFacts, StepInputs
from windlass.runner.kv_tiers import KVTiers

if TYPE_CHECKING:
    from windlass.runner.worker import Followers


class Runner:
    """Owns the KV pages, the block tables, the sampling state and the executors."""

    def __init__(self, parts: RunnerParts, executors: Sequence[Executor]) -> None:
        """`executors`: the fastest first; the last one never refuses."""
        self._parts = parts
        self.executors = executors
        self._facts = SlotFacts(parts.coarse_prompts)
        self._drafter: Drafter | None = None
        self._bank: Bank | None = None
        self._fetch: Callable[[str], Adapter] | None = None
        self._tiers: KVTiers | None = None
        self.followers: Followers | None = None  # other ranks, which run every plan too

    def lead(self, followers: Followers) -> None:
        """Announce every plan from now on to other ranks, before it is run here."""
        self.followers = followers

    def blocks_of(self, slot: SlotId) -> list[BlockId]:
        """The blocks of a slot after the steps submitted so far."""
        return self._parts.slots.blocks_of(slot)

    def max_draft_tokens(self, requested: int, num_rows: int) -> int:
        """Max draft tokens per row that a captured graph covers."""
        limits = [each.max_draft_tokens(num_rows) for each in self.executors]
        return min([requested, *(limit for limit in limits if limit is not None)])

    @property
    def max_mixed_tokens(self) -> int:
        """Max tokens of a mixed step that a captured graph covers. Such a graph verifies no drafts."""
        return max(each.max_mixed_tokens for each in self.executors)

    def storages(self) -> Iterator[Held]:
        """All tensors of the runner and its parts."""
        parts = self._parts
        shared = (
            parts.network,
            parts.cache,
            parts.slots,
            parts.sampling,
            parts.gemm,
            parts.pooler,
        )
        for part in (*shared, *self.executors, self._bank, self._drafter, self._tiers):
            if part is not None:
                yield from part.storages()

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture a graph that was left for later; False: there is none. No step may be in flight."""
        return any(each.capture_next() for each in self.executors)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step and wait for it."""
        return self.submit(plan).wait()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step: saves of blocks first, then block copies, then all rows as one batch.

        A row with draft tokens returns 1 + the number of accepted ones.
        """
        if self.followers is not None:
            return self._submit_with(self.followers, plan)
        try:
            return self._start(plan)
        except torch.cuda.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise OutOfMemory(
                f"a step of {plan.num_tokens} tokens does not fit beside the KV cache: {error} "
                "Lower --max-num-batched-tokens or --memory-share."
            ) from error

    def _submit_with(self, followers: Followers, plan: StepPlan) -> PendingStep:
        """Run a plan on all ranks. A failure is final, since the other ranks have started the step."""
        followers.announce(plan)
        try:
            own = self._start(plan)
        except Exception as error:
            raise followers.lost(error) from error
        return followers.shared(own) if self._parts.pipeline.is_last else followers.result()

    def _start(self, plan: StepPlan) -> PendingStep:
        if self._tiers is not None:
            self._tiers.apply(plan)
        grown = self._apply(plan)
        if not plan.rows:
            return PASSED_ON
        return self._launch(StepInputs(plan, self._facts, grown))

    def attach(self, drafter: Drafter) -> None:
        """Add a drafter, which runs in steps with a `draft_length`."""
        self._drafter = drafter
        self._facts.has_drafter = True
        for executor in self.executors:
            executor.attach(drafter)

    def attach_adapters(self, bank: Bank, fetch: Callable[[str], Adapter]) -> None:
        """Add LoRA slots, which plans may fill and rows may use."""
        self._bank, self._fetch = bank, fetch
        for executor in self.executors:
            executor.attach_adapters(bank)

    def attach_tiers(self, tiers: KVTiers) -> None:
        """Add KV tiers, to which plans may save blocks and from which they load them."""
        self._tiers = tiers

    def attach_grammars(self, grammars: Matchers) -> None:
        """Enable structured outputs."""
        self._parts.sampling.grammars = grammars
        self._facts.take_failures = grammars.take_failures

    def _apply(self, plan: StepPlan) -> list[Row]:
        """Apply everything in the plan that comes before its rows; returns rows that got new blocks."""
        parts = self._parts
        for executor in self.executors:
            executor.prepare(plan)
        self._put_adapters(plan)
        self._facts.apply(plan)
        parts.sampling.apply(plan)
        if self._drafter is not None:
            self._drafter.copy(plan.copies)
            # The drafter may write beyond a request's blocks.
            parts.slots.clear([admission.slot for admission in plan.admitted])
        grown = parts.slots.apply(plan)
        parts.cache.copy(plan.copies)
        return grown

    def _put_adapters(self, plan: StepPlan) -> None:
        if not plan.adapters:
            return
        if self._bank is None or self._fetch is None:
            names = ", ".join(name for _, name in plan.adapters)
            raise EngineError(f"a plan wants adapters ({names}), but this runner has no bank.")
        for slot, name in plan.adapters:
            self._bank.put(slot, self._fetch(name))

    def _launch(self, inputs: StepInputs) -> PendingStep:
        refusals: list[tuple[str, str]] = []
        rule = self._parts.sequence_parallel
        is_split = rule is not None and rule.splits(inputs.shape)
        for executor in self.executors:
            why = executor.refuses(inputs.shape)
            if is_split and not executor.splits_tokens:
                why = "tokens are split over the ranks"
            if why is None:
                inputs.executor, inputs.refusals = executor.name, tuple(refusals)
                return executor.launch(inputs)
            refusals.append((executor.name, why))
        raise EngineError(f"every executor refused the step: {refusals}.")
