"""Makes the scheduler of a config: limits, policy and gate."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windlass.config import EngineConfig, Limits
from windlass.core.blocks import BlockPool
from windlass.core.card import Capacity
from windlass.core.limits import SchedulerLimits, SloTimes
from windlass.core.policy import Continuous, Fcfs, Gate, Policy, Priority, Static
from windlass.core.scheduler import Scheduler, SchedulerOptions, SchedulerParts
from windlass.core.slo import make_slo

_POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority}


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """The scheduler limits that speculation sets; see `SchedulerLimits`."""

    lookahead: int = 0
    lookahead_after_drafts: int = 0
    drop_drafts_below: int = 0


def make_scheduler(
    config: EngineConfig,
    limits: Limits,
    capacity: Capacity,
    max_model_len: int,
    eos_ids: tuple[int, ...] = (),
    why_not_batch_invariant: str | None = None,
    draft_limits: DraftLimits | None = None,
    parts: SchedulerParts | None = None,
) -> Scheduler:
    """Make the scheduler for a config, which chooses its policy, gate and SLO. Needs no model."""
    settings = config.scheduler
    draft_limits = draft_limits or DraftLimits()
    scheduler_limits = SchedulerLimits(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=max_model_len,
        layout=capacity.layout,
        num_blocks=capacity.num_blocks,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        chunked_prefill=settings.enable_chunked_prefill,
        why_not_batch_invariant=why_not_batch_invariant,
        lookahead=draft_limits.lookahead,
        lookahead_after_drafts=draft_limits.lookahead_after_drafts,
        drop_drafts_below=draft_limits.drop_drafts_below,
        num_stages=config.parallel.pipeline_parallel_size,
    )
    times = SloTimes.of(
        ttft_ms=settings.slo_ttft_ms, tpot_ms=settings.slo_tpot_ms or limits.default_tpot_ms
    )
    options = SchedulerOptions(
        eos_ids=eos_ids,
        caching=config.cache.prefix_caching,
        seed=config.model.seed,
        fair_share=settings.fair_share,
        max_pinned_share=config.cache.max_pinned_share,
    )
    chosen = replace(
        parts or SchedulerParts(),
        policy=_POLICIES[settings.scheduling_policy](),
        gate=_gate(config),
        slo=make_slo(times, scheduler_limits),
    )
    pool = BlockPool(capacity.num_blocks, config.cache.prefix_caching)
    return Scheduler(scheduler_limits, pool, options, chosen)


def _gate(config: EngineConfig) -> Gate:
    settings = config.scheduler
    if settings.batching == "continuous":
        return Continuous()
    if settings.batching == "none":
        return Static(1, 0.0)
    return Static(settings.max_batch_size, settings.max_wait_ms / 1000)
